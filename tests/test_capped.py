"""The central promise: `fit` and the training after it get along with the budget where the plain step can't."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fit_child import BUDGET_BYTES, STEPS, big_step

CHILD = Path(__file__).with_name("fit_child.py")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is capped by Linux' RLIMIT_DATA"),
]


def run_capped(mode: str) -> subprocess.CompletedProcess[str]:
    """The child with glibc told to give freed memory back: by default it keeps blocks of up to 32 MiB for reuse."""
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    return subprocess.run(
        [sys.executable, str(CHILD), mode], env={**os.environ, **settings}, capture_output=True, text=True, timeout=600
    )


def fitted(mode: str) -> dict[str, Any]:
    child = run_capped(mode)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def plain_losses() -> list[float]:
    """What the same training gives here, where memory isn't capped and nobody called `fit`."""
    _, step = big_step()
    return [step.run().item() for _ in range(STEPS)]


def test_the_plain_step_runs_out_of_memory() -> None:
    child = run_capped("plain")
    assert child.returncode == 1
    assert "can't allocate memory" in child.stderr


@pytest.mark.parametrize("mode", ["fit", "report"])
def test_fit_and_the_training_after_it_keep_to_the_budget(mode: str, plain_losses: list[float]) -> None:
    found = fitted(mode)
    assert found["peak"] <= BUDGET_BYTES
    assert found["plain_peak"] >= 2 * BUDGET_BYTES
    assert found["recomputed_blocks"] > 0
    assert found["losses"] == plain_losses
    assert found["resident_bytes"] < 1.25 * BUDGET_BYTES
    if mode == "report":
        assert found["measured_plain"] is False
        assert found["scope"] == "region by region"
        assert found["differences"] == []
