"""What only real kernels can tell: seconds, workspaces, opaque sizes. Runs the step's parts, never the plain step
whole.

The forward runs once without gradients, which holds no activations; it shows the inputs of each distinct block. Then
one block of each kind runs forward and backward by itself, under every policy in question.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from reforward import _torch
from reforward._blocks import modules_by_path, watching
from reforward._errors import ReforwardError, ReplayError
from reforward._measure.measure import device_of
from reforward._measure.state import preserved
from reforward._measure.static import step_inputs
from reforward._measure.trace import record
from reforward._measure.workspace import OutputSizes, Workspaces
from reforward._plan import Plan, Region
from reforward._policy import Policy, Recompute, Save
from reforward._profile.dry import BlockCall, Knowledge, Operations
from reforward._profile.inputs import CallInputs, capture_inputs, without_graph
from reforward._profile.inside import policies_inside
from reforward._runtime import SeenCall, attached, seen_calls
from reforward._step import Step

_REPEATS = 5
# The optimizer is timed on so many elements and scaled to all of them: its cost is proportional to their number.
_OPTIMIZER_ELEMENTS = 2**22

Signature = tuple[Any, ...]
Kind = tuple[Any, ...]


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
        policies: what was tried, by kind of block: Save(), Recompute(), then more and more kept.
        blocks: seconds by signature and policy.
        outside_seconds: of the forward outside of all blocks.
        optimizer_seconds: of the optimizer's step.
    """

    knowledge: Knowledge
    policies: dict[Kind, tuple[Policy, ...]]
    blocks: dict[Signature, dict[Policy, BlockSeconds]]
    outside_seconds: float
    optimizer_seconds: float


def signature(module: nn.Module, call: BlockCall) -> Signature:
    """Equal for block calls that cost the same: same class and sizes, same trainable parameters, same inputs, same
    gradients, as many operations: a setting that the module's text doesn't show (how often it loops) shows there."""
    trained = tuple(p.requires_grad for p in module.parameters())
    return (*kind_of(module), trained, call.inputs, call.graded, call.flops)


def kind_of(module: nn.Module) -> Kind:
    """Equal for blocks that are built alike, on which the same policies are tried."""
    return type(module).__name__, repr(module)


def real_costs(model: nn.Module, step: Step, calls: Sequence[BlockCall], variant: int, known: Knowledge) -> RealCosts:
    """Times and profiles the parts of a step, and adds to what is known of it. The model must have no plan on it; it
    stays as it is."""
    device = device_of(model)
    with preserved(model, also=step_inputs(step)):
        cases, outside_seconds, knowledge = _cases(model, step, calls, variant, device)
        knowledge = known.merged(knowledge)
        bench = _Bench(model, device)
        policies: dict[Kind, tuple[Policy, ...]] = {}
        for case in cases.values():
            knowledge = bench.learn(case, knowledge)
            if kind_of(case.module) not in policies:
                inside = policies_inside(case.path, bench.calls(case))
                policies[kind_of(case.module)] = (Save(), Recompute(), *inside)
        blocks = dict(zip(cases, bench.seconds(list(cases.values()), policies), strict=True))
    return RealCosts(
        knowledge=knowledge,
        policies=policies,
        blocks=blocks,
        outside_seconds=outside_seconds,
        optimizer_seconds=_optimizer_seconds(step.optimizer, device),
    )


def learn_variant(
    model: nn.Module, step: Step, calls: Sequence[BlockCall], variant: int, known: Knowledge
) -> Knowledge:
    """Adds what the kernels of another batch need."""
    device = device_of(model)
    with preserved(model, also=step_inputs(step)):
        cases, _, own = _cases(model, step, calls, variant, device)
        bench = _Bench(model, device)
        known = known.merged(own)
        for case in cases.values():
            known = bench.learn(case, known)
    return known


