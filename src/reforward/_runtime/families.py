"""Which family of operations a function of torch belongs to. A table, built on first use."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

# Names as they stand in torch.nn.functional, torch and torch.Tensor; a name that one of them lacks is skipped there.
_NAMES = {
    "attention": "scaled_dot_product_attention multi_head_attention_forward",
    "matmul": "linear bilinear matmul mm bmm addmm addbmm baddbmm einsum tensordot __matmul__ __rmatmul__ mv addmv dot",
    "conv": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
    "norm": "layer_norm group_norm batch_norm instance_norm rms_norm local_response_norm normalize",
    "random": (
        "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu gumbel_softmax bernoulli"
        " bernoulli_ rand_like randn_like randint_like rand randn randint randperm multinomial normal normal_ uniform_"
        " exponential_ poisson"
    ),
    "elementwise": (
        "relu gelu silu mish elu celu selu leaky_relu prelu hardtanh hardswish hardsigmoid logsigmoid softplus softsign"
        " tanhshrink glu sigmoid tanh softmax log_softmax softmin relu6 threshold add sub mul div true_divide neg exp"
        " log sqrt rsqrt pow square sin cos erf abs clamp where addcmul addcdiv lerp sum mean var cumsum"
        " __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__"
    ),
}


@functools.cache
def _table() -> dict[Any, str]:
    return {
        getattr(home, name): family
        for family, names in _NAMES.items()
        for name in names.split()
        for home in _homes()
        if hasattr(home, name)
    }


def _homes() -> Iterable[Any]:
    return (F, torch, torch.Tensor)


def family_of(func: Any) -> str | None:
    """The family of a function that a function mode sees; None if it has none."""
    return _table().get(func)
