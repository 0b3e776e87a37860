"""The choice among candidates as a mixed-integer program, solved by HiGHS to proven optimality.

One binary per candidate; every block is covered by exactly one. The live bytes before each event are a continuous
variable, tied to the one before by the deltas of what is chosen, and at every event of the step live bytes plus the
event's peak stay within the budget: static memory, gradients that grow during backward, the block being recomputed,
loss head and optimizer alike. It minimises the weighed sum of seconds and recomputed operations (`options.py`). (The
interval model is that of Herrmann et al., rotor, 2019, as a set partition; the accounting per event that of Jain et
al., Checkmate, 2020, per block instead of per operation.)

Equal blocks make such programs symmetric: any order of the same choices takes the same time. Long stretches of equal
blocks are therefore counted instead of placed (`stretches.py`): one integer per shape, and one row per shape at which
the stretch could be highest.

Regime: optimal over the candidates offered, for any trace. Hundreds of blocks, thousands of candidates.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import highspy
import numpy as np

from reforward._solve.highs import Rows, solver
from reforward._solve.pool import Candidate, Pools
from reforward._solve.simulate import Effect, Placement, Timeline, gap_effect, placement_effects, run_placements, width
from reforward._solve.stretches import Job, gather

_LIVE_RANGE = 1000.0  # bytes are scaled so that the budget is about this, for HiGHS's absolute tolerances
_COST_RANGE = 1000.0  # as the plain step's cost
_GAP = 1e-6  # of the plain step's cost: what counts as proven
_PEAK_GAP = 1e-4  # of scaled bytes: the same, where peaks are minimised; one part in 10⁷ of the budget


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the program found.

    Attributes:
        candidates: what was chosen, in order; None if nothing fits.
        timeline: the step under the choice, simulated.
        status: "optimal" (proven over the candidates), "time limit", "infeasible", or what else HiGHS calls it.
        gap: relative distance between the step's cost and the proven bound.
        seconds: what the solver took.
    """

    candidates: tuple[Candidate, ...] | None
    timeline: Timeline | None
    status: str
    gap: float
    seconds: float


def choose(
    pools: Pools,
    candidates: Sequence[Candidate],
    budget_bytes: int,
    *,
    limit_seconds: float,
    known: Sequence[Candidate] = (),
    shrink: bool = False,
) -> Choice:
    """The best cover of the blocks by candidates.

    Args:
        pools: the profile with its chains.
        candidates: what may be chosen from; must cover every block of every chain.
        budget_bytes: no event may go above.
        limit_seconds: after that the best plan so far is taken, if there is one.
        known: a plan to begin with, if one is known; it needn't be made of the candidates, or fit.
        shrink: minimise the peak first, cost only among equal peaks; otherwise minimise cost.
    """
    began = time.perf_counter()
    program = _Program(pools, candidates, budget_bytes, shrink)
    room = budget_bytes
    while True:
        status, chosen, gap = program.solve(room, limit_seconds - (time.perf_counter() - began), known)
        if chosen is None:
            return Choice(candidates=None, timeline=None, status=status, gap=gap, seconds=time.perf_counter() - began)
        timeline = run_placements(pools.trace, [p for one in chosen for p in placements(pools, one)])
        if timeline.peak_bytes <= budget_bytes:
            break
        # HiGHS holds its rows to a tolerance; bytes are held exactly.
        room -= timeline.peak_bytes - budget_bytes
    return Choice(candidates=chosen, timeline=timeline, status=status, gap=gap, seconds=time.perf_counter() - began)


def placements(pools: Pools, candidate: Candidate) -> list[Placement]:
    """A candidate's placements, one per pass through its chain."""
    blocks = pools.chains[candidate.chain].calls[candidate.start : candidate.stop]
    return [Placement(calls=calls, shape=candidate.shape) for calls in zip(*blocks, strict=True)]


