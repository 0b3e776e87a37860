"""What the benchmarks share: interleaved CPU seconds, allocator peaks, exact counts of operations, models, plans.

A contender is a function that runs one whole step. Contenders are compared on one thread by the CPU time of the
process, one step of each per round, so that whatever else slows the machine meets all of them alike.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import reforward as rf
from reforward._measure.trace import record
from reforward._profile import DryRun, Profiled, dry_run, profile_step
from reforward._profile_type import Event, Profile
from reforward._solve import Planner
from reforward._solve.bound import cost_bound

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import models  # pyright: ignore[reportMissingImports]

# The profiler of torch 2.13 writes a line at each start and stop otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

Run = Callable[[], object]
# The planner adds up blocks, the dry run sees the whole step: so often the budget is lowered by what was exceeded.
_ROUNDS = 6


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """CPU seconds of one step, over all rounds."""

    minimum: float
    median: float


def interleaved(runs: Mapping[str, Run], rounds: int) -> dict[str, Seconds]:
    """CPU seconds of each run, one of each per round. Each must have run before: what is made once isn't timed."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            begin = time.process_time()
            run()
            taken[name].append(time.process_time() - begin)
    return {name: Seconds(minimum=min(each), median=statistics.median(each)) for name, each in taken.items()}


def allocated_peak(run: Run) -> int:
    """The most that a run allocates on top of what was there before it, as the allocator reports it to the profiler."""
    trace = record(run, device=torch.device("cpu"))
    return max(itertools.accumulate((event.bytes for event in trace.memory), initial=0))


class FlopCounter(TorchDispatchMode):
    """Adds up the floating-point operations of all matrix products, convolutions and attention that really run.

    torch's own table of formulas has no entry for the fused attention of CPUs; that of the other fused kernels, which
    take the same arguments, is used for it.
    """

    def __init__(self):
        super().__init__()
        aten = torch.ops.aten
        self.total = 0
        self._formulas = {
            **flop_registry,
            aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
            aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
                aten._scaled_dot_product_flash_attention_backward
            ],
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def counted_flops(run: Run) -> int:
    """Floating-point operations of one run, exactly."""
    with FlopCounter() as counter:
        run()
    return counter.total


Through = Callable[[Sequence[nn.Module], Tensor], Tensor]


class GPT(models.GPT):
    """The tests' GPT, whose way through its blocks can be exchanged: `through(blocks, x)` returns the last output."""

    through: Through | None = None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device)))
        return self.head(
            self.norm(one_by_one(self.layers, x) if self.through is None else self.through(self.layers, x))
        )


