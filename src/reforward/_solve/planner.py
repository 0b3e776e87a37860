"""The planner: pools of candidates, the program over them, and what comes out as a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from reforward._errors import BudgetError
from reforward._plan import Node, Plan, Region, Run
from reforward._profile_type import Profile
from reforward._solve.bound import cost_bound, peak_bound
from reforward._solve.milp import Choice, choose, placements
from reforward._solve.options import Allow, Weights
from reforward._solve.peak import explain_peak
from reforward._solve.pool import Candidate, Pools
from reforward._solve.rounding import rounded
from reforward._solve.simulate import Shape, Timeline, run_placements, width
from reforward._units import format_bytes

#: After that, the best plan so far is taken: only long chains of different blocks come near it.
LIMIT_SECONDS = 4.0
_MOST = 10_000  # candidates; with more, no search begins where a plan that is close to the bound is known
_CLOSE = 0.01  # of what any plan must add
_NOTHING = 1e-9  # of the plain step's cost


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A plan, the step that it is expected to give, and how sure it is that there is no faster one.

    Attributes:
        plan: with its predictions filled in. Blocks that it doesn't name save everything.
        timeline: the planned step, simulated.
        plain: the step without a plan, simulated.
        status: "optimal": no faster plan exists over the candidates offered; "time limit": proven up to `gap`;
            "feasible": it fits, nothing is proven.
        gap: distance to the bound that is proven over the candidates, as a share of the plan's cost; infinite if
            nothing is proven.
        seconds: what the solver took.
    """

    plan: Plan
    timeline: Timeline
    plain: Timeline
    status: str
    gap: float
    seconds: float


