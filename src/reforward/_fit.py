"""The line in one call: model + step + budget → plan → run → proof."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
from torch import nn

from reforward._blocks import Block, find_blocks
from reforward._errors import BudgetError, InputError
from reforward._measure import Measurement, measure
from reforward._measure.measure import device_of
from reforward._measure.room import room_bytes, total_bytes
from reforward._plan import Plan
from reforward._profile import Profiled, dry_run, profile_step
from reforward._profile_type import Profile
from reforward._runtime import attach, attached
from reforward._solve import Planner, Solution
from reforward._solve.frontier import trace_frontier
from reforward._step import Step
from reforward._techniques import none
from reforward._units import format_bytes, parse_bytes, parse_share
from reforward._verify import Proof, verify, verify_regions

Progress = Callable[[str, float], None]

# Rounds of planning: the solver adds up blocks, the dry run and the measurement see the step as a whole.
_ROUNDS = 6
_FRONTIER_POINTS = 12
# A step is taken to fit if this share of the room stays free beside it.
_RESERVE = 0.1


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a step is expected to take."""

    peak_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """The fastest plan for one budget, as predicted."""

    budget_bytes: int
    peak_bytes: int
    seconds: float
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class FitReport:
    """All that `fit` found.

    Attributes:
        plan: the plan, with its predictions.
        profile: the step in numbers.
        budget_bytes: the budget in bytes.
        breakdown: bytes at the plain step's peak: "parameters", "buffers", "gradients", "optimizer", "batch",
            "block:<path>", "head", "temporaries".
        predicted_plain, predicted_planned: of the heaviest batch.
        measured_plain: None where the plain step isn't known to fit.
        measured_planned: None if nothing was to be measured.
        proof: that the results are the same.
        frontier: time against memory, ascending in memory.
        solver_status, solver_gap, solver_seconds: how the solver did.
    """

    plan: Plan
    profile: Profile
    budget_bytes: int
    breakdown: dict[str, int]
    predicted_plain: Prediction
    predicted_planned: Prediction
    measured_plain: Measurement | None
    measured_planned: Measurement | None
    proof: Proof
    frontier: tuple[FrontierPoint, ...]
    solver_status: str
    solver_gap: float
    solver_seconds: float


def fit(model: nn.Module, step: Step | Callable[[], torch.Tensor], budget: str | int | float) -> Plan:
    """Fits a training step into a memory budget: finds the fastest plan that fits, proves it exact and puts it on the
    model.

    The plain step is never run. Weights, buffers, gradients, optimizer state and random streams are afterwards as if
    `fit` had not been called, so training goes on bit for bit as it would have.

    Args:
        model: the model.
        step: the step, or a function without arguments that returns its loss. With several batches, the plan holds the
            budget for each.
        budget: peak bytes of the whole step on the device, optimizer included: `"20GiB"`, a number, `"60%"` of the
            plain step's predicted peak, or `"60%device"` of the memory that the device has for this process.

    Returns:
        The plan, attached, with its predictions.

    Raises:
        BudgetError: no plan fits; the message gives the smallest budget that can be met and what holds it up.
        InputError, StepError, AttachError, DryRunError: the budget, step or model can't be used; the model is
            untouched.
        ReplayError: a block can't be recomputed exactly.
    """
    step = Step.of(step)
    fitting = _Fitting(model, step, budget, progress=lambda text, share: None)
    fitting.search()
    fitting.hold_when_measured()
    proof = verify_regions(model, step, fitting.plan, fitting.profiled.plain.calls, fitting.profiled.variant)
    _refuse_differences(proof)
    return attach(model, fitting.plan)


def fit_report(
    model: nn.Module,
    step: Step | Callable[[], torch.Tensor],
    budget: str | int | float,
    *,
    progress: Progress | None = None,
) -> FitReport:
    """As `fit`, with all that was found on the way, and the plan left off the model.

    Where the plain step is known to fit into the memory that is free, it is measured too, and the proof covers the
    whole step; elsewhere the proof is taken region by region.
    """
    step = Step.of(step)
    tell = progress or (lambda text, share: None)
    fitting = _Fitting(model, step, budget, progress=tell)
    fitting.search()
    measured = fitting.hold_when_measured()
    profiled = fitting.profiled
    measured_plain = None
    if fitting.plain_fits():
        tell("measuring the plain step", 0.75)
        with attached(model, none()):
            measured_plain = measure(model, step, variant=profiled.variant)
        tell("proving", 0.85)
        proof = verify(model, step, fitting.plan)
    else:
        tell("proving", 0.85)
        proof = verify_regions(model, step, fitting.plan, profiled.plain.calls, profiled.variant)
    tell("drawing the frontier", 0.95)
    return FitReport(
        plan=fitting.plan,
        profile=profiled.profile,
        budget_bytes=fitting.budget_bytes,
        breakdown=profiled.plain.breakdown,
        predicted_plain=Prediction(peak_bytes=profiled.plain.peak_bytes, seconds=fitting.planner.plain.seconds),
        predicted_planned=Prediction(
            peak_bytes=fitting.plan.predicted_peak_bytes or 0, seconds=fitting.plan.predicted_seconds or 0.0
        ),
        measured_plain=measured_plain,
        measured_planned=measured,
        proof=proof,
        frontier=_frontier(fitting.planner),
        solver_status=fitting.solution.status,
        solver_gap=fitting.solution.gap,
        solver_seconds=fitting.solution.seconds,
    )


