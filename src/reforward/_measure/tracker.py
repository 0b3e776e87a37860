"""StorageTracker: counts the bytes of live storages from within the dispatcher, for real and for fake tensors.

A storage is counted from the operation that made it until it is freed, under the tag (phase, label) that was current
when it was made. Frees are exact and cost nothing until they happen: torch keeps the Python object of a storage alive
as long as the storage itself, so a weak reference to it calls back at the very moment the memory is freed, also when
autograd does that.

The tracker sees operations as they reach the dispatcher. What a kernel allocates and frees within one operation it
can't see; `workspace` adds it (see `workspace.py`). Memory that no operation made isn't counted either: RNG states,
`from_numpy`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from reforward._measure.storages import is_on, storages
from reforward._torch import TorchDispatchMode

Workspace = Callable[[Any, tuple[Any, ...], Any], int]
OutputBytes = Callable[[Any, tuple[Any, ...], int], int]


class Tag(NamedTuple):
    """What was going on when a storage was made.

    Attributes:
        phase: "forward", "backward", "replay", "optimizer", or "" outside of all.
        label: path of the block that was running, or "".
    """

    phase: str
    label: str


@dataclass(frozen=True, kw_only=True)
class OpEvent:
    """One operation, as the dispatcher saw it.

    Attributes:
        op: the overload that was called.
        shapes: of the tensors among its arguments, in order.
        tag: phase and label at that moment.
        before_bytes, after_bytes: live bytes.
        workspace_bytes: what the kernel needs on top of both, if that is known.
    """

    op: Any
    shapes: tuple[tuple[int, ...], ...]
    tag: Tag
    before_bytes: int
    after_bytes: int
    workspace_bytes: int


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Live bytes at a moment, and the highest since the mark before it (both moments included)."""

    name: str
    live_bytes: int
    peak_bytes: int


class _Entry(weakref.ref):
    """A weak reference to a storage that knows its place in the accounts.

    Attributes:
        key: under which the tracker finds it.
        bytes: what it counts for now.
        unseen: bytes that it counts for beyond its own size.
        tag: None for one that isn't counted.
    """

    __slots__ = ("bytes", "key", "tag", "unseen")

    key: int
    bytes: int
    unseen: int
    tag: Tag | None


class MemoryLimitError(Exception):
    """More is live than a tracker was told to allow."""


