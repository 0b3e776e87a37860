"""Results of `fit` made up for the tests of those who show them."""

from types import SimpleNamespace

import reforward as rf
from reforward._measure.measurement import Breakdown

MIB = 2**20
ATTENTION = rf.Recompute(save="attention")


def measurement(peak_bytes, seconds):
    timeline = ((0.0, 100 * MIB), (seconds / 2, peak_bytes), (seconds, 100 * MIB))
    return SimpleNamespace(peak_bytes=peak_bytes, seconds=seconds, timeline=timeline)


def proof(**changes):
    fields = {"losses": 1, "gradients": 196, "buffers": 0, "rng_states": 1, "differences": (), "scope": "whole step"}
    fields |= {"hooks": 0, "plain_peak_bytes": None, "planned_peak_bytes": None}
    fields |= {"exactness": "bitwise", "tolerance": None, "largest_difference": None}
    return SimpleNamespace(**{**fields, **changes})


def fit_report(**changes):
    """A report with round numbers: 1000 MiB plain and 500 MiB planned, 2 s and 2.5 s, predicted 10 % too high."""
    plan = rf.Plan(nodes=tuple(rf.Region(path=f"h.{index}", policy=ATTENTION) for index in range(3)))
    fields = {
        "plan": plan,
        "profile": SimpleNamespace(blocks=tuple(f"h.{index}" for index in range(4))),
        "budget_bytes": 600 * MIB,
        "breakdown": Breakdown(
            parameters=200 * MIB,
            buffers=0,
            gradients=100 * MIB,
            optimizer_state=200 * MIB,
            batch=0,
            blocks={f"h.{index}": 100 * MIB for index in range(4)},
            loss_head=60 * MIB,
            temporaries=40 * MIB,
        ),
        "predicted_plain": SimpleNamespace(peak_bytes=1100 * MIB, seconds=2.2),
        "predicted_planned": SimpleNamespace(peak_bytes=550 * MIB, seconds=2.75),
        "measured_plain": measurement(1000 * MIB, 2.0),
        "measured_planned": measurement(500 * MIB, 2.5),
        "proof": proof(),
        "frontier": (
            SimpleNamespace(budget_bytes=600 * MIB, peak_bytes=500 * MIB, seconds=2.5, plan=plan),
            SimpleNamespace(budget_bytes=900 * MIB, peak_bytes=850 * MIB, seconds=2.1, plan=plan),
        ),
        "solver_status": "optimal",
        "solver_gap": 0.0,
        "above_bound": 0.012,
        "solver_seconds": 0.25,
    }
    return SimpleNamespace(**{**fields, **changes})
