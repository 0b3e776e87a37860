"""Fits a training step into a memory budget: activation checkpointing by one plan, proven exact.

The public names are listed here and nowhere else. They are loaded when first used, so that `import reforward`,
`reforward --help` and the solver don't wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reforward._blocks import Block as Block
    from reforward._blocks import find_blocks as find_blocks
    from reforward._errors import AttachError as AttachError
    from reforward._errors import BudgetError as BudgetError
    from reforward._errors import DryRunError as DryRunError
    from reforward._errors import HeadError as HeadError
    from reforward._errors import InputError as InputError
    from reforward._errors import MutationError as MutationError
    from reforward._errors import PatternError as PatternError
    from reforward._errors import PlanError as PlanError
    from reforward._errors import ReforwardError as ReforwardError
    from reforward._errors import ReplayError as ReplayError
    from reforward._errors import ReplayMismatchError as ReplayMismatchError
    from reforward._errors import StepError as StepError
    from reforward._fit import FitReport as FitReport
    from reforward._fit import explain as explain
    from reforward._fit import fit as fit
    from reforward._fit import fit_report as fit_report
    from reforward._frontier import Frontier as Frontier
    from reforward._frontier import frontier as frontier
    from reforward._measure import Measurement as Measurement
    from reforward._measure import measure as measure
    from reforward._plan import Head as Head
    from reforward._plan import Plan as Plan
    from reforward._plan import Region as Region
    from reforward._plan import Run as Run
    from reforward._policy import Device as Device
    from reforward._policy import Modules as Modules
    from reforward._policy import Ops as Ops
    from reforward._policy import Recompute as Recompute
    from reforward._policy import Save as Save
    from reforward._profile import profile as profile
    from reforward._profile_type import Profile as Profile
    from reforward._runtime import attach as attach
    from reforward._runtime import attached as attached
    from reforward._runtime import checkpoint as checkpoint
    from reforward._runtime import detach as detach
    from reforward._runtime import is_replaying as is_replaying
    from reforward._runtime import suspended as suspended
    from reforward._solve import Allow as Allow
    from reforward._solve import solve as solve
    from reforward._step import Step as Step
    from reforward._techniques import chunked_head as chunked_head
    from reforward._techniques import every as every
    from reforward._techniques import full as full
    from reforward._techniques import none as none
    from reforward._techniques import segments as segments
    from reforward._techniques import selective as selective
    from reforward._verify import Proof as Proof
    from reforward._verify import verify as verify

_HOME = {
    "_blocks": ("Block", "find_blocks"),
    "_errors": (
        "AttachError", "BudgetError", "DryRunError", "HeadError", "InputError", "MutationError", "PatternError",
        "PlanError", "ReforwardError", "ReplayError", "ReplayMismatchError", "StepError",
    ),
    "_fit": ("FitReport", "explain", "fit", "fit_report"),
    "_frontier": ("Frontier", "frontier"),
    "_measure": ("Measurement", "measure"),
    "_plan": ("Head", "Plan", "Region", "Run"),
    "_policy": ("Device", "Modules", "Ops", "Recompute", "Save"),
    "_profile": ("profile",),
    "_profile_type": ("Profile",),
    "_runtime": ("attach", "attached", "checkpoint", "detach", "is_replaying", "suspended"),
    "_solve": ("Allow", "solve"),
    "_step": ("Step",),
    "_techniques": ("chunked_head", "every", "full", "none", "segments", "selective"),
    "_verify": ("Proof", "verify"),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'reforward' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"reforward.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
