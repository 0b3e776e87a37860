"""The planner: pools of candidates, the program over them, and what comes out as a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from reforward._errors import BudgetError
from reforward._plan import Node, Plan, Region, Run
from reforward._profile_type import Profile
from reforward._solve.milp import Choice, choose, placements
from reforward._solve.options import Allow
from reforward._solve.peak import Peak, explain_peak
from reforward._solve.pool import Candidate, Pools
from reforward._solve.simulate import Shape, Timeline, run_placements, width
from reforward._units import format_bytes

LIMIT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A plan, the step that it is expected to give, and how sure it is that there is no faster one.

    Attributes:
        plan: with its predictions filled in. Blocks that it doesn't name save everything.
        timeline: the planned step, simulated.
        plain: the step without a plan, simulated.
        status: "optimal": no faster plan exists over the candidates offered; "time limit": proven up to `gap`.
        gap: distance to the proven bound, as a share of the plain step's time.
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

    def __init__(self, profile: Profile, allow: Allow | None = None):
        self.profile = profile
        self.pools = Pools(profile, allow or Allow())

    @cached_property
    def plain(self) -> Timeline:
        """The step without a plan."""
        return run_placements(self.pools.trace, [])

    @cached_property
    def smallest(self) -> Solution:
        """The plan with the smallest peak over the candidates, the fastest of those."""
        lowest = self.pools.guess(0)
        peak = self._simulate(lowest).peak_bytes
        candidates = self.pools.pick(0)
        return self._solution(
            choose(self.pools, candidates, peak, shrink=True, limit_seconds=LIMIT_SECONDS), lowest, None
        )

    def find(self, budget_bytes: int) -> Solution:
        """The fastest plan over the candidates whose peak is at most the budget.

        Raises:
            BudgetError: there is none.
        """
        guess = self.pools.guess(budget_bytes)
        candidates = self.pools.pick(budget_bytes)
        choice = choose(self.pools, candidates, budget_bytes, limit_seconds=LIMIT_SECONDS)
        # The guess helps out only where the program ran out of time, or a run crosses the border of a counted stretch.
        if choice.timeline is not None or self._simulate(guess).peak_bytes <= budget_bytes:
            return self._solution(choice, guess, budget_bytes)
        if self.smallest.timeline.peak_bytes <= budget_bytes:
            return self.smallest
        raise self._refusal(budget_bytes)

    def _solution(self, choice: Choice, guess: Sequence[Candidate], budget_bytes: int | None) -> Solution:
        """The choice, or the guess where the program found nothing better in its time."""
        timeline, chosen = choice.timeline, choice.candidates
        if timeline is None or chosen is None:
            timeline, chosen = self._simulate(guess), guess
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
            status=choice.status,
            gap=choice.gap,
            seconds=choice.seconds,
        )

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
        peak: Peak = explain_peak(self.profile, self.smallest.timeline)
        return BudgetError(
            f"no plan fits {format_bytes(budget_bytes)}: the smallest peak is {format_bytes(peak.peak_bytes)}"
            f" ({peak.peak_bytes} bytes). {peak}",
            budget_bytes=budget_bytes,
            smallest_bytes=peak.peak_bytes,
        )
