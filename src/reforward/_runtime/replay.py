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

import linecache
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeGuard

import torch

from reforward import _torch
from reforward._errors import MutationError, ReplayMismatchError
from reforward._plan import Node, Region, leaves
from reforward._policy import Save
from reforward._runtime.call import Call, Kept
from reforward._runtime.contexts import Contexts
from reforward._runtime.depth import depth
from reforward._runtime.fingerprint import Print, fingerprint, is_compared
from reforward._runtime.parts import leaves_in
from reforward._runtime.selective import Keeper
from reforward._runtime.streams import Bookmark


class _Done(BaseException):
    """Ends a replay when the last holder has its value. A BaseException, so that no `except Exception` in a model
    stops it."""


class _Local(threading.local):
    """What is going on in this thread: the block call that runs, and the recordings that the backward pass that runs
    has replayed."""

    frame: Recorder | Filler | None = None
    backward: int | None = None
    replayed: list[weakref.ref[Recording]]

    def __init__(self):
        self.replayed = []


_local = _Local()
# A replay exchanges what modules hold and sets the global streams: two threads can't do that at once.
_one_at_a_time = threading.RLock()


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
        overwritten: the forward overwrote the tensor after it was saved.
    """

    __slots__ = ("__weakref__", "_name", "_recording", "_version", "inner", "overwritten", "value")

    def __init__(self, name: str, recording: Recording | None, value: torch.Tensor | None = None):
        self._name = name
        self._recording = recording
        self.inner: Holder | None = None
        self.overwritten = False
        self.value: torch.Tensor | None = None
        self._version = 0
        if value is not None:
            self.fill(value)

    def fill(self, value: torch.Tensor) -> None:
        """Takes the tensor, which must be cut off from any graph."""
        self.value = value
        self._version = _torch.version_of_saved(value)

    def get(self) -> torch.Tensor:
        """The tensor; computed again now if it isn't there.

        Raises:
            MutationError: it was changed in place since it was saved; autograd would refuse it as well.
            ReplayMismatchError: the replay took another way than the forward did.
        """
        value = self.value
        if value is None:
            with _one_at_a_time:  # the end of another thread's backward could take it away again
                if self.value is None:
                    self._compute()
                    if self.inner is not None:
                        return self.inner.get()
                value = self.value
        elif self._recording is None:
            _note_backward_inside()
        if value is None:
            raise ReplayMismatchError(
                f"block {self._name!r}: the replay saved fewer tensors for backward than the forward did. Its forward"
                " must do the same when it runs again: look for state that it changes, or leave this block out of the"
                " plan"
            )
        if self.overwritten or _torch.version_of_saved(value) != self._version:
            raise MutationError(
                f"block {self._name!r}: a tensor of shape {tuple(value.shape)} ({value.dtype}) needed for backward was"
                " changed by an in-place operation after it was saved; write the operation out of place, or move it"
                " behind the backward"
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


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, so that the compiler doesn't trace it where compiled code in a block saves a tensor."""
    return torch.compiler.disable(function)


@cache
def _untraced_once(function: Callable[..., Any]) -> Callable[..., Any]:
    return _untraced(function)


