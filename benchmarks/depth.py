"""Bytes held and operations recomputed against depth, for techniques whose growth is known, and for the planner.

    python benchmarks/depth.py --plot docs/depth.png

Two stacks of 8 to 512 equal blocks. "Thin": each block is a linear map and tanh, which holds exactly what it passes on,
the chain of Griewank and Walther (2000). "Transformer": width 32, 2 heads, 32 tokens, batch 2. The blocks' parameters
are frozen, so that gradients, which grow with depth whatever is held, are left out. Peaks and operations are those of
dry runs on the thin stack, and on the transformer those of the planner's simulator, whose profile of a few blocks is
stretched; it is compared with dry runs. Nothing is timed. Exponents are fitted to the peak above static memory, log
against log, over all depths and between the two deepest; beside them is the theory: 1 for no checkpoints and for one
per block, 1/2 for √n runs (Chen et al., 2016, *Training Deep Nets with Sublinear Memory Cost*), log n for runs halved
again and again (the same paper; Griewank and Walther, 2000, *Algorithm 799: revolve*).

The planner gets the plain peak of the transformer with `BUDGET_DEPTH` blocks: what it recomputes at each depth, which
depth still fits, and which sequence length.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reforward as rf
from _common import arguments, flops_of, markdown, models, stretched, without_seconds, write_json
from reforward._profile import dry_run, profile_step
from reforward._profile_type import Profile
from reforward._solve import Planner, Timeline, simulate
from reforward._techniques import resolve_plan
from reforward._units import format_bytes

DEPTHS = (8, 16, 32, 64, 128, 256, 512)
BUDGET_DEPTH = 16
TOKENS = 32
PROFILED = 4  # blocks
SQRT_TARGET = 0.55
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)

#: What is expected of each technique: the growth of bytes, and how often the blocks' forward runs again.
THEORY = {
    "plain": ("n", "0"),
    "every block": ("n, smaller slope", "1"),
    "√n runs": ("√n", "1"),
    "nested": ("log n", "about log₂ n"),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender on one stack.

    Attributes:
        held_bytes: the peak above static memory, of the whole step.
        recomputed_share: recomputed operations, relative to the forward of all blocks.
    """

    stack: str
    contender: str
    depth: int
    held_bytes: int
    recomputed_share: float


class Thin(nn.Module):
    """Holds what it passes on: tanh's output; (rows, width) → the same."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Stack(nn.Module):
    """An inlet that is trained, then blocks that are frozen, one after the other."""

    def __init__(self, blocks: Sequence[nn.Module], width: int):
        super().__init__()
        self.layers = nn.ModuleList(blocks).requires_grad_(False)
        self.inlet = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x)
        return x


def thin(depth: int) -> models.Case:
    """512 rows of width 16: 32 KiB per block."""
    model, batch = Stack([Thin() for _ in range(depth)], 16), torch.randn(512, 16)
    return models.Case(model, lambda: model(batch).square().mean())


def transformer(depth: int, time: int) -> models.Case:
    """A stack of the tests' decoder layers, without dropout."""
    model = Stack([models.Layer(32, 2, 0.0, sdpa=True) for _ in range(depth)], 32)
    batch = torch.randn(2, time, 32)
    return models.Case(model, lambda: F.mse_loss(model(batch), batch))


STACKS = ("thin", "transformer")


def halved(paths: Sequence[str]) -> rf.Region | rf.Run:
    """Runs in runs: each holds its own input while its halves are gone through one after the other."""
    if len(paths) == 1:
        return rf.Region(path=paths[0], policy=rf.Recompute())
    middle = len(paths) // 2
    return rf.Run(members=(halved(paths[:middle]), halved(paths[middle:])))


def plan_of(contender: str, depth: int) -> Any:
    """The technique or plan."""
    if contender == "nested":
        return rf.Plan(nodes=(halved([f"layers.{index}" for index in range(depth)]),))
    return {"plain": rf.none(), "every block": rf.full(), "√n runs": rf.segments("sqrt")}[contender]


def forward_flops(profile: Profile) -> int:
    """Of all blocks, by what running them all again takes."""
    return sum(call.options[1].replay_flops for call in profile.calls)


