"""Step: one optimizer step as the user runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from reforward._errors import StepError

Phase = Literal["forward", "backward", "optimizer"]


@dataclass(frozen=True)
class Step:
    """One optimizer step: the loss of each batch, its backward, the optimizer.

    Attributes:
        loss_fn: returns the scalar loss of one batch, `loss_fn(batch)`; without batches it takes no argument.
        batches: one example of every batch that occurs (every sequence length, say). Each is a step of its own;
            a plan has to hold its budget for all of them.
        optimizer: updates the parameters at the end of the step; None: the step ends with the gradients.
        accumulate: micro-batches per optimizer step; each is `loss_fn` of the same batch, its loss divided by their
            number.
    """

    loss_fn: Callable[..., torch.Tensor]
    batches: Sequence[Any] | None = None
    optimizer: torch.optim.Optimizer | None = None
    accumulate: int = 1

    def __post_init__(self):
        if not callable(self.loss_fn):
            raise StepError(f"a step's loss_fn must be callable, not {self.loss_fn!r}")
        if self.batches is not None and not isinstance(self.batches, (list, tuple)):
            raise StepError(
                f"a step's batches must be a list, one entry per batch that occurs, not {type(self.batches).__name__};"
                " write Step(loss_fn, [batch], ...)"
            )
        if self.batches is not None and len(self.batches) == 0:
            raise StepError("a step needs at least one batch; leave `batches` out if loss_fn takes none")
        if self.optimizer is not None and not all(hasattr(self.optimizer, name) for name in ("step", "param_groups")):
            raise StepError(f"a step's optimizer must be a torch.optim.Optimizer, not {self.optimizer!r}")
        if not isinstance(self.accumulate, int) or isinstance(self.accumulate, bool) or self.accumulate < 1:
            raise StepError(f"accumulate must be a whole number of at least 1, not {self.accumulate!r}")

    @classmethod
    def of(cls, step: Step | Callable[[], torch.Tensor]) -> Step:
        """A Step from what a user may pass: a Step, or a function that returns the loss."""
        return step if isinstance(step, Step) else cls(step)

    @property
    def variants(self) -> int:
        """How many different steps this is: one per batch, at least one."""
        return 1 if self.batches is None else len(self.batches)

    def loss(self, variant: int = 0) -> torch.Tensor:
        """The loss of one batch, checked to be a scalar with floating-point values.

        Raises:
            StepError: it isn't.
        """
        loss = self.loss_fn() if self.batches is None else self.loss_fn(self.batches[variant])
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            what = (
                f"a tensor of shape {tuple(loss.shape)} ({loss.dtype})"
                if isinstance(loss, torch.Tensor)
                else repr(loss)
            )
            raise StepError(
                f"the step must return a scalar loss tensor, not {what}; reduce it, for example with .mean()"
            )
        return loss

    def run(
        self,
        variant: int = 0,
        *,
        phase: Callable[[Phase], AbstractContextManager[Any]] = lambda name: nullcontext(),
        optimize: bool = True,
    ) -> torch.Tensor:
        """Runs one step and returns its loss, detached.

        Args:
            variant: which batch.
            phase: makes a context in which each phase runs, for those who watch.
            optimize: whether the optimizer steps (and clears the gradients) at the end.
        """
        total: torch.Tensor | None = None
        for _ in range(self.accumulate):
            with phase("forward"):
                loss = self.loss(variant) / self.accumulate
            if not loss.requires_grad:
                raise StepError("the step's loss doesn't require grad: no parameter that takes part is trainable")
            with phase("backward"):
                loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
            del loss
        if self.optimizer is not None and optimize:
            with phase("optimizer"):
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        assert total is not None
        return total
