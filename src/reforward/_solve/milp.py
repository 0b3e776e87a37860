"""The choice among candidates as a mixed-integer program, solved by HiGHS to proven optimality.

One binary per candidate; every block is covered by exactly one. The live bytes before each event are a continuous variable,
tied to the one before by the deltas of what is chosen, and at every event of the step live bytes plus the event's peak stay
within the budget: static memory, gradients that grow during backward, the block being recomputed, loss head and optimizer
alike. It minimises seconds; recomputed operations break ties. (The interval model is that of Herrmann et al., rotor, 2019,
as a set partition; the accounting per event that of Jain et al., Checkmate, 2020, per block instead of per operation.)

Equal blocks make such programs symmetric: any order of the same choices takes the same time. Where swapping two neighbours
provably changes nothing else, only one order is admitted, the one that needs the fewest bytes (Liu's rule for sequences with
peaks, 1987): first what ends with fewer bytes than it began with, lowest peak first, then the rest, the largest rise of
the peak above what stays first.

Regime: optimal over the candidates offered, for any trace. Hundreds of blocks, thousands of candidates.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from reforward._solve.pool import Candidate, Pools
from reforward._solve.simulate import Effect, Placement, Timeline, gap_effect, placement_effects, run_placements

_LIVE_RANGE = 1000.0  # bytes are scaled so that the budget is about this, for HiGHS's absolute tolerances
_COST_RANGE = 1000.0  # as the plain step's cost
_GAP = 1e-6  # of the plain step's cost: what counts as proven


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the program found.

    Attributes:
        candidates: what was chosen, in order; None if nothing fits.
        timeline: the step under the choice, simulated.
        status: "optimal" (proven over the candidates), "time limit" or "infeasible".
        gap: relative distance between the step's cost and the proven bound.
        seconds: what the solver took.
    """

    candidates: tuple[Candidate, ...] | None
    timeline: Timeline | None
    status: str
    gap: float
    seconds: float


def choose(
    pools: Pools, candidates: Sequence[Candidate], budget_bytes: int, *, shrink: bool = False, limit_seconds: float = 60
) -> Choice:
    """The best cover of the blocks by candidates.

    Args:
        pools: the profile with its chains.
        candidates: what may be chosen from; must cover every block of every chain.
        budget_bytes: no event may go above.
        shrink: minimise the peak first, seconds only among equal peaks; otherwise minimise seconds.
        limit_seconds: after that the best plan so far is taken, if there is one.
    """
    began = time.perf_counter()
    program = _Program(pools, candidates, budget_bytes, shrink)
    room = budget_bytes
    while True:
        status, chosen, gap = program.solve(room, limit_seconds - (time.perf_counter() - began))
        if chosen is None:
            return Choice(
                candidates=None, timeline=None, status=status, gap=gap, seconds=time.perf_counter() - began
            )
        timeline = run_placements(pools.trace, [p for one in chosen for p in placements(pools, one)])
        if timeline.peak_bytes <= budget_bytes:
            break
        # HiGHS holds its rows to a tolerance; bytes are held exactly.
        room -= timeline.peak_bytes - budget_bytes
    return Choice(
        candidates=chosen, timeline=timeline, status=status, gap=gap, seconds=time.perf_counter() - began
    )


def placements(pools: Pools, candidate: Candidate) -> list[Placement]:
    """A candidate's placements, one per pass through its chain."""
    blocks = pools.chains[candidate.chain].calls[candidate.start : candidate.stop]
    return [Placement(calls=calls, shape=candidate.shape) for calls in zip(*blocks, strict=True)]


