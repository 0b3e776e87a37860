"""Live model → profile: block by block and dry, so that the plain step never has to fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn

from reforward._blocks import Block
from reforward._errors import InputError
from reforward._profile.dry import BlockCall, DryRun, Knowledge, dry_run, dry_runs
from reforward._profile.head import head_losses, with_heads
from reforward._profile.inputs import CallInputs, capture_inputs
from reforward._profile.profile import Profiled, profile_step
from reforward._profile_type import Profile
from reforward._step import Step

__all__ = [
    "BlockCall",
    "CallInputs",
    "DryRun",
    "Knowledge",
    "Profiled",
    "capture_inputs",
    "dry_run",
    "dry_runs",
    "head_losses",
    "profile",
    "profile_step",
    "with_heads",
]


def profile(
    model: nn.Module,
    step: Step | Callable[[], torch.Tensor],
    *,
    allow: Literal["chunked_head"] | None = None,
    blocks: Sequence[Block] | None = None,
) -> Profile:
    """The step as an ordered trace, with bytes and seconds of each block call under each option.

    The plain step isn't run: memory comes from dry runs, seconds from single blocks. Model, optimizer, gradients and
    random streams stay as they are. Of several batches, the one whose plain step needs most is profiled.

    Args:
        model: the model; a plan that is on it is taken off meanwhile.
        step: the step, or a function without arguments that returns its loss.
        allow: `"chunked_head"`: also with the loss head in chunks, for `Allow(chunked_head=True)`.
        blocks: as `find_blocks` gives them; None finds them.

    Raises:
        InputError: what is given isn't a model, it has no blocks, these aren't blocks of it, or its head can't be
            done in chunks.
        DryRunError: the model can't be run on fake tensors, or the step isn't the same each time it runs.
        StepError: the step can't be run, or calls no block.
    """
    if allow not in (None, "chunked_head"):
        raise InputError(f"allow must be 'chunked_head' or None, not {allow!r}")
    step = Step.of(step)
    profiled = profile_step(model, step, blocks=blocks)
    return (with_heads(model, step, profiled) if allow else profiled).profile
