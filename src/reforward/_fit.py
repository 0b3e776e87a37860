"""The line in one call: model + step + budget → plan → run → proof."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec
import torch
from torch import nn

from reforward._blocks import Block, check_model, find_blocks
from reforward._errors import BudgetError, DryRunError, HeadError, InputError, ReplayMismatchError
from reforward._frontier import FrontierPoint, frontier_points
from reforward._measure import Measurement, measure
from reforward._measure.measure import device_of
from reforward._measure.measurement import Breakdown
from reforward._measure.room import total_bytes, usable_bytes
from reforward._plan import Plan
from reforward._profile import DryRun, Profiled, dry_runs, head_losses, profile_step, with_heads
from reforward._profile_type import Profile
from reforward._runtime import attach, attached
from reforward._solve import Allow, HeadPlanner, Planner, Solution, explain_peak, planner_of
from reforward._step import Step
from reforward._techniques import check_blocks, none, resolve_head, type_name
from reforward._units import format_bytes, parse_bytes, parse_share
from reforward._verify import Proof, merged_proof, verify_head, verify_regions, verify_step

Progress = Callable[[str, float], None]
#: What may be done beside what is exact bit for bit.
Permission = Literal["chunked_head"]

# Rounds of planning: the solver adds up blocks, the dry run and the measurement see the step as a whole.
_ROUNDS = 10
_FRONTIER_POINTS = 12
# A dry run doesn't see the scalars that autograd keeps, a few bytes each; a budget is only promised with room for them:
# this share of the peak, and at least so many bytes.
_DRY_RUN_ERROR, _DRY_RUN_ERROR_BYTES = 0.001, 1024


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a step is expected to take."""

    peak_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FitReport:
    """All that `fit` found.

    Attributes:
        plan: the plan, with its predictions.
        profile: the step in numbers.
        budget_bytes: the budget in bytes.
        breakdown: where the plain step's peak comes from, as predicted.
        predicted_plain, predicted_planned: of the heaviest batch.
        measured_plain: None where the plain step isn't known to fit.
        measured_planned: of the batch that took most.
        proof: that the results are the same.
        frontier: time against memory, ascending in memory.
        solver_status, solver_gap, solver_seconds: how the solver did; no gap where it proved nothing.
        above_bound: how much more the plan adds than any plan within the budget must, as a share; None: not known.
    """

    plan: Plan
    profile: Profile
    budget_bytes: int
    breakdown: Breakdown
    predicted_plain: Prediction
    predicted_planned: Prediction
    measured_plain: Measurement | None
    measured_planned: Measurement
    proof: Proof
    frontier: tuple[FrontierPoint, ...]
    solver_status: str
    solver_gap: float | None
    solver_seconds: float
    above_bound: float | None


def fit(
    model: nn.Module,
    step: Step | Callable[[], torch.Tensor],
    budget: str | int | float,
    *,
    allow: Permission | None = None,
    blocks: Sequence[Block] | None = None,
) -> Plan:
    """Fits a training step into a memory budget: finds the fastest plan that fits, proves it and puts it on the model.

    The plain step is never run with gradients; its forward alone is. Weights, buffers, gradients, optimizer state and
    random streams are afterwards as if `fit` had not been called, so training goes on bit for bit as it would have.

    Args:
        model: the model.
        step: the step, or a function without arguments that returns its loss. With several batches, the plan holds the
            budget for each.
        budget: peak bytes of the whole step on the device, optimizer included: `"20GiB"`, a number, `"60%"` of the
            plain step's predicted peak, or `"60%device"` of the memory that the device has for this process.
        allow: `"chunked_head"`: the plan may also do the loss head in chunks, which makes loss and gradients equal to
            rounding (`Plan.exactness`); None: only what is exact bit for bit.
        blocks: the units of recomputation, as `find_blocks` gives them; None finds them.

    Returns:
        The plan, attached, with its predictions.

    Raises:
        BudgetError: no plan fits; the message gives the smallest budget that can be met and what holds it up, and says
            so if `allow="chunked_head"` would make it fit.
        InputError, StepError, AttachError, DryRunError: the budget, step or model can't be used, or a chunked head is
            allowed and there is none; the model is untouched.
        ReplayError: a block can't be recomputed exactly.
    """
    step = Step.of(step)
    search = _Search(model, step, budget, blocks, allow, tell=lambda text, share: None)
    found = search.run(repeats=1)
    _refuse_differences(_prove_parts(model, step, found.plan, search.profiled))
    return attach(model, found.plan)


