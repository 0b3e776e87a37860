"""The report on the terminal, as rich renderables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reforward._plan import Plan
from reforward._report.fold import plan_rows, stack_totals
from reforward._units import format_bytes, format_seconds

if TYPE_CHECKING:
    from reforward._fit import FitReport, Proof
    from reforward._frontier import Frontier
    from reforward._measure.measurement import Breakdown
    from reforward._train import TrainedStep

_LABELS = {"optimizer_state": "optimizer state", "loss_head": "activations of the loss head"}
_BAR_WIDTH = 24
_DIFFERENCES_SHOWN = 10
_ROUNDING = "exactness: rounding. Loss and gradients equal the plain step's to rounding, not bit for bit"


def fit_tables(report: FitReport) -> RenderableType:
    """Everything that `fit` found, in sections."""
    return Group(
        breakdown_table(report.breakdown),
        "",
        plan_table(report.plan, report.profile.blocks),
        _solver_line(report),
        "",
        comparison_table(report),
        "",
        proof_text(report.proof),
    )


def breakdown_table(breakdown: Breakdown) -> RenderableType:
    """Where the peak of the plain step comes from, its blocks summed per stack."""
    parts = [(_LABELS.get(name, name), size) for name, size in breakdown.to_dict().items() if name != "blocks"]
    parts += [
        (f"activations of {row.label}" + (f" ({row.blocks} blocks)" if row.blocks > 1 else ""), size)
        for row, size in stack_totals(breakdown.blocks)
    ]
    total = breakdown.total
    table = _table("Where the peak of the plain step comes from", "part", ">bytes", ">share", "")
    for label, size in sorted(parts, key=lambda part: -part[1]):
        if size:
            share = size / total
            bar = Text("█" * max(1, round(share * _BAR_WIDTH)), style="cyan")
            table.add_row(label, format_bytes(size), f"{share:.1%}", bar)
    table.add_section()
    table.add_row("peak", format_bytes(total), "", "", style="bold")
    return table


def frontier_table(found: Frontier) -> RenderableType:
    """Peaks and slowdowns along the curve, and of the named techniques, relative to the plain step as predicted."""
    plain, every = found.plain, [*found.points, *found.techniques]
    run = any(point.measured for point in every)
    columns = ["", ">peak", ">of plain", ">slowdown", *([">measured", ">time"] if run else [])]
    table = _table("Time against memory", *columns)
    for point in every:
        if found.techniques and point is found.techniques[0]:
            table.add_section()
        taken = point.measured
        table.add_row(
            point.name or "fastest plan",
            format_bytes(point.peak_bytes),
            f"{point.peak_bytes / plain.peak_bytes:.1%}",
            f"{point.seconds / plain.seconds:.3f} ×" if plain.seconds else "–",
            *([format_bytes(taken.peak_bytes), format_seconds(taken.seconds)] if taken else []),
        )
    least = f"The plain step: {format_bytes(plain.peak_bytes)}. No plan could have less than"
    return Group(table, Text(f"{least} {format_bytes(found.smallest_bytes)}.", style="dim"))


def plan_table(plan: Plan, blocks: Sequence[str] = ()) -> RenderableType:
    """The plan, consecutive blocks with the same treatment in one row."""
    table = _table("The plan", "blocks", ">count", "treatment")
    for row in plan_rows(plan, blocks):
        table.add_row(row.label, str(row.blocks), row.treatment)
    if plan.head is not None:
        table.add_row(plan.head.path, "", f"loss head in {plan.head.chunks} chunks")
    return table if plan.exactness == "bitwise" else Group(table, Text(_ROUNDING, style="yellow"))


def comparison_table(report: FitReport) -> RenderableType:
    """Peak and time of the plain and the planned step, predicted and measured."""
    plain, planned = report.predicted_plain, report.predicted_planned
    plain_run, planned_run = report.measured_plain, report.measured_planned
    table = _table(f"The step, budget {format_bytes(report.budget_bytes)}", "", ">predicted", ">measured", ">error")
    for name, predicted, run in (("plain", plain, plain_run), ("planned", planned, planned_run)):
        table.add_row(f"peak, {name}", *_compared(format_bytes, predicted.peak_bytes, run and run.peak_bytes))
    for name, predicted, run in (("plain", plain, plain_run), ("planned", planned, planned_run)):
        table.add_row(f"time, {name}", *_compared(format_seconds, predicted.seconds, run and run.seconds))
    saving, slowdown = 1 - planned.peak_bytes / plain.peak_bytes, planned.seconds / plain.seconds
    saving_run = slowdown_run = None
    if plain_run is not None and planned_run is not None:
        saving_run = 1 - planned_run.peak_bytes / plain_run.peak_bytes
        slowdown_run = planned_run.seconds / plain_run.seconds
    table.add_section()
    table.add_row("memory saved", *_compared("{:.1%}".format, saving, saving_run), style="bold")
    table.add_row("slowdown", *_compared("{:.3f} ×".format, slowdown, slowdown_run), style="bold")
    return table


def proof_text(proof: Proof) -> RenderableType:
    """How many values were compared with the plain step's, and which differ."""
    counts = ", ".join(
        _counted(count, noun)
        for count, noun in (
            (proof.losses, "loss"),
            (proof.gradients, "gradient"),
            (proof.buffers, "buffer"),
            (proof.rng_states, "RNG state"),
            *([(proof.hooks, "hook")] if proof.hooks else []),
        )
    )
    if not proof.differences:
        head = Text.assemble(("Proof ", "bold"), (f"({proof.scope}): ", ""), counts, (f": {_outcome(proof)}", "green"))
        return Group(head, _peaks(proof)) if proof.planned_peak_bytes is not None else head
    shown = [f"  {difference}" for difference in proof.differences[:_DIFFERENCES_SHOWN]]
    more = len(proof.differences) - len(shown)
    lines = [*shown, f"  and {more} more"] if more else shown
    head = Text.assemble(("Proof failed ", "bold red"), f"({proof.scope}): of {counts}, these differ")
    return Group(head, *lines)


