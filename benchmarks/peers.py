"""reforward against the honest front: hand-made mixes of torch's techniques, and other tools where they are installed.

    python benchmarks/peers.py --rounds 5
    python benchmarks/peers.py --rounds 0               # peaks and operations only
    python benchmarks/peers.py --compile                # torch.compile's memory budget, too: minutes of compiling

The model, bytes and clock are those of `techniques.py`: a 12-block GPT, the allocator's peak of forward and backward,
parameters left out and gradients in; CPU seconds on one thread, interleaved. Beside them the recomputed operations,
counted as they run, relative to the forward of all blocks.

The front: the first k blocks under torch's checkpoint; the same under selective checkpointing; the first k recomputed
and the others selective, with the last block plain. At each peak, what recomputes least of all that fits is compared
with a plan for that peak; beside it, what any plan must recompute.

Peers that aren't installed get a row that says so: `torch_remat` (`pip install torch-remat`), which marks regions in
the source (here whole blocks), and `ckptplan`, which chooses the k of n blocks, on CUDA only. Each belongs into an
environment of its own that has reforward as well. `torch.compile` recomputes what its memory budget says; it is shown
apart, because compiled code also fuses, and its gradients are compared under dropout.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

import reforward as rf
from _common import (
    Bench,
    Run,
    Seconds,
    Workbench,
    arguments,
    counted_flops,
    interleaved,
    markdown,
    write_json,
)
from reforward._measure.trace import record
from techniques import PLAIN, measured_within, selective_contexts, torch_runs

#: Shares of the plain peak at which the front and the plans are compared.
PEAKS = (0.709, 0.563, 0.442, 0.345, 0.272)
TARGET = 0.8  # of the front's recomputed operations
COMPILE_BUDGETS = (1.0, 0.5, 0.25, 0.1, 0.0)
PEERS = {"torch_remat": "torch-remat", "ckptplan": "ckptplan"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender; ratios are to the plain step, `recomputed_share` is to the forward of all blocks.

    Attributes:
        kind: "front", "plan" or "peer".
        minimum_ratio, median_ratio: of CPU seconds; None without rounds.
    """

    contender: str
    kind: str
    peak_bytes: int
    peak_ratio: float
    recomputed_share: float
    minimum_ratio: float | None
    median_ratio: float | None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """At one peak: the front's least, the plan's, and what any plan must recompute, as shares of the blocks' forward.

    The last two are None where no plan fits, and the bound where nothing is known.
    """

    peak_ratio: float
    front: str
    front_share: float | None
    plan_share: float | None
    bound_share: float | None

    @property
    def met(self) -> bool:
        """Whether the plan recomputes at most `TARGET` of the front's; also if no technique of the front fits."""
        if self.plan_share is None:
            return False
        return self.front_share is None or self.plan_share <= TARGET * self.front_share


