"""What a forward may write to its modules: attributes, containers held by them, buffers, tensors held as attributes.

A `ModuleState` is taken before a forward and sealed after it. `rewind` then shows a replay the modules as that forward
found them, also if they were changed since by other code (`model.eval()` before backward, weights swapped by
`torch.func.functional_call`), and puts everything back when the replay has ended.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from reforward import _torch
from reforward._errors import MutationError, ReplayError
from reforward._runtime.streams import OwnStream

# Buffers up to this size are copied before every forward; of larger ones, only those that a forward was seen to write.
_SMALL_BUFFER_BYTES = 64 * 1024
# What nn.Module itself keeps; parameters, buffers and submodules are dealt with one by one, hooks aren't state.
_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)
_IMMUTABLE = frozenset(
    {int, float, bool, str, bytes, type(None), tuple, frozenset, torch.dtype, torch.Size, torch.device}
)
_CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})

#: Names the tensors that the forwards of one block were seen to write: (index of the module, name).
Writes = set[tuple[int, str]]


class _HeldTensor:
    """A buffer, or a tensor that is an attribute, before the forward.

    Attributes:
        home: the dict in which the module keeps it.
        copy: its value before; None if it isn't copied.
    """

    __slots__ = ("copy", "home", "key", "name", "tensor", "version")

    def __init__(self, home: dict[str, Any], key: tuple[int, str], tensor: torch.Tensor, writes: Writes | None):
        self.home = home
        self.key = key
        self.name = key[1]
        self.tensor = tensor
        self.version = _torch.version(tensor)
        dense = tensor.layout is torch.strided
        copied = dense and (writes is None or key in writes or tensor.nbytes <= _SMALL_BUFFER_BYTES)
        self.copy = tensor.detach().clone() if copied else None

    def written(self) -> bool:
        """Whether it was written. Batch norm's kernel writes its running statistics without counting it as a write."""
        if _torch.version(self.tensor) != self.version:
            return True
        return self.copy is not None and not _torch.in_fake_mode() and not _same_values(self.tensor, self.copy)

    def shown(self) -> torch.Tensor:
        """What a replay finds in its place: a copy that it may write, if the forward wrote it.

        Exchanged rather than overwritten, so that versions stay and autograd's own checks go on working.
        """
        if self.copy is None:
            return self.tensor
        return self.copy.clone().requires_grad_(self.tensor.requires_grad)


class ModuleState:
    """The modules of a block before a forward.

    Args:
        name: the block, for messages.
        modules: the block's modules, each once.
        writes: what earlier forwards of the block wrote; None at the first call, when everything is copied because
            nothing is known yet.

    Attributes:
        tensors: parameters, buffers and tensors held as attributes, as they are in place: during a replay, copies stand
            for those that it may write.
    """

    def __init__(self, name: str, modules: list[nn.Module], writes: Writes | None):
        self._name = name
        self._homes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._parameters: list[tuple[torch.Tensor, int]] = []
        self._held: list[_HeldTensor] = []
        self._containers: list[tuple[dict[str, Any], str, int]] = []
        self._contents: dict[int, Any] = {}
        self._streams: list[OwnStream] = []
        for index, module in enumerate(modules):
            attributes, parameters, buffers = _torch.live_state(module)
            self._homes.append((attributes, attributes.copy()))
            if parameters:
                self._homes.append((parameters, parameters.copy()))
                self._parameters += [(p, _torch.version(p)) for p in parameters.values() if p is not None]
            if buffers:
                self._homes.append((buffers, buffers.copy()))
                self._held += [_HeldTensor(buffers, (index, k), b, writes) for k, b in buffers.items() if b is not None]
            for key, value in attributes.items():
                if key not in _MODULE_ATTRIBUTES and type(value) not in _IMMUTABLE:
                    self._add_attribute(attributes, (index, key), value, writes)
        self.tensors: list[torch.Tensor] = [p for p, _ in self._parameters] + [held.tensor for held in self._held]

    def _add_attribute(self, home: dict[str, Any], key: tuple[int, str], value: Any, writes: Writes | None) -> None:
        if type(value) in _CONTAINERS:
            self._containers.append((home, key[1], id(value)))
            self._contents.setdefault(id(value), copy.copy(value))
        elif isinstance(value, torch.Tensor):
            self._held.append(_HeldTensor(home, key, value, writes))
        else:
            self._streams += OwnStream.among([value])

    def seal(self, writes: Writes) -> None:
        """To be called when the forward has ended. Drops copies that aren't needed, adds what was written to `writes`.

        Raises:
            ReplayError: a large buffer was written that no earlier forward wrote, so its value before is lost.
        """
        for held in self._held:
            if not held.written():
                held.copy = None
                continue
            writes.add(held.key)
            if held.copy is None:
                raise ReplayError(
                    f"block {self._name!r} wrote its buffer {held.name!r} ({held.tensor.nbytes} bytes) in place in this"
                    " forward but in none before, so its value can't be brought back for the replay; run one forward of"
                    " the whole step before training, or leave this block out of the plan"
                )

    def rewind(self) -> Callable[[], None]:
        """Puts the modules as the forward found them; the function that is returned puts them as they are now.

        Raises:
            MutationError: a parameter or buffer was written in place since.
        """
        self._check_unchanged()
        now = [(home, home.copy()) for home, _ in self._homes]
        tensors, streams = self.tensors, [stream.now() for stream in self._streams]

        def undo() -> None:
            for home, contents in now:
                _restore(home, contents)
            for stream in streams:
                stream.apply()
            self.tensors = tensors

        try:
            self._show()
        except BaseException:
            undo()
            raise
        return undo

    def _show(self) -> None:
        for home, before in self._homes:
            _restore(home, before)
        contents = {key: copy.copy(content) for key, content in self._contents.items()}
        for home, key, content in self._containers:
            home[key] = contents[content]
        for stream in self._streams:
            stream.apply()
        if self._held:
            # Kept alive by this list: if a copy were freed in the replay, another tensor could take its address and be
            # taken for it.
            shown = [held.shown() for held in self._held]
            for held, tensor in zip(self._held, shown, strict=True):
                held.home[held.name] = tensor
            self.tensors = [p for p, _ in self._parameters] + shown

    def _check_unchanged(self) -> None:
        for parameter, version in self._parameters:
            if _torch.version(parameter) != version:
                raise self._mutated("parameter", self._name_of(parameter), parameter)
        for held in self._held:
            if held.copy is None and _torch.version(held.tensor) != held.version:
                raise self._mutated("buffer", held.name, held.tensor)

    def _name_of(self, tensor: torch.Tensor) -> str:
        return next(key for _, before in self._homes for key, value in before.items() if value is tensor)

    def _mutated(self, kind: str, key: str, tensor: torch.Tensor) -> MutationError:
        return MutationError(
            f"block {self._name!r}: its {kind} {key!r} of shape {tuple(tensor.shape)} ({tensor.dtype}) was changed in"
            " place between forward and backward, so the block can't be computed again as it was; run backward before"
            " changing it (optimizer step, clipping of weights), or leave this block out of the plan"
        )


def _same_values(tensor: torch.Tensor, copied: torch.Tensor) -> bool:
    return torch.equal(tensor, copied) or bool(((tensor == copied) | ((tensor != tensor) & (copied != copied))).all())


def _restore(home: dict[str, Any], wanted: dict[str, Any]) -> None:
    home.update(wanted)  # quicker than to look what differs
    if len(home) != len(wanted):
        for key in home.keys() - wanted.keys():
            del home[key]
