"""verify: the planned step gives what the plain step gives, bit for bit; to rounding, where its head is in chunks.

Two scopes. The whole step is run plainly and planned from the same state and compared by digests, where the plain
step is known to fit. Otherwise each distinct region of the plan is compared by itself on inputs that it really gets:
against the same blocks run plainly one at a time, which never needs the memory of more than one. A loss head in
chunks is compared on as many rows as one of its chunks has.

What is equal to rounding is compared by value. The difference of two tensors is the largest one of their elements, as a
share of the largest element there is; gradients that are small beside the largest of all count as a tenth of that,
since what should cancel to zero (the bias of attention's keys) is nothing but rounding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
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
from reforward._plan import Exactness, Node, Plan, Region, leaves
from reforward._policy import Save
from reforward._profile import BlockCall, CallInputs, capture_inputs
from reforward._runtime import RngState, SeenLoss, attached, chunked_loss, counted_hooks
from reforward._step import Step
from reforward._techniques import none, resolve_plan

Scope = Literal["whole step", "region by region"]

#: Largest relative difference that counts as rounding, by the coarsest type that takes part.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_SMALL = 0.1  # of the largest gradient: smaller ones are compared with this much of it


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was compared.

    Attributes:
        scope: "whole step", or "region by region".
        losses, gradients, buffers, rng_states: how many of each were compared. Region by region, the outputs of the
            regions stand for the loss, and gradients are those of the regions' parameters and inputs.
        differences: what isn't bit-identical (or equal to rounding, where that is what the plan promises), by name;
            empty if all is.
        hooks: forward hooks whose calls were counted. Those that only look must be called as often as in the plain
            step; those that return or change something are called again in a replay.
        plain_peak_bytes, planned_peak_bytes: the largest peaks of both, as measured; None if they weren't.
        tolerance: the largest relative difference of losses and gradients that counts as rounding; None: everything was
            compared bit for bit.
        largest_difference: the largest there was; None without a tolerance.
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
    tolerance: float | None = None
    largest_difference: float | None = None

    @property
    def exactness(self) -> Exactness:
        """What was looked for: "bitwise", or "rounding" where a loss head is in chunks."""
        return "bitwise" if self.tolerance is None else "rounding"


def verify(model: nn.Module, step: Step | Callable[[], torch.Tensor], plan: Any) -> Proof:
    """Runs every batch's step plainly and under a plan, from the same state, and compares all results bit for bit.

    Under a plan whose head is in chunks, losses and gradients are compared to rounding instead: to the tolerance of the
    coarsest type that takes part (`Proof.tolerance`). One copy of the gradients is kept in host memory meanwhile.
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
                results.append(_step_results(model, step, variant, to_rounding=plan.exactness == "rounding"))
        table.compare(prefix, *[result.digests for result in results])
        if plan.exactness == "rounding":
            plain, planned = results
            table.compare_values(prefix, plain.values, planned.values, plain.tolerance)
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


