"""From allocator events to live bytes over time, and to what is live at the peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from reforward._measure.static import Holding
from reforward._measure.trace import MemoryEvent


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One piece of memory from its allocation to its free.

    Attributes:
        address, bytes: where and how much.
        begin: index of the event that made it; -1 if it was there before the first.
        end: index of the event that freed it; the number of events if none did.
        kind: what it belongs to if it was there before, else "".
    """

    address: int
    bytes: int
    begin: int
    end: int
    kind: str = ""

    def lives_at(self, index: int) -> bool:
        """Whether it is live just after the event of that index."""
        return self.begin <= index < self.end


@dataclass(frozen=True, kw_only=True)
class Account:
    """Live bytes over a run.

    Attributes:
        live: after each event; the first entry is before all of them, so entry i + 1 belongs to event i.
        allocations: everything that was live at some time.
        peak: index of the event after which live bytes are highest for the first time; -1: before the first.
    """

    live: tuple[int, ...]
    allocations: tuple[Allocation, ...]
    peak: int

    @property
    def peak_bytes(self) -> int:
        """The highest live bytes."""
        return self.live[self.peak + 1]


def balance(events: Sequence[MemoryEvent], before: Sequence[Holding]) -> Account:
    """Follows every allocation through a run.

    Frees of unknown addresses (memory older than the run that isn't in `before`) are left out: their allocation was
    never counted. On the CPU the profiler is silent about frees of memory older than itself, so those go unnoticed.
    """
    open_: dict[int, tuple[int, int, str]] = {held.address: (held.bytes, -1, held.kind) for held in before}
    closed: list[Allocation] = []
    live = [sum(held.bytes for held in before)]
    for index, event in enumerate(events):
        now = live[-1]
        ended = open_.pop(event.address, None)
        if ended is not None:
            # Also when memory is allocated at an address that is still open: its free must have gone unnoticed.
            size, begin, kind = ended
            closed.append(Allocation(address=event.address, bytes=size, begin=begin, end=index, kind=kind))
            now -= size
        if event.bytes > 0:
            open_[event.address] = (event.bytes, index, "")
            now += event.bytes
        live.append(now)
    for address, (size, begin, kind) in open_.items():
        closed.append(Allocation(address=address, bytes=size, begin=begin, end=len(events), kind=kind))
    peak = max(range(len(live)), key=live.__getitem__) - 1
    return Account(live=tuple(live), allocations=tuple(closed), peak=peak)


def thinned(points: Sequence[tuple[float, int]], most: int) -> tuple[tuple[float, int], ...]:
    """About `most` of the points: of each stretch the first, the lowest and the highest, in their order."""
    if len(points) <= most:
        return tuple(points)
    stretches = max(1, most // 3)
    bounds = [round(i * len(points) / stretches) for i in range(stretches + 1)]
    kept: list[tuple[float, int]] = []
    for begin, end in pairwise(bounds):
        stretch = range(begin, end)
        chosen = {
            begin,
            min(stretch, key=lambda i: points[i][1]),
            max(stretch, key=lambda i: points[i][1]),
        }
        kept.extend(points[i] for i in sorted(chosen))
    return tuple(kept)
