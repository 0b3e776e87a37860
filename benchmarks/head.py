"""The loss head in chunks: its peak and its time, against the plain one.

    python benchmarks/head.py

A layer norm, a projection and a cross-entropy: vocabulary 32,000, width 512, 2,048 tokens. Peaks are the allocator's,
of forward and backward, without the parameters and the input; the weight's gradient is a part of them where it is
wanted. Times are CPU seconds on one thread, contenders interleaved.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reforward as rf
from _common import Run, allocated_peak, arguments, interleaved, show, write_json

CHUNKS = (4, 8, 16, 32)
LEAST_FALL = {True: 5.0, False: 8.0}  # with 16 chunks, by whether the weight's gradient is wanted
MOST_TIME = 1.15


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender; `fall` is the plain head's peak over its own, `time_ratio` that of the minima."""

    contender: str
    weight_gradient: bool
    peak_bytes: int
    fall: float
    minimum: float
    median: float
    time_ratio: float


class LossHead(nn.Module):
    """Norm and projection; tokens' features (batch, time, width) → logits."""

    def __init__(self, width: int, vocabulary: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden))


def contenders(model: LossHead, hidden: Tensor, target: Tensor) -> dict[str, Run]:
    """Forward and backward of the head, plainly and in chunks; models share their parameters."""

    def step(model: nn.Module) -> Run:
        def run() -> None:
            model.zero_grad(set_to_none=True)
            hidden.grad = None
            F.cross_entropy(model(hidden).flatten(0, 1), target.flatten()).backward()

        return run

    runs = {"plain": step(model)}
    for chunks in CHUNKS:
        copied = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        rf.attach(copied, rf.chunked_head(chunks=chunks, head="head"))
        runs[f"{chunks} chunks"] = step(copied)
    return runs


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LossHead(options.width, options.vocabulary)
    hidden = torch.randn(1, options.tokens, options.width, requires_grad=True)
    target = torch.randint(0, options.vocabulary, (1, options.tokens))
    rows: list[Row] = []
    for weight_gradient in (True, False):
        model.head.requires_grad_(weight_gradient)
        runs = contenders(model, hidden, target)
        peaks: dict[str, int] = {}
        for name, run in runs.items():
            run()
            model.zero_grad(set_to_none=True)
            hidden.grad = None
            peaks[name] = allocated_peak(run)
        seconds = interleaved(runs, options.rounds)
        rows += [
            Row(
                contender=name,
                weight_gradient=weight_gradient,
                peak_bytes=peaks[name],
                fall=peaks["plain"] / peaks[name],
                minimum=seconds[name].minimum,
                median=seconds[name].median,
                time_ratio=seconds[name].minimum / seconds["plain"].minimum,
            )
            for name in runs
        ]
    sizes = f"vocabulary {options.vocabulary}, width {options.width}, {options.tokens} tokens"
    show(
        f"Loss head, {sizes}, {options.rounds} rounds; target at 16 chunks: peak falls {LEAST_FALL[True]} × with the"
        f" weight's gradient, {LEAST_FALL[False]} × without, at {MOST_TIME} × the time",
        ["", "weight's gradient", "peak, MiB", "falls", "time, minimum", "time, median", "to plain", "target"],
        [
            [row.contender, "yes" if row.weight_gradient else "no", f"{row.peak_bytes / 2**20:.1f}",
             f"{row.fall:.2f} ×", f"{row.minimum:.2f} s", f"{row.median:.2f} s", f"{row.time_ratio:.3f}",
             "" if row.contender != "16 chunks" else
             "met" if row.fall >= LEAST_FALL[row.weight_gradient] and row.time_ratio <= MOST_TIME else "missed"]
            for row in rows
        ],
    )  # fmt: skip
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
