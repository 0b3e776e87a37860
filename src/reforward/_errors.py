"""The exception tree. Every message names the block, the value and the way out.

    ReforwardError
    ├── InputError (also ValueError)      the user's argument, file or pattern can't be used
    │   ├── PatternError                  a name or pattern matches nothing, or two match one block
    │   ├── PlanError                     a plan that can't be read, or was made for another model
    │   └── StepError                     a step that can't be run: no scalar loss, no block called
    ├── BudgetError (also ValueError)     no plan fits the budget; carries the smallest one that does
    ├── AttachError                       the model can't take a plan as it is (meta device, foreign wrapper)
    ├── ReplayError (also RuntimeError)   a replay can't be exact: refused, never silently wrong
    │   ├── ReplayMismatchError           the replay computed other values than the forward did
    │   └── MutationError                 a tensor the replay needs was changed in place
    ├── HeadError (also RuntimeError)     something is asked of a chunked loss head that it can't do
    └── DryRunError                       the step can't be traced

`ReplayError` is a RuntimeError, as autograd's own refusals are, so code that expects those goes on working.
"""

from __future__ import annotations


class ReforwardError(Exception):
    """Base of everything that reforward raises on purpose."""


class InputError(ReforwardError, ValueError):
    """The user's argument, file or pattern can't be used."""


class PatternError(InputError):
    """A name or pattern matches nothing, or two patterns match one block."""


class PlanError(InputError):
    """A plan that can't be read, or was made for another model."""


class StepError(InputError):
    """A step that can't be run: its loss isn't a scalar, or it never calls a block."""


class BudgetError(ReforwardError, ValueError):
    """No plan fits the budget.

    Attributes:
        budget_bytes: what was asked for.
        smallest_bytes: the smallest peak that any known plan reaches, or None if it isn't known.
    """

    def __init__(self, message: str, *, budget_bytes: int, smallest_bytes: int | None = None):
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes


class AttachError(ReforwardError):
    """The model can't take a plan as it is; it was left untouched."""


class ReplayError(ReforwardError, RuntimeError):
    """A replay can't be exact, so it is refused."""


class ReplayMismatchError(ReplayError):
    """The replay computed other values than the forward did."""


class MutationError(ReplayError):
    """A tensor that the replay needs was changed in place."""


class HeadError(ReforwardError, RuntimeError):
    """Something is asked of a chunked loss head, or of its logits, that it can't do."""


class DryRunError(ReforwardError):
    """The step can't be traced, neither on fake tensors nor on its own."""