def fit_report(
    model: nn.Module,
    step: Step | Callable[[], torch.Tensor],
    budget: str | int | float,
    *,
    allow: Permission | None = None,
    blocks: Sequence[Block] | None = None,
    progress: Progress | None = None,
) -> FitReport:
    """As `fit`, with all that was found on the way, and the plan left off the model.

    Where the plain step is known to fit into the memory that is free, it is measured too, and the proof covers the
    whole step; elsewhere the proof is taken region by region.

    Args:
        progress: is told what is being done, and the share of the work that is behind.
    """
    step = Step.of(step)
    tell = progress or (lambda text, share: None)
    search = _Search(model, step, budget, blocks, allow, tell)
    found = search.run(repeats=3)
    profiled, planner = search.profiled, search.planner
    measured_plain = None
    if search.plain_fits():
        tell("measuring the plain step", 0.75)
        with attached(model, none()):
            measured_plain = measure(model, step, variant=profiled.variant)
        tell("proving", 0.85)
        proof = verify_step(model, step, found.plan)
    else:
        tell("proving", 0.85)
        proof = _prove_parts(model, step, found.plan, profiled)
    tell("drawing the frontier", 0.95)
    return FitReport(
        plan=found.plan,
        profile=profiled.profile,
        budget_bytes=search.budget_bytes,
        breakdown=_breakdown(profiled.plain),
        predicted_plain=Prediction(peak_bytes=profiled.plain.peak_bytes, seconds=planner.plain.seconds),
        predicted_planned=Prediction(peak_bytes=found.dry_peak_bytes, seconds=found.solution.timeline.seconds),
        measured_plain=measured_plain,
        measured_planned=found.measured,
        proof=proof,
        frontier=frontier_points(planner, _FRONTIER_POINTS),
        solver_status=found.solution.status,
        solver_gap=found.solution.gap if math.isfinite(found.solution.gap) else None,
        solver_seconds=found.solution.seconds,
        above_bound=planner.above_bound(found.solution, search.budget_bytes),
    )


def explain(
    model: nn.Module, step: Step | Callable[[], torch.Tensor], *, blocks: Sequence[Block] | None = None
) -> Breakdown:
    """Where the peak of the plain step comes from, from a dry run: the step isn't run.

    Workspaces of kernels, which only a real run shows, aren't in it. Of several batches, the heaviest is explained.

    Args:
        blocks: as `find_blocks` gives them; None finds them.

    Returns:
        Bytes by part, which sum to the peak. `print` shows them as a list, `to_dict` gives them for JSON.
    """
    step = Step.of(step)
    check_model(model)
    found = find_blocks(model) if blocks is None else check_blocks(blocks, model)
    with attached(model, none()):
        runs = dry_runs(model, step, found)
    return _breakdown(max(runs, key=lambda run: run.peak_bytes))


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A plan that holds the budget.

    Attributes:
        solution: the solver's.
        plan: its plan, with the dry run's peak as prediction.
        dry_peak_bytes: of the heaviest batch, by the dry run of the planned step.
        measured: of the batch that took most.
    """

    solution: Solution
    plan: Plan
    dry_peak_bytes: int
    measured: Measurement


class _Search:
    """The search for a plan that holds the budget when its step is run dry, and when it is measured.

    Attributes:
        profiled, planner: of the plain step.
        budget_bytes: the budget.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Step,
        budget: str | int | float,
        blocks: Sequence[Block] | None,
        allow: Permission | None,
        tell: Progress,
    ):
        self._model = model
        self._step = step
        self._tell = tell
        self._allow = allow
        check_model(model)
        share = _checked(budget)
        if allow is not None and allow not in get_args(Permission):
            raise InputError(f"allow must be {' or '.join(map(repr, get_args(Permission)))}, not {allow!r}")
        self._device = device_of(model)
        if allow is not None:
            given = None if blocks is None else check_blocks(blocks, model)
            resolve_head(model, 1, blocks=given)  # what can't be done is refused before any work
        self.profiled: Profiled = profile_step(
            model, step, blocks=blocks, progress=lambda text, part: tell(text, 0.4 * part)
        )
        self.planner: Planner | HeadPlanner = Planner(self.profiled.profile)
        self.budget_bytes = self._bytes_of(budget, share)
        if allow is not None:
            self._profile_heads()

    def run(self, *, repeats: int) -> _Found:
        """Searches a plan.

        Args:
            repeats: how many steps are timed.

        Raises:
            BudgetError: there is none.
        """
        try:
            return self._search(repeats)
        except BudgetError as error:
            if self._allow is not None:
                raise
            raise self._with_advice(error) from None

    def _profile_heads(self) -> None:
        self.profiled = with_heads(
            self._model, self._step, self.profiled, progress=lambda text, part: self._tell(text, 0.4)
        )
        self.planner = planner_of(self.profiled.profile, Allow(chunked_head=True))

    def _with_advice(self, error: BudgetError) -> BudgetError:
        """The refusal; it says so if a chunked head would make the budget fit, which is tried."""
        try:
            self._profile_heads()
            found = self._search(1)
        except (BudgetError, InputError, HeadError, DryRunError):  # no head, or it doesn't help
            return error
        if found.plan.head is None:
            return error
        peak = found.measured.peak_bytes
        advice = (
            f' allow="chunked_head" (--allow chunked_head) would make it fit: with the loss head in'
            f" {found.plan.head.chunks} chunks the peak is {format_bytes(peak)} ({peak} bytes, as measured), and loss"
            " and gradients are equal to rounding."
        )
        return BudgetError(f"{error}{advice}", budget_bytes=error.budget_bytes, smallest_bytes=error.smallest_bytes)

    def _search(self, repeats: int) -> _Found:
        """Plans, and plans again for less while the step takes more than the solver thought.

        The solver adds up blocks; the dry run and the measurement see the step as a whole. The plan with the smallest
        peak is tried last.
        """
        target = self.budget_bytes
        for left in reversed(range(_ROUNDS)):
            self._tell("planning", 0.45)
            solution = self._solve(target) if left else self.planner.smallest
            peak, measured = self._dry_peak(solution.plan), None
            if peak <= self.budget_bytes:
                self._tell("measuring the planned step", 0.55)
                measured = self._measure(solution.plan, repeats)
                if measured.peak_bytes <= self.budget_bytes:
                    plan = self._finished(solution.plan, peak)
                    return _Found(solution=solution, plan=plan, dry_peak_bytes=peak, measured=measured)
            if solution.plan.digest() == self.planner.smallest.plan.digest():
                raise self._refusal(peak, measured)
            target -= (measured.peak_bytes if measured else peak) - self.budget_bytes
        raise AssertionError("unreachable")

    def plain_fits(self) -> bool:
        """Whether the plain step is known to fit beside what is in memory now."""
        extra = self.profiled.plain.peak_bytes - self.profiled.plain.parameter_bytes
        return extra <= usable_bytes(self._device)

    def _solve(self, target: int) -> Solution:
        """The plan for a target, which may be below the budget; at worst the plan with the smallest peak."""
        try:
            return self.planner.find(target)
        except (BudgetError, InputError):
            return self.planner.smallest

    def _measure(self, plan: Plan, repeats: int) -> Measurement:
        with attached(self._model, plan):
            taken = [
                measure(self._model, self._step, variant=variant, repeats=repeats)
                for variant in range(self._step.variants)
            ]
        return max(taken, key=lambda one: one.peak_bytes)

    def _dry_peak(self, plan: Plan) -> int:
        profiled = self.profiled
        with attached(self._model, plan):
            runs = dry_runs(self._model, self._step, profiled.blocks, knowledge=profiled.costs.knowledge)
        return max(run.peak_bytes for run in runs)

    def _finished(self, plan: Plan, peak_bytes: int) -> Plan:
        return msgspec.structs.replace(
            plan,
            model_type=type_name(self._model),
            budget_bytes=self.budget_bytes,
            predicted_peak_bytes=peak_bytes,
            predicted_plain_peak_bytes=self.profiled.plain.peak_bytes,
        )

    def _bytes_of(self, budget: str | int | float, share: tuple[float, bool] | None) -> int:
        if share is None:
            return parse_bytes(budget)
        part, of_device = share
        return int(part * (total_bytes(self._device) if of_device else self.profiled.plain.peak_bytes))

    def _refusal(self, dry_peak_bytes: int, measured: Measurement | None) -> BudgetError:
        """Of the plan with the smallest peak, by its dry run and, if that was within the budget, as measured."""
        if measured is not None:
            smallest, how = measured.peak_bytes, f", as measured; {format_bytes(dry_peak_bytes)} were predicted"
        else:
            unseen = max(dry_peak_bytes * _DRY_RUN_ERROR, _DRY_RUN_ERROR_BYTES)
            smallest, how = math.ceil(dry_peak_bytes + unseen), ""
        cause = explain_peak(self.profiled.profile, self.planner.smallest.timeline)
        return BudgetError(
            f"no plan fits {format_bytes(self.budget_bytes)}: the smallest peak is {format_bytes(smallest)}"
            f" ({smallest} bytes{how}). {cause}",
            budget_bytes=self.budget_bytes,
            smallest_bytes=smallest,
        )


