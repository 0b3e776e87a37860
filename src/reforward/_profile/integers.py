"""Keeps integers real in a dry run.

Masks, lengths and positions decide which way a model takes: Transformers leaves an attention mask out if it is all
ones. They weigh little, so what is computed from real integers alone is computed, and `.item()` on it works;
everything else stays fake.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from reforward import _torch

# Larger ones (one-hot codes of a vocabulary) aren't masks or positions.
_MOST_BYTES = 2**24


class RealIntegers(_torch.TorchDispatchMode):
    """To be entered inside a fake mode: computes operations whose tensors are all real integers."""

    def __init__(self):
        super().__init__()
        self._made = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _torch.tensors_in((args, kwargs))
        if not self._may_compute(func, given):
            return func(*args, **kwargs)
        if not _torch.returns_numbers(func):
            # What comes out is asked of the fake kernel first: floating-point numbers and large tensors stay fake.
            results = given if _torch.writes(func) else _torch.tensors_in(func(*args, **kwargs))
            if not all(is_integer(t) and t.nbytes <= _MOST_BYTES for t in results):
                return func(*args, **kwargs)
        with _torch.outside_fake_mode():
            result = func(*args, **kwargs)
        for tensor in _torch.tensors_in(result):
            self._made[tensor] = True
        return result

    def _may_compute(self, func: Any, given: list[torch.Tensor]) -> bool:
        if torch.Tag.nondeterministic_seeded in func.tags:
            return False
        if _torch.writes(func) and any(t not in self._made for t in given):
            return False  # a tensor of the user's mustn't be written
        return all(is_integer(t) and not _torch.is_fake(t) for t in given)


def is_integer(tensor: torch.Tensor) -> bool:
    """Integers and truth values: what masks, lengths and positions are made of."""
    return not tensor.is_floating_point() and not tensor.is_complex()
