"""Time against memory: the fastest plan for each of a range of budgets."""

from __future__ import annotations

from dataclasses import dataclass

from reforward._errors import InputError
from reforward._profile_type import Profile
from reforward._solve.heads import HeadPlanner, planner_of
from reforward._solve.options import Allow
from reforward._solve.planner import Planner, Solution

_LIMIT_SECONDS = 1.0  # per point: a plot needs no proof


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """The fastest plan found for one budget.

    Attributes:
        budget_bytes: what was allowed; `solution.timeline.peak_bytes` is at most that.
        solution: its plan and timeline.
    """

    budget_bytes: int
    solution: Solution


def frontier(profile: Profile, points: int = 20, *, allow: Allow | None = None) -> tuple[FrontierPoint, ...]:
    """Plans from the smallest peak to the plain step's, at evenly spaced budgets, ascending.

    More memory never takes longer along it.

    Args:
        points: how many budgets, both ends included; at least 2. One point if nothing can be saved.

    Raises:
        InputError: fewer than two points.
    """
    if points < 2:
        raise InputError(f"a frontier needs at least 2 points, not {points}")
    return trace_frontier(planner_of(profile, allow), points)


def trace_frontier(planner: Planner | HeadPlanner, points: int) -> tuple[FrontierPoint, ...]:
    """`frontier` with a planner that is already there."""
    smallest = planner.smallest
    low, high = smallest.timeline.peak_bytes, max(planner.plain.peak_bytes, smallest.timeline.peak_bytes)
    budgets = sorted({low + (high - low) * index // (points - 1) for index in range(points)})
    found: list[FrontierPoint] = []
    best = smallest
    for budget in budgets:
        solution = planner.find(budget, _LIMIT_SECONDS)
        # Plans go by operations as well, and hard programs end at a gap: what fits a smaller budget also fits this one.
        if solution.timeline.seconds <= best.timeline.seconds:
            best = solution
        found.append(FrontierPoint(budget_bytes=budget, solution=best))
    return tuple(found)