def mix(recomputed: int, selective: int = 0) -> Callable[[Sequence[nn.Module], Tensor], Tensor]:
    """The first blocks under torch's checkpoint, the next under its selective checkpointing, the rest plain."""

    def through(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
        for index, block in enumerate(blocks):
            if index < recomputed:
                x = checkpoint(block, x, use_reentrant=False)
            elif index < recomputed + selective:
                x = checkpoint(block, x, use_reentrant=False, context_fn=selective_contexts)
            else:
                x = block(x)
        return x

    return through


def front_runs(bench: Bench) -> dict[str, Run]:
    """torch's techniques, and the mixes."""
    count = len(bench.model.layers)
    mixes = {f"torch first {k} of {count}": mix(k) for k in range(1, count)}
    mixes |= {f"torch selective, first {k} of {count}": mix(0, k) for k in (count // 4, count // 2, count - 1)}
    mixes |= {
        f"torch first {k} of {count}, rest selective, last plain": mix(k, count - 1 - k) for k in range(2, count - 1, 2)
    }
    return torch_runs(bench) | {name: bench.by_hand(way) for name, way in mixes.items()}


def peer_runs(bench: Bench) -> dict[str, Run]:
    """Peers that are installed."""
    if importlib.util.find_spec("torch_remat") is None:
        return {}
    import torch_remat  # pyright: ignore[reportMissingImports]

    def first(count: int) -> Callable[[Sequence[nn.Module], Tensor], Tensor]:
        def through(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
            for index, block in enumerate(blocks):
                x = torch_remat.checkpoint(region_name=f"layers.{index}")(block)(x) if index < count else block(x)
            return x

        return through

    blocks = len(bench.model.layers)
    return {f"torch_remat first {k} of {blocks}": bench.by_hand(first(k)) for k in (6, blocks - 1, blocks)}


def plans(workbench: Workbench, bench: Bench, plain_peak: int) -> dict[float, rf.Plan | None]:
    """By share of the plain peak, a plan whose measured peak stays within it."""
    found = {}
    for share in PEAKS:
        held = measured_within(workbench, bench, int(share * plain_peak))
        found[share] = held.plan if held is not None else None
    return found


def rows_of(
    runs: dict[str, Run], seconds: dict[str, Seconds], peaks: dict[str, int], flops: dict[str, int], forward: int
) -> Iterator[Row]:
    """All contenders relative to the plain step."""
    for name in runs:
        yield Row(
            contender=name,
            kind="plan" if name.startswith("plan") else "front" if name.startswith(("torch ", PLAIN)) else "peer",
            peak_bytes=peaks[name],
            peak_ratio=peaks[name] / peaks[PLAIN],
            recomputed_share=(flops[name] - flops[PLAIN]) / forward,
            minimum_ratio=seconds[name].minimum / seconds[PLAIN].minimum if seconds else None,
            median_ratio=seconds[name].median / seconds[PLAIN].median if seconds else None,
        )


def verdicts(rows: Sequence[Row], workbench: Workbench, plain_peak: int, forward: int) -> Iterator[Verdict]:
    """What the front and the plan recompute at each peak."""
    front = [row for row in rows if row.kind == "front"]
    for share in PEAKS:
        within = [row for row in front if row.peak_bytes <= int(share * plain_peak)]
        best = min(within, key=lambda row: (row.recomputed_share, row.peak_bytes), default=None)
        plan = next((row for row in rows if row.contender == _plan_name(share)), None)
        bound = workbench.bound_flops(workbench.static_bytes + int(share * plain_peak))
        yield Verdict(
            peak_ratio=share,
            front=best.contender if best is not None else "nothing fits",
            front_share=best.recomputed_share if best is not None else None,
            plan_share=plan.recomputed_share if plan is not None else None,
            bound_share=bound / forward if bound is not None else None,
        )


def _plan_name(share: float) -> str:
    return f"plan at {share}"


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The whole step's model under `torch.compile` and one memory budget.

    Attributes:
        compile_seconds: CPU seconds of the first step.
        recomputed_share: operations beyond those at a budget of 1, relative to the forward of all blocks.
        dropout_error: how far gradients are from those at a budget of 1, both with dropout 0.1 and from one seed: the
            norm of the difference relative to the norm. Above rounding, backward had other masks than forward.
    """

    budget: float
    compile_seconds: float
    peak_ratio: float
    recomputed_share: float
    minimum_ratio: float | None
    dropout_error: float


def compiled_rows(bench: Bench, dropping: Bench, plain_peak: int, forward: int, rounds: int) -> list[Compiled]:
    """Each budget; peaks relative to the plain uncompiled step's, seconds to the compiled step's at a budget of 1."""
    runs, first, errors = {}, {}, {}
    reference: list[Tensor] = []
    for budget in COMPILE_BUDGETS:
        runs[str(budget)], first[budget] = _compiled(bench, budget)
        run, _ = _compiled(dropping, budget)
        torch.manual_seed(1)
        gradients = [gradient.clone() for gradient in run() if gradient is not None]
        reference = reference or gradients
        apart = sum(float((a - b).square().sum()) for a, b in zip(gradients, reference, strict=True))
        errors[budget] = (apart / sum(float(b.square().sum()) for b in reference)) ** 0.5
    flops = {name: _traced_flops(run) for name, run in runs.items()}
    peaks = {name: bench.peak_above_parameters(run) for name, run in runs.items()}
    seconds = interleaved(runs, rounds) if rounds else {}
    return [
        Compiled(
            budget=budget,
            compile_seconds=first[budget],
            peak_ratio=peaks[str(budget)] / plain_peak,
            recomputed_share=(flops[str(budget)] - flops["1.0"]) / forward,
            minimum_ratio=seconds[str(budget)].minimum / seconds["1.0"].minimum if seconds else None,
            dropout_error=errors[budget],
        )
        for budget in COMPILE_BUDGETS
    ]


def _compiled(bench: Bench, budget: float) -> tuple[Callable[[], list[Tensor | None]], float]:
    """A step of a compiled copy, which returns its gradients; and the CPU seconds that the first one took."""
    model = copy.deepcopy(bench.model)
    compiled = torch.compile(model)

    def run() -> list[Tensor | None]:
        model.zero_grad(set_to_none=True)
        bench.loss(compiled).backward()
        return [parameter.grad for parameter in model.parameters()]

    begin = time.process_time()
    with torch._functorch.config.patch(activation_memory_budget=budget):
        run()
    return run, time.process_time() - begin


def _traced_flops(run: Run) -> int:
    """Floating-point operations from the profiler's account: compiled code doesn't pass dispatch modes."""
    aten = torch.ops.aten
    attention = "_scaled_dot_product_flash_attention"
    formulas = {
        "aten::mm": (flop_registry[aten.mm], 2),
        "aten::addmm": (flop_registry[aten.addmm], 3),
        "aten::bmm": (flop_registry[aten.bmm], 2),
        "aten::baddbmm": (flop_registry[aten.baddbmm], 3),
        f"aten::{attention}_for_cpu": (flop_registry[getattr(aten, attention)], 3),
        f"aten::{attention}_for_cpu_backward": (flop_registry[getattr(aten, f"{attention}_backward")], 4),
    }
    total = 0
    for call in record(run, device=torch.device("cpu"), shapes=True).ops:
        if call.name in formulas:
            formula, count = formulas[call.name]
            total += formula(*[list(shape) for shape in call.input_shapes[:count]], out_val=None)
    return total


def main() -> int:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--compile", action="store_true", help="also torch.compile under memory budgets")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"batch": 4, "time": 256, "layers": 12, "width": 256, "heads": 8, "vocabulary": 512, "sdpa": True}
    bench = Bench.of(**sizes, dropout=0.0)
    forward = bench.block_flops()
    runs = front_runs(bench) | peer_runs(bench)
    runs[PLAIN]()
    plain_peak = bench.peak_above_parameters(runs[PLAIN])
    workbench = Workbench(bench.model, rf.Step(bench.loss), counted=True)
    found = plans(workbench, bench, plain_peak)
    runs |= {_plan_name(share): bench.attached(plan) for share, plan in found.items() if plan is not None}
    flops = {name: counted_flops(run) for name, run in runs.items()}  # also makes what is made once and kept
    peaks = {name: bench.peak_above_parameters(run) for name, run in runs.items()}
    seconds = interleaved(runs, options.rounds) if options.rounds else {}
    rows = list(rows_of(runs, seconds, peaks, flops, forward))
    print(markdown(["", "peak", "recomputed", "time, minimum", "time, median"], [_cells(row) for row in rows]))
    for module, package in PEERS.items():
        if importlib.util.find_spec(module) is None:
            print(f"{module}: not installed (pip install {package})")
    if importlib.util.find_spec("ckptplan") is not None:
        print("ckptplan: its plans need CUDA; they are among the first kind of mix, k of n blocks")
    judged = list(verdicts(rows, workbench, plain_peak, forward))
    headings = ["peak", "least of the front", "recomputed", "plan", "plan / front", "bound", f"at most {TARGET}"]
    print(markdown(headings, [_verdict_cells(verdict) for verdict in judged]))
    if options.compile:
        dropping = Bench.of(**sizes, dropout=0.1)
        compiled = compiled_rows(bench, dropping, plain_peak, forward, options.rounds)
        headings = ["budget", "compiling, s", "peak", "recomputed", "time to budget 1", "gradients off, dropout 0.1"]
        print(markdown(headings, [_compiled_cells(row) for row in compiled]))
    write_json(options.json, [*rows, *judged])
    return 0 if all(verdict.met for verdict in judged) else 1


def _cells(row: Row) -> list[str]:
    shares = [f"{row.peak_ratio:.3f}", f"{row.recomputed_share:.3f}"]
    return [row.contender, *shares, _number(row.minimum_ratio), _number(row.median_ratio)]


def _verdict_cells(verdict: Verdict) -> list[str]:
    ratio = verdict.plan_share / verdict.front_share if verdict.plan_share and verdict.front_share else None
    return [
        f"{verdict.peak_ratio}",
        verdict.front,
        _number(verdict.front_share),
        "none fits" if verdict.plan_share is None else _number(verdict.plan_share),
        _number(ratio),
        _number(verdict.bound_share),
        "yes" if verdict.met else "no",
    ]


def _compiled_cells(row: Compiled) -> list[str]:
    return [
        f"{row.budget:g}",
        f"{row.compile_seconds:.0f}",
        f"{row.peak_ratio:.3f}",
        f"{row.recomputed_share:.3f}",
        _number(row.minimum_ratio),
        f"{row.dropout_error:.1e}",
    ]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
