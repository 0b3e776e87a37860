"""A dry run: the step on fake tensors, by the very runtime that will run it, with an account of every storage.

The trace is cut at the begin and the end of every block's forward and backward. A block's backward begins when the
gradient of its output is there and ends when that of its input is; what lies between are gaps.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from reforward import _torch
from reforward._blocks import Block, watching
from reforward._errors import DryRunError, ReforwardError, StepError
from reforward._measure.measure import device_of
from reforward._measure.room import usable_bytes
from reforward._measure.tracker import MemoryLimitError, StorageTracker, Tag
from reforward._measure.workspace import OutputSizes, Workspaces
from reforward._profile.faking import TracedStep, faked
from reforward._profile.lending import lent
from reforward._runtime import is_replaying
from reforward._step import Phase, Step
from reforward._units import format_bytes

Kind = Literal["forward", "backward", "gap"]

_GRADIENT = Tag("backward", "gradient")


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of the trace. Bytes are relative to what was live at its begin.

    Attributes:
        kind: "forward" or "backward" of a block call, or "gap".
        call: index of the call; -1 for a gap.
        phase: "forward", "backward" or "optimizer".
        delta_bytes: live at the end.
        peak_bytes: highest in between, at least 0.
        flops: of the operations that ran.
    """

    kind: Kind
    call: int
    phase: str
    delta_bytes: int
    peak_bytes: int
    flops: int


@dataclass(frozen=True, kw_only=True)
class BlockCall:
    """One call of a block, as the dry run met it.

    Attributes:
        block: the block.
        follows: whether it received the output of the call before it.
        output_bytes: size of the storages of its output.
        inputs: shape, type and requires_grad of each tensor it was given.
        flops: floating-point operations of its forward.
        graded: which of its output tensors got a gradient.
        differentiates: whether its forward took a gradient.
    """

    block: Block
    follows: bool
    output_bytes: int
    inputs: tuple[Any, ...]
    flops: int = 0
    graded: tuple[int, ...] = ()
    differentiates: bool = False

    def __str__(self) -> str:
        return described(self.block.path, self.inputs)


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a dry run tells.

    Attributes:
        peak_bytes: of the whole step, static memory included.
        static_bytes: live before the step.
        breakdown: bytes at the peak by part: "parameters", "buffers", "gradients", "optimizer", "batch",
            "block:<path>", "head", "temporaries". They sum to the peak.
        calls: the block calls, in order.
        segments: the trace, without gaps in time.
        parameter_bytes, optimizer_bytes, gradient_bytes: parts of the static memory; gradients as they are when all
            exist.
        needs_values: it ran on real tensors.
    """

    peak_bytes: int
    static_bytes: int
    breakdown: dict[str, int]
    calls: tuple[BlockCall, ...]
    segments: tuple[Segment, ...]
    parameter_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    needs_values: bool = False


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """What a dry run is told: what only real kernels show, and what earlier dry runs showed.

    Attributes:
        workspaces: of kernels.
        output_sizes: of opaque outputs.
        needs_values: the step can't be run on fake tensors.
    """

    workspaces: Workspaces = field(default_factory=Workspaces)
    output_sizes: OutputSizes = field(default_factory=OutputSizes)
    needs_values: bool = False

    def merged(self, other: Knowledge) -> Knowledge:
        """What either knows."""
        return Knowledge(
            workspaces=self.workspaces.merged(other.workspaces),
            output_sizes=self.output_sizes.merged(other.output_sizes),
            needs_values=self.needs_values or other.needs_values,
        )


def dry_run(
    model: nn.Module, step: Step, blocks: Sequence[Block], *, variant: int = 0, knowledge: Knowledge | None = None
) -> DryRun:
    """Runs a step on fake tensors, under whatever plan is on the model. Model, optimizer and random streams stay as
    they are.

    If the model needs values of tensors (`.item()`, shapes that depend on data), the step runs on its own tensors, and
    is stopped before it takes more memory than is free.

    Raises:
        DryRunError: the step can't be run in either way.
        StepError: the step never calls a block, or has no scalar loss.
    """
    knowledge = knowledge or Knowledge()
    refusal = None
    if not knowledge.needs_values:
        try:
            with faked(model, step) as traced:
                return _called(model, blocks, _tracked(model, traced, blocks, variant, knowledge))
        except ReforwardError:
            raise
        except Exception as error:
            refusal = error
    free = usable_bytes(device_of(model))
    try:
        with lent(model, step) as traced:
            result = _tracked(model, traced, blocks, variant, knowledge, most_bytes=free)
    except ReforwardError:
        raise
    except Exception as error:
        raise _refusal(model, error, refusal, free) from error
    if refusal is not None:
        warnings.warn(
            f"{type(model).__name__} can't be run on tensors without values ({_in_short(refusal)}), so its memory is"
            " taken from real steps, which are undone",
            stacklevel=2,
        )
    return _called(model, blocks, replace(result, needs_values=True))


def dry_runs(
    model: nn.Module, step: Step, blocks: Sequence[Block], *, knowledge: Knowledge | None = None
) -> list[DryRun]:
    """`dry_run` of every batch; a step that needs values in one is run on its own tensors in the others, too."""
    knowledge, runs = knowledge or Knowledge(), []
    for variant in range(step.variants):
        runs.append(dry_run(model, step, blocks, variant=variant, knowledge=knowledge))
        knowledge = replace(knowledge, needs_values=knowledge.needs_values or runs[-1].needs_values)
    return runs


def _called(model: nn.Module, blocks: Sequence[Block], result: DryRun) -> DryRun:
    """The result, unless no block was called."""
    if blocks and not result.calls:
        raise StepError(
            f"the step never calls a block of {type(model).__name__} ({blocks[0].path!r}, ...);"
            " is it another model's step?"
        )
    return result


def inputs_of(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """`BlockCall.inputs` of these arguments."""
    return tuple((tuple(t.shape), str(t.dtype), t.requires_grad) for t in _torch.tensors_in((args, kwargs)))


def described(path: str, inputs: tuple[Any, ...]) -> str:
    """A block call in words; requires_grad isn't part of it."""
    tensors = ", ".join(f"{shape} {kind.removeprefix('torch.')}" for shape, kind, _ in inputs)
    return f"{path} with {tensors or 'no tensors'}"