class StorageTracker(TorchDispatchMode):
    """A dispatch mode that keeps account of the storages made while it is active.

    Storages that already existed are never counted, whether announced by `ignore` or met as an argument. Frees are
    noticed also after the mode was left. No tensor is kept alive.

    Args:
        device: count storages on this device only (`"cpu"`, `"cuda:0"`); None counts all. Fake tensors count as
            being on the device that they claim.
        workspace: bytes that the kernel of an operation needs beyond the larger of live-before and live-after, from
            `(op, args, outputs)`; `args` are the positional arguments followed by the values of the keyword ones.
        output_bytes: true size of the n-th output, from `(op, args, n)`, used where an output has no bytes at all: fake
            kernels of operations with opaque outputs (oneDNN's LSTM) leave them empty.
        on_op: called after every operation.
        most_bytes: an operation after which more is live raises MemoryLimitError.

    Attributes:
        phase, label: the current tag; set them, or use `in_phase` for the phase.
        live_bytes: what is live now.
        peak_bytes: the highest that live bytes, plus a workspace, have been.
        peak_by_tag: the live bytes after the operation that reached it, by tag.
        peak_workspace_bytes: what that operation needed on top of them.
        marks: what `mark` recorded.
    """

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        workspace: Workspace | None = None,
        output_bytes: OutputBytes | None = None,
        on_op: Callable[[OpEvent], None] | None = None,
        most_bytes: int | None = None,
    ):
        super().__init__()
        self.device = None if device is None else torch.device(device)
        self.workspace = workspace
        self.output_bytes = output_bytes
        self.on_op = on_op
        self.most_bytes = most_bytes
        self.phase = ""
        self.label = ""
        self.live_bytes = 0
        self.peak_bytes = 0
        self.peak_by_tag: dict[Tag, int] = {}
        self.peak_workspace_bytes = 0
        self.marks: list[Mark] = []
        self._by_tag: dict[Tag, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._peak_since_mark = 0
        self._on_free = _forgetter(weakref.ref(self))

    @property
    def tag(self) -> Tag:
        """The tag of what is made now."""
        return Tag(self.phase, self.label)

    @property
    def live_by_tag(self) -> dict[Tag, int]:
        """The live bytes by tag; they sum to `live_bytes`."""
        return {tag: count for tag, count in self._by_tag.items() if count}

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        """Sets `phase` for a while; fits `Step.run(phase=...)`."""
        outer, self.phase = self.phase, name
        try:
            yield
        finally:
            self.phase = outer

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Never counts these tensors' storages, even if they grow."""
        for tensor in tensors:
            for storage in storages(tensor):
                entry = self._entries.get(id(storage)) or self._enter(storage, None)
                self._change(entry, 0)
                entry.tag = None

    def retag(self, tensor: torch.Tensor, tag: Tag) -> None:
        """Moves a counted tensor's storage to another tag, for example a gradient that turns out to be one."""
        for storage in storages(tensor):
            entry = self._entries.get(id(storage))
            if entry is not None and entry.tag is not None:
                size = entry.bytes
                self._change(entry, 0)
                entry.tag = tag
                self._change(entry, size)

    def mark(self, name: str) -> Mark:
        """Records live bytes and the peak since the last mark."""
        mark = Mark(name=name, live_bytes=self.live_bytes, peak_bytes=max(self._peak_since_mark, self.live_bytes))
        self.marks.append(mark)
        self._peak_since_mark = self.live_bytes
        return mark

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # fake tensors ask for their device, at every turn, through here
            return func(*args, **(kwargs or {}))
        given = (*args, *kwargs.values()) if kwargs else args
        # `torch.tensor(data)` makes its storage unseen and shows it for the first time as the argument of lift_fresh.
        if func is not torch.ops.aten.lift_fresh.default:
            for tensor in tensors_in(given):
                self._meet(tensor)
        before = self.live_bytes
        outputs = func(*args, **(kwargs or {}))
        for position, tensor in enumerate(tensors_in(outputs)):
            self._count(tensor, func, given, position)
        self._after(func, given, outputs, before)
        return outputs

    def _meet(self, tensor: torch.Tensor) -> None:
        """An argument: either known, and perhaps resized since, or older than the tracker."""
        for storage in storages(tensor):
            entry = self._entries.get(id(storage))
            if entry is None:
                self._enter(storage, None)
            elif entry.tag is not None:
                self._change(entry, storage.nbytes() + entry.unseen)

    def _count(self, tensor: torch.Tensor, func: Any, args: tuple[Any, ...], position: int) -> None:
        if self.device is not None and not is_on(tensor.device, self.device):
            return
        for storage in storages(tensor):
            entry = self._entries.get(id(storage))
            if entry is None:
                entry = self._enter(storage, self.tag)
                if self.output_bytes is not None and storage.nbytes() == 0:
                    entry.unseen = self.output_bytes(func, args, position)
            if entry.tag is not None:
                self._change(entry, storage.nbytes() + entry.unseen)

    def _after(self, func: Any, args: tuple[Any, ...], outputs: Any, before: int) -> None:
        if self.most_bytes is not None and self.live_bytes > self.most_bytes:
            raise MemoryLimitError(f"more than {self.most_bytes} bytes are live")
        workspace = 0 if self.workspace is None else self.workspace(func, args, outputs)
        candidate = max(before, self.live_bytes) + workspace
        self._peak_since_mark = max(self._peak_since_mark, candidate)
        if candidate > self.peak_bytes:
            self.peak_bytes = candidate
            self.peak_by_tag = self.live_by_tag
            self.peak_workspace_bytes = candidate - self.live_bytes
        if self.on_op is not None:
            event = OpEvent(
                op=func,
                shapes=tuple(tuple(tensor.shape) for tensor in tensors_in(args)),
                tag=self.tag,
                before_bytes=before,
                after_bytes=self.live_bytes,
                workspace_bytes=workspace,
            )
            self.on_op(event)

    def _enter(self, storage: torch.UntypedStorage, tag: Tag | None) -> _Entry:
        entry = _Entry(storage, self._on_free)
        entry.key, entry.bytes, entry.unseen, entry.tag = id(storage), 0, 0, tag
        self._entries[entry.key] = entry
        return entry

    def _change(self, entry: _Entry, size: int) -> None:
        difference = size - entry.bytes
        if difference and entry.tag is not None:
            self.live_bytes += difference
            self._by_tag[entry.tag] = self._by_tag.get(entry.tag, 0) + difference
        entry.bytes = size

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.key]
        self._change(entry, 0)


def tensors_in(arguments: Any) -> Iterator[torch.Tensor]:
    """The tensors among an operation's arguments or outputs, which nest in tuples and lists only."""
    if isinstance(arguments, torch.Tensor):
        yield arguments
    elif isinstance(arguments, (tuple, list)):
        for item in arguments:
            yield from tensors_in(item)


def _forgetter(tracker: weakref.ref[StorageTracker]) -> Callable[[Any], None]:
    """A callback for weak references that doesn't keep the tracker alive through its own entries."""

    def forget(entry: _Entry) -> None:
        owner = tracker()
        if owner is not None:
            owner._forget(entry)

    return forget