class Planner:
    """Plans for one profile; candidates are searched once for all budgets."""

    def __init__(self, profile: Profile, allow: Allow | None = None, weights: Weights | None = None):
        self.profile = profile
        self.allow = allow or Allow()
        self.pools = Pools(profile, self.allow, weights)

    @cached_property
    def plain(self) -> Timeline:
        """The step without a plan."""
        return run_placements(self.pools.trace, [])

    @cached_property
    def smallest(self) -> Solution:
        """The plan with the smallest peak over the candidates."""
        guess = self.pools.guess(0)
        peak = self._simulate(guess).peak_bytes
        choice = choose(self.pools, self.pools.pick(0), peak, limit_seconds=LIMIT_SECONDS, known=guess, shrink=True)
        return self._solution(guess if choice.candidates is None else choice.candidates, choice, None)

    def find(self, budget_bytes: int, limit_seconds: float = LIMIT_SECONDS) -> Solution:
        """The fastest plan over the candidates whose peak is at most the budget.

        Args:
            budget_bytes: of the whole step's peak.
            limit_seconds: after that, the best plan so far is taken.

        Raises:
            BudgetError: there is none.
        """
        guess, candidates = self._guess(budget_bytes), self.pools.pick(budget_bytes)
        if len(candidates) > _MOST and self._is_close(guess, budget_bytes):
            nothing = Choice(candidates=None, timeline=None, status="feasible", gap=math.inf, seconds=0.0)
            return self._solution(guess, nothing, budget_bytes)
        choice = choose(self.pools, candidates, budget_bytes, limit_seconds=limit_seconds, known=guess)
        # The guess can be faster where the program left out runs that leave a counted stretch.
        known = [one for one in (choice.candidates, guess) if one is not None]
        fitting = [one for one in known if self._simulate(one).peak_bytes <= budget_bytes]
        if fitting:
            return self._solution(min(fitting, key=self._cost), choice, budget_bytes)
        if self.smallest.timeline.peak_bytes > budget_bytes:
            raise self._refusal(budget_bytes)
        plan = msgspec.structs.replace(self.smallest.plan, budget_bytes=budget_bytes)
        return replace(self.smallest, plan=plan, status="feasible", gap=math.inf)

    def _guess(self, budget_bytes: int) -> Sequence[Candidate]:
        """A plan to begin with, which may not fit."""
        guess = self.pools.guess(budget_bytes)
        other = rounded(self.pools, budget_bytes) if self.pools.long else None
        if other is None:
            return guess
        fits = self._simulate(guess).peak_bytes <= budget_bytes
        return min(guess, other, key=self._cost) if fits else other

    def _is_close(self, chosen: Sequence[Candidate], budget_bytes: int) -> bool:
        """Whether a plan fits and is so near to what any plan must add that a search isn't worth its time."""
        if self._simulate(chosen).peak_bytes > budget_bytes:
            return False
        bound = cost_bound(self.pools, budget_bytes)
        least = 0.0 if bound is None else bound - self.pools.weights(self.plain.seconds)
        return self._cost(chosen) - self.pools.weights(self.plain.seconds) <= (1 + _CLOSE) * least

    def above_bound(self, solution: Solution, budget_bytes: int) -> float | None:
        """How far what a plan adds to the plain step is from what any plan within the budget must add.

        Returns:
            0.02: at most 2 % more than the least that is possible; None if nothing is known to be needed.
        """
        plain = self.pools.weights(self.plain.seconds)
        added = self.pools.weights(solution.timeline.seconds, solution.timeline.replay_flops) - plain
        if added <= _NOTHING:
            return 0.0
        bound = cost_bound(self.pools, budget_bytes)
        least = bound - plain if bound is not None else 0.0
        return max(added / least - 1, 0.0) if least > _NOTHING else None

    @cached_property
    def peak_bound(self) -> int:
        """No plan's peak is lower than this."""
        return peak_bound(self.pools)

    def _solution(self, chosen: Sequence[Candidate], choice: Choice, budget_bytes: int | None) -> Solution:
        timeline = self._simulate(chosen)
        own = choice.candidates is not None and tuple(chosen) == choice.candidates
        plan = Plan(
            nodes=tuple(self._nodes(chosen)),
            budget_bytes=budget_bytes,
            predicted_peak_bytes=timeline.peak_bytes,
            predicted_seconds=timeline.seconds,
            predicted_plain_peak_bytes=self.plain.peak_bytes,
            predicted_plain_seconds=self.plain.seconds,
        )
        return Solution(
            plan=plan,
            timeline=timeline,
            plain=self.plain,
            status=choice.status if own else "feasible",
            gap=choice.gap if own else math.inf,
            seconds=choice.seconds,
        )

    def _cost(self, chosen: Sequence[Candidate]) -> float:
        timeline = self._simulate(chosen)
        return round(self.pools.weights(timeline.seconds, timeline.replay_flops), 9)

    def _simulate(self, candidates: Sequence[Candidate]) -> Timeline:
        return run_placements(self.pools.trace, [p for one in candidates for p in placements(self.pools, one)])

    def _nodes(self, candidates: Sequence[Candidate]) -> Iterator[Node]:
        for one in candidates:
            calls = [found[0] for found in self.pools.chains[one.chain].calls[one.start : one.stop]]
            if one.shape != 0:
                yield self._node(calls, one.shape)

    def _node(self, calls: Sequence[int], shape: Shape) -> Node:
        if isinstance(shape, int):
            cost = self.profile.calls[calls[0]]
            return Region(path=cost.path, policy=cost.options[shape].policy, module_type=cost.module_type)
        nodes, start = [], 0
        for member in shape:
            nodes.append(self._node(calls[start : start + width(member)], member))
            start += width(member)
        return Run(members=tuple(nodes))

    def _refusal(self, budget_bytes: int) -> BudgetError:
        peak = explain_peak(self.profile, self.smallest.timeline)
        least = f"; no plan could have less than {self.peak_bound}" if self.peak_bound < peak.peak_bytes else ""
        return BudgetError(
            f"no plan fits {format_bytes(budget_bytes)}: the smallest peak is {format_bytes(peak.peak_bytes)}"
            f" ({peak.peak_bytes} bytes{least}). {peak}",
            budget_bytes=budget_bytes,
            smallest_bytes=peak.peak_bytes,
        )
