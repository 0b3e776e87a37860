"""torch's checkpointing techniques against reforward's techniques and plans, on one GPT.

    python benchmarks/techniques.py
    python benchmarks/techniques.py --attention explicit
    python benchmarks/techniques.py --dropout 0.1

12 blocks, width 256, 8 heads, 256 tokens, batch 4. Peaks are the allocator's, of forward and backward, parameters left
out and gradients in; times are CPU seconds on one thread, steps interleaved; both relative to the plain step.
Recomputed operations are counted as they run: those of the step less those of the plain step, relative to the forward
of all blocks. For each peak of a technique of torch there is a plan that stays within it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import reforward as rf
from _common import (
    Bench,
    Held,
    Run,
    Seconds,
    Workbench,
    arguments,
    counted_flops,
    interleaved,
    one_by_one,
    show,
    write_json,
)

PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender.

    Attributes:
        kind: "torch", "technique" or "plan".
        peak_bytes: of the step, on top of the parameters.
        peak_ratio, minimum_ratio, median_ratio: peak and CPU time relative to the plain step.
        recomputed_flops: counted exactly.
        recomputed_share: relative to the forward of all blocks.
    """

    contender: str
    kind: str
    peak_bytes: int
    peak_ratio: float
    minimum_ratio: float
    median_ratio: float
    recomputed_flops: int
    recomputed_share: float