def _out_of_sight(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; untraced, if the compiler is loaded."""
    return _untraced_once(function) if "torch._dynamo" in sys.modules else function


class _Slot(weakref.ref[Holder]):
    """A holder, held weakly, and what is known of the tensor that it stands for.

    Attributes:
        print: its fingerprint, if its values are compared.
    """

    __slots__ = ("dtype", "print", "shape")

    shape: torch.Size
    dtype: torch.dtype
    print: Print | None


@dataclass
class _Made:
    """A call that was made.

    Attributes:
        slots: the holders of what it saved, in order.
        keeper: has what the call's policy selects.
        contexts: of custom autograd functions, emptied.
    """

    call: Call
    slots: list[_Slot]
    keeper: Keeper | None
    contexts: Contexts | None = None

    def last_needed(self) -> int | None:
        """The position of the last holder that is still alive; None if nothing of the call is needed."""
        for position in range(len(self.slots) - 1, -1, -1):
            if self.slots[position]() is not None:
                return position
        return 0 if self.contexts is not None and self.contexts.alive else None


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
        self._devices = devices
        self._entry: list[Kept | None] = []  # of a recording made in a replay: what its first call was given
        self._made: list[_Made] = []

    @property
    def count(self) -> int:
        """How many calls were made."""
        return len(self._made)

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
        made = _Made(call, [], keeper)
        self._made.append(made)
        recorder = Recorder(self, call, made.slots, keeper, sink, self._entry_storages(self.count - 1))
        start = _torch.graph_position()
        result = recorder.run(args, kwargs)
        recorder.note_overwritten()
        if keeper is not None:
            keeper.drop_unneeded(len(made.slots))
        replayed_whole = sink is None and not (keeper is not None and keeper.keeps_modules)
        if replayed_whole and (call.learnt.uses_contexts or not call.learnt.seen_through):
            contexts = Contexts(call.name, result, start, call.held_storages(), self.replay)
            call.learnt.seen_through = True
            if contexts.any_taken:
                made.contexts, call.learnt.uses_contexts = contexts, True
        return result

    def forward_again(self, call: Call, previous: list[Any], keeper: Keeper | None, sink: Filler) -> Any:
        """Runs a call in the replay of an outer recording, whose holders then stand before this one's."""
        if not self._made:
            self._entry = call.entry_of(previous)
        args, kwargs, undo = call.begin_again(previous)
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
        with _one_at_a_time:
            now = Bookmark(self._devices)
            depth.count += 1
            try:
                with torch.enable_grad():
                    self._replay_until(stop)
            except _Done:
                pass
            finally:
                depth.count -= 1
                now.go_back()
        _release_at_end_of_backward(self)

    def _last_needed(self) -> tuple[int, int] | None:
        for index in range(self.count - 1, -1, -1):
            position = self._made[index].last_needed()
            if position is not None:
                return index, position
        return None

    def _replay_until(self, stop: tuple[int, int]) -> None:
        previous, index = self._made[0].call.enter(self._entry), 0
        for member, offset, count in _members(self.node, self.start, self.count):
            nested = (
                None
                if member is self.node or _saves(member)
                else Recording(member, start=offset, devices=self._devices)
            )
            for _ in range(count):
                made = self._made[index]
                early = index == stop[0] and made.call.early_stop and made.contexts is None
                filler = Filler(
                    made.call,
                    made.slots,
                    stop=stop[1] if early else None,
                    keeper=made.keeper if nested is None else None,
                    entry=self._entry_storages(index),
                )
                start = _torch.graph_position()
                result = self._make_again(made.call, previous, filler, nested)
                filler.check_complete()
                if made.contexts is not None:
                    made.contexts.fill(result, start)
                if index == stop[0]:
                    return
                previous = leaves_in(result)
                index += 1

    def _make_again(self, call: Call, previous: list[Any], filler: Filler, nested: Recording | None) -> Any:
        with call.watched_again(), call.in_replay():
            if nested is not None:
                return nested.forward_again(call, previous, Keeper.of(nested.policy_of_next(), call.name), filler)
            args, kwargs, undo = call.begin_again(previous)
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
        for made in self._made:
            for slot in made.slots:
                holder = slot()
                if holder is not None:
                    holder.value = holder.inner = None
            if made.contexts is not None:
                made.contexts.empty()


def _release_at_end_of_backward(recording: Recording) -> None:
    number = _torch.backward_pass()
    if number is None:
        return
    if number != _local.backward:
        # What is left of another pass: one that failed, at whose end nothing is called.
        left = [reference for reference in _local.replayed if reference() is not None]
        _local.backward, _local.replayed = number, left
        _torch.at_end_of_backward(partial(_release, left))
    _local.replayed.append(weakref.ref(recording))


def _release(replayed: list[weakref.ref[Recording]]) -> None:
    with _one_at_a_time:
        while replayed:
            recording = replayed.pop()()
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

    @property
    def keepers(self) -> list[Keeper]:
        """Those that look at the operations of this call."""
        return [self.keeper] if self.keeper is not None else []

    def pack(self, tensor: torch.Tensor) -> Holder | torch.Tensor:
        """What autograd keeps instead of the tensor."""
        raise NotImplementedError

    def look(self) -> None:
        """Notes which storages live anyway. Not done earlier than the call begins: a replay exchanges buffers."""
        held = self.call.held_storages()
        self._held = held | self._entry if self._entry else held

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory lives anyway, so that it needn't be replaced."""
        return _torch.storage_key(tensor) in self._held

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes the call; meanwhile this frame deals with all that is saved in this thread."""
        outer, _local.frame = _local.frame, self  # pyright: ignore[reportAttributeAccessIssue]
        self.look()
        try:
            pack, unpack = (_untraced(self.pack), _untraced(_unpack)) if self.call.compiled else (self.pack, _unpack)
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
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
        slots: list[_Slot],
        keeper: Keeper | None,
        sink: Filler | None,
        entry: set[int],
    ):
        super().__init__(call, keeper, entry)
        self._recording = recording
        self._slots = slots
        self._sink = sink
        # Of each holder, the version that its tensor had when it was saved, while the block isn't proven.
        self._versions: list[tuple[_Slot, torch.Tensor, int]] = []
        self._watches = call.check == "values" and not _torch.in_fake_mode()
        self._compares_discrete = call.check == "discrete"

    @property
    def keepers(self) -> list[Keeper]:
        # A region inside the replay of another: the other's is still answering.
        return super().keepers + (self._sink.keepers if self._sink is not None else [])

    def pack(self, tensor: torch.Tensor) -> Holder:
        if _torch.storage_key(tensor) in self._held:
            holder = Holder(self.call.name, None, _cut_off(tensor))
        else:
            holder = Holder(self.call.name, self._recording)
            compared = self._watches or (self._compares_discrete and not tensor.is_floating_point())
            slot = _Slot(holder)
            slot.shape, slot.dtype = tensor.shape, tensor.dtype
            slot.print = (
                _out_of_sight(fingerprint)(tensor) if compared and is_compared(tensor, self.call.check) else None
            )
            self._slots.append(slot)
            if self._watches:
                self._versions.append((slot, _out_of_sight(_torch.counter_of)(tensor), _torch.version(tensor)))
        if self._sink is not None:
            self._pass_on(self._sink, tensor, holder)
        return holder

    def pack_kept(self, tensor: torch.Tensor) -> Holder:
        """For tensors saved inside a submodule that is kept whole: they aren't replayed."""
        holder = Holder(self.call.name, None, tensor.detach())
        if self._sink is not None:
            self._pass_on(self._sink, tensor, holder)
        return holder

    def note_overwritten(self) -> None:
        """To be called when the call has ended: autograd would refuse what was overwritten after it was saved, but the
        replay, which ends at the last saved tensor, may not get there."""
        for slot, counter, version in self._versions:
            holder = slot()
            if holder is not None and _torch.version(counter) != version:
                holder.overwritten = True
        self._versions = []

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

    def __init__(self, call: Call, slots: list[_Slot], *, stop: int | None, keeper: Keeper | None, entry: set[int]):
        super().__init__(call, keeper, entry)
        self._slots = slots
        self._stop = stop
        self._position = 0
        self._equal: list[tuple[_Slot, torch.Tensor, _Line]] = []

    @property
    def saved(self) -> int:
        """How many tensors were handed over so far."""
        return self._position

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if _torch.storage_key(tensor) in self._held:
            return _cut_off(tensor)
        value = tensor.detach()
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
        slot = self._slots[self._position]
        if self.call.check != "nothing" and (tensor.shape != slot.shape or tensor.dtype != slot.dtype):
            raise self._mismatch(
                f"saves a tensor of shape {tuple(tensor.shape)} ({tensor.dtype}) as number {self._position}, where the"
                f" forward saved {tuple(slot.shape)} ({slot.dtype}){_shown(_line())}"
            )
        if slot.print is not None:
            self._compare(slot, _out_of_sight(fingerprint)(tensor))
        holder = slot()
        if holder is not None and inner is not None:
            holder.inner = inner
        elif holder is not None:
            holder.fill(tensor)
        self._position += 1
        if self._stop is not None and self._position > self._stop:
            self._check_values()
            raise _Done

    def check_complete(self) -> None:
        """To be called when the call has ended by itself.

        Raises:
            ReplayMismatchError: it saved fewer tensors than the forward did, or other values.
        """
        if self._position != len(self._slots):
            raise self._mismatch(
                f"saves {self._position} tensors for backward, where the forward saved {len(self._slots)}"
            )
        self._check_values()

    def _compare(self, slot: _Slot, again: Print) -> None:
        equal = again == slot.print
        if isinstance(equal, torch.Tensor):  # looked at when the call has ended, so that the device isn't waited for
            self._equal.append((slot, equal, _line()))
        elif not equal:
            raise self._other_values(slot, _line())

    def _check_values(self) -> None:
        if self._equal:
            flags = torch.stack([equal.to(self._equal[0][1].device) for _, equal, _ in self._equal]).tolist()
            for (slot, _, line), equal in zip(self._equal, flags, strict=True):
                if not equal:
                    raise self._other_values(slot, line)
        if self.call.check == "values" and not _torch.in_fake_mode():  # a dry run compares nothing
            self.call.learnt.proven = True

    def _other_values(self, slot: _Slot, line: _Line) -> ReplayMismatchError:
        return self._mismatch(
            f"computes other values than the forward did, first in a tensor of shape {tuple(slot.shape)}"
            f" ({slot.dtype}){_shown(line)} (if such values don't matter, in memory that isn't initialised, say, attach"
            " the plan with check='off')"
        )

    def _mismatch(self, fact: str) -> ReplayMismatchError:
        return ReplayMismatchError(
            f"block {self.call.name!r}: its replay {fact}. Something that its forward depends on was changed"
            " between forward and backward (an attribute, a container, a global); keep it unchanged, or leave this"
            " block out of the plan"
        )

    def selection(self, keeper: Keeper) -> AbstractContextManager[Any]:
        return keeper.answering(self)


def _cut_off(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without a graph, which would otherwise hold itself; most that live anyway have none."""
    return tensor if tensor.is_leaf else tensor.detach()


_Line = tuple[str, int] | None
_PACKAGES = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))


def _line() -> _Line:
    """The line of the model's code that is being executed."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else None


def _shown(line: _Line) -> str:
    return f", at {Path(line[0]).name}:{line[1]}: {linecache.getline(*line).strip()}" if line is not None else ""