def check_same_calls(model: nn.Module, before: Sequence[BlockCall], now: Sequence[BlockCall | str]) -> None:
    """To be called with the calls of two runs of one step; of the second, `described` is enough.

    Raises:
        DryRunError: they differ.
    """
    for index, (one, other) in enumerate(zip_longest(map(str, before), map(str, now), fillvalue="missing")):
        if one != other:
            raise DryRunError(
                f"the step of {type(model).__name__} isn't the same each time it runs: block call {index} was {one},"
                f" and is now {other}. Give a step that takes the same way, and batches of several lengths one by one:"
                " Step(loss_fn, [batch, ...])"
            )


def _refusal(model: nn.Module, error: Exception, on_fakes: Exception | None, free: int) -> DryRunError:
    name = type(model).__name__
    if not isinstance(error, MemoryLimitError):
        return DryRunError(f"the step of {name} failed: {_in_short(error)}")
    why = f" ({_in_short(on_fakes)})" if on_fakes is not None else ""
    return DryRunError(
        f"{name} can't be run on tensors without values{why}, so its memory is taken from real steps, and one needs"
        f" more than the {format_bytes(free)} that are free. Give a smaller batch, or attach a technique by hand,"
        " rf.full() say"
    )


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _tracked(
    model: nn.Module,
    traced: TracedStep,
    blocks: Sequence[Block],
    variant: int,
    knowledge: Knowledge,
    most_bytes: int | None = None,
) -> DryRun:
    tracker = StorageTracker(
        workspace=knowledge.workspaces.lookup, output_bytes=knowledge.output_sizes.lookup, most_bytes=most_bytes
    )
    static = {
        "parameters": traced.parameters,
        "buffers": traced.buffers,
        "gradients": traced.gradients,
        "optimizer": traced.optimizer,
        "batch": traced.batch,
    }
    sizes = _sizes(static)
    for tensors in static.values():
        tracker.ignore(tensors)
    handles = [p.register_post_accumulate_grad_hook(_retagger(tracker)) for p in traced.parameters if p.requires_grad]
    watch = _Watch(tracker, blocks, traced.stand_in)
    paths = [block.path for block in blocks]
    with tracker, watch.operations, watching(model, paths, watch.begin_forward, watch.end_forward):
        traced.step.run(variant, phase=watch.phase)
        gradient_bytes = sizes["gradients"] + sum(
            p.nbytes for p in traced.parameters if p.requires_grad and p.grad is None
        )
        del handles
    return DryRun(
        peak_bytes=sum(sizes.values()) + tracker.peak_bytes,
        static_bytes=sum(sizes.values()),
        breakdown=_breakdown(sizes, tracker),
        calls=watch.finished_calls(),
        segments=tuple(watch.segments),
        parameter_bytes=sizes["parameters"],
        optimizer_bytes=sizes["optimizer"],
        gradient_bytes=gradient_bytes,
    )


