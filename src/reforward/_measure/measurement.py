"""Measurement: what a step really took. Plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from reforward._units import format_bytes


@dataclass(frozen=True, kw_only=True)
class PhaseSpan:
    """One phase of the step on the timeline.

    Attributes:
        name: "forward", "backward" or "optimizer".
        begin_seconds, end_seconds: on the timeline's clock.
        peak_bytes: the highest live bytes in it.
    """

    name: str
    begin_seconds: float
    end_seconds: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Where the peak's bytes are. The parts sum to the peak.

    Attributes:
        parameters: of the model, and of other modules that the step's function holds.
        buffers: of the same.
        gradients: those of the step so far, and any there before it.
        optimizer_state: tensors in the optimizer's state.
        batch: the step's batches, and other tensors that its function holds.
        blocks: by block path, what the block's forward left for later.
        loss_head: what the forward outside of all blocks left: embeddings, the head, the loss.
        temporaries: everything else: gradients of activations, workspaces, values recomputed or soon freed.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    batch: int
    blocks: dict[str, int]
    loss_head: int
    temporaries: int

    @property
    def saved_activations(self) -> int:
        """What all blocks left for backward."""
        return sum(self.blocks.values())

    @property
    def total(self) -> int:
        """The sum of the parts."""
        static = self.parameters + self.buffers + self.gradients + self.optimizer_state + self.batch
        return static + self.saved_activations + self.loss_head + self.temporaries

    def to_dict(self) -> dict[str, Any]:
        """The parts as plain dicts and numbers, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        parts = [(name.replace("_", " "), size) for name, size in self.to_dict().items() if name != "blocks"]
        largest_first = sorted([*parts, *self.blocks.items()], key=lambda part: -part[1])
        rows = [*((name, size) for name, size in largest_first if size), ("in all", self.total)]
        return "\n".join(f"{format_bytes(size):>8}  {name}" for name, size in rows)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one training step took on its device.

    Attributes:
        device: "cpu", "cuda:0", ...
        peak_bytes: highest live bytes of the step: static memory, and the most that was allocated on top of it.
        static_bytes: live when the step began: parameters, buffers, gradients, optimizer state, batch.
        peak_phase: the phase in which the peak lies.
        breakdown: where the peak's bytes are.
        timeline: (seconds since the first phase began, live bytes), thinned; its maximum is `peak_bytes`. The seconds
            are those of the profiled run, which is slower than the timed ones.
        phases: where the phases lie on the timeline.
        seconds: median duration of a step, unprofiled.
        seconds_samples: each of them.
        cpu_seconds: median CPU time of the process per step, over all its threads.
        cpu_seconds_samples: each of them.
        allocated_bytes: peak of what the allocator had handed out on the device, to whomever; None on the CPU.
        reserved_bytes: peak of what the allocator had taken from the device, fragmentation included; None on the CPU.
    """

    device: str
    peak_bytes: int
    static_bytes: int
    peak_phase: str
    breakdown: Breakdown
    timeline: tuple[tuple[float, int], ...]
    phases: tuple[PhaseSpan, ...]
    seconds: float
    seconds_samples: tuple[float, ...]
    cpu_seconds: float
    cpu_seconds_samples: tuple[float, ...]
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None

    @property
    def activation_peak_bytes(self) -> int:
        """The most that the step allocated on top of its static memory."""
        return self.peak_bytes - self.static_bytes

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain dicts, lists, numbers and text, ready for JSON."""
        result = asdict(self)
        result["activation_peak_bytes"] = self.activation_peak_bytes
        result["timeline"] = [list(point) for point in self.timeline]
        result["phases"] = list(result["phases"])
        result["seconds_samples"] = list(self.seconds_samples)
        result["cpu_seconds_samples"] = list(self.cpu_seconds_samples)
        return result
