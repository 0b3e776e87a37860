"""Time against memory: the fastest plan at every budget, with the named techniques beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from reforward._blocks import Block
from reforward._errors import PlanError
from reforward._measure import Measurement, measure
from reforward._plan import Plan
from reforward._profile import Profiled, profile_step
from reforward._runtime import attached
from reforward._solve import HeadPlanner, Planner, simulate, trace_frontier
from reforward._step import Step
from reforward._techniques import Technique, every, full, segments
from reforward._units import check_count

Progress = Callable[[str, float], None]

_TECHNIQUES: dict[str, Technique] = {
    "rf.full()": full(),
    "rf.every(2)": every(2),
    "rf.every(3)": every(3),
    'rf.segments("sqrt")': segments("sqrt"),
    "rf.segments(2)": segments(2),
}


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """A plan, and what its step is expected to take.

    Attributes:
        name: of a technique; "" for the fastest plan of a budget.
        budget_bytes: what was allowed; a technique's own peak.
        peak_bytes, seconds: as predicted.
        plan: the plan.
        measured: the step as it was run; None if it wasn't.
    """

    name: str = ""
    budget_bytes: int
    peak_bytes: int
    seconds: float
    plan: Plan
    measured: Measurement | None = None


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The curve.

    Attributes:
        plain: the step without a plan, as predicted.
        points: the fastest plans, from the smallest peak to the plain step's.
        techniques: those that can be put on the model.
        smallest_bytes: no plan could have a lower peak.
    """

    plain: FrontierPoint
    points: tuple[FrontierPoint, ...]
    techniques: tuple[FrontierPoint, ...]
    smallest_bytes: int


def frontier(
    model: nn.Module,
    step: Step | Callable[[], torch.Tensor],
    *,
    points: int = 20,
    measured: bool = False,
    blocks: Sequence[Block] | None = None,
    progress: Progress = lambda text, share: None,
) -> Frontier:
    """The whole curve, from the smallest peak that any plan was found for to the plain step's.

    The plain step isn't run. Model, optimizer and random streams stay as they are.

    Args:
        model: the model; a plan that is on it is taken off meanwhile.
        step: the step, or a function without arguments that returns its loss.
        points: how many budgets, evenly spaced; at least 2.
        measured: also run a step of every plan and technique; what needs more than is free must not be asked for.
        blocks: as `find_blocks` gives them; None finds them.
        progress: is told what is being done, and which share is done.

    Raises:
        InputError: fewer than two points, or what is given isn't a model.
        DryRunError, StepError: as `profile` does.
    """
    check_count("points", points, least=2)
    step = Step.of(step)
    profiled = profile_step(model, step, blocks=blocks, progress=lambda text, share: progress(text, 0.4 * share))
    planner = Planner(profiled.profile)
    progress("planning", 0.4)
    curve, techniques = frontier_points(planner, points), tuple(_techniques(model, profiled))
    if measured:
        every_point = [*curve, *techniques]
        for number, point in enumerate(every_point):
            progress("measuring", 0.5 + 0.5 * number / len(every_point))
            with attached(model, point.plan):
                every_point[number] = replace(point, measured=measure(model, step, variant=profiled.variant))
        curve, techniques = tuple(every_point[: len(curve)]), tuple(every_point[len(curve) :])
    plain = planner.plain
    return Frontier(
        plain=FrontierPoint(
            budget_bytes=plain.peak_bytes, peak_bytes=plain.peak_bytes, seconds=plain.seconds, plan=Plan(nodes=())
        ),
        points=curve,
        techniques=techniques,
        smallest_bytes=planner.peak_bound,
    )


def frontier_points(planner: Planner | HeadPlanner, points: int) -> tuple[FrontierPoint, ...]:
    """The curve of a profile that is there already."""
    return tuple(
        FrontierPoint(
            budget_bytes=point.budget_bytes,
            peak_bytes=point.solution.timeline.peak_bytes,
            seconds=point.solution.timeline.seconds,
            plan=point.solution.plan,
        )
        for point in trace_frontier(planner, points)
    )


def _techniques(model: nn.Module, profiled: Profiled) -> list[FrontierPoint]:
    found = []
    for name, technique in _TECHNIQUES.items():
        plan = technique.resolve(model, profiled.blocks)
        try:
            timeline = simulate(profiled.profile, plan)
        except PlanError:  # runs that this model's chains don't allow
            continue
        found.append(
            FrontierPoint(
                name=name,
                budget_bytes=timeline.peak_bytes,
                peak_bytes=timeline.peak_bytes,
                seconds=timeline.seconds,
                plan=plan,
            )
        )
    return found
