"""How long the planner takes: chains of 12, 100 and 1,000 blocks under four budgets each.

    python benchmarks/planning.py
    python benchmarks/planning.py --depths 1000 --chain equal

"Equal": a decoder's blocks with two selective options; "mixed": every third block is another; "different": no block
like its neighbours (the made-up profiles of the tests); "GPT": the profile of four real blocks, stretched. Seconds are
CPU seconds of the process, of making the planner (which is done once for all budgets) and of the slowest budget;
budgets lie between the smallest peak and the plain one. "Above the bound" is how much more the slowest and the worst
plan add than any plan must.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import reforward as rf
from _common import Bench, arguments, markdown, stretched, write_json
from reforward._profile import profile_step
from reforward._profile_type import Profile
from reforward._solve import Planner

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "solve"))
import profiles  # pyright: ignore[reportMissingImports]

DEPTHS = (12, 100, 1000)
SHARES = (0.7, 0.3, 0.1, 0.02)
TARGET_DEPTH, TARGET_SECONDS = 1000, 10.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One chain under all budgets.

    Attributes:
        planner_seconds: of making the planner.
        smallest_seconds: of finding the plan with the smallest peak, which only refusals and curves need.
        find_seconds: of each budget.
        statuses: what the solver said of each.
        above_bound: of each plan; None where nothing must be added.
    """

    chain: str
    depth: int
    planner_seconds: float
    smallest_seconds: float
    find_seconds: tuple[float, ...]
    statuses: tuple[str, ...]
    above_bound: tuple[float | None, ...]

    @property
    def seconds(self) -> float:
        """Of one plan, the slowest."""
        return self.planner_seconds + max(self.find_seconds)


def mixed(depth: int) -> Profile:
    """Two plain blocks, then one that holds and takes more, again and again."""
    kinds = {3: 0.8, 6: 0.55, 10: 0.3, 14: 0.15, 20: 0.05}
    return profiles.step(
        [
            profiles.block(i, plain=34 + 10 * (i % 3 == 2), seconds=1.0 + 0.5 * (i % 3 == 2), selective=kinds)
            for i in range(depth)
        ]
    )


def different(depth: int) -> Profile:
    """Sizes and durations that no two neighbours share."""
    return profiles.step(
        [
            profiles.block(
                i, plain=12 + 5 * (i % 7), selective={3 + i % 2: 0.6}, seconds=1 + 0.25 * (i % 11), gradient=i % 4 << 19
            )
            for i in range(depth)
        ]
    )


@functools.cache
def four_blocks() -> Profile:
    bench = Bench.of(batch=1, time=128, layers=4, width=64, heads=4, vocabulary=64, dropout=0.0, sdpa=True)
    return profile_step(bench.model, rf.Step(bench.loss)).profile


CHAINS: dict[str, Callable[[int], Profile]] = {
    "equal": profiles.decoder,
    "mixed": mixed,
    "different": different,
    "GPT": lambda depth: stretched(four_blocks(), depth),
}


def row_of(chain: str, depth: int) -> Row:
    """One chain, planned for all budgets."""
    profile = CHAINS[chain](depth)
    begin = time.process_time()
    planner = Planner(profile)
    made = time.process_time() - begin
    begin = time.process_time()
    low = planner.smallest.timeline.peak_bytes
    smallest = time.process_time() - begin
    found, seconds = [], []
    for share in SHARES:
        budget = low + int(share * (planner.plain.peak_bytes - low))
        begin = time.process_time()
        solution = planner.find(budget)
        seconds.append(time.process_time() - begin)
        found.append((solution.status, planner.above_bound(solution, budget)))
    statuses, above = zip(*found, strict=True)
    return Row(
        chain=chain,
        depth=depth,
        planner_seconds=made,
        smallest_seconds=smallest,
        find_seconds=tuple(seconds),
        statuses=statuses,
        above_bound=above,
    )


def cells(row: Row) -> list[str]:
    """A line of the table."""
    above = [f"{share:.1%}" if share is not None else "–" for share in row.above_bound]
    return [
        row.chain,
        str(row.depth),
        f"{row.planner_seconds:.2f}",
        ", ".join(f"{seconds:.2f}" for seconds in row.find_seconds),
        f"{row.smallest_seconds:.2f}",
        f"{row.seconds:.2f}",
        ", ".join(above),
        ", ".join(row.statuses),
    ]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--depths", type=int, nargs="*", default=list(DEPTHS))
    parser.add_argument("--chain", choices=CHAINS, nargs="*", default=list(CHAINS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for chain in options.chain:
        rows += [row_of(chain, depth) for depth in options.depths]
        print(f"{chain} done", file=sys.stderr, flush=True)
    budgets = "/".join(f"{share:.0%}" for share in SHARES)
    headings = [
        "chain",
        "blocks",
        "planner, s",
        f"plan at {budgets}, s",
        "smallest, s",
        "slowest, s",
        "above the bound",
    ]
    print(markdown([*headings, "solver"], [cells(row) for row in rows]))
    write_json(options.json, rows)
    slow = [row.chain for row in rows if row.depth == TARGET_DEPTH and row.seconds >= TARGET_SECONDS]
    if TARGET_DEPTH not in options.depths:
        return 0
    print(f"{TARGET_DEPTH} blocks in under {TARGET_SECONDS:g} s: {'not ' + ', '.join(slow) if slow else 'yes'}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
