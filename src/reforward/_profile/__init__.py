"""Live model → profile: block by block and dry, so that the plain step never has to fit."""

from reforward._profile.dry import BlockCall, DryRun, Knowledge, dry_run
from reforward._profile.inputs import CallInputs, capture_inputs
from reforward._profile.profile import Profiled, profile, profile_step

__all__ = [
    "BlockCall",
    "CallInputs",
    "DryRun",
    "Knowledge",
    "Profiled",
    "capture_inputs",
    "dry_run",
    "profile",
    "profile_step",
]
