"""Plans with the loss head plain, or in chunks: whichever is the fastest that fits.

Each number of chunks that was profiled gives a profile of its own, with the same blocks and other gaps between them;
the blocks are planned for each by itself, and the best of these plans is taken. That is the full search, as the head's
choice is one of a handful; the solver runs once per number of chunks, and only once if the plain step fits.
"""

from __future__ import annotations

import math
from functools import cached_property

import msgspec

from reforward._errors import BudgetError, InputError
from reforward._profile_type import HeadCost, Profile
from reforward._solve.bound import cost_bound
from reforward._solve.options import Allow
from reforward._solve.planner import LIMIT_SECONDS, Planner, Solution
from reforward._solve.simulate import Timeline


def planner_of(profile: Profile, allow: Allow | None = None) -> Planner | HeadPlanner:
    """The planner of a profile, for what may be done.

    Raises:
        InputError: the head may be done in chunks, and wasn't profiled so.
    """
    if allow is None or not allow.chunked_head:
        return Planner(profile, allow)
    if not profile.heads:
        raise InputError(
            "the profile doesn't say what the loss head takes in chunks: make it with profile(model, step,"
            " allow='chunked_head')"
        )
    return HeadPlanner(profile, allow)


class HeadPlanner:
    """As `Planner`, with the profile's heads as further options."""

    def __init__(self, profile: Profile, allow: Allow):
        self._base = Planner(profile, allow)
        self._heads = profile.heads

    @property
    def plain(self) -> Timeline:
        """The step without a plan."""
        return self._base.plain

    @cached_property
    def smallest(self) -> Solution:
        """The plan with the smallest peak over the candidates."""
        return min(
            (self._under(cost, planner.smallest) for cost, planner in self._planners),
            key=lambda solution: solution.timeline.peak_bytes,
        )

    def find(self, budget_bytes: int, limit_seconds: float = LIMIT_SECONDS) -> Solution:
        """The fastest plan over the candidates whose peak is at most the budget; of equal ones the exact one.

        Raises:
            BudgetError: there is none.
        """
        if self.plain.peak_bytes <= budget_bytes:
            return self._base.find(budget_bytes, limit_seconds)
        found: list[tuple[float, Solution]] = []
        refusals: list[BudgetError] = []
        for cost, planner in self._planners:
            try:
                solution = planner.find(budget_bytes, limit_seconds)
            except BudgetError as error:
                refusals.append(error)
            else:
                found.append((self._cost(cost, solution), self._under(cost, solution)))
        if not found:
            raise min(refusals, key=lambda error: error.smallest_bytes or math.inf)
        return min(found, key=lambda one: one[0])[1]

    def above_bound(self, solution: Solution, budget_bytes: int) -> float | None:
        """As `Planner.above_bound`: over all numbers of chunks that were profiled."""
        plain = self._base.pools.weights(self.plain.seconds)
        added = self._cost(self._cost_of(solution), solution) - plain
        if added <= 0:
            return 0.0
        bounds = [
            bound + self._extra(cost) - self._weighed(cost)
            for cost, planner in self._planners
            if (bound := cost_bound(planner.pools, budget_bytes)) is not None
        ]
        least = min(bounds, default=plain) - plain
        return max(added / least - 1, 0.0) if least > 0 else None

    @cached_property
    def peak_bound(self) -> int:
        """No plan's peak is lower than this."""
        return min(planner.peak_bound for _, planner in self._planners)

    @cached_property
    def _planners(self) -> list[tuple[HeadCost | None, Planner]]:
        base = self._base
        return [
            (None, base),
            *[(cost, Planner(base.profile.under(cost), base.allow, base.pools.weights)) for cost in self._heads],
        ]

    def _cost_of(self, solution: Solution) -> HeadCost | None:
        return next((cost for cost in self._heads if cost.head == solution.plan.head), None)

    def _cost(self, cost: HeadCost | None, solution: Solution) -> float:
        """Comparable between heads: what a head takes longer counts in full, as a block's recomputation does."""
        timeline = solution.timeline
        return (
            self._base.pools.weights(timeline.seconds, timeline.replay_flops) - self._weighed(cost) + self._extra(cost)
        )

    def _weighed(self, cost: HeadCost | None) -> float:
        """What `Weights` makes of the head's seconds, which are a part of its share for measured ones alone."""
        return 0.0 if cost is None else self._base.pools.weights(cost.extra_seconds)

    def _extra(self, cost: HeadCost | None) -> float:
        seconds = self.plain.seconds
        return 0.0 if cost is None or seconds <= 0 else cost.extra_seconds / seconds

    def _under(self, cost: HeadCost | None, solution: Solution) -> Solution:
        if cost is None:
            return solution
        plan = msgspec.structs.replace(
            solution.plan,
            head=cost.head,
            predicted_plain_peak_bytes=self.plain.peak_bytes,
            predicted_plain_seconds=self.plain.seconds,
        )
        return Solution(
            plan=plan,
            timeline=solution.timeline,
            plain=self.plain,
            status=solution.status,
            gap=solution.gap,
            seconds=solution.seconds,
        )
