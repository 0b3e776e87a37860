"""The pictures: memory over the step, and time against memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from reforward._units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from reforward._fit import FitReport
    from reforward._frontier import Frontier, FrontierPoint

_PLAIN, _PLANNED, _BUDGET = "#8a8f98", "#1f6feb", "#d1242f"


def save_plot(report: FitReport, path: Path) -> None:
    """Writes the report's picture as PNG.

    Raises:
        ImportError: matplotlib, an optional dependency, isn't installed.
    """
    # The figure is made without pyplot: no window system and no global state of the user's session is touched.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    timeline, frontier = figure.subplots(1, 2)
    _draw_timeline(timeline, report)
    _draw_frontier(frontier, report)
    figure.savefig(path, dpi=130)


def save_frontier(found: Frontier, path: Path) -> None:
    """Writes the curve as PNG: slowdown against the peak, each relative to the plain step's.

    Raises:
        ImportError: matplotlib, an optional dependency, isn't installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    plain = found.plain

    def places(points: Sequence[FrontierPoint]) -> tuple[list[float], list[float]]:
        return [p.peak_bytes / plain.peak_bytes for p in points], [p.seconds / plain.seconds for p in points]

    axes.plot(*places(found.points), "o-", color=_PLANNED, markersize=4, linewidth=1.2, label="fastest plans")
    runs = [(p.measured.peak_bytes, p.measured.seconds) for p in [*found.points, *found.techniques] if p.measured]
    if runs:
        peaks, seconds = [size / plain.peak_bytes for size, _ in runs], [taken / plain.seconds for _, taken in runs]
        axes.plot(peaks, seconds, "x", color=_PLAIN, markersize=7, label="measured")
    for technique, marker in zip(found.techniques, "sD^vP", strict=False):
        axes.plot(*places([technique]), marker, color=_PLAIN, markersize=7, label=technique.name)
    axes.axvline(found.smallest_bytes / plain.peak_bytes, color=_BUDGET, linestyle=":", label="no plan could need less")
    axes.plot(1.0, 1.0, "*", color=_PLAIN, markersize=14, label="plain")
    axes.set(
        title="Time against memory, predicted", xlabel="peak / plain step's peak", ylabel="time / plain step's time"
    )
    _finish(axes)
    figure.savefig(path, dpi=130)


def _draw_timeline(axes: Axes, report: FitReport) -> None:
    unit, unit_name = _unit(report)
    measured = (("plain", report.measured_plain, _PLAIN), ("planned", report.measured_planned, _PLANNED))
    for name, measurement, color in measured:
        if measurement is None or not measurement.timeline:
            continue
        seconds = [moment for moment, _ in measurement.timeline]
        sizes = [size / unit for _, size in measurement.timeline]
        label = f"{name}: peak {format_bytes(measurement.peak_bytes)}"
        axes.step(seconds, sizes, where="post", color=color, linewidth=1.2, label=label)
        axes.fill_between(seconds, sizes, step="post", color=color, alpha=0.15)
    label = f"budget: {format_bytes(report.budget_bytes)}"
    axes.axhline(report.budget_bytes / unit, color=_BUDGET, linestyle="--", linewidth=1.2, label=label)
    rounding = " (plan equal to rounding)" if report.plan.exactness == "rounding" else ""
    axes.set(
        title=f"Memory over one step, measured{rounding}",
        xlabel="seconds",
        ylabel=f"{unit_name} in use",
        ylim=(0, None),
    )
    _finish(axes)


def _draw_frontier(axes: Axes, report: FitReport) -> None:
    unit, unit_name = _unit(report)
    points = sorted((point.peak_bytes / unit, point.seconds) for point in report.frontier)
    if points:
        peaks, seconds = zip(*points, strict=True)
        axes.plot(peaks, seconds, "o-", color=_PLANNED, markersize=4, linewidth=1, label="best plans, predicted")
    plain, chosen = report.predicted_plain, report.predicted_planned
    axes.plot(plain.peak_bytes / unit, plain.seconds, "s", color=_PLAIN, markersize=8, label="plain, predicted")
    axes.plot(chosen.peak_bytes / unit, chosen.seconds, "*", color=_PLANNED, markersize=16, label="chosen, predicted")
    measured = (("plain", report.measured_plain, _PLAIN), ("chosen", report.measured_planned, _PLANNED))
    for name, measurement, color in measured:
        if measurement is not None:
            label = f"{name}, measured"
            axes.plot(measurement.peak_bytes / unit, measurement.seconds, "x", color=color, markersize=9, label=label)
    axes.axvline(report.budget_bytes / unit, color=_BUDGET, linestyle="--", linewidth=1.2, label="budget")
    axes.set(title="Time against memory", xlabel=f"peak of the step, {unit_name}", ylabel="seconds per step")
    _finish(axes)


def _unit(report: FitReport) -> tuple[int, str]:
    """Bytes in the unit of the axes, and its name: the one that suits the plain step's peak."""
    return (GIB, "GiB") if report.predicted_plain.peak_bytes >= GIB else (MIB, "MiB")


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
