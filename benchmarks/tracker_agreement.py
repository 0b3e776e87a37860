"""How well a dispatch-mode tracker agrees with the allocator, without and with workspaces learnt from a profiled step.

    python benchmarks/tracker_agreement.py

The allocator's peak (profiler memory events) is the ground truth; both tracker columns are relative to it. One step is
forward and backward, on one thread; bytes are on top of parameters, buffers and batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from reforward._measure.trace import record
from reforward._measure.tracker import StorageTracker, Workspace
from reforward._measure.workspace import Workspaces
from reforward._step import Step
from reforward._units import format_bytes

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import models

CASES: dict[str, Callable[[], models.Case]] = {
    "GPT, explicit attention, dropout": lambda: models.gpt(width=128, batch=4, time=128),
    "GPT, fused attention, dropout": lambda: models.gpt(width=128, batch=4, time=128, sdpa=True),
    "GPT, fused attention": lambda: models.gpt(width=128, batch=4, time=128, sdpa=True, dropout=0.0),
    "ResNet, BatchNorm": lambda: models.resnet(width=16, batch=8, size=64),
    "LSTM": lambda: models.lstm(width=128, batch=8, time=64),
    "UNet": lambda: models.unet(width=16, batch=4, size=32),
}


def peaks(case: models.Case) -> tuple[int, int, int]:
    """Peak bytes of one step: the allocator's, the tracker's, the tracker's with workspaces."""
    step = Step(case.loss)
    step.run()  # what is made once and kept
    clear(case)
    trace = record(step.run, device=torch.device("cpu"), shapes=True)
    clear(case)
    truth = max(accumulate(event.bytes for event in trace.memory))
    return truth, tracked(case, None), tracked(case, Workspaces.from_trace(trace).lookup)


def tracked(case: models.Case, workspace: Workspace | None) -> int:
    """The tracker's peak of one step."""
    tracker = StorageTracker(workspace=workspace)
    with tracker:
        Step(case.loss).run(phase=tracker.in_phase)
    clear(case)
    return tracker.peak_bytes


def clear(case: models.Case) -> None:
    """Drops the gradients."""
    for parameter in case.model.parameters():
        parameter.grad = None


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = Table("model", title=f"peak of one step on the CPU, torch {torch.__version__}")
    for heading in ("allocator", "tracker", "error", "with workspaces", "error"):
        table.add_column(heading, justify="right")
    for name, build in CASES.items():
        truth, bare, complete = peaks(build())
        row = [format_bytes(truth)]
        for peak in (bare, complete):
            row += [format_bytes(peak), f"{peak / truth - 1:+.2%}"]
        table.add_row(name, *row)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
