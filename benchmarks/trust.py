"""What `rf.fit` promises, on twelve architectures under four budgets each; exits with 1 where it isn't kept.

    python benchmarks/trust.py
    python benchmarks/trust.py --model t5 convnext

Small models, most of them from Transformers' own classes; the step is forward and backward. A budget is a share of what
the plain step takes on top of what is live before it (parameters, buffers, batch), or the smallest that a refusal
names; where that is refused as well, with the peak that was measured, it is what the second refusal names.
What is promised: the predicted peak is within 3 % of the measured one (median) and never more than 5 % below it, the
measured peak is never above the budget, and losses, gradients, weights after an optimizer's step, buffers and random
streams are those of a model that no plan was ever on, bit for bit.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import reforward as rf
from _common import arguments, markdown, models, write_json
from reforward import _fit
from reforward._profile import profile_step
from reforward._units import format_bytes

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "runtime"))
import same  # pyright: ignore[reportMissingImports]

SHARES = (0.70, 0.50, 0.35)
SMALLEST = "smallest"
MEDIAN_ERROR, MOST_BELOW = 0.03, 0.05

#: Deep or large enough that most of the budgets can be met.
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 8},
    "llama": {"layers": 8},
    "qwen2_moe": {"layers": 6},
    "mamba": {"layers": 6},
    "t5": {"layers": 4},
    "bert": {"layers": 8},
    "vit": {"layers": 8},
    "swin": {"depths": (2, 6)},
    "resnet50": {"batch": 8},
    "convnext": {"batch": 4},
    "unet": {"batch": 4, "size": 32, "depth": 3},
    "whisper": {"layers": 4},
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model under one budget.

    Attributes:
        budget: in words.
        static_bytes, plain_peak_bytes: of the plain step, as measured: live before it, and its peak.
        predicted_peak_bytes, measured_peak_bytes: of the planned step; None where the budget was refused.
        recomputing: how many blocks the plan recomputes, and of how many.
        differences: what isn't bit-identical, by name.
        named_bytes: the smallest budget as the first refusal named it.
        refusal: what `fit` said, unless it was that the budget is below the smallest.
    """

    model: str
    budget: str
    budget_bytes: int
    static_bytes: int
    plain_peak_bytes: int
    named_bytes: int
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    recomputing: tuple[int, int] = (0, 0)
    differences: tuple[str, ...] = ()
    refusal: str = ""

    @property
    def error(self) -> float | None:
        """Of the predicted peak, relative to the measured one."""
        if self.predicted_peak_bytes is None or self.measured_peak_bytes is None:
            return None
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1

    @property
    def within(self) -> bool:
        """Whether the measured peak stays within the budget."""
        return self.measured_peak_bytes is None or self.measured_peak_bytes <= self.budget_bytes

    def share(self, peak_bytes: int) -> float:
        """A peak as a share of the plain step's, both on top of what was live before."""
        return (peak_bytes - self.static_bytes) / (self.plain_peak_bytes - self.static_bytes)


def rows_of(name: str, shares: Sequence[float] = SHARES, **sizes: Any) -> Iterator[Row]:
    """A model under each share that can be met, and under the smallest budget that a refusal names."""
    model, loss = models.build(name, **sizes)
    step = rf.Step(loss)
    plain = rf.measure(model, step, repeats=1)
    common: dict[str, Any] = {
        "model": name,
        "static_bytes": plain.static_bytes,
        "plain_peak_bytes": plain.peak_bytes,
    }
    expected = same.record(*models.build(name, **sizes))
    profiled = profile_step(model, step)
    with mock.patch.object(_fit, "profile_step", return_value=profiled):  # one profile for all budgets
        named = _smallest(model, step, 1)
        smallest = _smallest(model, step, named) or named
        asked = {f"{share:.0%}": plain.static_bytes + int(share * plain.activation_peak_bytes) for share in shares}
        for budget, budget_bytes in {**asked, SMALLEST: smallest}.items():
            common |= {"budget": budget, "budget_bytes": budget_bytes, "named_bytes": named}
            try:
                plan = rf.fit(model, step, budget_bytes)
            except rf.BudgetError as error:
                yield Row(**common, refusal="" if budget_bytes < smallest else str(error))
                continue
            except rf.ReforwardError as error:
                yield Row(**common, refusal=str(error))
                continue
            measured = rf.measure(model, step, repeats=1)
            rf.detach(model)
            yield Row(
                **common,
                predicted_peak_bytes=plan.predicted_peak_bytes,
                measured_peak_bytes=measured.peak_bytes,
                recomputing=(sum(leaf.policy != rf.Save() for leaf in plan.regions()), len(profiled.blocks)),
                differences=tuple(_differences(name, sizes, expected, plan)),
            )


