"""Run by `test_capped.py`: a training step in a process whose memory is capped at the budget + 10 %.

    python fit_child.py fit     fits the step into the budget and trains
    python fit_child.py plain   trains without a plan, which takes twice the budget

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

import torch

import reforward as rf
from models import GPT, gpt

BUDGET_BYTES = 250 * 2**20
STEPS = 3


def big_step() -> tuple[torch.nn.Module, rf.Step]:
    """A model of 20 MiB whose plain step takes more than twice the budget, mostly in attention's matrices."""
    torch.manual_seed(0)
    case = gpt(layers=6, width=256, heads=8, time=512, batch=2, vocabulary=256)
    return case.model, rf.Step(case.loss, optimizer=torch.optim.AdamW(case.model.parameters()))


def tiny_step() -> tuple[torch.nn.Module, rf.Step]:
    case = gpt(layers=2)
    return case.model, rf.Step(case.loss, optimizer=torch.optim.AdamW(case.model.parameters()))


def data_bytes(field: str = "VmData") -> int:
    """What the limit counts: private memory that can be written, touched or not."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def cap_memory(extra_bytes: int) -> int:
    """Allows so much more than is held now, and returns what is held now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    held = data_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (held + extra_bytes, resource.RLIM_INFINITY))
    return held


def main(mode: str) -> None:
    torch.set_num_threads(1)
    rf.fit(*tiny_step(), "90%")
    resident = data_bytes("VmRSS")
    cap_memory(int(1.1 * BUDGET_BYTES))
    model, step = big_step()
    found = {}
    if mode == "fit":
        plan = rf.fit(model, step, BUDGET_BYTES)
        found = {
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "predicted_plain_peak_bytes": plan.predicted_plain_peak_bytes,
            "regions_on_the_model": sum("forward" in vars(module) for module in model.modules()),
        }
    assert isinstance(model, GPT)
    found["losses"] = [step.run().item() for _ in range(STEPS)]
    found["resident_bytes"] = data_bytes("VmHWM") - resident
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
