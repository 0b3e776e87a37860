"""One region: a forward that keeps what the policy says, and a replay that computes the rest again.

In forward, every tensor that autograd wants to save is replaced by an empty `Holder`; the region's `Recording`
remembers the holders weakly, in order, and what is needed to run its calls again. The first holder that backward asks
for makes the recording replay: it runs the calls again under a second pair of hooks, which hand the n-th saved tensor
to the n-th holder, and stops after the last holder that is still alive.

A recording may cover several calls (a run). Its replay treats each member of the run as the plan says: a member that
saves has its holders filled at once; a member that recomputes becomes a recording of its own, whose holders stand
behind those of the outer one. Nesting is nothing more than that, to any depth.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeGuard

import torch

from reforward import _torch
from reforward._errors import MutationError, ReplayMismatchError
from reforward._plan import Node, Region, leaves
from reforward._policy import Save
from reforward._runtime.depth import depth
from reforward._runtime.fence import Fence
from reforward._runtime.selective import Keeper
from reforward._runtime.streams import RngState


class _Done(BaseException):
    """Ends a replay when the last holder has its value. A BaseException, so that no `except Exception` in a model
    stops it."""


class _Local(threading.local):
    frame: Recorder | Filler | None = None


_local = _Local()
_NO_CONTEXT = nullcontext()


def current_frame() -> Recorder | Filler | None:
    """What deals with the tensors saved by the block call that runs now; None outside of regions."""
    return _local.frame


def is_open_to_regions(frame: Recorder | Filler | None) -> TypeGuard[Filler | None]:
    """Whether a region that begins now acts as one.

    In the forward of an outer region it doesn't: that one keeps its own input, and no more. In its replay it does, and
    nests, unless the outer region keeps whole submodules, whose saved tensors neither of the two would count alike.
    """
    return frame is None or (
        isinstance(frame, Filler) and not (frame.keeper is not None and frame.keeper.keeps_modules)
    )


class Holder:
    """What autograd keeps in a tensor's place.

    Attributes:
        value: the tensor, once it is there.
        inner: the holder of a nested recording that stands behind this one.
    """

    __slots__ = ("__weakref__", "_name", "_recording", "_version", "inner", "value")

    def __init__(self, name: str, recording: Recording | None, value: torch.Tensor | None = None):
        self._name = name
        self._recording = recording
        self.inner: Holder | None = None
        self.value: torch.Tensor | None = None
        self._version = 0
        if value is not None:
            self.fill(value)

    def fill(self, value: torch.Tensor) -> None:
        """Takes the tensor, which must be cut off from any graph."""
        self.value = value
        self._version = _torch.version(value)

    def get(self) -> torch.Tensor:
        """The tensor; computed again now if it isn't there.

        Raises:
            MutationError: it was changed in place since it was saved; autograd would refuse it as well.
            ReplayMismatchError: the replay took another way than the forward did.
        """
        if self.value is None:
            self._compute()
            if self.inner is not None:
                return self.inner.get()
        elif self._recording is None:
            _note_backward_inside()
        value = self.value
        if value is None:
            raise ReplayMismatchError(
                f"block {self._name!r}: the replay saved fewer tensors for backward than the forward did. Its forward"
                " must do the same when it runs again: look for state that it changes, or leave this block out of the"
                " plan"
            )
        if _torch.version(value) != self._version:
            raise MutationError(
                f"block {self._name!r}: a tensor of shape {tuple(value.shape)} ({value.dtype}) needed for backward was"
                f" changed by an in-place operation after it was saved (version {_torch.version(value)}, expected"
                f" {self._version}); write the operation out of place, or move it behind the backward"
            )
        return value

    def _compute(self) -> None:
        """Replays, unless a nested recording will have the tensor."""
        if self.inner is None and self._recording is not None:
            _note_backward_inside()
            self._recording.replay()


def _note_backward_inside() -> None:
    """A value asked for while a region's forward runs: that forward differentiates something itself."""
    frame = _local.frame
    if isinstance(frame, Recorder) and frame.keeper is not None:
        frame.keeper.differentiates = True


