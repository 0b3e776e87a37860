"""What a forward may write to its modules: attributes, containers held by them, buffers, tensors held as attributes.

A `ModuleState` is taken before a forward and sealed after it. `rewound` then shows a replay the modules as that forward
found them, also if they were changed since by other code (`model.eval()` before backward, weights swapped by
`torch.func.functional_call`), and puts everything back when the replay has ended.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import nn

from reforward import _torch
from reforward._errors import MutationError, ReplayError
from reforward._runtime.streams import OwnStream

# Buffers up to this size are copied before every forward; of larger ones, only those that a forward was seen to write.
_SMALL_BUFFER_BYTES = 64 * 1024
_MISSING = object()
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
    """

    def __init__(self, name: str, modules: list[nn.Module], writes: Writes | None):
        self._name = name
        self._attributes = [(m, dict(m.__dict__)) for m in modules]
        self._parameters = [
            (home, key, p, _torch.version(p))
            for m in modules
            if (home := _torch.live_parameters(m))
            for key, p in home.items()
            if p is not None
        ]
        self._tensors = [
            _HeldTensor(home, (i, key), b, writes)
            for i, m in enumerate(modules)
            if (home := _torch.live_buffers(m))
            for key, b in home.items()
            if b is not None
        ]
        self._containers: list[tuple[dict[str, Any], str, int]] = []
        self._contents: dict[int, Any] = {}
        own_streams = []
        for i, (module, attributes) in enumerate(self._attributes):
            for key in attributes.keys() - _MODULE_ATTRIBUTES:
                value = attributes[key]
                kind = type(value)
                if kind in _IMMUTABLE:
                    continue
                if kind in _CONTAINERS:
                    self._containers.append((module.__dict__, key, id(value)))
                    self._contents.setdefault(id(value), copy.copy(value))
                elif isinstance(value, torch.Tensor):
                    self._tensors.append(_HeldTensor(module.__dict__, (i, key), value, writes))
                else:
                    own_streams.append(value)
        self._streams = OwnStream.among(own_streams)

    def seal(self, writes: Writes) -> None:
        """To be called when the forward has ended. Drops copies that aren't needed, adds what was written to `writes`.

        Raises:
            ReplayError: a large buffer was written that no earlier forward wrote, so its value before is lost.
        """
        for held in self._tensors:
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

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """The modules as the forward found them; on exit as they are now.

        Raises:
            MutationError: a parameter or buffer was written in place since.
        """
        self._check_unchanged()
        attributes = [(module, dict(module.__dict__)) for module, _ in self._attributes]
        homes = [(home, dict(home)) for home in self._homes()]
        streams = [stream.now() for stream in self._streams]
        try:
            shown = self._show()
            yield
            del shown
        finally:
            for module, now in attributes:
                _restore(module.__dict__, now)
            for home, now in homes:
                _restore(home, now)
            for stream in streams:
                stream.apply()

    def _homes(self) -> list[dict[str, Any]]:
        """The parameter and buffer dicts, each once."""
        found = {id(home): home for home, *_ in self._parameters}
        found.update((id(held.home), held.home) for held in self._tensors)
        return list(found.values())

    def _show(self) -> list[torch.Tensor]:
        """Puts everything as it was; returns what the replay may overwrite, to be kept alive during it.

        If such a tensor were freed in the replay, another could take its address and be taken for it.
        """
        for module, before in self._attributes:
            _restore(module.__dict__, before)
        for home, key, parameter, _ in self._parameters:
            home[key] = parameter
        contents = {key: copy.copy(content) for key, content in self._contents.items()}
        for home, key, content in self._containers:
            home[key] = contents[content]
        for stream in self._streams:
            stream.apply()
        shown = [held.shown() for held in self._tensors]
        for held, tensor in zip(self._tensors, shown, strict=True):
            held.home[held.name] = tensor
        return shown

    def _check_unchanged(self) -> None:
        for _, key, parameter, version in self._parameters:
            if _torch.version(parameter) != version:
                raise self._mutated("parameter", key, parameter)
        for held in self._tensors:
            if held.copy is None and _torch.version(held.tensor) != held.version:
                raise self._mutated("buffer", held.name, held.tensor)

    def _mutated(self, kind: str, key: str, tensor: torch.Tensor) -> MutationError:
        return MutationError(
            f"block {self._name!r}: its {kind} {key!r} of shape {tuple(tensor.shape)} ({tensor.dtype}) was changed in place"
            " between forward and backward, so the block can't be computed again as it was; run backward before changing"
            " it (optimizer step, clipping of weights), or leave this block out of the plan"
        )


def _same_values(tensor: torch.Tensor, copied: torch.Tensor) -> bool:
    return torch.equal(tensor, copied) or bool(((tensor == copied) | ((tensor != tensor) & (copied != copied))).all())


def changed(wanted: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The names whose values aren't the same objects."""
    if wanted.keys() == now.keys() and all(map(is_, wanted.values(), now.values())):  # the common case, at C's speed
        return []
    return [key for key in {**wanted, **now} if wanted.get(key, _MISSING) is not now.get(key, _MISSING)]


def _restore(home: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key in changed(wanted, home):
        if key in wanted:
            home[key] = wanted[key]
        else:
            del home[key]