class _Program:
    """The rows and columns. Columns: one per candidate, the live bytes before each event, the peak."""

    def __init__(self, pools: Pools, candidates: Sequence[Candidate], budget_bytes: int, shrink: bool):
        self._pools = pools
        self._candidates = candidates
        self._profile = pools.trace.profile
        self._effects = [_effects(pools, candidate) for candidate in candidates]
        self._unit = max(budget_bytes, 1) / _LIVE_RANGE
        self._live = len(candidates)
        self._peak = self._live + len(self._profile.events) + 1
        self._highs = highspy.Highs()
        self._highs.setOptionValue("output_flag", False)
        self._highs.setOptionValue("mip_rel_gap", 0.0)
        self._highs.setOptionValue("mip_abs_gap", _GAP * _COST_RANGE)
        self._highs.setOptionValue("primal_feasibility_tolerance", 1e-9)
        self._highs.setOptionValue("mip_feasibility_tolerance", 1e-9)
        self._add_columns(shrink)
        self._add_rows()

    def solve(self, room_bytes: int, limit_seconds: float) -> tuple[str, tuple[Candidate, ...] | None, float]:
        """Status, what is chosen (None if nothing fits) and the relative gap."""
        highs = self._highs
        highs.changeColBounds(self._peak, 0.0, room_bytes / self._unit)
        highs.setOptionValue("time_limit", max(limit_seconds, 0.1) + highs.getRunTime())
        highs.run()
        status = _STATUS.get(highs.getModelStatus(), "infeasible")
        info = highs.getInfo()
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return status, None, float("inf")
        values = highs.getSolution().col_value[: len(self._candidates)]
        chosen = [candidate for candidate, value in zip(self._candidates, values, strict=True) if value > 0.5]
        chosen.sort(key=lambda one: self._pools.chains[one.chain].calls[one.start])
        gap = abs(info.objective_function_value - info.mip_dual_bound) / _COST_RANGE
        return status, tuple(chosen), gap

    def _add_columns(self, shrink: bool) -> None:
        weights, events = self._pools.weights, len(self._profile.events)
        costs = np.array([
            weights(sum(e.seconds for e in effects.values()), sum(e.replay_flops for e in effects.values()))
            for effects in self._effects
        ])  # fmt: skip
        chosen = len(self._candidates)
        # A peak one part in 10⁴ lower is worth more than any time, when peaks are what is minimised.
        scale = 1e-2 if shrink else _COST_RANGE
        objective = np.concatenate([costs * scale, np.zeros(events + 1), [1.0 if shrink else 0.0]])
        lower = np.concatenate([np.zeros(chosen), np.full(events + 1, -highspy.kHighsInf), [0.0]])
        upper = np.concatenate([np.ones(chosen), np.full(events + 2, highspy.kHighsInf)])
        count = len(objective)
        empty = np.zeros(0)
        self._highs.addCols(count, objective, lower, upper, 0, np.zeros(count, dtype=np.int32), empty.astype(np.int32), empty)
        kinds = [highspy.HighsVarType.kInteger] * chosen
        self._highs.changeColsIntegrality(chosen, np.arange(chosen, dtype=np.int32), np.array(kinds))

    def _add_rows(self) -> None:
        rows = _Rows()
        self._cover(rows)
        self._account(rows)
        for order in _orders(self._pools, self._candidates):
            rows.add(-highspy.kHighsInf, 1.0, {column: 1.0 for column in order})
        rows.pass_to(self._highs)

    def _cover(self, rows: _Rows) -> None:
        covering: dict[tuple[int, int], dict[int, float]] = {
            (index, block): {} for index, chain in enumerate(self._pools.chains) for block in range(len(chain))
        }
        for column, candidate in enumerate(self._candidates):
            for block in range(candidate.start, candidate.stop):
                covering[candidate.chain, block][column] = 1.0
        for columns in covering.values():
            rows.add(1.0, 1.0, columns)

    def _account(self, rows: _Rows) -> None:
        by_event: list[list[tuple[int, Effect]]] = [[] for _ in self._profile.events]
        for column, effects in enumerate(self._effects):
            for index, effect in effects.items():
                by_event[index].append((column, effect))
        start = self._profile.static_bytes / self._unit
        rows.add(start, start, {self._live: 1.0})
        for index, event in enumerate(self._profile.events):
            fixed = gap_effect(event) if event.kind == "gap" else self._fixed(index, event.call)
            live, delta, peak = self._live + index, fixed.delta_bytes / self._unit, fixed.peak_bytes / self._unit
            flow = {live + 1: 1.0, live: -1.0}
            height = {live: 1.0, self._peak: -1.0}
            for column, effect in by_event[index]:
                flow[column] = -effect.delta_bytes / self._unit
                height[column] = effect.peak_bytes / self._unit
            rows.add(delta, delta, flow)
            rows.add(-highspy.kHighsInf, -peak, height)

    def _fixed(self, index: int, call: int) -> Effect:
        """The effect of a call that no chain holds (nothing is recomputed there); nothing for the others."""
        if any(call in calls for chain in self._pools.chains for calls in chain.calls):
            return Effect()
        return placement_effects(self._pools.trace, Placement(calls=(call,), shape=0))[index]


class _Rows:
    """Sparse rows, gathered and passed to HiGHS at once."""

    def __init__(self) -> None:
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._starts: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []

    def add(self, lower: float, upper: float, terms: dict[int, float]) -> None:
        self._lower.append(lower)
        self._upper.append(upper)
        self._starts.append(len(self._columns))
        self._columns.extend(terms)
        self._values.extend(terms.values())

    def pass_to(self, highs: highspy.Highs) -> None:
        highs.addRows(
            len(self._starts),
            np.array(self._lower),
            np.array(self._upper),
            len(self._columns),
            np.array(self._starts, dtype=np.int32),
            np.array(self._columns, dtype=np.int32),
            np.array(self._values),
        )


def _effects(pools: Pools, candidate: Candidate) -> dict[int, Effect]:
    return {
        index: effect
        for placement in placements(pools, candidate)
        for index, effect in placement_effects(pools.trace, placement).items()
    }


def _orders(pools: Pools, candidates: Sequence[Candidate]) -> list[list[int]]:
    return []


_STATUS = {
    highspy.HighsModelStatus.kOptimal: "optimal",
    highspy.HighsModelStatus.kTimeLimit: "time limit",
}