def explain(model: nn.Module, step: Step | Callable[[], torch.Tensor]) -> dict[str, int]:
    """Where the peak of the plain step comes from, in bytes that sum to it, from a dry run: the step isn't run.

    Returns:
        Bytes by part: "parameters", "buffers", "gradients", "optimizer", "batch", "block:<path>" (what the block's
        forward left for backward), "head" (what the forward outside of blocks left), "temporaries".
    """
    step = Step.of(step)
    blocks = find_blocks(model)
    with attached(model, none()):
        runs = [dry_run(model, step, blocks, variant=variant) for variant in range(step.variants)]
    return max(runs, key=lambda run: run.peak_bytes).breakdown


class _Fitting:
    """The search for one plan, from the profile to a measured step.

    Attributes:
        profiled, planner: of the plain step.
        budget_bytes: the budget.
        solution: the latest of the solver.
        plan: its plan, predictions corrected by the dry run.
    """

    solution: Solution
    plan: Plan

    def __init__(self, model: nn.Module, step: Step, budget: str | int | float, *, progress: Progress):
        self._model = model
        self._step = step
        self._tell = progress
        share = _checked(budget)
        self.device = device_of(model)
        blocks = find_blocks(model)
        self.profiled: Profiled = profile_step(
            model, step, blocks=blocks, progress=lambda text, part: progress(text, 0.4 * part)
        )
        self.planner = Planner(self.profiled.profile)
        self.budget_bytes = self._bytes_of(budget, share)
        self._target = self.budget_bytes

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.profiled.blocks

    def search(self) -> None:
        """Plans until the dry run of the planned step, the same runtime on fake tensors, stays within the budget."""
        for _ in range(_ROUNDS):
            self._tell("planning", 0.45)
            self.solution = self.planner.find(self._target)
            peak = self._dry_peak(self.solution.plan)
            self.plan = msgspec.structs.replace(
                self.solution.plan,
                model_type=type(self._model).__name__,
                budget_bytes=self.budget_bytes,
                predicted_peak_bytes=peak,
                predicted_plain_peak_bytes=self.profiled.plain.peak_bytes,
            )
            if peak <= self.budget_bytes:
                return
            self._tighten(peak)
        raise self._never_held("predicted")

    def hold_when_measured(self) -> Measurement:
        """Measures the planned step, and plans again while it takes more than the budget."""
        for _ in range(_ROUNDS):
            self._tell("measuring the planned step", 0.55)
            with attached(self._model, self.plan):
                measured = [measure(self._model, self._step, variant=v) for v in range(self._step.variants)]
            heaviest = max(measured, key=lambda one: one.peak_bytes)
            if heaviest.peak_bytes <= self.budget_bytes:
                return measured[self.profiled.variant]
            self._tighten(heaviest.peak_bytes)
            self.search()
        raise self._never_held("measured")

    def plain_fits(self) -> bool:
        """Whether the plain step is known to fit beside what is in memory now."""
        extra = self.profiled.plain.peak_bytes - self.profiled.plain.parameter_bytes
        return extra <= room_bytes(self.device) * (1 - _RESERVE)

    def _dry_peak(self, plan: Plan) -> int:
        with attached(self._model, plan):
            runs = [
                dry_run(self._model, self._step, self.blocks, variant=v, knowledge=self.profiled.costs.knowledge)
                for v in range(self._step.variants)
            ]
        return max(run.peak_bytes for run in runs)

    def _tighten(self, peak_bytes: int) -> None:
        self._target -= peak_bytes - self.budget_bytes

    def _bytes_of(self, budget: str | int | float, share: tuple[float, bool] | None) -> int:
        if share is None:
            return parse_bytes(budget)
        part, of_device = share
        return int(part * (total_bytes(self.device) if of_device else self.profiled.plain.peak_bytes))

    def _never_held(self, how: str) -> BudgetError:
        return BudgetError(
            f"no plan for {type(self._model).__name__} stayed within {format_bytes(self.budget_bytes)}"
            f" when its step was {how}; raise the budget",
            budget_bytes=self.budget_bytes,
        )


def _checked(budget: str | int | float) -> tuple[float, bool] | None:
    """Reads the budget before any work is done."""
    share = parse_share(budget) if isinstance(budget, str) else None
    if share is None:
        parse_bytes(budget)
    return share


def _refuse_differences(proof: Proof) -> None:
    if proof.differences:
        raise InputError(
            f"the plan would change the results of this model: {', '.join(proof.differences[:3])} differ when their"
            " region is computed again. Find out with rf.verify, and leave that block out"
        )


def _frontier(planner: Planner) -> tuple[FrontierPoint, ...]:
    return tuple(
        FrontierPoint(
            budget_bytes=point.budget_bytes,
            peak_bytes=point.solution.timeline.peak_bytes,
            seconds=point.solution.timeline.seconds,
            plan=point.solution.plan,
        )
        for point in trace_frontier(planner, _FRONTIER_POINTS)
    )


__all__ = ["FitReport", "FrontierPoint", "Prediction", "Proof", "explain", "fit", "fit_report"]
