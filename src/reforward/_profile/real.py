"""What only real kernels can tell: seconds, workspaces, opaque sizes. Runs the step's parts, never the plain step
whole.

The forward runs once without gradients, which holds no activations; it shows the inputs of each distinct block. Then
one block of each kind runs forward and backward by itself, under every policy in question.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from reforward import _torch
from reforward._blocks import modules_by_path
from reforward._measure.measure import device_of
from reforward._measure.state import preserved
from reforward._measure.static import step_inputs
from reforward._measure.trace import record
from reforward._measure.workspace import OutputSizes, Workspaces
from reforward._policy import Policy, Recompute, Save, selectors
from reforward._profile.dry import BlockCall, Knowledge
from reforward._profile.inputs import CallInputs, capture_inputs
from reforward._runtime import attached, families_of
from reforward._step import Step

_REPEATS = 5
# The optimizer is timed on so many elements and scaled to all of them: its cost is proportional to their number.
_OPTIMIZER_ELEMENTS = 2**22

Signature = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class BlockSeconds:
    """Of one block call under one policy: forward, backward, and what the policy adds to both."""

    forward: float
    backward: float
    replay: float


@dataclass(frozen=True, kw_only=True)
class RealCosts:
    """What the parts of a step cost.

    Attributes:
        knowledge: for dry runs.
        policies: what was tried: Save(), Recompute(), then what can be selected in these blocks.
        blocks: seconds by signature and policy.
        outside_seconds: of the forward outside of all blocks.
        optimizer_seconds: of the optimizer's step.
    """

    knowledge: Knowledge
    policies: tuple[Policy, ...]
    blocks: dict[Signature, dict[Policy, BlockSeconds]]
    outside_seconds: float
    optimizer_seconds: float


def signature(module: nn.Module, call: BlockCall) -> Signature:
    """Equal for block calls that cost the same: same class and sizes, same trainable parameters, same inputs, same
    gradients."""
    return (
        call.block.module_type,
        repr(module),
        tuple(p.requires_grad for p in module.parameters()),
        call.inputs,
        call.graded,
    )


def real_costs(model: nn.Module, step: Step, calls: Sequence[BlockCall], variant: int) -> RealCosts:
    """Times and profiles the parts of a step. The model must have no plan on it; it stays as it is."""
    device = device_of(model)
    with preserved(model, also=step_inputs(step)):
        by_path = modules_by_path(model)
        signatures = [signature(by_path[call.block.path], call) for call in calls]
        first = {key: index for index, key in reversed(list(enumerate(signatures)))}
        inputs, outside_seconds, knowledge = _forward(model, step, calls, first.values(), variant, device)
        bench = _Bench(model, device)
        cases = {
            key: _Case(
                path=calls[index].block.path,
                module=by_path[calls[index].block.path],
                inputs=inputs[index],
                graded=calls[index].graded,
            )
            for key, index in first.items()
        }
        policies = _policies(set().union(*(case.families() for case in cases.values())))
        for case in cases.values():
            knowledge = bench.learn(case, knowledge)
        blocks = {key: bench.seconds(case, policies) for key, case in cases.items()}
    return RealCosts(
        knowledge=knowledge,
        policies=policies,
        blocks=blocks,
        outside_seconds=outside_seconds,
        optimizer_seconds=_optimizer_seconds(step.optimizer, device),
    )


def _policies(families: set[str]) -> tuple[Policy, ...]:
    """The policies worth trying where these families of operations run."""
    heavy = [family for family in ("attention", "matmul", "conv") if family in families]
    sets = [[family] for family in heavy] + ([heavy] if len(heavy) > 1 else [])
    return (Save(), Recompute(), *(Recompute(save=selectors(chosen)) for chosen in sets))


def _forward(
    model: nn.Module,
    step: Step,
    calls: Sequence[BlockCall],
    wanted: Collection[int],
    variant: int,
    device: torch.device,
) -> tuple[dict[int, CallInputs], float, Knowledge]:
    """The forward without gradients: inputs of some calls, seconds outside of blocks, what its kernels need."""
    sizes = OutputSizes()
    with sizes:
        inputs = capture_inputs(model, calls, lambda: step.loss(variant), wanted=wanted)
    with torch.no_grad():
        seconds = min(_seconds_outside(model, calls, lambda: step.loss(variant), device) for _ in range(_REPEATS))
        trace = record(lambda: step.loss(variant), device=device, shapes=True)
    return inputs, seconds, Knowledge(workspaces=Workspaces.from_trace(trace), output_sizes=sizes)


def _seconds_outside(
    model: nn.Module, calls: Sequence[BlockCall], run: Callable[[], Any], device: torch.device
) -> float:
    """Duration of a run without what passes in block calls; measured inside one run, so that noise in blocks
    cancels."""
    by_path = modules_by_path(model)
    inside = 0.0

    def begin(*_: Any) -> None:
        nonlocal inside
        inside -= _now(device)

    def end(*_: Any) -> None:
        nonlocal inside
        inside += _now(device)

    handles = []
    for module in dict.fromkeys(by_path[call.block.path] for call in calls):
        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        return _timed(run, device) - inside
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, kw_only=True)
class _Case:
    """One block call by itself: the block, its arguments, and which of its output tensors get gradients."""

    path: str
    module: nn.Module
    inputs: CallInputs
    graded: tuple[int, ...]

    def families(self) -> set[str]:
        """The families of operations that the block's forward is written with."""
        args, kwargs = self.inputs.fresh()
        with torch.no_grad(), families_of() as found:
            self.module(*args, **kwargs)
        return found

    def run(self, device: torch.device) -> tuple[float, float]:
        """Runs it forward and backward; the seconds of each."""
        args, kwargs = self.inputs.fresh()
        sources = [t for t in (*_torch.tensors_in((args, kwargs)), *self.module.parameters()) if t.requires_grad]
        begin = _now(device)
        with torch.enable_grad():
            outputs = _torch.tensors_in(self.module(*args, **kwargs))
        forward = _now(device) - begin
        graded = [outputs[index] for index in self.graded]
        ones = [torch.ones_like(t) for t in graded]
        del outputs
        begin = _now(device)
        if graded and sources:
            torch.autograd.grad(graded, sources, ones, allow_unused=True)
        return forward, _now(device) - begin


