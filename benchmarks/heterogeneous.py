"""Blocks that differ: what plans recompute at the peaks of uniform techniques, on five models.

    python benchmarks/heterogeneous.py
    python benchmarks/heterogeneous.py --model unet hybrid

T5's encoder and decoder, a UNet with skips, Swin with stages that shrink, a hybrid of state-space and attention layers
with a mixture of experts, and ResNet-50, all small. Peaks and recomputed floating-point operations are those of dry
runs of the whole step, and plans go by counted operations alone: nothing here is timed. At the peak of each technique,
the technique that recomputes least within it is compared with the planner's plan; beside it, what any plan must
recompute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reforward as rf
from _common import Workbench, arguments, flops_of, markdown, models, write_json

TARGET = 0.6  # of the best uniform technique's recomputed operations

TECHNIQUES: dict[str, Any] = {
    "full()": rf.full(),
    "every(2)": rf.every(2),
    "every(3)": rf.every(3),
    'segments("sqrt")': rf.segments("sqrt"),
    "segments(2)": rf.segments(2),
    "selective(matmul)": rf.selective(save="matmul"),
    "selective(attention)": rf.selective(save="attention"),
    "selective(conv)": rf.selective(save="conv"),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """At the peak of one technique.

    Attributes:
        peak_bytes: of the step under that technique; share: on top of static memory, relative to the plain step's.
        best: the technique that recomputes least within that peak.
        best_flops, plan_flops: recomputed operations of it and of the plan; None: no plan was found.
        bound_flops: what any plan must recompute, over the options of the profile.
        blocks_flops: of all blocks recomputed once.
    """

    model: str
    technique: str
    peak_bytes: int
    share: float
    best: str
    best_flops: int
    plan_flops: int | None
    bound_flops: float | None
    blocks_flops: int

    @property
    def ratio(self) -> float | None:
        """Of the plan to the best technique; None where there's nothing to compare with."""
        return self.plan_flops / self.best_flops if self.best_flops and self.plan_flops is not None else None

    @property
    def met(self) -> bool:
        """Whether the target is met, or the technique recomputes nothing itself and neither does the plan."""
        return self.plan_flops is not None and self.plan_flops <= TARGET * self.best_flops


class StateSpace(nn.Module):
    """As in Mamba, in small: a short causal convolution, then a scan whose decay depends on the input, gated."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.inlet = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.conv = nn.Conv1d(2 * width, 2 * width, 4, padding=3, groups=2 * width)
        self.rate, self.out = nn.Linear(2 * width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.inlet(self.norm(x)).chunk(2, -1)
        h = F.silu(self.conv(h.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        decay = torch.sigmoid(self.rate(h)) / x.shape[1]
        state = torch.cumsum(decay * h, 1) * torch.exp(-torch.cumsum(decay, 1))
        return x + self.out(state * F.silu(gate))


class Experts(nn.Module):
    """An attention layer whose feed-forward is a mixture of experts; every expert sees every row, weighed."""

    def __init__(self, width: int, heads: int, experts: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = models.Attention(width, heads, 0.0, sdpa=True)
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        weights = self.gate(h).softmax(-1)
        for index, expert in enumerate(self.experts):
            x = x + weights[..., index : index + 1] * expert(h)
        return x


class Hybrid(nn.Module):
    """State-space layers, every third an attention layer with experts; ids (batch, time) → logits."""

    def __init__(self, *, layers: int = 9, width: int = 32):
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, width)
        self.layers = nn.ModuleList(
            Experts(width, 4, 4) if index % 3 == 2 else StateSpace(width) for index in range(layers)
        )
        self.head = nn.Linear(width, models.VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def hybrid() -> models.Case:
    model, ids = Hybrid(), torch.randint(0, models.VOCABULARY, (4, 65))
    return models.Case(model, lambda: F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()))


MODELS: dict[str, Callable[[], models.Case]] = {
    "t5": lambda: models.t5(layers=3),
    "unet": lambda: models.unet(width=16, levels=3, depth=2, batch=4, size=32),
    "swin": lambda: models.swin(depths=(2, 6)),
    "hybrid": hybrid,
    "resnet50": lambda: models.resnet50(batch=8),
}


def rows_of(name: str) -> Iterator[Row]:
    """One model at the peaks of all techniques that its blocks allow."""
    torch.manual_seed(0)
    model, loss = MODELS[name]()
    workbench = Workbench(model.train(), rf.Step(loss), counted=True)
    plain = workbench.dry(rf.none())
    plain_flops, activations = flops_of(plain), plain.peak_bytes - plain.static_bytes
    families = {
        selector.family
        for call in workbench.profiled.profile.calls
        for option in call.options
        if isinstance(option.policy, rf.Recompute)
        for selector in option.policy.save
        if isinstance(selector, rf.Ops)
    }
    runs = {
        technique: workbench.dry(what)
        for technique, what in TECHNIQUES.items()
        if not technique.startswith("selective") or any(f"({family})" in technique for family in families)
    }
    recomputed = {technique: flops_of(run) - plain_flops for technique, run in runs.items()}
    for technique, run in sorted(runs.items(), key=lambda item: -item[1].peak_bytes):
        peak = run.peak_bytes
        best = min((t for t in runs if runs[t].peak_bytes <= peak), key=lambda t: (recomputed[t], runs[t].peak_bytes))
        try:
            plan_flops = flops_of(workbench.dry(workbench.held(peak).plan)) - plain_flops
        except rf.BudgetError:
            plan_flops = None
        yield Row(
            model=name,
            technique=technique,
            peak_bytes=peak,
            share=(peak - plain.static_bytes) / activations,
            best=best,
            best_flops=recomputed[best],
            plan_flops=plan_flops,
            bound_flops=workbench.bound_flops(peak),
            blocks_flops=recomputed["full()"],
        )


def cells(row: Row) -> list[str]:
    """A line of the table; operations relative to all blocks recomputed once."""
    unit = max(row.blocks_flops, 1)
    bound = "–" if row.bound_flops is None or row.met else f"{row.bound_flops / unit:.3f}"
    return [
        row.model,
        row.technique,
        f"{row.share:.3f}",
        row.best,
        f"{row.best_flops / unit:.3f}",
        "none fits" if row.plan_flops is None else f"{row.plan_flops / unit:.3f}",
        "–" if row.ratio is None else f"{row.ratio:.2f}",
        bound,
        "yes" if row.met else "no",
    ]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=MODELS, nargs="*", default=list(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name in options.model:
        rows += rows_of(name)
        print(f"{name} done", file=sys.stderr, flush=True)
    headings = ["model", "at the peak of", "peak", "least there", "recomputed", "plan", "plan / least", "bound"]
    print(markdown([*headings, f"at most {TARGET}"], [cells(row) for row in rows]))
    write_json(options.json, rows)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
