"""Profile + budget → plan. Pure: no torch, no input or output."""

from __future__ import annotations

from reforward._errors import InputError
from reforward._plan import Plan
from reforward._profile_type import Profile
from reforward._solve.frontier import FrontierPoint, frontier, trace_frontier
from reforward._solve.heads import HeadPlanner, planner_of
from reforward._solve.inside import Value, nested_choices
from reforward._solve.options import Allow
from reforward._solve.peak import Peak, explain_peak
from reforward._solve.planner import Planner, Solution
from reforward._solve.simulate import Moment, Timeline, simulate
from reforward._units import parse_bytes, parse_share

__all__ = [
    "Allow",
    "FrontierPoint",
    "HeadPlanner",
    "Moment",
    "Peak",
    "Planner",
    "Solution",
    "Timeline",
    "Value",
    "explain_peak",
    "find",
    "frontier",
    "nested_choices",
    "planner_of",
    "simulate",
    "solve",
    "trace_frontier",
]


def solve(profile: Profile, budget: str | int | float, *, allow: Allow | None = None) -> Plan:
    """The fastest plan whose predicted peak stays within the budget at every moment of the step.

    Args:
        profile: the step in numbers.
        budget: bytes of the whole step's peak: `"6GiB"`, `900_000_000`, or `"60%"` of the plain step's peak.
        allow: what the plan may be made of; None: everything that is exact bit for bit.

    Returns:
        The plan with its predictions. Blocks that it doesn't name save everything.

    Raises:
        InputError: the budget isn't a finite, positive size.
        BudgetError: no plan fits; the message says which budget can be met and what holds it up.
    """
    return find(profile, budget, allow=allow).plan


def find(profile: Profile, budget: str | int | float, *, allow: Allow | None = None) -> Solution:
    """As `solve`, with the timeline and how the solver did."""
    if not isinstance(profile, Profile):
        raise InputError(f"solve takes a profile, as rf.profile(model, step) gives it, not {profile!r}")
    if allow is not None and not isinstance(allow, Allow):
        raise InputError(f"allow must be rf.Allow(...), not {allow!r}")
    planner = planner_of(profile, allow)
    share = parse_share(budget) if isinstance(budget, str) else None
    if share is None:
        return planner.find(parse_bytes(budget))
    part, of_device = share
    if of_device:
        raise InputError(
            f"{budget!r} is a share of a device, which a profile doesn't know; give bytes or a share of the peak"
        )
    return planner.find(max(1, int(part * planner.plain.peak_bytes)))