def one_by_one(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """The plain way."""
    for block in blocks:
        x = block(x)
    return x


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A GPT and a batch of it; `model` itself stays plain.

    Attributes:
        ids: tokens, (batch, time + 1).
    """

    model: GPT
    ids: Tensor

    @classmethod
    def of(cls, *, batch: int, time: int, **sizes: Any) -> Bench:
        """A GPT of these sizes (`models.GPT`) in training mode, the same at each call."""
        torch.manual_seed(0)
        model = GPT(context=time, **sizes).train()
        return cls(model=model, ids=torch.randint(0, model.embedding.num_embeddings, (batch, time + 1)))

    def loss(self, model: nn.Module | None = None) -> Tensor:
        """The scalar loss of the batch."""
        logits = (self.model if model is None else model)(self.ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), self.ids[:, 1:].flatten())

    def step(self, model: nn.Module | None = None) -> None:
        """Forward and backward, beginning without gradients."""
        model = self.model if model is None else model
        model.zero_grad(set_to_none=True)
        self.loss(model).backward()

    def by_hand(self, through: Through) -> Run:
        """A step that goes through the blocks in another way."""
        model = self._sharing_parameters()
        model.through = through
        return lambda: self.step(model)

    def attached(self, what: Any) -> Run:
        """A step under a plan or a technique."""
        model = self._sharing_parameters()
        rf.attach(model, what)
        return lambda: self.step(model)

    def peak_above_parameters(self, run: Run) -> int:
        """The allocator's peak of a step, on top of the parameters."""
        self.model.zero_grad(set_to_none=True)
        return allocated_peak(run)

    def block_flops(self) -> int:
        """Floating-point operations of the forward of all blocks."""
        x = torch.randn(*self.ids[:, :-1].shape, self.model.embedding.embedding_dim)
        with torch.no_grad():
            return counted_flops(lambda: one_by_one(self.model.layers, x))

    def _sharing_parameters(self) -> GPT:
        memo = {id(parameter): parameter for parameter in self.model.parameters()}
        return copy.deepcopy(self.model, memo)


@dataclass(frozen=True, kw_only=True)
class Held:
    """A plan that stays within a budget.

    Attributes:
        plan: the plan.
        predicted_peak_bytes: of the whole step, by a dry run.
        predicted_ratio: its time, relative to the plain step's; NaN where plans go by counted operations alone.
        solver_seconds: what the last search took.
    """

    plan: rf.Plan
    predicted_peak_bytes: int
    predicted_ratio: float
    solver_seconds: float


def without_seconds(profile: Profile) -> Profile:
    """The profile with no durations: plans then go by counted operations alone, and are the same each time."""
    calls = tuple(
        replace(
            call,
            options=tuple(
                replace(option, forward_seconds=0.0, backward_seconds=0.0, replay_seconds=0.0)
                for option in call.options
            ),
        )
        for call in profile.calls
    )
    return replace(profile, calls=calls, events=tuple(replace(event, seconds=0.0) for event in profile.events))


def stretched(profile: Profile, depth: int) -> Profile:
    """The profile of one chain of blocks, `layers.0` and so on, as if it had so many: those between the ends repeat.

    Only what a step adds to its static memory is stretched.
    """
    count, events = len(profile.calls), profile.events
    forward = [index for index, event in enumerate(events) if event.kind == "forward"]
    backward = [index for index, event in enumerate(events) if event.kind == "backward"]
    in_order = [events[i].call for i in forward] == [*range(count)] == [events[i].call for i in reversed(backward)]
    if count < 3 or depth < 3 or not in_order or len({call.chain for call in profile.calls}) > 1:
        raise ValueError("only a chain of three blocks or more, each called once, can be stretched")
    cuts = [0, *forward, forward[-1] + 1, *backward, backward[-1] + 1, len(events)]
    before, *pieces, after = [events[start:stop] for start, stop in itertools.pairwise(cuts)]
    ahead, between, back = pieces[:count], pieces[count], pieces[:count:-1]
    sources = [0, *[1] * (depth - 2), count - 1]

    def moved(piece: Sequence[Event], call: int) -> tuple[Event, ...]:
        return tuple(event if event.kind == "gap" else replace(event, call=call) for event in piece)

    made = [
        before,
        *(moved(ahead[source], call) for call, source in enumerate(sources)),
        between,
        *(moved(back[source], call) for call, source in reversed(list(enumerate(sources)))),
        after,
    ]
    paths = tuple(f"layers.{index}" for index in range(depth))
    calls = tuple(replace(profile.calls[source], path=path) for path, source in zip(paths, sources, strict=True))
    return replace(profile, calls=calls, events=tuple(itertools.chain(*made)), blocks=paths)


class Workbench:
    """Plans for one model and step, from one profile, as `rf.fit` makes them but without running the step.

    Args:
        counted: plan by counted operations alone.
    """

    def __init__(self, model: nn.Module, step: rf.Step, *, counted: bool = False):
        self.model, self.step = model, step
        model.zero_grad(set_to_none=True)
        self.profiled: Profiled = profile_step(model, step)
        self.planner = Planner(without_seconds(self.profiled.profile) if counted else self.profiled.profile)

    @property
    def static_bytes(self) -> int:
        """Live before the step."""
        return self.profiled.profile.static_bytes

    def dry(self, plan: Any) -> DryRun:
        """The step under a plan or technique, by a dry run."""
        self.model.zero_grad(set_to_none=True)
        with rf.attached(self.model, plan):
            knowledge = self.profiled.costs.knowledge
            return dry_run(self.model, self.step, self.profiled.blocks, knowledge=knowledge)

    def dry_peak(self, plan: Any) -> int:
        """The step's peak under a plan or technique, by a dry run."""
        return self.dry(plan).peak_bytes

    def bound_flops(self, budget_bytes: int) -> float | None:
        """What any plan within a budget must recompute, if plans go by counted operations alone; None if none fits."""
        pools = self.planner.pools
        assert pools.weights.second == 0.0, "the bound of a profile with seconds isn't one of operations"
        cost = cost_bound(pools, budget_bytes)
        return None if cost is None else cost / pools.weights.flop

    def held(self, budget_bytes: int) -> Held:
        """The planner's plan whose dry run stays within a budget on the whole step's peak.

        Raises:
            BudgetError: there is none.
        """
        target = budget_bytes
        for _ in range(_ROUNDS):
            solution = self.planner.find(target)
            peak = self.dry_peak(solution.plan)
            if peak <= budget_bytes:
                plain_seconds = solution.plain.seconds
                ratio = solution.timeline.seconds / plain_seconds if plain_seconds else math.nan
                return Held(
                    plan=solution.plan,
                    predicted_peak_bytes=peak,
                    predicted_ratio=ratio,
                    solver_seconds=solution.seconds,
                )
            target -= peak - budget_bytes
        raise rf.BudgetError(f"no plan stayed within {budget_bytes} bytes", budget_bytes=budget_bytes)


def arguments(description: str | None, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has; `rounds` is for those that time steps."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"steps timed of each contender ({rounds})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    return parser


def show(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; all columns but the first are aligned to the right."""
    table = Table(title=f"{title}; torch {torch.__version__}", title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)


def flops_of(run: DryRun) -> int:
    """Floating-point operations of a dry step."""
    return sum(segment.flops for segment in run.segments)


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as the documentation has them."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_json(path: Path | None, rows: Sequence[Any]) -> None:
    """Writes rows, which are dataclasses, as a JSON list."""
    if path is not None:
        path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