def _unpack(held: Holder | torch.Tensor) -> torch.Tensor:
    return held.get() if isinstance(held, Holder) else held


# A holder, and the shape and type of the tensor that it stands for.
_Slot = tuple[weakref.ref[Holder], torch.Size, torch.dtype]


class _Previous:
    """Stands for a leaf of the output of the call before."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


class _Kept:
    """A tensor argument: its memory, whether it wants a gradient, and its version when the call began."""

    __slots__ = ("requires_grad", "tensor", "version")

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor.detach()
        self.requires_grad = tensor.requires_grad
        self.version = _torch.version(tensor)

    @property
    def intact(self) -> bool:
        return _torch.version(self.tensor) == self.version

    def fresh(self) -> torch.Tensor:
        return self.tensor.detach().requires_grad_(self.requires_grad)


class Call:
    """One call of a block, with all that is needed to make it again.

    Args:
        name: the block, for messages.
        function: what to call; never a region itself.
        given, structure: the arguments as `_torch.flatten_call` gives them. Containers are taken apart, so that a block
            that changes its list or dict doesn't matter.
        previous: leaves of the output of the call before, if this one belongs to the same run.
        fence: the world before the call.
        modules: the block's modules, each once; the first is the block itself.
        contexts: further contexts for the replay.
        early_stop: whether a replay may end after the last tensor that is needed.
        check: whether shapes and types are compared with the forward's.
    """

    __slots__ = ("_leaves", "_structure", "check", "contexts", "early_stop", "fence", "function", "modules", "name")

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        given: list[Any],
        structure: Any,
        *,
        previous: list[Any],
        fence: Fence,
        modules: list[torch.nn.Module],
        contexts: Callable[[], AbstractContextManager[Any]] | None = None,
        early_stop: bool = True,
        check: bool = True,
    ):
        self.name = name
        self.function = function
        self.fence = fence
        self.modules = modules
        self.contexts = contexts
        self.early_stop = early_stop
        self.check = check
        self._structure = structure
        positions = {id(leaf): i for i, leaf in enumerate(previous) if isinstance(leaf, torch.Tensor)}
        kept: dict[int, _Kept] = {}  # a tensor that is given twice is kept once
        self._leaves = [
            leaf
            if not isinstance(leaf, torch.Tensor)
            else _Previous(positions[id(leaf)])
            if id(leaf) in positions
            else kept.setdefault(id(leaf), _Kept(leaf))
            for leaf in given
        ]

    def arguments(self, previous: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Fresh arguments, cut off from the graph that made them; `previous` are leaves of the output of the call
        before.

        Raises:
            MutationError: an argument was changed in place since the call.
        """
        fresh: list[Any] = []
        made: dict[_Kept, torch.Tensor] = {}  # and given twice again: attention asks whether `query is key`
        for leaf in self._leaves:
            if isinstance(leaf, _Kept):
                if leaf not in made:
                    made[leaf] = self._fresh(leaf)
                leaf = made[leaf]
            elif isinstance(leaf, _Previous):  # not cut off: the block may overwrite it, as it did in forward
                leaf = previous[leaf.index]
            fresh.append(leaf)
        return _torch.unflatten_call(fresh, self._structure)

    def _fresh(self, kept: _Kept) -> torch.Tensor:
        if not kept.intact:
            raise self._mutated(kept, "after its forward")
        return kept.fresh()

    def entry_of(self, previous: list[Any]) -> list[_Kept | None]:
        """What a recording that begins with this call keeps of the output of the call before: the leaves that it
        takes."""
        needed = {leaf.index for leaf in self._leaves if isinstance(leaf, _Previous)}
        return [_Kept(leaf) if i in needed else None for i, leaf in enumerate(previous)]

    def enter(self, entry: list[_Kept | None]) -> list[Any]:
        """The inverse of `entry_of`.

        Raises:
            MutationError: a tensor was changed in place since.
        """
        return [self._fresh(kept) if kept is not None else None for kept in entry]

    def check_unchanged(self) -> None:
        """To be called when the forward has ended.

        Raises:
            MutationError: the block changed an argument in place, so its value before is lost.
        """
        for leaf in self._leaves:
            if isinstance(leaf, _Kept) and not leaf.intact:
                raise self._mutated(leaf, "in its own forward")

    def _mutated(self, leaf: _Kept, when: str) -> MutationError:
        return MutationError(
            f"block {self.name!r}: an argument of shape {tuple(leaf.tensor.shape)} ({leaf.tensor.dtype}) was changed in"
            f" place {when}, so the block can't be computed again from it; write that operation out of place, pass a"
            " clone, or leave this block out of the plan"
        )

    def held_storages(self) -> set[int]:
        """Storages that live whether or not this call is recorded, or that the recording holds anyway."""
        held = [*self.fence.tensors, *[leaf.tensor for leaf in self._leaves if isinstance(leaf, _Kept)]]
        return set(map(_torch.storage_key, held))