def some_blocks(chosen: Callable[[int], bool]) -> Callable[[Sequence[nn.Module], Tensor], Tensor]:
    """torch's checkpoint on the blocks whose index is chosen."""

    def through(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
        for index, block in enumerate(blocks):
            x = checkpoint(block, x, use_reentrant=False) if chosen(index) else block(x)
        return x

    return through


def sequential(segments: int) -> Callable[[Sequence[nn.Module], Tensor], Tensor]:
    """torch's checkpoint_sequential."""
    return lambda blocks, x: checkpoint_sequential(list(blocks), segments, x, use_reentrant=False)


_aten = torch.ops.aten
_SAVED = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


#: For torch's selective checkpointing: what matrix products and attention compute is saved.
selective_contexts = functools.partial(create_selective_checkpoint_contexts, _policy)


def selective_of_torch(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """torch's selective checkpointing of every block."""
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False, context_fn=selective_contexts)
    return x


def torch_runs(bench: Bench) -> dict[str, Run]:
    """Steps under plain torch."""
    ways = {
        PLAIN: one_by_one,
        "torch every block": some_blocks(lambda index: True),
        "torch every 2nd": some_blocks(lambda index: index % 2 == 0),
        "torch 3 of 4": some_blocks(lambda index: index % 4 != 3),
        **{f"torch sequential {count}": sequential(count) for count in range(2, 7)},
        "torch selective": selective_of_torch,
    }
    return {name: bench.by_hand(way) for name, way in ways.items()}


def technique_runs(bench: Bench) -> dict[str, Run]:
    """Steps under reforward's techniques."""
    techniques = {
        "rf.full()": rf.full(),
        "rf.every(2)": rf.every(2),
        **{f"rf.segments({count})": rf.segments(count) for count in (2, 3, 4, 6)},
        "rf.segments(4, nested=3)": rf.segments(4, nested=3),
        "rf.selective(save='matmul')": rf.selective(save="matmul"),
        "rf.selective(save='attention')": rf.selective(save="attention"),
        "rf.selective(save=both)": rf.selective(save=["matmul", "attention"]),
    }
    return {name: bench.attached(technique) for name, technique in techniques.items()}


def plan_runs(bench: Bench, peaks: dict[str, int]) -> dict[str, Run]:
    """Steps under plans that stay within the peaks of torch's techniques; equal plans only once."""
    workbench = Workbench(bench.model, rf.Step(bench.loss))
    runs: dict[str, Run] = {}
    for name, peak in sorted(peaks.items(), key=lambda item: -item[1]):
        if name != PLAIN:
            held = measured_within(workbench, bench, peak)
            if held is not None:
                runs[f"plan at {name.removeprefix('torch ')}"] = bench.attached(held.plan)
    return runs


def measured_within(workbench: Workbench, bench: Bench, peak_bytes: int) -> Held | None:
    """A plan whose measured peak on top of the parameters is at most that; None if there is none."""
    target = peak_bytes
    while True:
        try:
            held = workbench.held(workbench.static_bytes + target)
        except rf.BudgetError:
            return None
        run = bench.attached(held.plan)
        run()
        excess = bench.peak_above_parameters(run) - peak_bytes
        if excess <= 0:
            return held
        target -= excess


def rows_of(
    runs: dict[str, Run], seconds: dict[str, Seconds], peaks: dict[str, int], forward_flops: int
) -> Iterator[Row]:
    """The table, relative to the plain step."""
    plain, plain_peak, plain_flops = seconds[PLAIN], peaks[PLAIN], counted_flops(runs[PLAIN])
    for name, run in runs.items():
        extra = counted_flops(run) - plain_flops
        yield Row(
            contender=name,
            kind="technique" if name.startswith("rf.") else "plan" if name.startswith("plan") else "torch",
            peak_bytes=peaks[name],
            peak_ratio=peaks[name] / plain_peak,
            minimum_ratio=seconds[name].minimum / plain.minimum,
            median_ratio=seconds[name].median / plain.median,
            recomputed_flops=extra,
            recomputed_share=extra / forward_flops,
        )


def verdicts(rows: Sequence[Row]) -> list[list[str]]:
    """At each of torch's peaks: the technique of torch that recomputes least within it, and the plan for it."""
    of_torch = [row for row in rows if row.kind == "torch"]
    plans = {row.contender.removeprefix("plan at "): row for row in rows if row.kind == "plan"}
    table = []
    for row in of_torch:
        if row.contender == PLAIN:
            continue
        best = min((o for o in of_torch if o.peak_bytes <= row.peak_bytes), key=lambda o: o.recomputed_flops)
        plan = plans.get(row.contender.removeprefix("torch "))
        if plan is None:
            table.append([f"{row.peak_ratio:.3f}", best.contender, f"{best.recomputed_share:.3f}", "none fits", "no"])
            continue
        within = plan.recomputed_flops <= best.recomputed_flops
        own, other = f"{plan.recomputed_share:.3f}", f"{best.recomputed_share:.3f}"
        table.append([f"{row.peak_ratio:.3f}", best.contender, other, own, "yes" if within else "no"])
    return sorted(table, reverse=True)


def main() -> None:
    parser = arguments(__doc__, rounds=12)
    parser.add_argument("--attention", choices=["sdpa", "explicit"], default="sdpa")
    parser.add_argument("--dropout", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench.of(
        batch=4, time=256, layers=12, width=256, heads=8, vocabulary=512,
        dropout=options.dropout, sdpa=options.attention == "sdpa",
    )  # fmt: skip
    runs = torch_runs(bench)
    for run in runs.values():
        run()  # what is made once and kept
    peaks = {name: bench.peak_above_parameters(run) for name, run in runs.items()}
    runs |= technique_runs(bench) | plan_runs(bench, peaks)
    peaks = {name: bench.peak_above_parameters(run) for name, run in runs.items()}
    seconds = interleaved(runs, options.rounds)
    rows = list(rows_of(runs, seconds, peaks, bench.block_flops()))
    setting = f"{options.attention} attention, dropout {options.dropout:g}"
    show(
        f"12-block GPT, {setting}, {options.rounds} rounds; plain: {peaks[PLAIN] / 2**20:.1f} MiB,"
        f" {seconds[PLAIN].minimum:.3f} s",
        ["", "peak", "time, minimum", "time, median", "recomputed"],
        [
            [r.contender, f"{r.peak_ratio:.3f}", f"{r.minimum_ratio:.3f}", f"{r.median_ratio:.3f}",
             f"{r.recomputed_share:.3f}"] for r in rows
        ],
    )  # fmt: skip
    show(
        "Recomputed operations at each of torch's peaks",
        ["peak", "least of torch", "recomputed", "plan", "plan at most that"],
        verdicts(rows),
    )
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
