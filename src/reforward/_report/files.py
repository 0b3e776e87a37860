"""The files that `reforward fit` and `reforward frontier` leave, and the documents within them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reforward._errors import InputError
from reforward._report.plot import save_frontier, save_plot

if TYPE_CHECKING:
    from reforward._fit import FitReport, Prediction, Proof
    from reforward._frontier import Frontier, FrontierPoint
    from reforward._measure import Measurement
    from reforward._train import TrainedStep

PLAN, MEASUREMENTS, PICTURE = FIT_FILES = "plan.json", "measurements.json", "report.png"
CURVE, CURVE_PICTURE = FRONTIER_FILES = "frontier.json", "frontier.png"
_ANOTHER = "give another directory with --out"
_NO_PICTURE = "{} wasn't drawn: matplotlib isn't installed (pip install 'reforward[plot]')"


def make_directory(path: Path, names: Sequence[str] = FIT_FILES) -> Path:
    """The directory for files of these names, made if it isn't there.

    Raises:
        InputError: it can't be made, or a file in it can't be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise InputError(f"can't make the directory {str(path)!r}: {_reason(error)}; {_ANOTHER}") from error
    for file in (path / name for name in names):
        if file.is_dir():
            raise InputError(f"can't write {str(file)!r}: it is a directory; {_ANOTHER}")
        if not os.access(file if file.exists() else path, os.W_OK):
            raise InputError(f"can't write {str(file)!r}: it is read-only; {_ANOTHER}")
    return path


def write_files(
    directory: Path, name: str, report: FitReport, training: Sequence[TrainedStep], *, remark: Callable[[str], None]
) -> list[Path]:
    """Writes all files and returns their paths; without matplotlib there is no picture, and a remark says so.

    Raises:
        InputError: a file can't be written.
    """
    report.plan.to_json(directory / PLAN)
    document = fit_document(name, report, training, timelines=True)
    picture = directory / PICTURE
    return [
        directory / PLAN,
        *_written(directory / MEASUREMENTS, document, picture, lambda: save_plot(report, picture), remark),
    ]


def write_frontier(directory: Path, name: str, found: Frontier, *, remark: Callable[[str], None]) -> list[Path]:
    """As `write_files`, of a frontier."""
    picture = directory / CURVE_PICTURE
    document = frontier_document(name, found)
    return _written(directory / CURVE, document, picture, lambda: save_frontier(found, picture), remark)


def _written(
    data: Path, document: dict[str, Any], picture: Path, draw: Callable[[], None], remark: Callable[[str], None]
) -> list[Path]:
    try:
        data.write_text(json.dumps(document) + "\n", encoding="utf-8")
        draw()
    except OSError as error:
        raise InputError(f"can't write into {str(data.parent)!r}: {_reason(error)}; {_ANOTHER}") from error
    except ImportError:
        remark(_NO_PICTURE.format(picture.name))
        return [data]
    return [data, picture]


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def fit_document(
    name: str, report: FitReport, training: Sequence[TrainedStep], *, timelines: bool = False
) -> dict[str, Any]:
    """The whole report as plain JSON data; sizes in bytes, durations in seconds.

    Args:
        name: what the model is called.
        report: what `fit` found.
        training: the steps taken under the plan.
        timelines: whether to include the memory timelines, which are long.
    """
    return {
        "model": name,
        "budget_bytes": report.budget_bytes,
        "plan": json.loads(report.plan.to_json()),
        "solver": {
            "status": report.solver_status,
            "gap": report.solver_gap,
            "seconds": report.solver_seconds,
            "above_bound": report.above_bound,
        },
        "breakdown_bytes": report.breakdown.to_dict(),
        "plain": _side(report.predicted_plain, report.measured_plain, timelines),
        "planned": _side(report.predicted_planned, report.measured_planned, timelines),
        "proof": proof_document(report.proof),
        "frontier": [
            {
                "budget_bytes": point.budget_bytes,
                "peak_bytes": point.peak_bytes,
                "seconds": point.seconds,
                "exactness": point.plan.exactness,
            }
            for point in report.frontier
        ],
        "training": [{"loss": taken.loss, "seconds": taken.seconds} for taken in training],
    }


def frontier_document(name: str, found: Frontier) -> dict[str, Any]:
    """A frontier as plain JSON data; sizes in bytes, durations in seconds."""
    return {
        "model": name,
        "plain": _point(found.plain),
        "smallest_bytes": found.smallest_bytes,
        "points": [_point(point) for point in found.points],
        "techniques": [_point(point) for point in found.techniques],
    }


def _point(point: FrontierPoint) -> dict[str, Any]:
    run = point.measured
    return {
        "name": point.name,
        "peak_bytes": point.peak_bytes,
        "seconds": point.seconds,
        "measured": None if run is None else {"peak_bytes": run.peak_bytes, "seconds": run.seconds},
        "plan": json.loads(point.plan.to_json()),
    }


def proof_document(proof: Proof) -> dict[str, Any]:
    """A proof as plain JSON data."""
    return {
        "identical": proof.exactness == "bitwise" and not proof.differences,
        "exactness": proof.exactness,
        "tolerance": proof.tolerance,
        "largest_difference": proof.largest_difference,
        "scope": proof.scope,
        "losses": proof.losses,
        "gradients": proof.gradients,
        "buffers": proof.buffers,
        "rng_states": proof.rng_states,
        "hooks": proof.hooks,
        "plain_peak_bytes": proof.plain_peak_bytes,
        "planned_peak_bytes": proof.planned_peak_bytes,
        "differences": list(proof.differences),
    }


def _side(predicted: Prediction, measured: Measurement | None, timelines: bool) -> dict[str, Any]:
    side: dict[str, Any] = {"predicted": {"peak_bytes": predicted.peak_bytes, "seconds": predicted.seconds}}
    if measured is None:
        return {**side, "measured": None}
    side["measured"] = {"peak_bytes": measured.peak_bytes, "seconds": measured.seconds}
    if timelines:
        side["measured"]["timeline"] = [list(point) for point in measured.timeline]
    side["error"] = {
        "peak": predicted.peak_bytes / measured.peak_bytes - 1,
        "seconds": predicted.seconds / measured.seconds - 1,
    }
    return side
