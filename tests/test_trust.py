"""What `fit` promises, on a few small architectures; `benchmarks/trust.py` has twelve, under more budgets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import trust


@pytest.mark.parametrize("name", [pytest.param("bert", marks=pytest.mark.slow), "unet"])
def test_fit_keeps_its_promises(name: str) -> None:
    rows = list(trust.rows_of(name, shares=(0.6,)))
    assert [row.budget for row in rows] == ["60%", trust.SMALLEST]
    assert all(row.measured_peak_bytes is not None for row in rows), [row.refusal for row in rows]
    assert {promise: found for promise, (found, kept) in trust.criteria(rows).items() if not kept} == {}
