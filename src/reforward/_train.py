"""Trains for a few steps: what the command does once a plan is in place."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from reforward._errors import StepError
from reforward._step import Step


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """One optimizer step that was taken.

    Attributes:
        loss: before the step's update.
        seconds: wall-clock duration.
    """

    loss: float
    seconds: float


def train(step: Step, steps: int, batches: Iterator[Any] | None = None) -> Iterator[TrainedStep]:
    """Takes optimizer steps, one each time the iterator is advanced.

    Args:
        step: the loss and the optimizer.
        steps: how many to take at most.
        batches: one is drawn per step; None: the step's own batches, in turn.

    Raises:
        StepError: at once, if there are steps to take and no optimizer to take them.
    """
    if steps and step.optimizer is None:
        raise StepError(
            "the step has no optimizer, so it can't be trained; give it one (--optimizer), or take no steps (--steps 0)"
        )
    return _train(step, steps, batches)


def _train(step: Step, steps: int, batches: Iterator[Any] | None) -> Iterator[TrainedStep]:
    variants = itertools.cycle(range(step.variants))
    for _ in range(steps):
        started = time.perf_counter()
        loss = step.run(next(variants)) if batches is None else replace(step, batches=[next(batches)]).run()
        if loss.is_cuda:
            torch.cuda.synchronize(loss.device)
        yield TrainedStep(loss=loss.item(), seconds=time.perf_counter() - started)
