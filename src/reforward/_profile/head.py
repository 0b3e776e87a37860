"""The loss head in chunks, as further options of a profile.

One dry run per number of chunks gives the bytes of the gaps between the blocks. Seconds: a chunk costs what its rows
cost, and what it costs by itself (the weight is read, and its gradient added to, once per chunk). The latter is told
from chunks of one and of two times as many rows, so the plain head never runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import nn

from reforward._errors import InputError
from reforward._measure.measure import device_of
from reforward._measure.state import preserved
from reforward._measure.static import step_inputs
from reforward._measure.trace import record
from reforward._measure.workspace import Workspaces
from reforward._plan import Head, Plan
from reforward._profile.dry import check_same_calls, dry_run
from reforward._profile.inputs import without_graph
from reforward._profile.profile import Profiled, events_of, joined, lone_forwards
from reforward._profile.real import now
from reforward._profile_type import HeadCost
from reforward._runtime import SeenLoss, attached, chunked_loss, seen_losses
from reforward._step import Step
from reforward._techniques import resolve_head

CHUNKS = (4, 8, 16, 32)
_REPEATS = 3

Progress = Callable[[str, float], None]


def with_heads(
    model: nn.Module, step: Step, profiled: Profiled, *, progress: Progress = lambda text, share: None
) -> Profiled:
    """The profile with its loss head in several numbers of chunks. Model and streams stay as they are.

    Raises:
        InputError: the model has no head that can be done in chunks, or the step takes no cross-entropy of its logits.
    """
    head = resolve_head(model, max(CHUNKS), blocks=profiled.blocks)
    variant = profiled.variant
    progress("timing the head", 0.0)
    seen = head_losses(model, step, head, profiled, variant)
    if not seen:
        raise InputError(
            f"the step never gives the logits of head {head.path!r} to torch.nn.functional.cross_entropy with class"
            " indices, so its loss can't be computed in chunks; leave allow='chunked_head' out"
        )
    fewest = min(len(loss.rows) for loss in seen)
    with preserved(model, also=step_inputs(step)):
        extra = [_extra_seconds(loss, device_of(model)) * step.accumulate for loss in seen]
        workspaces = [_workspaces(loss, chunks, device_of(model)) for loss in seen for chunks in CHUNKS]
    knowledge = profiled.costs.knowledge
    costs = replace(
        profiled.costs,
        knowledge=replace(knowledge, workspaces=knowledge.workspaces.merged(*workspaces)),
    )
    made = []
    for number, chunks in enumerate([chunks for chunks in CHUNKS if chunks <= fewest] or [fewest]):
        progress("dry runs of the head in chunks", number / len(CHUNKS))
        option = Head(path=head.path, chunks=chunks, module_type=head.module_type)
        with attached(model, Plan(nodes=(), head=option)):
            run = dry_run(model, step, profiled.blocks, variant=variant, knowledge=costs.knowledge)
        check_same_calls(model, profiled.plain.calls, run.calls)
        seconds = sum(rerun + own * (chunks - 1) for own, rerun in extra)
        events = events_of(joined(run, lone_forwards(profiled.plain)), costs, extra_seconds=seconds)
        made.append(HeadCost(head=option, events=events, extra_seconds=seconds))
    return replace(profiled, profile=replace(profiled.profile, heads=tuple(made)), costs=costs)


def head_losses(model: nn.Module, step: Step, head: Head, profiled: Profiled, variant: int) -> list[SeenLoss]:
    """The losses that one forward of the step takes of the head's logits, from a run without gradients."""
    with (
        preserved(model, also=step_inputs(step)),
        attached(model, Plan(nodes=(), head=head)),
        without_graph(model, profiled.calls[variant]),
        seen_losses() as seen,
    ):
        step.loss(variant)
    return [loss for loss in seen if loss.recipe.source.path == head.path]


def _extra_seconds(loss: SeenLoss, device: torch.device) -> tuple[float, float]:
    """What each chunk costs by itself, beside its rows, and what all rows cost a second time.

    They are only run again in backward where each row has a loss of its own.
    """
    rows = max(1, len(loss.rows) // (2 * max(CHUNKS)))
    runs = [_loss_of(loss, rows, 1), _loss_of(loss, 2 * rows, 1)]
    seconds = [
        min(samples) for samples in zip(*[[_timed(run, device) for run in runs] for _ in range(_REPEATS)], strict=True)
    ]
    own = max(0.0, 2 * seconds[0] - seconds[1])
    if loss.criterion.reduction != "none":
        return own, 0.0
    with torch.no_grad():
        forward = min(_timed(runs[1], device) for _ in range(_REPEATS))
    return own, forward * len(loss.rows) / (2 * rows)


def _workspaces(loss: SeenLoss, chunks: int, device: torch.device) -> Workspaces:
    """What the kernels of one chunk need beside their results."""
    run = _loss_of(loss, -(-len(loss.rows) // chunks), 1)
    return Workspaces.from_trace(record(run, device=device, shapes=True))


def _loss_of(loss: SeenLoss, count: int, chunks: int) -> Callable[[], object]:
    """The loss of the first rows, forward and, where gradients are on, backward; the step's own gradients stay."""
    source = replace(loss.recipe.source, chunks=chunks)
    recipe, target = replace(loss.recipe, source=source), loss.target[:count]
    rows = loss.rows[:count].clone().requires_grad_()
    sources = [t for t in (rows, source.weight, source.bias) if t is not None and t.requires_grad]

    def run() -> None:
        with loss.ambient.enter() or nullcontext():
            value = chunked_loss(recipe, rows, target, loss.criterion)
        if value.requires_grad:
            torch.autograd.grad(value.sum(), sources)

    return run


def _timed(run: Callable[[], object], device: torch.device) -> float:
    begin = now(device)
    run()
    return now(device) - begin