def _smallest(model: torch.nn.Module, step: rf.Step, budget_bytes: int) -> int:
    """What the refusal of a budget names; 0 if it isn't refused."""
    try:
        rf.fit(model, step, budget_bytes)
    except rf.BudgetError as error:
        return error.smallest_bytes or 0
    rf.detach(model)
    return 0


def _differences(name: str, sizes: dict[str, Any], expected: same.Record, plan: rf.Plan) -> list[str]:
    """Between a model that no plan was ever on and its twin under a plan, after two optimizer steps of two batches."""
    model, loss = models.build(name, **sizes)
    rf.attach(model, plan)
    return same.differences(expected, same.record(model, loss))


def criteria(rows: Sequence[Row]) -> dict[str, tuple[str, bool]]:
    """What is promised: what was found, and whether the promise is kept."""
    errors = [row.error for row in rows if row.error is not None]
    median, lowest = statistics.median(map(abs, errors)), min(errors)
    above = [f"{row.model} at {row.budget}" for row in rows if not row.within]
    differing = [f"{row.model} at {row.budget}" for row in rows if row.differences]
    refused = [f"{row.model} at {row.budget}" for row in rows if row.refusal]
    renamed = [row.model for row in rows if row.budget == SMALLEST and row.budget_bytes != row.named_bytes]
    return {
        f"the median error of the predicted peak is at most {MEDIAN_ERROR:.0%}": (
            f"{median:.3%}",
            median <= MEDIAN_ERROR,
        ),
        f"no prediction is more than {MOST_BELOW:.0%} below": (f"{lowest:+.3%}", lowest >= -MOST_BELOW),
        "no measured peak is above its budget": (_listed(above), not above),
        "all results are bit-identical": (_listed(differing), not differing),
        "no budget above the smallest is refused": (_listed(refused), not refused),
        "the smallest is what the first refusal names": (_listed(renamed), not renamed),
    }


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none else"


def cells(row: Row) -> list[str]:
    """A line of the table."""
    budget = f"{row.budget} ({row.share(row.budget_bytes):.1%})" if row.budget == SMALLEST else row.budget
    if row.predicted_peak_bytes is None or row.measured_peak_bytes is None or row.error is None:
        why = "refused" if row.refusal else "below the smallest"
        return [row.model, budget, format_bytes(row.budget_bytes), why, "–", "–", "–", "–"]
    return [
        row.model,
        budget,
        format_bytes(row.budget_bytes),
        f"{row.predicted_peak_bytes}",
        f"{row.measured_peak_bytes}",
        f"{row.error:+.2%}",
        f"{row.recomputing[0]} of {row.recomputing[1]}",
        "yes" if not row.differences else f"no: {row.differences[0]}, …",
    ]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=SIZES, nargs="*", default=list(SIZES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    headings = ["model", "budget", "bytes", "predicted", "measured", "error", "recomputed blocks", "bit-identical"]
    for name in options.model:
        rows += rows_of(name, **SIZES[name])
        print(f"{name} done", file=sys.stderr, flush=True)
    print(markdown(headings, [cells(row) for row in rows]))
    found = criteria(rows)
    print(markdown(["promise", "found", "kept"], [[p, f, "yes" if kept else "NO"] for p, (f, kept) in found.items()]))
    for row in rows:
        if row.refusal:
            print(f"{row.model} at {row.budget}: {row.refusal}")
    write_json(options.json, rows)
    return 0 if all(kept for _, kept in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
