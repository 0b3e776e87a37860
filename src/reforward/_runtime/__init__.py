"""Carries out a plan on a live model."""

from reforward._runtime.ambient import Ambient
from reforward._runtime.attach import attach, attached, detach, suspended
from reforward._runtime.checkpoint import checkpoint
from reforward._runtime.chunked_loss import chunked_loss
from reforward._runtime.current import is_replaying
from reforward._runtime.hooks import counted as counted_hooks
from reforward._runtime.logits import SeenLoss, seen_losses
from reforward._runtime.parts import Parts
from reforward._runtime.seen import SeenCall, seen_calls
from reforward._runtime.selective import is_meant
from reforward._runtime.streams import RngState, accelerators

__all__ = [
    "Ambient",
    "Parts",
    "RngState",
    "SeenCall",
    "SeenLoss",
    "accelerators",
    "attach",
    "attached",
    "checkpoint",
    "chunked_loss",
    "counted_hooks",
    "detach",
    "is_meant",
    "is_replaying",
    "seen_calls",
    "seen_losses",
    "suspended",
]
