"""Live model → profile: block by block and dry, so that the plain step never has to fit."""

from reforward._profile.profile import Profiled, profile, profile_step

__all__ = ["Profiled", "profile", "profile_step"]