def _retagger(tracker: StorageTracker) -> Any:
    reference = weakref.ref(tracker)

    def retag(parameter: torch.Tensor) -> None:
        owner = reference()
        if owner is not None and parameter.grad is not None:
            owner.retag(parameter.grad, _GRADIENT)

    return retag


def _sizes(static: dict[str, tuple[torch.Tensor, ...]]) -> dict[str, int]:
    """Bytes of each kind's storages; one that two kinds share counts for the first."""
    seen: set[int] = set()
    sizes = {}
    for kind, tensors in static.items():
        new = {
            _torch.storage_key(t): t.untyped_storage().nbytes() for t in tensors if _torch.storage_key(t) not in seen
        }
        seen |= new.keys()
        sizes[kind] = sum(new.values())
    return sizes


def _breakdown(sizes: dict[str, int], tracker: StorageTracker) -> dict[str, int]:
    parts = dict(sizes)
    for tag, count in tracker.peak_by_tag.items():
        if tag == _GRADIENT:
            part = "gradients"
        elif tag.phase == "forward":
            part = f"block:{tag.label}" if tag.label else "head"
        else:
            part = "temporaries"
        parts[part] = parts.get(part, 0) + count
    parts["temporaries"] = parts.get("temporaries", 0) + tracker.peak_workspace_bytes
    return parts


