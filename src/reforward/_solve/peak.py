"""Where a step's peak comes from, and what would lower it."""

from __future__ import annotations

from dataclasses import dataclass

from reforward._profile_type import Event, Profile
from reforward._solve.simulate import Timeline
from reforward._units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The highest moment of a step, in parts that add up.

    Attributes:
        peak_bytes: all of it.
        where: the event in words.
        static_bytes: live before the step.
        gradient_bytes: gradients that backward has made so far.
        kept_bytes: what blocks keep for backward, and what lies between them.
        event_bytes: what the event itself needs on top.
        remedy: what would lower the largest part that isn't static, in words.
    """

    peak_bytes: int
    where: str
    static_bytes: int
    gradient_bytes: int
    kept_bytes: int
    event_bytes: int
    remedy: str

    def __str__(self) -> str:
        parts = {
            "static memory": self.static_bytes,
            "gradients": self.gradient_bytes,
            "kept for backward": self.kept_bytes,
            self.where: self.event_bytes,
        }
        listed = " + ".join(f"{format_bytes(size)} {name}" for name, size in parts.items())
        return f"It is reached in {self.where}: {listed}. {self.remedy}."


def explain_peak(profile: Profile, timeline: Timeline) -> Peak:
    """The parts of a simulated step's peak."""
    index = timeline.peak_event
    if index < 0:
        before, done, where, event = timeline.static_bytes, [], "the static memory alone", None
    else:
        before = timeline.moments[index].live_before_bytes
        done = [moment.event.call for moment in timeline.moments[:index] if moment.event.kind == "backward"]
        event = timeline.moments[index].event
        where = _where(profile, event)
    options = [profile.calls[call].options[0] for call in done]
    gradients = sum(option.forward_delta_bytes + option.backward_delta_bytes for option in options)
    kept = before - timeline.static_bytes - gradients
    own = timeline.peak_bytes - before
    return Peak(
        peak_bytes=timeline.peak_bytes,
        where=where,
        static_bytes=timeline.static_bytes,
        gradient_bytes=gradients,
        kept_bytes=kept,
        event_bytes=own,
        remedy=_remedy(event, timeline.static_bytes + gradients, kept, own),
    )


def _where(profile: Profile, event: Event) -> str:
    if event.kind != "gap":
        return f"the {event.kind} of {profile.calls[event.call].path}"
    if event.name == "optimizer":
        return "the optimizer's update"
    return f"what runs outside the blocks in {event.name or 'the step'}"


def _remedy(event: Event | None, fixed: int, kept: int, own: int) -> str:
    if event is None or fixed >= kept + own:
        return (
            "What would help: parameters, gradients and optimizer state weigh most; train in a smaller type,"
            " take an optimizer with less state, freeze parameters or shard them"
        )
    if own < kept:
        return "What would help: a smaller batch or shorter sequences, as what is kept grows with both"
    if event.kind != "gap":
        return "What would help: smaller blocks as units, a smaller batch or shorter sequences"
    if event.name == "optimizer":
        return "What would help: an optimizer that makes fewer temporaries, such as foreach=False"
    return "What would help: the loss head in chunks, a smaller batch or shorter sequences"
