"""A step on its own tensors, for models that look at what tensors hold; afterwards all is as before."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from reforward import _torch
from reforward._measure.state import preserved
from reforward._measure.static import step_inputs
from reforward._profile.faking import TracedStep, fill_state, modules_of, unique
from reforward._step import Step


@contextmanager
def lent(model: nn.Module, step: Step) -> Iterator[TracedStep]:
    """Inside, the step may run; afterwards weights, optimizer, random streams and Python state are as before."""
    held = step_inputs(step)
    own = [_torch.named_own(module) for module in modules_of(model, held)]
    with preserved(model, step.optimizer, also=held):
        optimizer = _with_state(model, step.optimizer) if step.optimizer is not None else None
        parameters = unique(p for named, _ in own for p in named.values())
        yield TracedStep(
            step=replace(step, optimizer=optimizer),
            stand_in=lambda tensor: tensor,
            parameters=parameters,
            buffers=unique(b for _, named in own for b in named.values()),
            gradients=unique(p.grad for p in parameters if p.grad is not None),
            optimizer=unique(_torch.tensors_in([*optimizer.state.values()])) if optimizer is not None else (),
            batch=unique(item for item in held if isinstance(item, torch.Tensor)),
        )


def _with_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer with its state, as it has it from the second step of a training on."""
    lent = copy.copy(optimizer)
    lent.__dict__.pop("step", None)  # a scheduler's wrapper, which would count
    if not lent.state:
        with preserved(model):  # weight decay moves the weights also without a gradient
            fill_state(lent)
    return lent