class Recording:
    """A live region: its calls, and the holders of what they saved.

    Args:
        node: the plan's node that it carries out.
        start: the leaf of the node that the first call belongs to.
        devices: accelerators whose random streams the calls may draw from.
    """

    def __init__(self, node: Node, *, start: int = 0, devices: tuple[torch.device, ...] = ()):
        self.node = node
        self.start = start
        self.calls: list[Call] = []
        self._devices = devices
        self._entry: list[_Kept | None] = []  # of a recording made in a replay: what its first call was given
        self._slots: list[list[_Slot]] = []
        self._keepers: list[Keeper | None] = []

    def forward(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        keeper: Keeper | None,
        sink: Filler | None = None,
    ) -> Any:
        """Runs a call for the first time, with the arguments as given.

        Args:
            keeper: keeps what the call's policy selects.
            sink: the frame of an outer region's replay, if the call is made in one.
        """
        slots: list[_Slot] = []
        self.calls.append(call)
        self._slots.append(slots)
        self._keepers.append(keeper)
        recorder = Recorder(self, call, slots, keeper, sink, self._entry_storages(len(self.calls) - 1))
        result = recorder.run(args, kwargs)
        if keeper is not None:
            keeper.drop_unneeded(len(slots))
        return result

    def forward_again(self, call: Call, previous: list[Any], keeper: Keeper | None, sink: Filler) -> Any:
        """Runs a call in the replay of an outer recording, whose holders then stand before this one's."""
        if not self.calls:
            self._entry = call.entry_of(previous)
        args, kwargs = call.arguments(previous)
        undo = call.fence.rewind()
        try:
            sink.look()
            return self.forward(call, args, kwargs, keeper, sink)
        finally:
            undo()

    def _entry_storages(self, index: int) -> set[int]:
        """Storages that the recording holds for its first call beside the call's own."""
        return {_torch.storage_key(kept.tensor) for kept in self._entry if kept is not None} if index == 0 else set()

    def replay(self) -> None:
        """Computes the calls again, up to the last holder that is still alive, and fills the holders.

        Random streams are as before when it returns, also by an exception.
        """
        stop = self._last_needed()
        if stop is None:
            return
        now = RngState.capture(self._devices, share=False)
        depth.count += 1
        try:
            with torch.enable_grad():
                self._replay_until(stop)
        except _Done:
            pass
        finally:
            depth.count -= 1
            now.apply()
        reference: weakref.ref[Recording] = weakref.ref(self)
        _torch.at_end_of_backward(lambda: _release(reference))

    def _last_needed(self) -> tuple[int, int] | None:
        for index in range(len(self._slots) - 1, -1, -1):
            for position in range(len(self._slots[index]) - 1, -1, -1):
                if self._slots[index][position][0]() is not None:
                    return index, position
        return None

    def _replay_until(self, stop: tuple[int, int]) -> None:
        previous, index = self.calls[0].enter(self._entry), 0
        for member, offset, count in _members(self.node, self.start, len(self.calls)):
            nested = (
                None
                if member is self.node or _saves(member)
                else Recording(member, start=offset, devices=self._devices)
            )
            for _ in range(count):
                filler = Filler(
                    self.calls[index],
                    self._slots[index],
                    stop=stop[1] if index == stop[0] and self.calls[index].early_stop else None,
                    keeper=self._keepers[index] if nested is None else None,
                    entry=self._entry_storages(index),
                )
                previous = _torch.flatten(self._make_again(self.calls[index], previous, filler, nested))[0]
                filler.check_complete()
                if index == stop[0]:
                    return
                index += 1

    def _make_again(self, call: Call, previous: list[Any], filler: Filler, nested: Recording | None) -> Any:
        with call.contexts() if call.contexts is not None else _NO_CONTEXT:
            if nested is not None:
                return nested.forward_again(call, previous, Keeper.of(nested.policy_of_next(), call.name), filler)
            args, kwargs = call.arguments(previous)
            undo = call.fence.rewind()
            try:
                return filler.run(args, kwargs)
            finally:
                undo()

    def policy_of_next(self) -> Any:
        """The policy under which the next call is recorded: a leaf's own; inside a run nothing but the input is
        kept."""
        return self.node.policy if isinstance(self.node, Region) else None

    def release(self) -> None:
        """Empties the holders that outlive a backward pass (retain_graph), so that memory is as before it."""
        for slots in self._slots:
            for reference, _, _ in slots:
                holder = reference()
                if holder is not None:
                    holder.value = holder.inner = None


