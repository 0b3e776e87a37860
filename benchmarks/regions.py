"""What the runtime itself costs: microseconds per region, on a block that computes almost nothing.

    python benchmarks/regions.py

32 blocks of LayerNorm, two Linear of width 8 and dropout, each a region of its own: under torch's checkpoint, under
`rf.full()` and others. A region's cost is what the step takes beyond the plain one, divided by the number of blocks;
the replay of the block's own operations is in it, for torch and for reforward alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import reforward as rf
from _common import Run, arguments, interleaved, show, write_json

WIDTH = 8


@dataclass(frozen=True, kw_only=True)
class Row:
    """Microseconds per block beyond the plain step."""

    contender: str
    minimum_us: float
    median_us: float
    minimum_to_torch: float


class Block(nn.Module):
    """(batch, WIDTH) → the same."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks one after the other, each called through `call`; (batch, WIDTH) → scalar."""

    def __init__(self, blocks: int):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.call: Callable[[nn.Module, Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.call is None else self.call(block, x)
        return x.sum()


def contenders(stack: Stack) -> dict[str, Run]:
    """One step each; the input needs no gradient, as in training."""
    x = torch.randn(2, WIDTH)

    def run(prepare: Callable[[Stack], object]) -> Run:
        model = copy.deepcopy(stack)
        prepare(model)
        return lambda: model(x).backward()

    def called(call: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[Stack], object]:
        return lambda model: setattr(model, "call", call)

    def of_torch(block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)

    def of_ours(block: nn.Module, x: Tensor) -> Tensor:
        return rf.checkpoint(block, x, use_reentrant=False)

    return {
        "plain": run(lambda model: None),
        "torch checkpoint": run(called(of_torch)),
        "rf.full()": run(lambda model: rf.attach(model, rf.full())),
        "rf.full(), check='off'": run(lambda model: rf.attach(model, rf.full(), check="off")),
        "rf.full(), check='always'": run(lambda model: rf.attach(model, rf.full(), check="always")),
        "rf.checkpoint": run(called(of_ours)),
        "rf.segments(8)": run(lambda model: rf.attach(model, rf.segments(8))),
        "rf.segments(8, nested=4)": run(lambda model: rf.attach(model, rf.segments(8, nested=4))),
        "rf.selective(save='matmul')": run(lambda model: rf.attach(model, rf.selective(save="matmul"))),
    }


def main() -> None:
    parser = arguments(__doc__, rounds=60)
    parser.add_argument("--blocks", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    runs = contenders(Stack(options.blocks))
    for run in runs.values():
        run()
    seconds = interleaved(runs, options.rounds)
    plain, reference = seconds.pop("plain"), seconds["torch checkpoint"]
    rows = [
        Row(
            contender=name,
            minimum_us=(taken.minimum - plain.minimum) / options.blocks * 1e6,
            median_us=(taken.median - plain.median) / options.blocks * 1e6,
            minimum_to_torch=(taken.minimum - plain.minimum) / (reference.minimum - plain.minimum),
        )
        for name, taken in seconds.items()
    ]
    show(
        f"CPU time per block beyond the plain step, {options.blocks} blocks, {options.rounds} rounds",
        ["", "minimum", "median", "to torch"],
        [
            [row.contender, f"{row.minimum_us:.0f} µs", f"{row.median_us:.0f} µs", f"{row.minimum_to_torch:.2f}"]
            for row in rows
        ],
    )
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
