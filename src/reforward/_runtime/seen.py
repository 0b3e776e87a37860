"""Which calls of a block's forward a policy can select, and what each of them would keep and spare."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from reforward import _patterns, _torch
from reforward._blocks import modules_by_path, watching
from reforward._runtime.families import family_of
from reforward._runtime.selective import CallPlace, KeepOps, KeptCall, Pass


@dataclass(frozen=True, kw_only=True)
class SeenCall:
    """One call of a function that has a family.

    Attributes:
        family: its family.
        places: where it is made: the block (""), then the submodules around it from the outermost in, each with its
            number there.
        kept_bytes: what is held if it is kept; 0 if a replay, which ends at the last saved tensor, never gets to it.
        seconds, flops: what it takes to compute it.
    """

    family: str
    places: tuple[CallPlace, ...]
    kept_bytes: int
    seconds: float
    flops: int


class Meter(AbstractContextManager[Any], Protocol):
    """A context that adds up floating-point operations."""

    flops: int


def seen_calls(
    model: nn.Module,
    path: str,
    run: Callable[[], Any],
    *,
    clock: Callable[[], float],
    meter: Meter,
    repeats: int,
) -> list[SeenCall]:
    """The calls in a block's forward, in order.

    Args:
        model: the model, without a plan.
        path: the block's.
        run: runs its forward, with gradients.
        clock: seconds up to now.
        meter: counts operations.
        repeats: how often to run it for the times; the least is taken.
    """
    with meter:
        seen, kept = _kept(model, path, run, meter)
    for _ in range(repeats):
        times = _times(model, path, run, clock)
        if len(times) != len(seen):  # it doesn't do the same each time: nothing can be said of single calls
            return []
        seen = [replace(call, seconds=min(call.seconds, seconds)) for call, seconds in zip(seen, times, strict=True)]
    return [replace(call, kept_bytes=one.nbytes) for call, one in zip(seen, kept, strict=True)]


def _kept(model: nn.Module, path: str, run: Callable[[], Any], meter: Meter) -> tuple[list[SeenCall], list[KeptCall]]:
    seen: list[SeenCall] = []
    kept: list[KeptCall] = []
    saved = _Saved()

    def keep(family: str, places: list[CallPlace], call: Callable[[], Any], func: Any) -> Any:
        one, before = KeptCall(func), meter.flops
        with KeepOps(one, family, saved):
            result = call()
        one.seal(result)
        kept.append(one)
        spent = meter.flops - before
        seen.append(SeenCall(family=family, places=tuple(places), kept_bytes=0, seconds=float("inf"), flops=spent))
        return result

    with torch.autograd.graph.saved_tensors_hooks(saved.count, lambda tensor: tensor):
        _watched(model, path, run, keep)
    for one in kept:
        one.drop_unneeded(saved.saved)
    return seen, kept


def _times(model: nn.Module, path: str, run: Callable[[], Any], clock: Callable[[], float]) -> list[float]:
    times: list[float] = []

    def time(family: str, places: list[CallPlace], call: Callable[[], Any], func: Any) -> Any:
        begin = clock()
        result = call()
        times.append(clock() - begin)
        return result

    _watched(model, path, run, time)
    return times


_Handle = Callable[[str, "list[CallPlace]", Callable[[], Any], Any], Any]


def _watched(model: nn.Module, path: str, run: Callable[[], Any], handle: _Handle) -> None:
    one_pass = Pass(_Saved())

    def begin(inside: str, *_: Any) -> None:
        one_pass.enter(inside)

    def end(*_: Any) -> None:
        one_pass.leave()

    inside = [other for other in modules_by_path(model) if _patterns.is_inside(other, path)]
    with watching(model, inside, begin, end), _Calls(one_pass, handle):
        run()


class _Calls(_torch.OwnFunctionMode):
    """Sends every call that has a family to `handle`."""

    def __init__(self, one_pass: Pass, handle: _Handle):
        super().__init__()
        self._pass = one_pass
        self._handle = handle

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        family = family_of(func)
        if family is None or not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        return self._handle(family, self._pass.count(family), lambda: func(*args, **(kwargs or {})), func)


class _Saved:
    """Counts what autograd saves."""

    def __init__(self):
        self.saved = 0

    def count(self, tensor: torch.Tensor) -> torch.Tensor:
        self.saved += 1
        return tensor.detach()
