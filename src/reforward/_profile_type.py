"""Profile: what the solver sees of a model and a step. Numbers and names only, no torch.

The step is an ordered trace of events. A block's call appears in it twice, when it runs forward and when its backward
runs; what lies between is a gap (embedding, loss head, optimizer). The bytes of an event are relative to what is live
when it begins, so that the live bytes at any moment are `static_bytes` plus the deltas of the events before it,
whichever option each call is run with. One profile covers calls of one module several times, two forwards before one
backward, accumulation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from reforward._plan import Head
from reforward._policy import Policy


@dataclass(frozen=True, kw_only=True)
class OptionCost:
    """One call of one block, run under one policy.

    Attributes:
        policy: Save() for the plain block, Recompute(save=...) otherwise.
        forward_delta_bytes: change of live bytes over the call's forward: what it leaves for backward, plus its output.
        forward_peak_bytes: highest live bytes during the forward, relative to its begin.
        backward_delta_bytes: change over the call's backward (replay included): what it left is freed, gradients are
            added.
        backward_peak_bytes: highest live bytes during the backward (replay included), relative to its begin.
        forward_seconds, backward_seconds: duration without any replay.
        replay_seconds: duration of the recomputation; 0 for Save().
        replay_flops: floating-point operations of the recomputation.
    """

    policy: Policy
    forward_delta_bytes: int
    forward_peak_bytes: int
    backward_delta_bytes: int
    backward_peak_bytes: int
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    replay_seconds: float = 0.0
    replay_flops: int = 0


@dataclass(frozen=True, kw_only=True)
class CallCost:
    """One call of one block.

    Attributes:
        path: canonical module path; calls of one module share it, and a plan gives them one policy.
        module_type: class name of the module.
        chain: calls with the same number, consecutive in the trace, pass one's output on to the next: only they can
            form runs.
        output_bytes: size of the output that the next call of the chain receives.
        options: the first is Save(), the second Recompute() with nothing saved; then the selective ones.
        signature: calls with an equal signature have equal costs (same class, same shapes).
    """

    path: str
    module_type: str
    chain: int
    output_bytes: int
    options: tuple[OptionCost, ...]
    signature: int = 0


@dataclass(frozen=True, kw_only=True)
class Event:
    """One entry of the trace.

    Attributes:
        kind: "forward" or "backward" of a call, or "gap": all that isn't in a block.
        call: index into `Profile.calls`; -1 for a gap.
        name: of a gap: "forward", "backward" or "optimizer", the phase it lies in.
        delta_bytes, peak_bytes, seconds: of a gap, as in OptionCost.
    """

    kind: Literal["forward", "backward", "gap"]
    call: int = -1
    name: str = ""
    delta_bytes: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class HeadCost:
    """The step with its loss head in chunks and its blocks plain.

    Attributes:
        head: which head, in how many chunks.
        events: the trace, whose gaps are those of such a step.
        extra_seconds: what the chunks take longer than the plain head; a part of the gaps' seconds.
    """

    head: Head
    events: tuple[Event, ...]
    extra_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model's step in numbers.

    Attributes:
        static_bytes: live before the step begins: parameters, buffers, optimizer state, batch.
        parameter_bytes, gradient_bytes, optimizer_bytes: parts of the static memory and, of gradients, what backward
            adds.
        calls: the block calls, in the order of their forwards.
        events: the trace.
        blocks: paths of all blocks found, in order; those without a call take no part in the step.
        heads: the loss head in chunks, if that was profiled; fewer chunks first.
    """

    static_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    calls: tuple[CallCost, ...]
    events: tuple[Event, ...]
    blocks: tuple[str, ...] = ()
    heads: tuple[HeadCost, ...] = ()

    def under(self, cost: HeadCost) -> Profile:
        """The profile of the step whose head is in chunks."""
        return replace(self, events=cost.events, heads=())
