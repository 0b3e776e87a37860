"""verify: the planned step gives what the plain step gives, bit for bit.

Two scopes. The whole step is run plainly and planned from the same state and compared by digests, where the plain
step is known to fit. Otherwise each distinct region of the plan is compared by itself on inputs that it really gets:
against the same blocks run plainly one at a time, which never needs the memory of more than one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy.random  # noqa: F401 - numpy loads it late; a stream that begins between two runs would differ
import torch
from torch import nn

from reforward import _patterns, _torch
from reforward._blocks import modules_by_path
from reforward._measure.measure import measure
from reforward._measure.state import preserved
from reforward._measure.static import step_inputs
from reforward._plan import Node, Plan, Region, leaves
from reforward._policy import Save
from reforward._profile import BlockCall, CallInputs, capture_inputs
from reforward._runtime import RngState, attached, counted_hooks
from reforward._step import Step
from reforward._techniques import none, resolve_plan

Scope = Literal["whole step", "region by region"]


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was compared.

    Attributes:
        scope: "whole step", or "region by region".
        losses, gradients, buffers, rng_states: how many of each were compared. Region by region, the outputs of the
            regions stand for the loss, and gradients are those of the regions' parameters and inputs.
        differences: what isn't bit-identical, by name; empty if all is.
        hooks: forward hooks whose calls were counted. Those that only look must be called as often as in the plain
            step; those that return or change something are called again in a replay.
        plain_peak_bytes, planned_peak_bytes: the largest peaks of both, as measured; None if they weren't.
    """

    scope: Scope
    losses: int
    gradients: int
    buffers: int
    rng_states: int
    differences: tuple[str, ...]
    hooks: int = 0
    plain_peak_bytes: int | None = None
    planned_peak_bytes: int | None = None


def verify(model: nn.Module, step: Step | Callable[[], torch.Tensor], plan: Any) -> Proof:
    """Runs every batch's step plainly and under a plan, from the same state, and compares all results bit for bit.

    Compared are the loss, the gradient of every parameter, every buffer, every random stream after the step, and how
    often forward hooks were called; both peaks are measured. The plain step has to fit into memory. Model, optimizer,
    gradients and random streams are put back.

    Args:
        plan: a Plan, or whatever `rf.attach` takes.

    Raises:
        InputError, PlanError, StepError: as from attaching the plan and running the step.
    """
    step = Step.of(step)
    resolved = resolve_plan(model, plan)
    proof = verify_step(model, step, resolved)
    plain, planned = (_peak_bytes(model, step, what) for what in (none(), resolved))
    return replace(proof, plain_peak_bytes=plain, planned_peak_bytes=planned)


def verify_step(model: nn.Module, step: Step, plan: Plan) -> Proof:
    """`verify` without the peaks."""
    table = _Table("whole step")
    for variant in range(step.variants):
        prefix = f"batch {variant}: " if step.variants > 1 else ""
        results = []
        for what in (none(), plan):
            # Values are compared here, so that each difference is reported and none raises.
            with attached(model, what, check="off"), preserved(model, step.optimizer, also=step_inputs(step)):
                for parameter in model.parameters():
                    parameter.grad = None
                results.append(_step_digests(model, step, variant))
        table.compare(prefix, *results)
    return table.proof()


def _peak_bytes(model: nn.Module, step: Step, plan: Any) -> int:
    with attached(model, plan, check="off"):
        return max(measure(model, step, variant=variant, repeats=1).peak_bytes for variant in range(step.variants))


