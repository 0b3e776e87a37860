"""What no plan can do better: a lower bound on the cost of any plan within a budget, and on the peak of any plan.

A program in which every block takes one of its options, or is *inside a run* at the least that this can cost: of such a
block nothing is held from its forward to its backward, its forward runs once more, and its backward goes as under the
cheapest option. Any plan, with runs of any length and nested to any depth, is a point of that program whose bytes at
each event and whose cost are at most the plan's own: so its optimum, and any bound on that, is at most the cost of the
best plan. HiGHS has a limited time; what it has proven by then is taken, at worst the optimum over mixes of options.
(The relaxation of Jain et al., Checkmate, 2020, per block instead of per operation, with runs added.)

Regime: budgets at which most blocks needn't be in runs; there it is close. Shortfalls: below "every block recomputed" a
real run holds what it recomputes and a nested one recomputes it again, neither of which the program sees. The bound is
one within the profile's numbers: over the options profiled, and as far as bytes and costs of single blocks add up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import highspy
import numpy as np

from reforward._profile_type import CallCost, OptionCost
from reforward._solve.highs import Rows, solver
from reforward._solve.options import Chain
from reforward._solve.pool import Pools
from reforward._solve.simulate import FULL, Effect, Placement, gap_effect, placement_effects

_RANGE = 1000.0  # bytes and costs are scaled to about this, for HiGHS's absolute tolerances


@dataclass(frozen=True, kw_only=True)
class _Column:
    """Something that a block can do: what it adds to each event, and how much it costs, in all passes together."""

    effects: dict[int, Effect]
    cost: float


def cost_bound(pools: Pools, budget_bytes: int, *, limit_seconds: float = 1.0) -> float | None:
    """A lower bound on the cost (by the weights of `pools`) of any plan whose peak is at most the budget.

    Returns:
        The bound; None if it is proven that there is no such plan.
    """
    return Relaxation(pools, budget_bytes).least_cost(budget_bytes, limit_seconds)


def peak_bound(pools: Pools) -> int:
    """A lower bound on the peak bytes of any plan."""
    return Relaxation(pools, pools.trace.profile.static_bytes).least_peak()


class Relaxation:
    """Columns: what each block may do, as shares that add up to 1; the live bytes before each event; the peak.

    Args:
        pools: the profile with its chains.
        scale_bytes: a size of about the peaks in question.
        runs: whether blocks may be inside a run; without that it bounds plans of single blocks only.
    """

    def __init__(self, pools: Pools, scale_bytes: int, *, runs: bool = True):
        self._pools = pools
        self._unit = max(scale_bytes, 1) / _RANGE
        self._places = [(i, block) for i, chain in enumerate(pools.chains) for block in range(len(chain))]
        blocks = [list(_columns(pools, pools.chains[i], block, runs)) for i, block in self._places]
        self._widths = [len(columns) for columns in blocks]
        self._columns = [column for columns in blocks for column in columns]
        self._live = len(self._columns)
        self._peak = self._live + len(pools.trace.profile.events) + 1
        self._highs = solver(0.0)
        self._add_columns()
        rows = Rows()
        first = 0
        for columns in blocks:
            rows.add(1.0, 1.0, dict.fromkeys(range(first, first + len(columns)), 1.0))
            first += len(columns)
        self._account(rows)
        rows.pass_to(self._highs)

    def least_cost(self, budget_bytes: int, limit_seconds: float) -> float | None:
        """Of any plan within the budget; None if there is none."""
        self._minimise_cost(budget_bytes)
        if self._infeasible():
            return None
        relaxed = self._highs.getInfo().objective_function_value
        whole = np.arange(self._live, dtype=np.int32)
        self._highs.changeColsIntegrality(
            len(whole), whole, np.full(len(whole), int(highspy.HighsVarType.kInteger), dtype=np.uint8)
        )
        self._highs.setOptionValue("time_limit", limit_seconds + self._highs.getRunTime())
        self._highs.run()
        if self._infeasible():
            return None
        return self._fixed_cost() + max(relaxed, self._highs.getInfo().mip_dual_bound) / _RANGE

    def cheapest_mix(self, budget_bytes: int) -> dict[tuple[int, int], list[float]] | None:
        """By chain and block, the share of each option, and of being in a run, at the least cost within the budget;
        None if there is no such mix."""
        self._minimise_cost(budget_bytes)
        if self._infeasible():
            return None
        shares = iter(self._highs.getSolution().col_value)
        return {
            place: [next(shares) for _ in range(count)] for place, count in zip(self._places, self._widths, strict=True)
        }

    def least_peak(self) -> int:
        """Of any plan."""
        self._minimise({self._peak: 1.0})
        return int(self._highs.getInfo().objective_function_value * self._unit)

    def _minimise_cost(self, budget_bytes: int) -> None:
        self._highs.changeColBounds(self._peak, 0.0, budget_bytes / self._unit)
        self._minimise({i: column.cost * _RANGE for i, column in enumerate(self._columns)})

    def _infeasible(self) -> bool:
        return self._highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible

    def _minimise(self, costs: dict[int, float]) -> None:
        every = np.arange(self._peak + 1, dtype=np.int32)
        self._highs.changeColsCost(len(every), every, np.array([costs.get(int(i), 0.0) for i in every]))
        self._highs.run()

    def _add_columns(self) -> None:
        infinity, events = highspy.kHighsInf, self._peak - self._live
        lower = np.concatenate([np.zeros(self._live), np.full(events, -infinity), [0.0]])
        upper = np.concatenate([np.ones(self._live), np.full(events + 1, infinity)])
        self._highs.addVars(self._peak + 1, lower, upper)

    def _account(self, rows: Rows) -> None:
        profile, unit = self._pools.trace.profile, self._unit
        start = profile.static_bytes / unit
        rows.add(start, start, {self._live: 1.0})
        choices: list[list[tuple[int, Effect]]] = [[] for _ in profile.events]
        for index, column in enumerate(self._columns):
            for event, effect in column.effects.items():
                choices[event].append((index, effect))
        for index, fixed in enumerate(self._fixed()):
            live = self._live + index
            flow, height = {live + 1: 1.0, live: -1.0}, {live: 1.0, self._peak: -1.0}
            for column, effect in choices[index]:
                flow[column] = -effect.delta_bytes / unit
                height[column] = effect.peak_bytes / unit
            rows.add(fixed.delta_bytes / unit, fixed.delta_bytes / unit, flow)
            rows.add(-highspy.kHighsInf, -fixed.peak_bytes / unit, height)

    def _fixed(self) -> Iterator[Effect]:
        """By event: what it adds whatever is chosen."""
        trace = self._pools.trace
        chosen = {event for column in self._columns for event in column.effects}
        for index, event in enumerate(trace.profile.events):
            if event.kind == "gap":
                yield gap_effect(event)
            elif index in chosen:
                yield Effect()
            else:  # nothing can be chosen for this call: it saves everything
                yield placement_effects(trace, Placement(calls=(event.call,), shape=0))[index]

    def _fixed_cost(self) -> float:
        return self._pools.weights(sum(effect.seconds for effect in self._fixed()))


def _columns(pools: Pools, chain: Chain, block: int, runs: bool) -> Iterator[_Column]:
    calls, trace = chain.calls[block], pools.trace
    for option in range(len(chain.costs[block].options)):
        effects: dict[int, Effect] = {}
        for call in calls:
            effects |= placement_effects(trace, Placement(calls=(call,), shape=option))
        work = Effect()
        for effect in effects.values():
            work = work.then(effect)
        yield _Column(effects=effects, cost=pools.weights(work.seconds, work.replay_flops))
    if runs and len(chain) > 1:
        effects, cost = {}, 0.0
        for number, call in enumerate(calls):
            before = trace.profile.calls[chain.calls[block - 1][number]].output_bytes if block else 0
            ahead, back = _in_a_run(trace.profile.calls[call], before)
            effects |= {trace.forward[call]: ahead, trace.backward[call]: back}
            cost += _cost_in_a_run(pools, trace.profile.calls[call])
        yield _Column(effects=effects, cost=cost)


def _in_a_run(cost: CallCost, input_bytes: int) -> tuple[Effect, Effect]:
    """Forward and backward of a call at the least that they can need inside a run, nested or not.

    Its input is freed once it is consumed. When its backward begins, it is there again, under some option, beside
    whatever else the run holds then; its output isn't.
    """
    full = cost.options[FULL]
    held = min(full.forward_delta_bytes, *[o.forward_delta_bytes for o in cost.options]) - input_bytes
    left = min(o.forward_delta_bytes + o.backward_delta_bytes for o in cost.options)
    height = min(o.forward_delta_bytes - cost.output_bytes + o.backward_peak_bytes for o in cost.options)
    ahead = Effect(delta_bytes=held, peak_bytes=max(full.forward_peak_bytes, 0))
    return ahead, Effect(delta_bytes=left - held, peak_bytes=max(height, 0))


def _cost_in_a_run(pools: Pools, cost: CallCost) -> float:
    full = cost.options[FULL]

    def own(option: OptionCost) -> float:
        extra = option.forward_seconds - full.forward_seconds + option.backward_seconds + option.replay_seconds
        return pools.weights(extra, option.replay_flops)

    again = pools.weights(full.forward_seconds + full.replay_seconds, full.replay_flops)
    return again + min(own(option) for option in cost.options)
