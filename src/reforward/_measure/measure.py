"""measure: runs a step and says what it took."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from reforward._blocks import check_model, find_blocks, watching
from reforward._errors import InputError
from reforward._measure.account import Account, balance, thinned
from reforward._measure.breakdown import break_down
from reforward._measure.measurement import Breakdown, Measurement, PhaseSpan
from reforward._measure.state import preserved
from reforward._measure.static import addresses, gradients, holdings, optimizer_tensors, step_inputs, trainable
from reforward._measure.trace import Span, Trace, record, span
from reforward._step import Phase, Step
from reforward._units import check_count

TIMELINE_POINTS = 3000


def measure(
    model: nn.Module,
    step: Step | Callable[[], torch.Tensor],
    *,
    variant: int = 0,
    optimize: bool = True,
    repeats: int = 3,
    restore: bool = True,
) -> Measurement:
    """Runs a training step and measures its peak memory, by the allocator's own account, and its duration.

    Runs `repeats + 2` steps: one to warm up, so that the optimizer's state is there as it is in training; one under the
    profiler; the others timed. Every step begins without the gradients that weren't there at the call.

    Args:
        model: the model, with a plan attached or not.
        step: the step, or a function without arguments that returns its loss.
        variant: which of the step's batches.
        optimize: whether the optimizer steps.
        repeats: how many steps are timed; at least 1.
        restore: put model, optimizer, gradients and random streams back bit for bit. Otherwise the model has trained
            for those steps.

    Raises:
        InputError: a device that can't be measured, a batch that doesn't exist, or fewer than one repeat.
        StepError: the step can't be run.
    """
    step = Step.of(step)
    check_count("repeats", repeats)
    check_count("variant", variant, least=0)
    if variant >= step.variants:
        raise InputError(f"the step has {step.variants} batches, so variant must be below that, not {variant!r}")
    device = device_of(model)
    runner = _Runner(model, step, variant, optimize, device)
    keep = preserved(model, step.optimizer, also=step_inputs(step)) if restore else nullcontext()
    with keep:
        runner.run()
        profiled = runner.profiled()
        samples = [runner.timed() for _ in range(repeats)]
    wall, cpu = zip(*samples, strict=True)
    account, phases = profiled.account, profiled.phases
    return Measurement(
        device=str(device),
        peak_bytes=account.peak_bytes,
        static_bytes=account.live[0],
        peak_phase=_phase_at_peak(profiled),
        breakdown=profiled.breakdown,
        timeline=_timeline(profiled),
        phases=tuple(_phase_span(profiled, phase) for phase in phases),
        seconds=statistics.median(wall),
        seconds_samples=wall,
        cpu_seconds=statistics.median(cpu),
        cpu_seconds_samples=cpu,
        allocated_bytes=profiled.allocated_bytes,
        reserved_bytes=profiled.reserved_bytes,
    )


def device_of(model: nn.Module) -> torch.device:
    """The device that holds most bytes of the model's parameters.

    Raises:
        InputError: there are no parameters, or they hold no memory (meta device).
    """
    check_model(model)
    held: dict[torch.device, int] = {}
    for parameter in model.parameters():
        held[parameter.device] = held.get(parameter.device, 0) + parameter.numel() * parameter.element_size()
    if not held:
        raise InputError(f"{type(model).__name__} has no parameters, so there is no training step to measure")
    device = max(held, key=held.__getitem__)
    if device.type == "meta":
        raise InputError(
            f"{type(model).__name__} is on the meta device, so its step can't be run;"
            " give it memory with model.to_empty(device=...)"
        )
    return device


class _Runner:
    """Runs one step again and again, each time from the same gradients."""

    def __init__(self, model: nn.Module, step: Step, variant: int, optimize: bool, device: torch.device):
        self._model, self._step, self._device = model, step, device
        self._variant, self._optimize = variant, optimize
        self._trainable = trainable(model, step.optimizer)
        self._without_gradient = [p for p in self._trainable if p.grad is None]

    def run(self, phase: Callable[[Phase], Any] = lambda name: nullcontext()) -> None:
        self._clear_gradients()
        self._step.run(self._variant, phase=phase, optimize=self._optimize)

    def timed(self) -> tuple[float, float]:
        """Seconds of one step: by the clock, and of the process on the CPU."""
        _synchronize(self._device)
        wall, cpu = time.perf_counter(), time.process_time()
        self.run()
        _synchronize(self._device)
        return time.perf_counter() - wall, time.process_time() - cpu

    def profiled(self) -> _Profiled:
        """One step under the profiler."""
        held: list[frozenset[int]] = []

        @contextmanager
        def phase(name: Phase) -> Iterator[None]:
            with span("phase", name):
                yield
                if name == "backward":
                    held.append(addresses(gradients(self._trainable)))

        self._clear_gradients()
        before = holdings(self._model, self._step, self._device)
        with _block_spans(self._model), _device_peaks(self._device) as device_peaks:
            trace = record(lambda: self.run(phase), device=self._device)
        account = balance(trace.memory, before)
        state = addresses(optimizer_tensors(self._step.optimizer))
        return _Profiled(
            trace=trace,
            account=account,
            breakdown=break_down(account, trace, gradients=held, optimizer_state=state),
            **device_peaks,
        )

    def _clear_gradients(self) -> None:
        for parameter in self._without_gradient:
            parameter.grad = None


@dataclass(frozen=True, kw_only=True)
class _Profiled:
    """What one profiled step gave."""

    trace: Trace
    account: Account
    breakdown: Breakdown
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None

    @property
    def phases(self) -> list[Span]:
        """The step's phases, in order."""
        return [found for found in self.trace.spans if found.kind == "phase"]


def _block_spans(model: nn.Module) -> AbstractContextManager[None]:
    """While inside, every call of a block is a span of the trace."""
    running: list[AbstractContextManager[None]] = []

    def begin(path: str, *_: Any) -> None:
        running.append(span("block", path))
        running[-1].__enter__()

    def end(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    return watching(model, [block.path for block in find_blocks(model)], begin, end)


@contextmanager
def _device_peaks(device: torch.device) -> Iterator[dict[str, int]]:
    """The allocator's own peaks while inside, where it has them; filled in on exit."""
    peaks: dict[str, int] = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield peaks
    if device.type == "cuda":
        peaks["allocated_bytes"] = torch.cuda.max_memory_allocated(device)
        peaks["reserved_bytes"] = torch.cuda.max_memory_reserved(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timeline(profiled: _Profiled) -> tuple[tuple[float, int], ...]:
    begin, live = profiled.phases[0].begin, profiled.account.live
    points = [(0.0, live[0])]
    for event, count in zip(profiled.trace.memory, live[1:], strict=True):
        points.append(((event.time - begin) * 1e-6, count))
    return thinned(points, TIMELINE_POINTS)


def _phase_span(profiled: _Profiled, phase: Span) -> PhaseSpan:
    begin = profiled.phases[0].begin
    events = profiled.trace.between(phase.begin, phase.end)
    return PhaseSpan(
        name=phase.name,
        begin_seconds=(phase.begin - begin) * 1e-6,
        end_seconds=(phase.end - begin) * 1e-6,
        peak_bytes=max(profiled.account.live[events.start : events.stop + 1]),
    )


def _phase_at_peak(profiled: _Profiled) -> str:
    """The phase of the peak; what comes between two phases counts to the one before."""
    phases, peak = profiled.phases, profiled.account.peak
    if peak < 0:
        return phases[0].name
    time = profiled.trace.memory[peak].time
    return next((phase.name for phase in reversed(phases) if phase.begin <= time), phases[0].name)