def _release(reference: weakref.ref[Recording]) -> None:
    recording = reference()
    if recording is not None:
        recording.release()


def _saves(node: Node) -> bool:
    return isinstance(node, Region) and isinstance(node.policy, Save)


def _members(node: Node, start: int, count: int) -> Iterator[tuple[Node, int, int]]:
    """The members of a node that `count` calls from leaf `start` on belong to: (member, its first leaf, calls)."""
    if isinstance(node, Region):
        yield node, 0, count
        return
    position = 0
    for member in node.members:
        size = sum(1 for _ in leaves(member))
        first, last = max(start, position), min(start + count, position + size)
        if first < last:
            yield member, first - position, last - first
        position += size


class _Frame:
    """Deals with the tensors that a running call saves.

    Args:
        entry: storages that the recording holds beside the call's own.
    """

    def __init__(self, call: Call, keeper: Keeper | None, entry: set[int]):
        self.call = call
        self.keeper = keeper
        self._entry = entry
        self._held: set[int] = entry

    def pack(self, tensor: torch.Tensor) -> Holder | torch.Tensor:
        """What autograd keeps instead of the tensor."""
        raise NotImplementedError

    def look(self) -> None:
        """Notes which storages live anyway. Not done earlier than the call begins: a replay exchanges buffers."""
        self._held = self.call.held_storages() | self._entry

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory lives anyway, so that it needn't be replaced."""
        return _torch.storage_key(tensor) in self._held

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes the call; meanwhile this frame deals with all that is saved in this thread."""
        outer, _local.frame = _local.frame, self  # pyright: ignore[reportAttributeAccessIssue]
        self.look()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack):
                if self.keeper is None:
                    return self.call.function(*args, **kwargs)
                with self.selection(self.keeper):
                    return self.call.function(*args, **kwargs)
        finally:
            _local.frame = outer

    def selection(self, keeper: Keeper) -> AbstractContextManager[Any]:
        """The context in which selected values are kept or answered."""
        raise NotImplementedError


class Recorder(_Frame):
    """The frame of a forward: replaces tensors by holders.

    Args:
        slots: where the holders are remembered, in order.
        sink: in a replay, the filler of the outer recording; its holders get this one's as their inner ones.
    """

    def __init__(
        self,
        recording: Recording,
        call: Call,
        slots: list[Any],
        keeper: Keeper | None,
        sink: Filler | None,
        entry: set[int],
    ):
        super().__init__(call, keeper, entry)
        self._recording = recording
        self._slots = slots
        self._sink = sink

    def pack(self, tensor: torch.Tensor) -> Holder:
        if _torch.storage_key(tensor) in self._held:
            holder = Holder(self.call.name, None, tensor.detach())
        else:
            holder = Holder(self.call.name, self._recording)
            self._slots.append((weakref.ref(holder), tensor.shape, tensor.dtype))
        if self._sink is not None:
            self._pass_on(self._sink, tensor, holder)
        return holder

    def pack_kept(self, tensor: torch.Tensor) -> Holder:
        """For tensors saved inside a submodule that is kept whole: they aren't replayed."""
        holder = Holder(self.call.name, None, tensor.detach())
        if self._sink is not None:
            self._pass_on(self._sink, tensor, holder)
        return holder

    @staticmethod
    def _pass_on(sink: Filler, tensor: torch.Tensor, holder: Holder) -> None:
        if not sink.holds(tensor):
            sink.put(tensor, holder)

    @property
    def saved(self) -> int:
        """How many tensors were replaced so far."""
        return len(self._slots)

    def selection(self, keeper: Keeper) -> AbstractContextManager[Any]:
        return keeper.keeping(self)