def verify_head(model: nn.Module, plan: Plan, loss: SeenLoss) -> Proof:
    """Compares a loss of the plan's head with the plain one, on the first rows that it really gets: as many as a chunk
    of the plan has, so that the plain head needs no more memory than the plan's."""
    table = _Table("region by region")
    source = loss.recipe.source
    count = -(-len(loss.rows) // source.chunks)
    target = loss.target[:count]

    def results(take: Callable[[torch.Tensor], torch.Tensor]) -> Values:
        rows = loss.rows[:count].clone().requires_grad_()
        given = {"input": rows, "weight": source.weight, "bias": source.bias}
        wanted = {name: t for name, t in given.items() if t is not None and t.requires_grad}
        with torch.enable_grad(), loss.ambient.enter() or nullcontext():
            value = take(rows)
        outputs, cotangents = _cotangents([value])
        named = zip(wanted, torch.autograd.grad(outputs, [*wanted.values()], cotangents), strict=True)
        return {("loss", f"of {source.path}"): value.detach()} | {
            ("gradient", f"{name} of {source.path}"): gradient for name, gradient in named
        }

    def plainly(rows: torch.Tensor) -> torch.Tensor:
        return loss.criterion(loss.recipe.whole(rows, source.weight, source.bias), target, loss.criterion.reduction)

    with preserved(model):
        got = results(lambda rows: chunked_loss(loss.recipe, rows, target, loss.criterion))
        tolerance = _tolerance({source.dtype, loss.recipe.dtype, loss.rows.dtype, source.weight.dtype})
        table.compare_values("", results(plainly), got, tolerance)
    return table.proof()


def merged_proof(proofs: Sequence[Proof]) -> Proof:
    """Several proofs region by region as one."""
    tolerances = [proof.tolerance for proof in proofs if proof.tolerance is not None]
    largest = [proof.largest_difference for proof in proofs if proof.largest_difference is not None]
    return Proof(
        scope="region by region",
        losses=sum(proof.losses for proof in proofs),
        gradients=sum(proof.gradients for proof in proofs),
        buffers=sum(proof.buffers for proof in proofs),
        rng_states=sum(proof.rng_states for proof in proofs),
        differences=tuple(difference for proof in proofs for difference in proof.differences),
        tolerance=max(tolerances, default=None),
        largest_difference=max(largest, default=None),
    )


def _isolated(parts: Sequence[_Part], run: Callable[[Sequence[_Part]], Digests]) -> Digests:
    """Runs from the state that is there, with no gradients at the begin, and puts it back."""
    modules = [part.module for part in parts]
    with preserved(modules[0], also=modules):
        for module in modules:
            for parameter in module.parameters():
                parameter.grad = None
        return run(parts)


Digests = dict[tuple[str, str], str]
Values = dict[tuple[str, str], torch.Tensor]


class _Table:
    """Collects what was compared."""

    def __init__(self, scope: Scope):
        self._scope: Scope = scope
        self._counts = {"loss": 0, "gradient": 0, "buffer": 0, "RNG state": 0, "calls of": 0}
        self._differences: list[str] = []
        self._tolerance: float | None = None
        self._largest = 0.0

    def compare_values(self, prefix: str, expected: Values, got: Values, tolerance: float) -> None:
        """Compares to rounding."""
        self._tolerance = max(tolerance, self._tolerance or 0.0)
        top = max((_largest(t) for (kind, _), t in expected.items() if kind == "gradient"), default=0.0)
        for key in {**expected, **got}:
            kind, name = key
            self._counts[kind] += 1
            difference = _difference(expected.get(key), got.get(key), top * _SMALL if kind == "gradient" else 0.0)
            self._largest = max(self._largest, difference)
            if not difference <= tolerance:
                self._differences.append(f"{prefix}{kind} {name}".rstrip() + f" (by {difference:.1e})")

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
            tolerance=self._tolerance,
            largest_difference=None if self._tolerance is None else self._largest,
        )


def _difference(expected: torch.Tensor | None, got: torch.Tensor | None, least: float) -> float:
    """The largest difference of two elements, relative to the largest element or to `least`, if that is more."""
    if expected is None or got is None or expected.shape != got.shape or expected.dtype != got.dtype:
        return float("inf")
    scale = max(_largest(expected), least)
    apart = _largest(expected.double() - got.double())
    if torch.equal(expected.isnan(), got.isnan()) and (apart == 0 or torch.equal(expected, got)):
        return 0.0
    return apart / scale if scale > 0 else float("inf")


def _largest(tensor: torch.Tensor) -> float:
    """The largest absolute value of what is a number; 0.0 if nothing is."""
    return tensor.detach().double().abs().nan_to_num(0.0, float("inf")).max().item() if tensor.numel() else 0.0


class _Types(_torch.TorchDispatchMode):
    """Notes the floating-point types of what operations return."""

    def __init__(self):
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen |= {tensor.dtype for tensor in _torch.tensors_in(result)}
        return result


def _tolerance(types: Iterable[torch.dtype]) -> float:
    """Of the coarsest of some types."""
    return max((TOLERANCES[t] for t in types if t in TOLERANCES), default=TOLERANCES[torch.float32])


@dataclass(frozen=True, kw_only=True)
class _Results:
    """Of a step: what is compared bit for bit, what is compared to rounding, and to which."""

    digests: Digests
    values: Values
    tolerance: float


def _step_results(model: nn.Module, step: Step, variant: int, *, to_rounding: bool) -> _Results:
    types = _Types()
    with counted_hooks(model) as hooks, types if to_rounding else nullcontext():
        loss = step.run(variant, optimize=False)
    gradients = {_patterns.canonical(name): p.grad for name, p in model.named_parameters() if p.requires_grad}
    found: Digests = {}
    values: Values = {}
    if to_rounding:
        made = {name: grad.to("cpu", copy=True) for name, grad in gradients.items() if grad is not None}
        values = {("loss", ""): loss.cpu()} | {("gradient", name): grad for name, grad in made.items()}
    else:
        found = {("loss", ""): _digest(loss)} | {("gradient", name): _digest(g) for name, g in gradients.items()}
    for name, hook in hooks.items():
        found["calls of", name] = str(hook.calls if hook.acted else hook.calls + hook.replays)
    found.update(_buffers(model))
    found.update(_streams(tuple({p.device for p in model.parameters()})))
    return _Results(digests=found, values=values, tolerance=_tolerance(types.seen))


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