def _grouped_mm_flops(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """Every row of one matrix meets one of the other, whichever group it is in; two stacks are a batched product."""
    return 2 * (len(a) if a.dim() == b.dim() == 3 else 1) * a.shape[-2] * a.shape[-1] * b.shape[-1]


_aten = torch.ops.aten
# torch's table has no entry for the fused attention of CPUs; the other fused kernels take the same arguments.
_FLOPS = {
    **flop_registry,
    _aten._grouped_mm: _grouped_mm_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}


def _sum(a: Any, b: Any) -> tuple[Any, tuple[Any, Any]]:
    """The operation by which autograd adds two gradients outside of dispatch modes: in place where it can."""
    for target, other in ((a, b), (b, a)):
        if not isinstance(target, torch.Tensor) or not isinstance(other, torch.Tensor) or is_replaying():
            break
        if target.shape == other.shape and target.dtype == other.dtype and _torch.is_sum_of_its_own(target):
            return _aten.add_.Tensor, (target, other)
    return _aten.add.Tensor, (a, b)


class Operations(_torch.TorchDispatchMode):
    """Notes what runs.

    Attributes:
        flops: floating-point operations so far, by torch's own formulas.
        in_backward: whether any of them was part of a backward pass; to be reset by who asks.
    """

    def __init__(self):
        super().__init__()
        self.flops = 0
        self.in_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_backward = _torch.backward_pass() is not None
        self.in_backward = self.in_backward or in_backward
        if func is _aten.add.Tensor and in_backward and not kwargs and not torch.is_grad_enabled():
            func, args = _sum(*args)
        result = func(*args, **(kwargs or {}))
        formula = _FLOPS.get(_torch.packet(func))
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


class _Watch:
    """Cuts the trace where blocks begin and end. A region is a module's forward, so hooks on the module lie outside."""

    def __init__(
        self, tracker: StorageTracker, blocks: Sequence[Block], stand_in: Callable[[torch.Tensor], torch.Tensor]
    ):
        self.operations = Operations()
        self.calls: list[BlockCall] = []
        self.segments: list[Segment] = []
        self._tracker = tracker
        self._blocks = {block.path: block for block in blocks}
        self._stand_in = stand_in
        self._open: tuple[Kind, int] = ("gap", -1)
        self._begin_bytes = 0
        self._begin_flops = 0
        self._output: list[weakref.ref[torch.Tensor]] = []
        self._graded: dict[int, set[int]] = {}

    def cut(self, kind: Kind, call: int) -> None:
        """Ends the open segment and begins another."""
        mark = self._tracker.mark("")
        kind_before, call_before = self._open
        delta, flops = mark.live_bytes - self._begin_bytes, self.operations.flops - self._begin_flops
        peak = max(mark.peak_bytes - self._begin_bytes, 0)
        if kind_before != "gap" or delta or peak or flops:
            self.segments.append(
                Segment(
                    kind=kind_before, call=call_before, phase=self._tracker.phase,
                    delta_bytes=delta, peak_bytes=peak, flops=flops,
                )
            )  # fmt: skip
        self._open = kind, call
        self._begin_bytes, self._begin_flops = mark.live_bytes, self.operations.flops
        self._tracker.label = self.calls[call].block.path if call >= 0 else ""

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        with self._tracker.in_phase(name):
            yield
            self.cut("gap", -1)

    def finished_calls(self) -> tuple[BlockCall, ...]:
        """The calls, with what backward told of them."""
        return tuple(replace(call, graded=tuple(sorted(self._graded.get(i, ())))) for i, call in enumerate(self.calls))

    def begin_forward(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """To be called before a block runs; gives the arguments to run it with."""
        given = _torch.tensors_in((args, kwargs))
        follows = any(reference() is t for reference in self._output for t in given)
        call = len(self.calls)
        self.calls.append(
            BlockCall(block=self._blocks[path], follows=follows, output_bytes=0, inputs=inputs_of(args, kwargs))
        )
        self.cut("forward", call)
        self.operations.in_backward = False
        for tensor in given:
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(lambda gradient: self._end_backward(call))
        return self._without_real(args, kwargs)

    def _without_real(self, args: Any, kwargs: Any) -> Any:
        """Arguments in which the fake takes the place of a real tensor that the step's function holds.

        The fake mode would exchange it at every operation; then the block's saved input isn't what it was given.
        """
        leaves, structure = _torch.flatten((args, kwargs))
        return _torch.unflatten([self._stand_in(x) if isinstance(x, torch.Tensor) else x for x in leaves], structure)

    def end_forward(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """To be called when a block has run."""
        call = self._open[1]
        given = {id(t) for t in _torch.tensors_in((args, kwargs))}
        tensors = _torch.tensors_in(output)
        self._output = [weakref.ref(t) for t in tensors]
        size = sum({_torch.storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values())
        self.calls[call] = replace(
            self.calls[call],
            output_bytes=size,
            flops=self.operations.flops - self._begin_flops,
            differentiates=self.operations.in_backward,
        )
        for index, tensor in enumerate(tensors):
            if tensor.requires_grad and id(tensor) not in given:  # what is only passed on was made elsewhere
                tensor.register_hook(lambda gradient, index=index: self._begin_backward(call, index))
        self.cut("gap", -1)

    def _begin_backward(self, call: int, output: int) -> None:
        if is_replaying() or self._tracker.phase == "forward":  # where a later block takes a gradient for itself
            return
        if call not in self._graded:
            self._graded[call] = set()
            self.cut("backward", call)
        self._graded[call].add(output)

    def _end_backward(self, call: int) -> None:
        if self._open == ("backward", call):
            self.cut("gap", -1)
