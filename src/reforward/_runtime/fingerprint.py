"""Fingerprints of tensors: whether a replay computes the very values that the forward computed.

A fingerprint is a sum over the tensor's bits, on its device: each word of 32 bits is multiplied with an odd number of
its own, modulo 2**64. Whole numbers add up to the same in any order, a flipped bit always changes the sum (the product
of an odd number and a difference of less than 2**64 isn't 0), and values that changed places do with near certainty.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch

from reforward import _torch

#: What of a replay is compared with the forward. "shapes" compares shapes and types, "discrete" also the values of
#: integer and boolean tensors (routing, masks), "values" all values.
Check = Literal["nothing", "shapes", "discrete", "values"]

# Words that are multiplied at a time: what a fingerprint takes in memory. An accelerator needs more to be busy.
_WORDS_ON_CPU, _WORDS_ON_DEVICE = 1 << 14, 1 << 20


#: On an accelerator a tensor, so that nothing waits for it.
Print = int | torch.Tensor


def is_compared(tensor: torch.Tensor, check: Check) -> bool:
    """Whether the values of a tensor are compared."""
    if check != "values" and (check != "discrete" or tensor.is_floating_point() or tensor.is_complex()):
        return False
    if type(tensor) not in _DENSE or not is_dense(tensor) or tensor.numel() == 0:
        return False
    # Bytes in a row are the workspace of a kernel (LSTM), which it doesn't fill to the last one.
    return tensor.dtype is not torch.uint8 or tensor.dim() != 1


_DENSE = (torch.Tensor, torch.nn.Parameter)
_QUANTISED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an array of values in memory that every operation knows: it can be copied and compared. The
    bits of a quantised one can't be taken for integers (a crash); a wrapper has only the operations that its author
    wrote."""
    return (
        (type(tensor) in _DENSE or _torch.is_plain_class(type(tensor)))
        and tensor.layout is torch.strided
        and tensor.dtype not in _QUANTISED
        and not tensor.is_nested
        and not tensor.is_meta
    )


@torch.no_grad()
def fingerprint(tensor: torch.Tensor) -> Print:
    """The fingerprint of a dense tensor's values: a whole number, on an accelerator in a scalar of type int64 there."""
    on_cpu = tensor.device.type == "cpu"
    size = _WORDS_ON_CPU if on_cpu else _WORDS_ON_DEVICE
    with _torch.unseen_by_modes():
        factors = _odd_numbers(size, tensor.device)
        parts = [(chunk * factors[: chunk.numel()]).sum() for chunk in _words(tensor.detach()).split(size)]
        many = _odd_numbers(max(size, len(parts)), tensor.device)[: len(parts)]
        result = (torch.stack(parts) * many).sum()
        return int(result) if on_cpu else result


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers of 32 bits, in the order in which they lie in memory where they lie densely."""
    tensor = tensor.resolve_conj().resolve_neg()
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    flat = tensor.permute(order).contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    if flat.element_size() in (4, 8):
        return flat.view(torch.int32)
    if flat.nbytes % 4 == 0 and flat.storage_offset() * flat.element_size() % 4 == 0:
        return flat.view(torch.int32)
    return flat.view(torch.uint8).to(torch.int32)


@cache
def _odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, device="cpu").bitwise_or(1).to(device)


_odd_numbers(_WORDS_ON_CPU, torch.device("cpu"))  # before anybody counts bytes
