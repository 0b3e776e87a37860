"""Stretches of equal blocks, counted instead of placed: breaks the symmetry that identical blocks give a program.

Backward undoes a chain from its end, so seen from its begin a shape is a job that raises the live bytes by what it
holds less the gradients it will have left, with a peak on the way. Of all sequences of such jobs, Liu's (1987) has
the lowest highest peak: first the jobs that end lower than they began, lowest peak first; then the others, the
largest excess of the peak over the end first. Any plan over equal blocks can be sorted so, neighbour by neighbour,
without needing more bytes or time; so it is enough to decide how often each shape occurs.

Regime: the blocks' backwards follow each other with nothing in between, and the forward is never the tighter place;
elsewhere candidates are placed one by one. Shortfalls: a run doesn't cross the border of a counted stretch; where there
are several passes, the order is the last one's, which meets the gradients of all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reforward._solve.options import Chain
from reforward._solve.pool import Candidate, Pools
from reforward._solve.simulate import Effect, Placement, Shape, Trace, gap_effect, placement_effects, width

_SHORTEST = 6  # blocks; shorter stretches are cheap to place one by one, with runs across their borders


@dataclass(frozen=True, kw_only=True)
class Job:
    """One pass of a shape over equal blocks: all its forwards, and all its backwards."""

    forward: Effect
    backward: Effect

    @property
    def rises(self) -> bool:
        """Whether more is live after it than before, seen from the begin of the chain."""
        return self.backward.delta_bytes <= 0

    @property
    def rank(self) -> tuple[bool, int]:
        """Liu's order."""
        peak = self.backward.peak_bytes
        return (True, -peak) if self.rises else (False, peak - self.backward.delta_bytes)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Equal blocks in a row of one chain.

    Attributes:
        chain, start, stop: which blocks.
        passes: the calls of each pass.
        shapes: what may be done, in Liu's order for the last pass.
        jobs: per pass, one job per shape.
    """

    chain: int
    start: int
    stop: int
    passes: tuple[tuple[int, ...], ...]
    shapes: tuple[Shape, ...]
    jobs: tuple[tuple[Job, ...], ...]

    def meets(self, one: Candidate) -> bool:
        """Whether a candidate covers one of the blocks."""
        return one.chain == self.chain and one.start < self.stop and self.start < one.stop

    def lay_out(self, counts: Sequence[int]) -> list[Candidate]:
        """The shapes, each as often as counted, placed in order."""
        placed, start = [], self.start
        for shape, count in zip(self.shapes, counts, strict=True):
            for _ in range(count):
                placed.append(Candidate(chain=self.chain, start=start, shape=shape))
                start += width(shape)
        return placed


def gather(pools: Pools, candidates: Sequence[Candidate]) -> tuple[list[Stretch], list[Candidate]]:
    """Stretches that can be counted, and the candidates that remain to be placed one by one."""
    stretches = [
        stretch
        for index, chain in enumerate(pools.chains)
        for start, stop in _equal(chain)
        if (stretch := _stretch(pools.trace, index, chain, start, stop, candidates)) is not None
    ]
    return stretches, [one for one in candidates if not any(stretch.meets(one) for stretch in stretches)]


def _equal(chain: Chain) -> list[tuple[int, int]]:
    found, start = [], 0
    for stop in range(1, len(chain) + 1):
        if stop == len(chain) or chain.keys[stop] != chain.keys[start]:
            if stop - start >= _SHORTEST:
                found.append((start, stop))
            start = stop
    return found


def _stretch(
    trace: Trace, index: int, chain: Chain, start: int, stop: int, candidates: Sequence[Candidate]
) -> Stretch | None:
    inside = [one for one in candidates if one.chain == index and start <= one.start and one.stop <= stop]
    shapes = list(dict.fromkeys(one.shape for one in inside))
    passes = tuple(zip(*chain.calls[start:stop], strict=True))
    if not all(_undisturbed(trace, calls) for calls in passes):
        return None
    jobs = [[_job(trace, calls, shape) for shape in shapes] for calls in passes]
    if not all(_backward_is_tighter(job) for of_pass in jobs for job in of_pass):
        return None
    order = sorted(range(len(shapes)), key=lambda i: (jobs[-1][i].rank, i))
    return Stretch(
        chain=index,
        start=start,
        stop=stop,
        passes=passes,
        shapes=tuple(shapes[i] for i in order),
        jobs=tuple(tuple(of_pass[i] for i in order) for of_pass in jobs),
    )


def _job(trace: Trace, calls: Sequence[int], shape: Shape) -> Job:
    ours = tuple(calls[: width(shape)])
    effects = placement_effects(trace, Placement(calls=ours, shape=shape))
    ahead = back = Effect()
    for call in ours:
        ahead = ahead.then(effects[trace.forward[call]])
    for call in reversed(ours):
        back = back.then(effects[trace.backward[call]])
    return Job(forward=ahead, backward=back)


def _backward_is_tighter(job: Job) -> bool:
    """Whether its backward, with what it holds, needs at least what its forward needed, and leaves nothing negative."""
    ahead, back = job.forward, job.backward
    return ahead.peak_bytes <= ahead.delta_bytes + back.peak_bytes and ahead.delta_bytes + back.delta_bytes >= 0


def _undisturbed(trace: Trace, calls: Sequence[int]) -> bool:
    """Nothing happens between these forwards, nor between these backwards, and what lies between both frees nothing."""
    forward = [trace.forward[call] for call in calls]
    backward = [trace.backward[call] for call in reversed(calls)]
    if forward[-1] - forward[0] != len(calls) - 1 or backward[-1] - backward[0] != len(calls) - 1:
        return False
    gaps, open_calls = 0, set()
    for event in trace.profile.events[forward[-1] + 1 : backward[0]]:
        if event.kind == "gap":
            gaps += gap_effect(event).delta_bytes
        elif event.kind == "forward":
            open_calls.add(event.call)
        elif event.call not in open_calls:
            return False
    nets = [o.forward_delta_bytes + o.backward_delta_bytes for c in open_calls for o in trace.profile.calls[c].options]
    return gaps >= 0 and min(nets, default=0) >= 0