def _cases(
    model: nn.Module, step: Step, calls: Sequence[BlockCall], variant: int, device: torch.device
) -> tuple[dict[Signature, _Case], float, Knowledge]:
    """One case of each signature, the forward's seconds outside of blocks, and what its kernels need."""
    by_path = modules_by_path(model)
    calls = calls[: len(calls) // step.accumulate]  # of one micro-batch: that is what a forward makes
    signatures = [signature(by_path[call.block.path], call) for call in calls]
    first = {key: index for index, key in reversed(list(enumerate(signatures)))}
    inputs, seconds, knowledge = _forward(model, step, calls, first.values(), variant, device)
    cases = {
        key: _Case(
            path=calls[index].block.path,
            module=by_path[calls[index].block.path],
            inputs=inputs[index],
            graded=calls[index].graded,
        )
        for key, index in first.items()
    }
    return cases, seconds, knowledge


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
    with without_graph(model, calls):
        seconds = min(_seconds_outside(model, calls, lambda: step.loss(variant), device) for _ in range(2))
        trace = record(lambda: step.loss(variant), device=device, shapes=True)
    return inputs, seconds, Knowledge(workspaces=Workspaces.from_trace(trace), output_sizes=sizes)


def _seconds_outside(
    model: nn.Module, calls: Sequence[BlockCall], run: Callable[[], Any], device: torch.device
) -> float:
    """Duration of a run without what passes in block calls; measured inside one run, so that noise in blocks
    cancels."""
    inside = 0.0

    def begin(*_: Any) -> None:
        nonlocal inside
        inside -= now(device)

    def end(*_: Any) -> None:
        nonlocal inside
        inside += now(device)

    with watching(model, [call.block.path for call in calls], begin, end):
        return _timed(run, device) - inside


@dataclass(frozen=True, kw_only=True)
class _Case:
    """One block call by itself: the block, its arguments, and which of its output tensors get gradients."""

    path: str
    module: nn.Module
    inputs: CallInputs
    graded: tuple[int, ...]

    def forward(self) -> Any:
        """Runs its forward; what it returned."""
        args, kwargs = self.inputs.fresh()
        with torch.enable_grad(), self.inputs.settings():
            return self.module(*args, **kwargs)

    def run(self, device: torch.device) -> tuple[float, float]:
        """Runs it forward and backward; the seconds of each.

        Raises:
            ReplayError: it can't be run by itself, as a block that overwrites its input can't.
        """
        args, kwargs = self.inputs.fresh()
        sources = [t for t in (*_torch.tensors_in((args, kwargs)), *self.module.parameters()) if t.requires_grad]
        try:
            begin = now(device)
            with torch.enable_grad(), self.inputs.settings():
                outputs = _torch.tensors_in(self.module(*args, **kwargs))
            forward = now(device) - begin
            graded = [outputs[index] for index in self.graded]
            ones = [torch.ones_like(t) for t in graded]
            del outputs
            begin = now(device)
            if graded and sources:
                torch.autograd.grad(graded, sources, ones, allow_unused=True)
            return forward, now(device) - begin
        except ReforwardError:
            raise
        except RuntimeError as error:
            raise ReplayError(
                f"block {self.path!r} can't be run by itself: {error}. Leave it out: name the others with blocks="
            ) from error


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
        return replace(known, workspaces=known.workspaces.merged(Workspaces.from_trace(trace)))

    def calls(self, case: _Case) -> list[SeenCall]:
        """The calls in the block's forward that a policy could select."""
        return seen_calls(
            self._model,
            case.path,
            case.forward,
            clock=lambda: now(self._device),
            meter=Operations(),
            repeats=_REPEATS,
        )

    def seconds(
        self, cases: Sequence[_Case], policies: dict[Kind, tuple[Policy, ...]]
    ) -> list[dict[Policy, BlockSeconds]]:
        """Durations of each case under each policy of its kind: the least of some interleaved runs."""
        own = [policies[kind_of(case.module)] for case in cases]
        runs = [{policy: [] for policy in some} for some in own]
        for _ in range(_REPEATS):
            for number in range(max(map(len, own), default=0)):
                here = [
                    (c, some[number], taken)
                    for c, some, taken in zip(cases, own, runs, strict=True)
                    if number < len(some)
                ]
                chosen = {case.path: policy for case, policy, _ in here}
                with attached(self._model, Plan(nodes=tuple(Region(path=p, policy=q) for p, q in chosen.items()))):
                    for case, policy, taken in here:
                        taken[policy].append(case.run(self._device))
        return [_least(taken) for taken in runs]


def _least(runs: dict[Policy, list[tuple[float, float]]]) -> dict[Policy, BlockSeconds]:
    """The least of each policy's runs. Each keeps more than the one before it, which never makes a replay longer, so
    what says so is noise."""
    best = {policy: (min(f for f, _ in taken), min(b for _, b in taken)) for policy, taken in runs.items()}
    forward, backward = best[Save()]
    found: dict[Policy, BlockSeconds] = {Save(): BlockSeconds(forward=forward, backward=backward, replay=0.0)}
    replay = float("inf")
    for policy, (f, b) in best.items():
        if policy != Save():
            replay = min(replay, max(0.0, f + b - forward - backward))
            found[policy] = BlockSeconds(forward=forward, backward=backward, replay=replay)
    return found


def _optimizer_seconds(optimizer: torch.optim.Optimizer | None, device: torch.device) -> float:
    """Estimated from steps of a copy of the optimizer on copies of some elements of the parameters."""
    if optimizer is None:
        return 0.0
    trial = copy.copy(optimizer)
    trial.__dict__.pop("step", None)  # a scheduler's wrapper, which would step the real one
    trial.state = defaultdict(dict)
    trial.param_groups, left, total = [], _OPTIMIZER_ELEMENTS, 0
    for group in optimizer.param_groups:
        samples = []
        for parameter in group["params"]:
            total += parameter.numel() * parameter.requires_grad
            rows = _rows_within(parameter, left) if parameter.requires_grad else 0
            if rows:
                samples.append(nn.Parameter(parameter.detach().reshape(-1, *parameter.shape[1:])[:rows].clone()))
                left -= samples[-1].numel()
        trial.param_groups.append({**group, "params": samples})
    for group in trial.param_groups:
        for sample in group["params"]:
            sample.grad = torch.zeros_like(sample)
    trial.step()
    taken = min(_timed(trial.step, device) for _ in range(_REPEATS))
    return taken * total / max(_OPTIMIZER_ELEMENTS - left, 1)


def _rows_within(parameter: torch.Tensor, elements: int) -> int:
    """How many rows of a parameter have at most so many elements."""
    rows = parameter.shape[0] if parameter.dim() else 1
    return min(rows, elements * rows // max(parameter.numel(), 1))


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    begin = now(device)
    run()
    return now(device) - begin


def now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.process_time()  # what other processes take doesn't count
    return time.perf_counter()
