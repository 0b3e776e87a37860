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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from reforward import _torch
from reforward._plan import Node, Region, leaves
from reforward._policy import Save
from reforward._runtime.call import Call, Kept
from reforward._runtime.contexts import Contexts
from reforward._runtime.current import current
from reforward._runtime.frames import Done, Filler, Recorder
from reforward._runtime.holders import Slot, one_at_a_time
from reforward._runtime.parts import leaves_in
from reforward._runtime.selective import Keeper
from reforward._runtime.streams import Bookmark


class _Local(threading.local):
    """The recordings that the backward pass that runs in this thread has replayed."""

    backward: int | None = None
    replayed: list[weakref.ref[Recording]]

    def __init__(self):
        self.replayed = []


_local = _Local()


@dataclass
class _Made:
    """A call that was made.

    Attributes:
        slots: the holders of what it saved, in order.
        keeper: has what the call's policy selects.
        contexts: of custom autograd functions, emptied.
    """

    call: Call
    slots: list[Slot]
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
        with one_at_a_time:
            now = Bookmark(self._devices)
            current.replays += 1
            try:
                with torch.enable_grad():
                    self._replay_until(stop)
            finally:
                current.replays -= 1
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
                result = None
                try:
                    result = self._make_again(made.call, previous, filler, nested)
                except (Done, Exception):
                    if not filler.stopped:
                        raise
                if filler.stopped:  # also where the model's own code took the exception, or exchanged it for another
                    return
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
    with one_at_a_time:
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