class Filler(_Frame):
    """The frame of a replay: hands the tensors to the holders.

    Args:
        slots: the holders, in order.
        stop: position of the last holder needed; None: the call is needed to its end.
    """

    def __init__(self, call: Call, slots: list[Any], *, stop: int | None, keeper: Keeper | None, entry: set[int]):
        super().__init__(call, keeper, entry)
        self._slots = slots
        self._stop = stop
        self._position = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        value = tensor.detach()
        if _torch.storage_key(value) not in self._held:
            self.put(value, None)
        return value

    def put(self, tensor: torch.Tensor, inner: Holder | None) -> None:
        """Gives the next holder its tensor, cut off from any graph, or the holder of a nested recording that will have
        it.

        Raises:
            ReplayMismatchError: the forward saved another tensor here.
        """
        if self._position >= len(self._slots):
            raise self._mismatch(f"saves more than the {len(self._slots)} tensors that the forward saved")
        reference, shape, dtype = self._slots[self._position]
        if self.call.check and (tensor.shape != shape or tensor.dtype != dtype):
            raise self._mismatch(
                f"saves a tensor of shape {tuple(tensor.shape)} ({tensor.dtype}) as number {self._position}, where the"
                f" forward saved {tuple(shape)} ({dtype})"
            )
        holder = reference()
        if holder is not None and inner is not None:
            holder.inner = inner
        elif holder is not None:
            holder.fill(tensor)
        self._position += 1
        if self._stop is not None and self._position > self._stop:
            raise _Done

    def check_complete(self) -> None:
        """To be called when the call has ended by itself.

        Raises:
            ReplayMismatchError: it saved fewer tensors than the forward did.
        """
        if self._position != len(self._slots):
            raise self._mismatch(
                f"saves {self._position} tensors for backward, where the forward saved {len(self._slots)}"
            )

    def _mismatch(self, fact: str) -> ReplayMismatchError:
        kind = f" ({type(self.call.modules[0]).__name__})" if self.call.modules else ""
        return ReplayMismatchError(
            f"block {self.call.name!r}{kind}: its replay {fact}. Something that its forward depends on was changed"
            " between forward and backward (an attribute, a container, a global); keep it unchanged, or leave this"
            " block out of the plan"
        )

    def selection(self, keeper: Keeper) -> AbstractContextManager[Any]:
        return keeper.answering()
