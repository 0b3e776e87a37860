"""Run by `test_capped.py`: trains in a process whose memory is capped at the budget + 10 %.

    python fit_child.py fit      fits the step into the budget first
    python fit_child.py report   the same, as the command does it
    python fit_child.py plain    trains without a plan, which takes twice the budget

What the interpreter and the libraries take is found by fitting a tiny model first. Then the cap is set, and only then
the model is built. Prints one JSON document.
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import models
import reforward as rf
from reforward._fit import fit_report

# A tenth of it has to hold, beside the libraries, what Python and the profiler keep of a fit: about 15 MiB.
BUDGET_BYTES = 230 * 2**20
STEPS = 3


def gpt_step(**sizes: Any) -> tuple[nn.Module, rf.Step]:
    torch.manual_seed(0)
    model, loss = models.gpt(**sizes)
    return model, rf.Step(loss, optimizer=torch.optim.AdamW(model.parameters()))


def big_step() -> tuple[nn.Module, rf.Step]:
    """A step that takes twice the budget, most of it for attention's matrices."""
    return gpt_step(layers=6, width=256, heads=8, time=512, batch=2)


def held_bytes(field: str) -> int:
    """What the kernel counts for this process.

    `VmData`, which the limit is on, is private memory that can be written, touched or not; `VmRSS` is what is touched,
    and `VmHWM` the highest that it was.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def cap_memory(extra_bytes: int) -> None:
    """Allows so much more than is held now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is no head start
    resource.setrlimit(resource.RLIMIT_DATA, (held_bytes("VmData") + extra_bytes, resource.RLIM_INFINITY))


def main(mode: str) -> None:
    torch.set_num_threads(1)
    fit_report(*gpt_step(layers=2), "90%")
    cap_memory(BUDGET_BYTES * 11 // 10)
    resident = held_bytes("VmRSS")
    model, step = big_step()
    found: dict[str, Any] = {}
    if mode == "fit":
        plan = rf.fit(model, step, BUDGET_BYTES)
        found = {"peak": plan.predicted_peak_bytes, "plain_peak": plan.predicted_plain_peak_bytes}
    elif mode == "report":
        report = fit_report(model, step, BUDGET_BYTES)
        rf.attach(model, report.plan)
        found = {
            "peak": report.predicted_planned.peak_bytes,
            "plain_peak": report.predicted_plain.peak_bytes,
            "measured_plain": report.measured_plain is not None,
            "scope": report.proof.scope,
            "differences": report.proof.differences,
        }
    found["recomputed_blocks"] = sum("forward" in vars(module) for module in model.modules())
    found["losses"] = [step.run().item() for _ in range(STEPS)]
    found["resident_bytes"] = held_bytes("VmHWM") - resident
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