class _Program:
    """The rows and columns.

    Columns: one per placed candidate; two per counted shape (how often, whether); the live bytes before each event;
    the peak.
    """

    def __init__(self, pools: Pools, candidates: Sequence[Candidate], budget_bytes: int, shrink: bool):
        self._pools = pools
        self._profile = pools.trace.profile
        self._stretches, self._placed = gather(pools, candidates)
        self._effects = [_effects(pools, candidate) for candidate in self._placed]
        self._unit = max(budget_bytes, 1) / _LIVE_RANGE
        self._counted = np.cumsum([len(self._placed), *(2 * len(stretch.shapes) for stretch in self._stretches)])
        self._live = int(self._counted[-1])
        self._peak = self._live + len(self._profile.events) + 1
        self._highs = solver(_PEAK_GAP if shrink else _GAP * _COST_RANGE)
        self._add_columns(shrink)
        rows = Rows()
        self._cover(rows)
        self._account(rows)
        rows.pass_to(self._highs)

    def solve(
        self, room_bytes: int, limit_seconds: float, known: Sequence[Candidate]
    ) -> tuple[str, tuple[Candidate, ...] | None, float]:
        """Status, what is chosen (None if nothing fits) and the relative gap."""
        highs = self._highs
        highs.changeColBounds(self._peak, 0.0, room_bytes / self._unit)
        self._begin_with(known)
        highs.setOptionValue("time_limit", max(limit_seconds, 0.1) + highs.getRunTime())
        highs.run()
        status = highs.modelStatusToString(highs.getModelStatus()).lower()
        status = "time limit" if "time limit" in status else status
        info = highs.getInfo()
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return status, None, float("inf")
        counts = np.rint(highs.getSolution().col_value[: self._live]).astype(int).tolist()
        chosen = [candidate for candidate, count in zip(self._placed, counts, strict=False) if count]
        for stretch, first in zip(self._stretches, self._counted, strict=False):
            chosen += stretch.lay_out(counts[first : first + len(stretch.shapes)])
        chosen.sort(key=lambda one: self._pools.chains[one.chain].calls[one.start])
        gap = abs(info.objective_function_value - info.mip_dual_bound) / max(abs(info.objective_function_value), 1e-9)
        return status, tuple(chosen), gap

    def _begin_with(self, known: Sequence[Candidate]) -> None:
        """Begins with a plan, unless it isn't made of the candidates. Whether it fits is left to HiGHS."""
        placed = {candidate: column for column, candidate in enumerate(self._placed)}
        found = Counter(placed.get(one, self._counted_column(one)) for one in known)
        if not found or None in found:
            return
        counted = zip(self._counted, self._stretches, strict=False)
        columns = [*range(len(placed)), *(int(first) + i for first, s in counted for i in range(len(s.shapes)))]
        values = np.array([found[column] for column in columns], dtype=np.float64)
        self._highs.setSolution(len(columns), np.array(columns, dtype=np.int32), values)

    def _counted_column(self, one: Candidate) -> int | None:
        """Where the candidate's shape is counted, if it lies in a stretch."""
        for stretch, first in zip(self._stretches, self._counted, strict=False):
            inside = stretch.chain == one.chain and stretch.start <= one.start and one.stop <= stretch.stop
            if inside and one.shape in stretch.shapes:
                return int(first) + stretch.shapes.index(one.shape)
        return None

    def _add_columns(self, shrink: bool) -> None:
        weights = self._pools.weights
        costs = [weights(*_work(effects.values())) for effects in self._effects]
        upper = [1.0] * len(costs)
        for stretch in self._stretches:
            for shape, jobs in zip(stretch.shapes, zip(*stretch.jobs, strict=True), strict=True):
                costs.append(weights(*_work(effect for job in jobs for effect in (job.forward, job.backward))))
                upper.append((stretch.stop - stretch.start) // width(shape))
            costs += [0.0] * len(stretch.shapes)
            upper += [1.0] * len(stretch.shapes)
        # Where peaks are minimised, one part in 10⁵ of a lower peak is worth more than all the time of the step.
        scale = 1e-2 if shrink else _COST_RANGE
        lives = len(self._profile.events) + 1
        infinity = highspy.kHighsInf
        self._highs.addVars(
            self._peak + 1,
            np.concatenate([np.zeros(len(costs)), np.full(lives, -infinity), [0.0]]),
            np.concatenate([upper, np.full(lives + 1, infinity)]),
        )
        objective = np.concatenate([np.array(costs) * scale, np.zeros(lives), [1.0 if shrink else 0.0]])
        columns = np.arange(self._peak + 1, dtype=np.int32)
        self._highs.changeColsCost(len(columns), columns, objective)
        integers = columns[: self._live]
        self._highs.changeColsIntegrality(
            len(integers), integers, np.full(len(integers), int(highspy.HighsVarType.kInteger), dtype=np.uint8)
        )

    def _cover(self, rows: Rows) -> None:
        """Every block is in exactly one candidate."""
        covering: dict[tuple[int, int], dict[int, float]] = {}
        for column, candidate in enumerate(self._placed):
            for block in range(candidate.start, candidate.stop):
                covering.setdefault((candidate.chain, block), {})[column] = 1.0
        for columns in covering.values():
            rows.add(1.0, 1.0, columns)
        for stretch, first in zip(self._stretches, self._counted, strict=False):
            length = stretch.stop - stretch.start
            widths = {int(first) + i: float(width(shape)) for i, shape in enumerate(stretch.shapes)}
            rows.add(length, length, widths)
            self._order_uses(rows, int(first) + len(stretch.shapes), stretch.jobs[-1])

    def _order_uses(self, rows: Rows, uses: int, jobs: Sequence[Job]) -> None:
        """Counts a rising shape as used once one before it is: its row holds anyway, and the program gets tighter."""
        for i, (before, job) in enumerate(pairwise(jobs)):
            if before.rises and job.rises:
                rows.add(-highspy.kHighsInf, 0.0, {uses + i: 1.0, uses + i + 1: -1.0})

    def _account(self, rows: Rows) -> None:
        """Live bytes from event to event; the forwards of a counted stretch are one event, and so are its backwards."""
        start = self._profile.static_bytes / self._unit
        rows.add(start, start, {self._live: 1.0})
        by_event: list[list[tuple[int, Effect]]] = [[] for _ in self._profile.events]
        for column, effects in enumerate(self._effects):
            for index, effect in effects.items():
                by_event[index].append((column, effect))
        counted = self._counted_events()
        index = 0
        while index < len(self._profile.events):
            if index in counted:
                index = counted[index](rows)
            else:
                self._account_event(rows, index, by_event[index])
                index += 1

    def _account_event(self, rows: Rows, index: int, choices: list[tuple[int, Effect]]) -> None:
        event, live = self._profile.events[index], self._live + index
        if event.kind == "gap":
            fixed = gap_effect(event)
        elif choices:
            fixed = Effect()
        else:  # nothing can be chosen for this call: it saves everything
            fixed = placement_effects(self._pools.trace, Placement(calls=(event.call,), shape=0))[index]
        flow = {live + 1: 1.0, live: -1.0}
        height = {live: 1.0, self._peak: -1.0}
        for column, effect in choices:
            flow[column] = -effect.delta_bytes / self._unit
            height[column] = effect.peak_bytes / self._unit
        rows.add(fixed.delta_bytes / self._unit, fixed.delta_bytes / self._unit, flow)
        rows.add(-highspy.kHighsInf, -fixed.peak_bytes / self._unit, height)

    def _counted_events(self) -> dict[int, Callable[[Rows], int]]:
        """By index of the first event of a stretch's forwards or backwards: adds rows, returns the index after."""
        found: dict[int, Callable[[Rows], int]] = {}
        trace = self._pools.trace
        for stretch, first in zip(self._stretches, self._counted, strict=False):
            for calls, jobs in zip(stretch.passes, stretch.jobs, strict=True):
                ahead, back = trace.forward[calls[0]], trace.backward[calls[-1]]
                found[ahead] = partial(self._account_forwards, ahead, int(first), jobs, len(calls))
                found[back] = partial(self._account_backwards, back, int(first), jobs, len(calls))
        return found

    def _account_forwards(self, index: int, first: int, jobs: Sequence[Job], length: int, rows: Rows) -> int:
        """Only the sum: a stretch is counted only where its backward is the tighter place."""
        live = self._live + index
        deltas = {first + i: -job.forward.delta_bytes / self._unit for i, job in enumerate(jobs)}
        rows.add(0.0, 0.0, {live + length: 1.0, live: -1.0, **deltas})
        return index + length

    def _account_backwards(self, index: int, first: int, jobs: Sequence[Job], length: int, rows: Rows) -> int:
        """The sum, and the highest point of each shape in use: its job with the most around it.

        Jobs run backward in the reverse of their order. Of equal jobs that rise, seen from the begin of the chain, the
        last in order is the highest; of those that fall, the first.
        """
        live, uses = self._live + index, first + len(jobs)
        deltas = {first + i: -job.backward.delta_bytes / self._unit for i, job in enumerate(jobs)}
        rows.add(0.0, 0.0, {live + length: 1.0, live: -1.0, **deltas})
        after: dict[int, float] = {}
        for i, job in reversed(list(enumerate(jobs))):
            delta, peak = job.backward.delta_bytes / self._unit, job.backward.peak_bytes / self._unit
            rows.add(-highspy.kHighsInf, 0.0, {first + i: 1.0, uses + i: -float(length)})
            if not job.rises:
                after[first + i] = delta
                peak -= delta
            rows.add(-highspy.kHighsInf, 0.0, {live: 1.0, self._peak: -1.0, **after, uses + i: peak})
            after[first + i] = delta
        return index + length


def _work(effects: Iterable[Effect]) -> tuple[float, int]:
    """Seconds and recomputed operations of effects together."""
    total = Effect()
    for effect in effects:
        total = total.then(effect)
    return total.seconds, total.replay_flops


def _effects(pools: Pools, candidate: Candidate) -> dict[int, Effect]:
    return {
        index: effect
        for placement in placements(pools, candidate)
        for index, effect in placement_effects(pools.trace, placement).items()
    }