def thin_rows(depths: Sequence[int]) -> list[Row]:
    """The techniques on the thin stack, by dry runs."""
    rows = []
    for depth in depths:
        case = thin(depth)
        runs = {}
        for contender in THEORY:
            with rf.attached(case.model, plan_of(contender, depth)):
                runs[contender] = dry_run(case.model, rf.Step(case.loss), rf.find_blocks(case.model))
        plain = runs["plain"]
        forward = sum(segment.flops for segment in plain.segments if segment.kind == "forward")
        rows += [
            Row(
                stack="thin",
                contender=contender,
                depth=depth,
                held_bytes=run.peak_bytes - run.static_bytes,
                recomputed_share=(flops_of(run) - flops_of(plain)) / forward,
            )
            for contender, run in runs.items()
        ]
    return rows


def transformer_profile(time: int = TOKENS) -> Profile:
    """Of a few blocks, to be stretched."""
    case = transformer(PROFILED, time)
    return without_seconds(profile_step(case.model, rf.Step(case.loss)).profile)


def transformer_rows(profile: Profile, depths: Sequence[int]) -> list[Row]:
    """The techniques on the transformer, by the planner's simulator on a stretched profile."""
    rows = []
    for depth in depths:
        deep = stretched(profile, depth)
        model = transformer(depth, TOKENS).model
        for contender in THEORY:
            plan = resolve_plan(model, plan_of(contender, depth))
            rows.append(_simulated(contender, deep, simulate(deep, plan)))
    return rows


def planner_rows(profile: Profile, budget_bytes: int, depths: Sequence[int]) -> list[Row]:
    """The planner on the transformer, under a budget above static memory; depths that don't fit are left out."""
    rows = []
    for depth in depths:
        deep = stretched(profile, depth)
        try:
            rows.append(_simulated("planner", deep, Planner(deep).find(deep.static_bytes + budget_bytes).timeline))
        except rf.BudgetError:
            break
    return rows


def _simulated(contender: str, profile: Profile, timeline: Timeline) -> Row:
    return Row(
        stack="transformer",
        contender=contender,
        depth=len(profile.calls),
        held_bytes=timeline.peak_bytes - profile.static_bytes,
        recomputed_share=timeline.replay_flops / forward_flops(profile),
    )


def longest(budget_bytes: int) -> dict[str, int]:
    """By contender, the most tokens of `LENGTHS` that `BUDGET_DEPTH` blocks take within a budget above static memory.

    The planner's plan is the one with the smallest peak.
    """
    found = dict.fromkeys((*THEORY, "planner"), 0)
    for time in LENGTHS:
        profile = transformer_profile(time)
        held = {row.contender: row.held_bytes for row in transformer_rows(profile, [BUDGET_DEPTH])}
        deep = stretched(profile, BUDGET_DEPTH)
        held["planner"] = Planner(deep).smallest.timeline.peak_bytes - deep.static_bytes
        fitting = [contender for contender, size in held.items() if size <= budget_bytes]
        if not fitting:
            break
        found |= dict.fromkeys(fitting, time)
    return found


def simulator_error(profile: Profile) -> float:
    """The largest error of the simulator's peaks on top of static memory, against dry runs of a few blocks."""
    depth = min(DEPTHS)
    case, errors = transformer(depth, TOKENS), []
    for row in transformer_rows(profile, [depth]):
        with rf.attached(case.model, plan_of(row.contender, depth)):
            run = dry_run(case.model, rf.Step(case.loss), rf.find_blocks(case.model))
        errors.append(row.held_bytes / (run.peak_bytes - run.static_bytes) - 1)
    return max(errors, key=abs)


def exponent(rows: Sequence[Row]) -> float:
    """Slope of log bytes over log depth, by least squares."""
    return _slope([math.log(row.depth) for row in rows], [math.log(row.held_bytes) for row in rows])


