"""Carries out a plan on a live model."""

from reforward._runtime.ambient import Ambient
from reforward._runtime.attach import attach, attached, detach, suspended
from reforward._runtime.checkpoint import checkpoint
from reforward._runtime.depth import is_replaying
from reforward._runtime.hooks import counted as counted_hooks
from reforward._runtime.selective import families_of
from reforward._runtime.streams import RngState, accelerators

__all__ = [
    "Ambient",
    "RngState",
    "accelerators",
    "attach",
    "attached",
    "checkpoint",
    "counted_hooks",
    "detach",
    "families_of",
    "is_replaying",
    "suspended",
]
