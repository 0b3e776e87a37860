"""Puts a model, its optimizer and the random streams back, bit for bit, after steps that were only tried out.

Three things are kept: the contents of every storage that the model and the optimizer hold, gradients included; which
objects hang where (module attributes, containers in them, gradients, optimizer state), so that what a step replaced,
added or cleared is put back as the same object; and the state of every random number generator.

Contents are written back into the storages themselves, below autograd, so no tensor's version changes. This must not
happen between a forward and its backward.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from reforward._measure.storages import dense_parts
from reforward._runtime import RngState

_CHUNK_BYTES = 2**24

_IMMUTABLE = (str, bytes, int, float, complex, type(None))

Restore = Callable[[], object]


class Copies(Protocol):
    """Where the contents of storages are kept meanwhile."""

    def keep(self, flat: torch.Tensor) -> Restore:
        """Copies a flat byte tensor and returns what writes the bytes back into it."""
        ...

    def close(self) -> None:
        """Gives up the copies."""
        ...


class HostCopies:
    """Copies in host memory."""

    def keep(self, flat: torch.Tensor) -> Restore:
        copy = flat.to("cpu", copy=True)
        return lambda: flat.copy_(copy)

    def close(self) -> None:
        pass


class FileCopies:
    """Copies in an anonymous temporary file, for when the host's memory is what is scarce or measured."""

    def __init__(self):
        self._file = tempfile.TemporaryFile(prefix="reforward-")  # noqa: SIM115 - closed by close()

    def keep(self, flat: torch.Tensor) -> Restore:
        begin = self._file.seek(0, 2)
        for piece, part in self._buffered(flat):
            part.copy_(piece)
            self._file.write(part.numpy().data)
        return lambda: self._read(flat, begin)

    def close(self) -> None:
        self._file.close()

    def _read(self, flat: torch.Tensor, begin: int) -> None:
        self._file.seek(begin)
        for piece, part in self._buffered(flat):
            self._file.readinto(part.numpy().data)  # pyright: ignore[reportAttributeAccessIssue]
            piece.copy_(part)

    @staticmethod
    def _buffered(flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pieces of the tensor, each with a host buffer of its size.

        Never the piece itself becomes a numpy array: that would make its storage refuse to be resized for ever.
        """
        buffer = torch.empty(min(_CHUNK_BYTES, flat.numel()), dtype=torch.uint8)
        for piece in flat.split(_CHUNK_BYTES):
            yield piece, buffer[: piece.numel()]


@contextmanager
def preserved(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    also: Iterable[Any] = (),
    copies: Copies | None = None,
) -> Iterator[None]:
    """Whatever happens inside, model, optimizer and random streams are afterwards as they were.

    Put back are: contents and identity of parameters, buffers, gradients and of tensors that modules hold as
    attributes; the optimizer's state and groups; every other attribute of a module, shallowly (containers regain
    their members, but other objects aren't looked into); training flags; `torch.Generator`s held by modules; the
    global streams of torch (CPU and, once it is in use, CUDA), Python and, if imported, numpy.

    Args:
        model: the model.
        optimizer: its optimizer.
        also: more to keep: tensors, modules, containers of them.
        copies: where the contents are kept; by default in a temporary file for a model on the CPU, where memory
            taken for copies would be missing from the step's budget, and in host memory for one on an accelerator.
    """
    keeper = copies or (FileCopies() if _on_cpu(model) else HostCopies())
    try:
        snapshot = _Snapshot(keeper)
        for root in (model, optimizer, *also):
            snapshot.add(root)
        streams = RngState.capture(_accelerators())
        try:
            yield
        finally:
            snapshot.restore()
            streams.apply()
    finally:
        keeper.close()


def _on_cpu(model: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in model.parameters())


def _accelerators() -> tuple[torch.device, ...]:
    """The devices whose random streams exist already."""
    if not torch.cuda.is_initialized():
        return ()
    return tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))


class _Snapshot:
    """Walks objects and remembers, once each, what they hold."""

    def __init__(self, copies: Copies):
        self._copies = copies
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that an id stays theirs
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._restores: list[Restore] = []

    def add(self, root: Any) -> None:
        queue = deque([root])
        while queue:
            item = queue.popleft()
            if id(item) in self._seen:
                continue
            self._seen[id(item)] = item
            queue.extend(member for member in self._remember(item) if not isinstance(member, _IMMUTABLE))

    def restore(self) -> None:
        for restore in self._restores:
            restore()

    def _remember(self, item: Any) -> Iterable[Any]:
        """Notes how to restore one object, and returns what to look at next."""
        if isinstance(item, torch.Tensor):
            return self._remember_tensor(item)
        if isinstance(item, torch.Generator):
            state = item.get_state()
            self._restores.append(lambda: item.set_state(state))
            return ()
        if isinstance(item, (nn.Module, torch.optim.Optimizer)):
            return (vars(item),)
        return self._remember_container(item)

    def _remember_tensor(self, tensor: torch.Tensor) -> Iterable[Any]:
        for part in dense_parts(tensor):
            storage = part.untyped_storage()
            if id(storage) not in self._storages:
                self._storages[id(storage)] = storage
                self._restores.append(_contents(storage, self._copies))
        if not tensor.is_leaf:
            return ()
        if tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__"):
            self._restores.append(_geometry(tensor))
        grad = tensor.grad
        self._restores.append(lambda: _restore_grad(tensor, grad))
        return () if grad is None else (grad,)

    def _remember_container(self, item: Any) -> Iterable[Any]:
        if isinstance(item, dict):
            pairs = tuple(item.items())
            self._restores.append(lambda: _restore_dict(item, pairs))
            return (member for pair in pairs for member in pair)
        if isinstance(item, (list, deque)):
            members = tuple(item)
            self._restores.append(lambda: _restore_sequence(item, members))
            return members
        if isinstance(item, set):
            members = frozenset(item)
            self._restores.append(lambda: _restore_set(item, members))
            return members
        return item if isinstance(item, (tuple, frozenset)) else ()


def _contents(storage: torch.UntypedStorage, copies: Copies) -> Restore:
    size = storage.nbytes()
    restore = copies.keep(_flat(storage)) if size else None

    def put_back() -> None:
        if storage.nbytes() != size:
            storage.resize_(size)
        if restore is not None:
            restore()

    return put_back


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage as a flat tensor of bytes that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _geometry(tensor: torch.Tensor) -> Restore:
    """Undoes `tensor.data = other`."""
    original = tensor.detach()

    def put_back() -> None:
        moved = tensor.untyped_storage() is not original.untyped_storage()
        if moved or tensor.shape != original.shape or tensor.stride() != original.stride():
            tensor.data = original

    return put_back


def _restore_grad(tensor: torch.Tensor, grad: torch.Tensor | None) -> None:
    if tensor.grad is not grad:
        tensor.grad = grad


def _restore_dict(target: dict[Any, Any], pairs: tuple[tuple[Any, Any], ...]) -> None:
    now = tuple(target.items())
    if not _same([item for pair in now for item in pair], [item for pair in pairs for item in pair]):
        target.clear()
        target.update(pairs)


def _restore_sequence(target: list[Any] | deque[Any], members: tuple[Any, ...]) -> None:
    if not _same(target, members):
        target.clear()
        target.extend(members)


def _restore_set(target: set[Any], members: frozenset[Any]) -> None:
    if target != members:
        target.clear()
        target.update(members)


def _same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
