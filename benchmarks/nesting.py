"""Below "every block checkpointed": nested runs of a deep GPT, by hand and by the planner.

    python benchmarks/nesting.py

64 blocks, width 128, 4 heads, 256 tokens, batch 16, vocabulary 512. Peaks are the allocator's, of forward and backward,
parameters left out; times are CPU seconds on one thread, steps interleaved; both relative to torch's checkpoint on
every block. The reference is torch's checkpoint around 16 runs of 4 blocks with a checkpoint around each block. The
planner gets that reference's peak, the target, and no budget at all ("smallest").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import reforward as rf
from _common import (
    Bench,
    Run,
    Workbench,
    arguments,
    counted_flops,
    interleaved,
    show,
    write_json,
)

EVERY_BLOCK = "torch every block"
BY_HAND = "torch nested 16 × 4"
TARGET_PEAK, TARGET_TIME = 0.56, 1.18


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender; ratios are to `EVERY_BLOCK`, `recomputed_share` is to the forward of all blocks."""

    contender: str
    peak_bytes: int
    peak_ratio: float
    minimum_ratio: float
    median_ratio: float
    recomputed_share: float


def every_block(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """torch's checkpoint on each block."""
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def nested_of_torch(runs: int):
    """torch's checkpoint around runs of near-equal length, and around each block in them."""

    def through(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
        length = math.ceil(len(blocks) / runs)
        for start in range(0, len(blocks), length):
            x = checkpoint(every_block, list(blocks)[start : start + length], x, use_reentrant=False)
        return x

    return through


def runs_of(lengths: Sequence[int], *, last: rf.Recompute | rf.Save) -> rf.Plan:
    """A plan by hand: runs of these lengths whose blocks recompute; `last`: what the last block of a run does."""
    nodes: list[rf.Run | rf.Region] = []
    start = 0
    for length in lengths:
        policies = [rf.Recompute()] * (length - 1) + [last if length > 1 else rf.Recompute()]
        regions = [rf.Region(path=f"layers.{start + i}", policy=policy) for i, policy in enumerate(policies)]
        nodes.append(rf.Run(members=tuple(regions)) if length > 1 else regions[0])
        start += length
    return rf.Plan(nodes=tuple(nodes))


def by_hand(bench: Bench) -> dict[str, Run]:
    """Nested plans written by hand."""
    layers = len(bench.model.layers)
    quarter = layers // 4
    made = {
        "rf.full()": rf.full(),
        f"rf.segments({quarter}, nested=4)": rf.segments(quarter, nested=4),
        f"rf: {quarter} runs of 4, every block recomputed": runs_of([4] * quarter, last=rf.Recompute()),
        # The gradients grow in backward, so that its end is the peak: the last blocks can keep their own inputs.
        f"rf: {quarter - 2} runs of 4, then 8 blocks": runs_of([4] * (quarter - 2) + [1] * 8, last=rf.Save()),
    }
    return {name: bench.attached(what) for name, what in made.items()}


def planned(bench: Bench, budgets: dict[str, int]) -> dict[str, Run]:
    """Plans for budgets on top of the parameters, and the smallest."""
    workbench = Workbench(bench.model, rf.Step(bench.loss))
    runs = {}
    for name, budget in budgets.items():
        try:
            runs[f"plan at {name}"] = bench.attached(workbench.held(workbench.static_bytes + budget).plan)
        except rf.BudgetError as error:
            print(f"no plan at {name}: {error}")
    return runs | {"smallest plan": bench.attached(workbench.planner.smallest.plan)}


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--layers", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench.of(
        batch=16, time=256, layers=options.layers, width=128, heads=4, vocabulary=512, dropout=0.0, sdpa=True
    )
    runs = {EVERY_BLOCK: bench.by_hand(every_block), BY_HAND: bench.by_hand(nested_of_torch(options.layers // 4))}
    runs[EVERY_BLOCK]()  # what is made once and kept
    peaks = {name: bench.peak_above_parameters(run) for name, run in runs.items()}
    budgets = {"torch's nested peak": peaks[BY_HAND], f"{TARGET_PEAK} ×": int(TARGET_PEAK * peaks[EVERY_BLOCK])}
    runs |= by_hand(bench) | planned(bench, budgets)
    peaks = {name: bench.peak_above_parameters(run) for name, run in runs.items()}
    flops = {name: counted_flops(run) for name, run in runs.items()}
    plain_flops, forward_flops = counted_flops(bench.step), bench.block_flops()
    seconds = interleaved(runs, options.rounds)
    reference = seconds[EVERY_BLOCK]
    rows = [
        Row(
            contender=name,
            peak_bytes=peaks[name],
            peak_ratio=peaks[name] / peaks[EVERY_BLOCK],
            minimum_ratio=seconds[name].minimum / reference.minimum,
            median_ratio=seconds[name].median / reference.median,
            recomputed_share=(flops[name] - plain_flops) / forward_flops,
        )
        for name in runs
    ]
    show(
        f"{options.layers}-block GPT, {options.rounds} rounds; {EVERY_BLOCK}: {peaks[EVERY_BLOCK] / 2**20:.1f} MiB,"
        f" {reference.minimum:.2f} s; target: peak {TARGET_PEAK} at time {TARGET_TIME}",
        ["", "peak", "time, minimum", "time, median", "recomputed", "target"],
        [
            [row.contender, f"{row.peak_ratio:.3f}", f"{row.minimum_ratio:.3f}", f"{row.median_ratio:.3f}",
             f"{row.recomputed_share:.3f}",
             "met" if row.peak_ratio <= TARGET_PEAK and row.minimum_ratio <= TARGET_TIME else ""]
            for row in rows
        ],
    )  # fmt: skip
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
