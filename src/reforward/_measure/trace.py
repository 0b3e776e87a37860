"""One profiled run: the allocator's own account of every allocation, and what was running meanwhile.

`torch.profiler` reports each allocation and free with its size and address, on CPU and on CUDA alike. They are read
from the trace that it exports, the public form that also carries the addresses.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from reforward._errors import InputError

_PREFIX = "reforward/"
_DEVICE_TYPES = {"cpu": 0, "cuda": 1}


@dataclass(frozen=True, kw_only=True)
class MemoryEvent:
    """An allocation (bytes > 0) or a free (bytes < 0) at an address, at a time in microseconds."""

    time: float
    address: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something with a begin and an end, in microseconds: a phase or a block's forward."""

    kind: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class OpCall:
    """One call of one operation: its name (`aten::mm`) and its inputs' shapes and types as the profiler writes them."""

    name: str
    begin: float
    end: float
    input_shapes: tuple[Any, ...]
    input_types: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What one profiled run did, in order of time.

    Attributes:
        memory: allocations and frees on the device.
        spans: what `span` marked.
        ops: calls of operations, if shapes were recorded.
    """

    memory: tuple[MemoryEvent, ...]
    spans: tuple[Span, ...]
    ops: tuple[OpCall, ...]

    def between(self, begin: float, end: float) -> slice:
        """The memory events of that stretch of time."""
        return slice(bisect_left(self._times, begin), bisect_right(self._times, end))

    @cached_property
    def _times(self) -> list[float]:
        return [event.time for event in self.memory]


@contextmanager
def span(kind: str, name: str) -> Iterator[None]:
    """Marks what runs inside, in the trace of `record`."""
    with record_function(f"{_PREFIX}{kind}/{name}"):
        yield


def record(run: Callable[[], object], *, device: torch.device, shapes: bool = False) -> Trace:
    """Runs something under the profiler.

    Args:
        run: what to run, once.
        device: whose memory to watch; without an index, all devices of the type.
        shapes: also record the calls of operations with the shapes of their inputs.

    Raises:
        InputError: the device's allocator doesn't report to the profiler.
    """
    if device.type not in _DEVICE_TYPES:
        known = " and ".join(_DEVICE_TYPES)
        raise InputError(f"memory can be measured on {known}, not on {device.type!r}; move the model there")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=shapes) as profiler:
        run()
    with tempfile.TemporaryDirectory(prefix="reforward-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = _DECODER.decode(path.read_bytes()).traceEvents
    vars(profiler).clear()  # it holds itself through methods of its own, and the whole trace with it
    return Trace(
        memory=tuple(sorted(_memory(events, device), key=lambda event: event.time)),
        spans=tuple(sorted(_spans(events), key=lambda found: found.begin)),
        ops=tuple(_ops(events)) if shapes else (),
    )


class _Args(msgspec.Struct):
    bytes: int = msgspec.field(name="Bytes", default=0)
    address: int = msgspec.field(name="Addr", default=0)
    device_type: int = msgspec.field(name="Device Type", default=-1)
    device_index: int = msgspec.field(name="Device Id", default=-1)
    input_shapes: tuple[Any, ...] = msgspec.field(name="Input Dims", default=())
    input_types: tuple[str, ...] = msgspec.field(name="Input type", default=())


class _Event(msgspec.Struct):
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: _Args = msgspec.field(default_factory=_Args)


class _File(msgspec.Struct):
    traceEvents: list[_Event]


_DECODER = msgspec.json.Decoder(_File)


def _memory(events: list[_Event], device: torch.device) -> Iterator[MemoryEvent]:
    for event in events:
        args = event.args
        if event.name != "[memory]" or args.device_type != _DEVICE_TYPES[device.type]:
            continue
        if device.index is None or args.device_index == device.index or device.type == "cpu":
            yield MemoryEvent(time=event.ts, address=args.address, bytes=args.bytes)


def _spans(events: list[_Event]) -> Iterator[Span]:
    for event in events:
        if event.cat == "user_annotation" and event.name.startswith(_PREFIX):
            _, kind, name = event.name.split("/", 2)
            yield Span(kind=kind, name=name, begin=event.ts, end=event.ts + event.dur)


def _ops(events: list[_Event]) -> Iterator[OpCall]:
    for event in events:
        if event.cat == "cpu_op" and event.name.startswith("aten::"):
            yield OpCall(
                name=event.name,
                begin=event.ts,
                end=event.ts + event.dur,
                input_shapes=event.args.input_shapes,
                input_types=event.args.input_types,
            )
