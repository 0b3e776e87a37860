"""The two sides of a region: a frame deals with every tensor that a call saves for backward.

In forward a `Recorder` puts an empty holder in the tensor's place; in the replay a `Filler` hands the n-th saved tensor
to the n-th holder.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from reforward import _torch
from reforward._errors import ReplayError, ReplayMismatchError
from reforward._runtime.call import Call
from reforward._runtime.current import current
from reforward._runtime.fingerprint import Print, fingerprint, is_compared
from reforward._runtime.holders import Holder, Slot, unpack
from reforward._runtime.selective import Keeper

if TYPE_CHECKING:
    from reforward._runtime.replay import Recording


class Done(BaseException):
    """Ends a replay when the last holder has its value. A BaseException, so that no `except Exception` in a model
    stops it."""


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
        outer, current.frame = current.frame, self  # pyright: ignore[reportAttributeAccessIssue]
        self.look()
        try:
            with torch.autograd.graph.saved_tensors_hooks(*self._hooks()):
                if self.keeper is None:
                    return self.call.function(*args, **kwargs)
                with self.selection(self.keeper):
                    return self.call.function(*args, **kwargs)
        except RuntimeError as error:
            if _torch.is_from_transform(error):
                raise ReplayError(
                    f"block {self.call.name!r} differentiates with torch.func in its forward, which doesn't allow what"
                    " stands in for saved tensors; use torch.autograd.grad there, or leave this block out of the plan"
                ) from error
            raise
        finally:
            current.frame = outer

    def _hooks(self) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        """For autograd; not traced where compiled code in a block saves a tensor."""
        if self.call.compiled:
            return _untraced(self.pack), _untraced(unpack)
        return self.pack, unpack

    def selection(self, keeper: Keeper) -> AbstractContextManager[Any]:
        """The context in which selected values are kept or answered."""
        raise NotImplementedError

    def note_use(self) -> None:
        """To be called when a region's saved value is asked for while this frame's call runs."""


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
        slots: list[Slot],
        keeper: Keeper | None,
        sink: Filler | None,
        entry: set[int],
    ):
        super().__init__(call, keeper, entry)
        self._recording = recording
        self._slots = slots
        self._sink = sink
        # Of each holder, the version that its tensor had when it was saved, while the block isn't proven.
        self._versions: list[tuple[Slot, torch.Tensor, int]] = []
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
            slot = Slot(holder)
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

    def note_use(self) -> None:
        """The call differentiates something itself."""
        self.call.learnt.adds_gradients = True  # perhaps
        if self.keeper is not None:
            self.keeper.differentiates = True

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

    Attributes:
        stopped: the last holder needed has its value.
    """

    def __init__(self, call: Call, slots: list[Slot], *, stop: int | None, keeper: Keeper | None, entry: set[int]):
        super().__init__(call, keeper, entry)
        self._slots = slots
        self._stop = stop
        self._position = 0
        self.stopped = False
        self._equal: list[tuple[Slot, torch.Tensor, _Line]] = []

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
            self.stopped = True
            raise Done

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

    def _compare(self, slot: Slot, again: Print) -> None:
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

    def _other_values(self, slot: Slot, line: _Line) -> ReplayMismatchError:
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


def is_open_to_regions(frame: Recorder | Filler | None) -> TypeGuard[Filler | None]:
    """Whether a region that begins now acts as one.

    In the forward of an outer region it doesn't: that one keeps its own input, and no more. In its replay it does, and
    nests, unless the outer region keeps whole submodules, whose saved tensors neither of the two would count alike.
    """
    return frame is None or (
        isinstance(frame, Filler) and not (frame.keeper is not None and frame.keeper.keeps_modules)
    )


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(function)


_untraced_once = cache(_untraced)


def _out_of_sight(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; untraced, if the compiler is loaded."""
    return _untraced_once(function) if "torch._dynamo" in sys.modules else function


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
