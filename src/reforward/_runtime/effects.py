"""What a submodule's call does besides returning its output, for one that is kept whole and not called again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from reforward import _torch
from reforward._runtime.learnt import Learnt
from reforward._runtime.module_state import ModuleState
from reforward._runtime.parts import Parts


class Effects(NamedTuple):
    """What was seen.

    Attributes:
        buffers: those that it wrote in place, and tensor attributes: the dict that holds one, its name, and the value
            that it left.
        others: it did more: set attributes, changed what it was given or holds, may have drawn from a generator of its
            own.
    """

    buffers: list[tuple[dict[str, Any], str, torch.Tensor]]
    others: bool

    def repeat(self) -> None:
        """Writes the buffers that are in place now as the call left them."""
        with torch.no_grad():
            for home, name, value in self.buffers:
                home[name].copy_(value)


class Watch:
    """Before the call.

    Args:
        name: the submodule, for messages.
        module: the submodule.
        args, kwargs: what it is given.
        learnt: of its earlier calls.
    """

    def __init__(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], learnt: Learnt):
        self._parts = Parts()
        self._given = [(value, self._parts.take(value)) for value in (*args, *kwargs.values())]
        tensors = [leaf for leaf in self._parts.leaves if isinstance(leaf, torch.Tensor)]
        self._versions = [(tensor, _torch.version(tensor)) for tensor in tensors]
        self._state = ModuleState(name, _torch.submodules(module), learnt, self._parts)

    def seen(self) -> Effects:
        """To be called when the call has ended."""
        buffers = self._state.written_in_place()
        given = any(not self._parts.matches(ref, value, {}) for value, ref in self._given)
        written = any(_torch.version(tensor) != version for tensor, version in self._versions)
        return Effects(buffers or [], given or written or buffers is None or self._state.holds_generators)