class _Bench:
    """Runs single blocks of a model."""

    def __init__(self, model: nn.Module, device: torch.device):
        self._model = model
        self._device = device

    def learn(self, case: _Case, known: Knowledge) -> Knowledge:
        """Adds what the block's kernels need, forward and backward."""
        with known.output_sizes:
            case.run(self._device)
        trace = record(lambda: case.run(self._device), device=self._device, shapes=True)
        return Knowledge(
            workspaces=known.workspaces.merged(Workspaces.from_trace(trace)), output_sizes=known.output_sizes
        )

    def seconds(self, case: _Case, policies: Sequence[Policy]) -> dict[Policy, BlockSeconds]:
        """Durations under each policy: the least of some interleaved runs."""
        runs: dict[Policy, list[tuple[float, float]]] = {policy: [] for policy in policies}
        for _ in range(_REPEATS):
            for policy in policies:
                with attached(self._model, {case.path: policy}):
                    runs[policy].append(case.run(self._device))
        best = {policy: (min(f for f, _ in taken), min(b for _, b in taken)) for policy, taken in runs.items()}
        forward, backward = best[policies[0]]
        return {
            policy: BlockSeconds(forward=forward, backward=backward, replay=max(0.0, f + b - forward - backward))
            for policy, (f, b) in best.items()
        }


def _optimizer_seconds(optimizer: torch.optim.Optimizer | None, device: torch.device) -> float:
    """Estimated from steps on a copy of some parameters."""
    if optimizer is None:
        return 0.0
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    total = sum(p.numel() for p in parameters)
    sample, counted = [], 0
    for parameter in parameters:
        if counted < _OPTIMIZER_ELEMENTS:
            sample.append(nn.Parameter(parameter.detach().clone()))
            counted += parameter.numel()
    trial = type(optimizer)(sample, **_settings(optimizer))
    for parameter in sample:
        parameter.grad = torch.zeros_like(parameter)
    trial.step()
    return min(_timed(trial.step, device) for _ in range(_REPEATS)) * total / max(counted, 1)


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    accepted = inspect.signature(type(optimizer)).parameters
    return {key: value for key, value in optimizer.param_groups[0].items() if key in accepted and key != "params"}


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    begin = _now(device)
    run()
    return _now(device) - begin


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter()