def _outcome(proof: Proof) -> str:
    """What held, of a proof without differences."""
    if proof.tolerance is None:
        return "all bit-identical"
    what = "losses and gradients" if proof.scope == "whole step" else "those of the head"
    found = f"largest relative difference {proof.largest_difference:.1e}, tolerance {proof.tolerance:.0e}"
    return f"{what} equal to rounding ({found}), all else bit-identical"


def _peaks(proof: Proof) -> RenderableType:
    plain, planned = proof.plain_peak_bytes or 0, proof.planned_peak_bytes or 0
    saved = f", {1 - planned / plain:.1%} less" if planned < plain else ""
    return f"Peak as measured: {format_bytes(plain)} plain, {format_bytes(planned)} planned{saved}"


def training_line(number: int, steps: int, taken: TrainedStep) -> RenderableType:
    """One step of the training under the plan."""
    return f"step {number}/{steps}   loss {taken.loss:.4f}   {format_seconds(taken.seconds)}"


def files_line(paths: Sequence[Path]) -> RenderableType:
    """Where the files are."""
    return f"written: {', '.join(str(path) for path in paths)}"


def _compared(text: Callable[[float], str], predicted: float, measured: float | None) -> tuple[str, str, str]:
    """A prediction, its measurement and its signed relative error: +1.3% if it was too high."""
    if measured is None:
        return text(predicted), "not run", ""
    return text(predicted), text(measured), f"{predicted / measured - 1:+.1%}" if measured else ""


def _solver_line(report: FitReport) -> Text:
    gap = "nothing proven" if report.solver_gap is None else f"gap {report.solver_gap:.2%}"
    bound = "" if report.above_bound is None else f", within {report.above_bound:.1%} of the least that any plan adds"
    text = f"solver: {report.solver_status}, {gap}, {format_seconds(report.solver_seconds)}{bound}"
    return Text(text, style="dim")


def _table(title: str, *columns: str) -> Table:
    """A table whose columns are set flush right where the header starts with `>`."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return table


def _counted(count: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{count} {noun if count == 1 else plural}"