def verify_regions(model: nn.Module, step: Step, plan: Plan, calls: Sequence[BlockCall], variant: int = 0) -> Proof:
    """Compares each distinct region of a plan with its blocks run plainly one at a time, on inputs that it really gets.

    Args:
        calls: the block calls of that batch's step, as a dry run met them.
    """
    table = _Table("region by region")
    by_path = modules_by_path(model)
    calls = calls[: len(calls) // step.accumulate]  # of one micro-batch: the others are like it
    passes = _passes(plan, calls, by_path)
    wanted = {index for _, indices in passes for index in indices}
    linked = {index for _, indices in passes for index in indices[1:]}
    with preserved(model, also=step_inputs(step)):
        with attached(model, none()):
            inputs = capture_inputs(model, calls, lambda: step.loss(variant), wanted=wanted, linked=linked)
        for node, indices in passes:
            parts = [
                _Part(path=calls[i].block.path, module=by_path[calls[i].block.path], inputs=inputs[i]) for i in indices
            ]
            with attached(model, none()):
                expected = _isolated(parts, _plain)
            with attached(model, Plan(nodes=(node,), when=plan.when), check="off"):
                got = _isolated(parts, _planned)
            table.compare("", expected, got)
    return table.proof()


def _isolated(parts: Sequence[_Part], run: Callable[[Sequence[_Part]], Digests]) -> Digests:
    """Runs from the state that is there, with no gradients at the begin, and puts it back."""
    modules = [part.module for part in parts]
    with preserved(modules[0], also=modules):
        for module in modules:
            for parameter in module.parameters():
                parameter.grad = None
        return run(parts)


Digests = dict[tuple[str, str], str]


class _Table:
    """Collects what was compared."""

    def __init__(self, scope: Scope):
        self._scope: Scope = scope
        self._counts = {"loss": 0, "gradient": 0, "buffer": 0, "RNG state": 0, "calls of": 0}
        self._differences: list[str] = []

    def compare(self, prefix: str, expected: Digests, got: Digests) -> None:
        for key in {**expected, **got}:
            kind, name = key
            self._counts[kind] += 1
            if expected.get(key) != got.get(key):
                self._differences.append(f"{prefix}{kind} {name}".rstrip())

    def proof(self) -> Proof:
        return Proof(
            scope=self._scope,
            losses=self._counts["loss"],
            gradients=self._counts["gradient"],
            buffers=self._counts["buffer"],
            rng_states=self._counts["RNG state"],
            differences=tuple(self._differences),
            hooks=self._counts["calls of"],
        )


def _step_digests(model: nn.Module, step: Step, variant: int) -> Digests:
    with counted_hooks(model) as hooks:
        loss = step.run(variant, optimize=False)
    found: Digests = {("loss", ""): _digest(loss)}
    for name, hook in hooks.items():
        found["calls of", name] = str(hook.calls if hook.acted else hook.calls + hook.replays)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found["gradient", _patterns.canonical(name)] = _digest(parameter.grad)
    found.update(_buffers(model))
    found.update(_streams(tuple({p.device for p in model.parameters()})))
    return found


def _buffers(module: nn.Module) -> Digests:
    return {("buffer", _patterns.canonical(name)): _digest(buffer) for name, buffer in module.named_buffers()}


def _streams(devices: tuple[torch.device, ...]) -> Digests:
    accelerators = tuple(d for d in devices if d.type not in ("cpu", "meta"))
    state = RngState.capture(accelerators)
    found = {
        ("RNG state", "torch CPU"): repr(state.cpu),
        ("RNG state", "Python"): repr(state.python),
        ("RNG state", "numpy"): repr(state.numpy),
    }
    return found | {("RNG state", f"torch {device}"): repr(value) for device, value in state.devices or ()}


def _digest(tensor: torch.Tensor | None) -> str:
    """A hash of type, shape and every bit; it takes the place of a copy, which would need the tensor's memory."""
    if tensor is None:
        return "none"
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    hashed = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    flat = tensor.detach().reshape(-1)
    for part in flat.split(2**22):
        # A copy, because an array that shares a tensor's memory would forbid its storage to be resized for ever.
        hashed.update(part.to("cpu", copy=True).contiguous().view(torch.uint8).numpy().data)
    return hashed.hexdigest()


# Region by region
# --------------------------------------------------------------------------------------------------------


def _passes(plan: Plan, calls: Sequence[BlockCall], by_path: dict[str, nn.Module]) -> list[tuple[Node, list[int]]]:
    """Each distinct node of the plan that recomputes, with the indices of the calls of its first pass.

    A block that the step doesn't call has nothing to prove.
    """
    paths = [call.block.path for call in calls]
    found: dict[Any, tuple[Node, list[int]]] = {}
    for node in plan.nodes:
        wanted = [leaf.path for leaf in leaves(node)]
        starts = [i for i in range(len(paths)) if paths[i : i + len(wanted)] == wanted]
        if starts and not (isinstance(node, Region) and isinstance(node.policy, Save)):
            indices = list(range(starts[0], starts[0] + len(wanted)))
            found.setdefault(_kind_of(node, [calls[i] for i in indices], by_path), (node, indices))
    return list(found.values())


def _kind_of(node: Node, calls: Sequence[BlockCall], by_path: dict[str, nn.Module]) -> Any:
    """Equal for nodes that do the same to blocks that can't be told apart, called in the same way."""
    if isinstance(node, Region):
        module = by_path[node.path]
        return node.policy, repr(module), _settings_of(module), calls[0].inputs, calls[0].graded
    kinds, start = [], 0
    for member in node.members:
        count = sum(1 for _ in leaves(member))
        kinds.append(_kind_of(member, calls[start : start + count], by_path))
        start += count
    return tuple(kinds)


def _settings_of(module: nn.Module) -> tuple[Any, ...]:
    """Plain attributes and parameters' shapes of all submodules: what a module's text leaves out (a window's size)."""
    parts: list[Any] = [(tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters()]
    for part in module.modules():
        parts += [(k, v) for k, v in vars(part).items() if isinstance(v, (bool, int, float, str)) and k[0] != "_"]
    return tuple(parts)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One block call of a region: its module and its arguments."""

    path: str
    module: nn.Module
    inputs: CallInputs

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Calls the block as the step does, under its autocast; the leaves of the output."""
        with self.inputs.settings():
            return _torch.flatten(self.module(*args, **kwargs))[0]


def _planned(parts: Sequence[_Part]) -> Digests:
    """The region forward and backward, its blocks one after another as the model calls them."""
    previous: list[Any] = []
    sources: list[list[torch.Tensor]] = []
    for part in parts:
        args, kwargs = part.inputs.fresh(previous)
        sources.append([t for t in _torch.tensors_in((args, kwargs)) if t.is_leaf and t.requires_grad])
        previous = part.run(args, kwargs)
    found = _state(parts, previous)
    torch.autograd.backward(*_cotangents(previous))
    return found | _gradients(parts, sources)


def _plain(parts: Sequence[_Part]) -> Digests:
    """The same without checkpointing. Of several blocks, only one at a time is run with gradients.

    First all blocks run forward without them, which shows each one's inputs and random state; then, from the last to
    the first, each runs again from these and its backward follows at once.
    """
    if len(parts) == 1 or len({part.path for part in parts}) < len(parts):
        return _planned(parts)
    before: list[tuple[list[Any], RngState]] = []
    previous: list[Any] = []
    devices = _accelerators(parts)
    with preserved(parts[0].module, also=[part.module for part in parts]), torch.no_grad():
        for part in parts:
            before.append((previous, RngState.capture(devices)))
            args, kwargs = part.inputs.fresh(previous)
            previous = part.run(args, kwargs)
        found = _state(parts, previous)
    sources: list[list[torch.Tensor]] = []
    cotangents: dict[int, torch.Tensor] | None = None
    for part, (given, state) in zip(reversed(parts), reversed(before), strict=True):
        state.apply()
        linked = [_as_leaf(leaf) for leaf in given]
        args, kwargs = part.inputs.fresh(linked)
        tensors = [t for t in _torch.tensors_in((args, kwargs)) if t.is_leaf and t.requires_grad]
        sources.append([t for t in tensors if all(t is not leaf for leaf in linked)])
        received = _received(linked)
        output = part.run(args, kwargs)
        torch.autograd.backward(*(_cotangents(output) if cotangents is None else _matched(output, cotangents)))
        cotangents = received
    return found | _gradients(parts, list(reversed(sources)))


def _as_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().requires_grad_(leaf.is_floating_point() or leaf.is_complex())
    return leaf


def _received(leaves: Sequence[Any]) -> dict[int, torch.Tensor]:
    """By index, the gradients that a backward to come sends to these leaves, as they come.

    What it leaves in `grad` has the leaf's strides instead, and the order of a sum goes by strides.
    """
    found: dict[int, torch.Tensor] = {}

    def receive(index: int, leaf: torch.Tensor) -> None:
        leaf.register_hook(lambda gradient: found.__setitem__(index, gradient))

    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            receive(index, leaf)
    return found


def _cotangents(output: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs that want gradients, and what to send into them: no constant, so that no error cancels."""
    wanting = [t for t in output if isinstance(t, torch.Tensor) and t.requires_grad]
    return wanting, [torch.linspace(-1, 1, t.numel(), dtype=t.dtype, device=t.device).view(t.shape) for t in wanting]


def _matched(
    output: Sequence[Any], cotangents: dict[int, torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    indices = [i for i in cotangents if output[i].requires_grad]
    return [output[i] for i in indices], [cotangents[i] for i in indices]


def _state(parts: Sequence[_Part], output: Sequence[Any]) -> Digests:
    """Outputs, buffers and random streams after the forward."""
    found: Digests = {("loss", f"output {i}"): _digest(t) for i, t in enumerate(output) if isinstance(t, torch.Tensor)}
    for part in parts:
        found |= {("buffer", f"{part.path}.{name}"): value for (_, name), value in _buffers(part.module).items()}
    return found | _streams(_accelerators(parts))


def _gradients(parts: Sequence[_Part], sources: Sequence[Sequence[torch.Tensor]]) -> Digests:
    found: Digests = {}
    for part, given in zip(parts, sources, strict=True):
        for name, parameter in part.module.named_parameters():
            if parameter.requires_grad:
                found["gradient", f"{part.path}.{name}"] = _digest(parameter.grad)
        for index, tensor in enumerate(given):
            found["gradient", f"input {index} of {part.path}"] = _digest(tensor.grad)
    return found


def _accelerators(parts: Sequence[_Part]) -> tuple[torch.device, ...]:
    devices = dict.fromkeys(p.device for part in parts for p in part.module.parameters())
    return tuple(device for device in devices if device.type not in ("cpu", "meta"))