def _checked(budget: str | int | float) -> tuple[float, bool] | None:
    """Reads the budget before any work is done."""
    share = parse_share(budget) if isinstance(budget, str) else None
    if share is None:
        parse_bytes(budget)
    return share


def _breakdown(run: DryRun) -> Breakdown:
    parts = run.breakdown
    return Breakdown(
        parameters=parts["parameters"],
        buffers=parts["buffers"],
        gradients=parts["gradients"],
        optimizer_state=parts["optimizer"],
        batch=parts["batch"],
        blocks={name.removeprefix("block:"): size for name, size in parts.items() if name.startswith("block:")},
        loss_head=parts.get("head", 0),
        temporaries=parts["temporaries"],
    )


def _prove_parts(model: nn.Module, step: Step, plan: Plan, profiled: Profiled) -> Proof:
    """The proof region by region, and that of the head, for every batch."""
    proofs = [verify_regions(model, step, plan, calls, variant) for variant, calls in enumerate(profiled.calls)]
    if plan.head is not None:
        for variant in range(step.variants):
            losses = head_losses(model, step, plan.head, profiled, variant)
            proofs += [verify_head(model, plan, loss) for loss in losses]
    return merged_proof(proofs)


def _refuse_differences(proof: Proof) -> None:
    if proof.differences:
        raise ReplayMismatchError(
            f"the plan would change the results of this model: {', '.join(proof.differences[:3])} differ when their"
            " region is computed again, or the head in chunks. Does the block give the same twice, run plainly? If it"
            " does, leave it out of `blocks` and report it"
        )