def per_doubling(rows: Sequence[Row]) -> float:
    """Bytes more for each doubling of the depth, by least squares."""
    return _slope([math.log2(row.depth) for row in rows], [float(row.held_bytes) for row in rows])


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def plot(path: Path, rows: Sequence[Row], budget_bytes: int) -> None:
    """Bytes and recomputed operations of the transformer over depth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for contender in (*THEORY, "planner"):
        mine = [row for row in rows if row.stack == "transformer" and row.contender == contender]
        depths, label = [row.depth for row in mine], f"{contender}"
        left.plot(depths, [row.held_bytes / 2**20 for row in mine], marker="o", label=label)
        right.plot(depths, [row.recomputed_share for row in mine], marker="o", label=label)
    left.axhline(budget_bytes / 2**20, color="grey", linestyle=":", label="the planner's budget")
    left.set(xscale="log", yscale="log", xlabel="blocks", ylabel="MiB above static memory")
    right.set(xscale="log", xlabel="blocks", ylabel="recomputed, in forwards of all blocks")
    for axes in (left, right):
        axes.set_xticks(DEPTHS, [str(depth) for depth in DEPTHS], minor=False)
        axes.minorticks_off()
    left.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--depths", type=int, nargs="*", default=list(DEPTHS))
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw both curves there")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    profile = transformer_profile()
    rows = thin_rows(options.depths) + transformer_rows(profile, options.depths)
    plain = simulate(stretched(profile, BUDGET_DEPTH), rf.Plan(nodes=()))
    budget = plain.peak_bytes - plain.static_bytes
    rows += planner_rows(profile, budget, options.depths)
    print(markdown(["stack", "", *map(str, options.depths), "exponent", "theory"], _bytes_table(rows)))
    print(markdown(["stack", "", *map(str, options.depths), "theory"], _flops_table(rows)))
    print(f"Within {format_bytes(budget)} above static memory ({BUDGET_DEPTH} blocks of {TOKENS} tokens, plain):\n")
    print(markdown(["", "depth that fits", "tokens that fit"], _fits_table(rows, budget)))
    if options.plot is not None:
        plot(options.plot, rows, budget)
    write_json(options.json, rows)
    print(f"largest error of a simulated peak against a dry run, {min(DEPTHS)} blocks: {simulator_error(profile):+.2%}")
    square_root = exponent(_of(rows, "thin", "√n runs"))
    print(f"√n runs on the thin stack: exponent {square_root:.3f}, at most {SQRT_TARGET} wanted")
    return 0 if square_root <= SQRT_TARGET else 1


def _of(rows: Sequence[Row], stack: str, contender: str) -> list[Row]:
    return [row for row in rows if row.stack == stack and row.contender == contender]


def _bytes_table(rows: Sequence[Row]) -> list[list[str]]:
    table = []
    for stack in STACKS:
        for contender, (growth, _) in THEORY.items():
            mine = _of(rows, stack, contender)
            fitted = f"{exponent(mine):.2f}, {exponent(mine[-2:]):.2f}"
            if contender == "nested":
                fitted += f"; {format_bytes(round(per_doubling(mine)))} per doubling"
            table.append([stack, contender, *[format_bytes(row.held_bytes) for row in mine], fitted, growth])
    mine = _of(rows, "transformer", "planner")
    missing = len(_of(rows, "transformer", "plain")) - len(mine)
    held = [format_bytes(row.held_bytes) for row in mine] + ["none fits"] * missing
    return [*table, ["transformer", "planner", *held, "–", "the budget"]]


def _flops_table(rows: Sequence[Row]) -> list[list[str]]:
    table = []
    for stack in STACKS:
        for contender, (_, work) in THEORY.items():
            mine = _of(rows, stack, contender)
            table.append([stack, contender, *[f"{row.recomputed_share:.2f}" for row in mine], work])
    mine = _of(rows, "transformer", "planner")
    missing = len(_of(rows, "transformer", "plain")) - len(mine)
    return [*table, ["transformer", "planner", *[f"{row.recomputed_share:.2f}" for row in mine], *["–"] * missing, "–"]]


def _fits_table(rows: Sequence[Row], budget_bytes: int) -> list[list[str]]:
    table = []
    for contender, tokens in longest(budget_bytes).items():
        fitting = [row.depth for row in _of(rows, "transformer", contender) if row.held_bytes <= budget_bytes]
        table.append([contender, str(max(fitting, default=0)), str(tokens)])
    return table


if __name__ == "__main__":
    sys.exit(main())
