"""Puts a plan on a live model and takes it off.

The block's `forward` becomes an instance attribute: a callable object that refers to nothing but the module and the
attachment, so `state_dict`, module names, `isinstance`, hooks, `deepcopy` and `pickle` go on working. Taking it off
deletes the attribute.
"""

from __future__ import annotations

import inspect
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from reforward import _patterns, _torch
from reforward._blocks import check_model, modules_by_path
from reforward._errors import AttachError, InputError, PlanError, ReplayError
from reforward._heads import check_head
from reforward._plan import Head, Node, Plan, Region, Run, leaves
from reforward._policy import Recompute
from reforward._runtime.call import Arguments, new_call
from reforward._runtime.current import current
from reforward._runtime.fingerprint import Check
from reforward._runtime.frames import is_open_to_regions
from reforward._runtime.learnt import Learnt
from reforward._runtime.logits import is_watched, logits_of
from reforward._runtime.parts import Parts, is_iterator, leaves_in
from reforward._runtime.replay import Recording
from reforward._runtime.run import Chains, OpenRun
from reforward._runtime.selective import Keeper
from reforward._runtime.streams import accelerators
from reforward._techniques import resolve_plan

_requires_grad = operator.attrgetter("requires_grad")
_LAZY = frozenset({UninitializedParameter, UninitializedBuffer})

#: When replays are compared with their forwards, value by value.
Checked = Literal["first", "always", "off"]


class Attachment:
    """A plan on a model, and what its regions share while they run.

    Attributes:
        plan: the plan.
        check: which replays are compared with their forwards, value by value.
        active: False while suspended.
        chains: the open runs.
        warned: blocks at which a broken chain was reported.
    """

    def __init__(self, plan: Plan, check: Checked):
        self.plan = plan
        self.check: Checked = check
        self.active = True
        self._reset()

    def _reset(self) -> None:
        self.chains = Chains()
        self.warned: set[str] = set()

    def is_on(self, module: nn.Module) -> bool:
        """Whether the plan holds for a module now: it isn't suspended, nor meant for training mode alone."""
        return self.active and (self.plan.when == "grad" or module.training)

    def check_of(self, learnt: Learnt) -> Check:
        """What is compared in the replay of a call of a block."""
        if self.check == "off":
            return "shapes"
        return "discrete" if self.check == "first" and learnt.proven else "values"

    def __getstate__(self) -> dict[str, Any]:
        """Without what is live: a copy of the model starts with no open run."""
        return {"plan": self.plan, "check": self.check, "active": self.active}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


class _Forward:
    """Stands in for the `forward` of a module.

    Args:
        module: the module.
        path: its canonical path.
    """

    def __init__(self, module: nn.Module, path: str):
        self.module = module
        self.path = path

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The own forward's: trainers look at it to choose a batch's columns."""
        return inspect.signature(type(self.module).forward.__get__(self.module))


class RegionForward(_Forward):
    """The forward of a block that the plan recomputes.

    Args:
        node: the top-level node of the plan that the block belongs to.
        attachment: shared by all blocks of the model.
    """

    def __init__(self, module: nn.Module, path: str, node: Node, attachment: Attachment):
        super().__init__(module, path)
        self.node = node
        self.attachment = attachment
        paths = [leaf.path for leaf in leaves(node)]
        self._start, self._size = paths.index(path), len(paths)
        self._learnt = Learnt()

    def __getstate__(self) -> dict[str, Any]:
        """Without what earlier calls taught: a copy's code and modules are looked at anew."""
        return {key: value for key, value in self.__dict__.items() if key != "_learnt"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._learnt = Learnt()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._in_compiler(*args, **kwargs)
        frame = current.frame
        if not is_open_to_regions(frame) or not self._applies():
            return self.plain(*args, **kwargs)
        arguments = Arguments(Parts(), args, kwargs)
        modules = _torch.submodules(self.module)
        tensors = [leaf for leaf in arguments.leaves if isinstance(leaf, torch.Tensor)] + _torch.parameters_of(modules)
        if not any(map(_requires_grad, tensors)) or not _LAZY.isdisjoint(map(type, tensors)):
            return self.plain(*args, **kwargs)
        run = self._open_run(arguments.leaves)
        devices = accelerators(tensors)
        call = new_call(
            self.path,
            self.plain,
            arguments,
            modules,
            devices=devices,
            learnt=self._learnt,
            check=self.attachment.check_of(self._learnt),
            previous=run.outputs() if run is not None else [],
        )
        recording = run.recording if run is not None else Recording(self.node, start=self._start, devices=devices)
        keeper = Keeper.of(recording.policy_of_next(), self.path)
        with call.watched():
            result = recording.forward(call, args, kwargs, keeper, frame)
        call.seal()
        returned = leaves_in(result)
        self._refuse_iterators(returned)
        self._keep_open(recording, returned)
        return result

    def _refuse_iterators(self, returned: list[Any]) -> None:
        for leaf in returned:
            if is_iterator(leaf):
                raise ReplayError(
                    f"block {self.path!r} ({type(self.module).__name__}) returns an iterator ({type(leaf).__name__}),"
                    " whose work is done after the block has returned, so it can't be computed again for backward;"
                    " return a list, or leave this block out of the plan"
                )

    def _in_compiler(self, *args: Any, **kwargs: Any) -> Any:
        from reforward._runtime import compiled  # loads the compiler, which takes seconds

        if not self.attachment.is_on(self.module):
            return self.plain(*args, **kwargs)
        return compiled.block(self.plain, self.node, self.attachment.check, self.path, args, kwargs, eager=self)

    def _applies(self) -> bool:
        return torch.is_grad_enabled() and not _torch.in_transform() and self.attachment.is_on(self.module)

    def _open_run(self, given: list[Any]) -> OpenRun | None:
        if isinstance(self.node, Region):
            return None
        run = self.attachment.chains.continued_by(self.node, self.path, given)
        if run is not None:
            self.attachment.chains.close(run)
        elif self._start > 0 and _wants_gradient(given):  # otherwise the blocks before it are frozen, and plain
            self._warn_of_broken_chain()
        return run

    def _keep_open(self, recording: Recording, returned: list[Any]) -> None:
        next_leaf = recording.start + recording.count
        if isinstance(self.node, Run) and next_leaf < self._size:
            self.attachment.chains.add(OpenRun(recording, next_leaf, returned))

    def _warn_of_broken_chain(self) -> None:
        if self.path not in self.attachment.warned:
            self.attachment.warned.add(self.path)
            warnings.warn(
                f"block {self.path!r} wasn't given the very output of the block before it in its run, so it keeps its"
                " own input: the result is exact, but more memory is held than the plan says; end the run before this"
                " block",
                stacklevel=4,
            )


class SubmoduleForward(_Forward):
    """The forward of a submodule that a selector names: it tells the keeper where the block is."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.plain(*args, **kwargs)
        frame = current.frame
        function: Callable[..., Any] = self.plain
        for keeper in frame.keepers if frame is not None else ():
            function = partial(keeper.call_submodule, self.path, self.module, function)
        return function(*args, **kwargs)


class HeadForward(_Forward):
    """The forward of a loss head that the plan does in chunks.

    Args:
        head: what the plan says.
        attachment: shared with all blocks of the model.
    """

    def __init__(self, module: nn.Linear, head: Head, attachment: Attachment):
        super().__init__(module, head.path)
        self.chunks = head.chunks
        self.attachment = attachment

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return self._in_compiler(input)
        module = cast("nn.Linear", self.module)
        if not self._applies() or not (_wants_gradient([input, module.weight, module.bias]) or is_watched()):
            return self.plain(input)
        logits = logits_of(self.path, input, module.weight, module.bias, self.chunks, self.attachment.warned)
        return self.plain(input) if logits is None else logits

    def _applies(self) -> bool:
        wanted = torch.is_grad_enabled() or is_watched()
        return wanted and not _torch.in_transform() and self.attachment.is_on(self.module)

    def _in_compiler(self, input: torch.Tensor) -> torch.Tensor:
        if self.attachment.active and not torch.compiler.is_exporting():
            raise compiled_head_error(self.path)
        return self.plain(input)


def compiled_head_error(path: str) -> AttachError:
    """Of a head in compiled code."""
    return AttachError(
        f"the head {path!r} is compiled, and a loss in chunks can't be: leave the head out of the plan, or compile the"
        " blocks alone (for block in model.layers: block.compile())"
    )


class _TakenOver:
    """In place of a layer's `gradient_checkpointing = True` (Transformers' flag) while a plan is on: off, and known
    to have been on."""

    def __bool__(self) -> bool:
        return False


def attach(model: nn.Module, what: Any, *, check: Checked = "first") -> Plan:
    """Puts a plan on a model; from then on its forward and backward run as the plan says.

    Args:
        model: any module. A plan that is on it already is replaced.
        what: a Plan, a technique (`rf.every(2)`), a policy for every block, or `{path or pattern: policy}`.
        check: when the values that a replay computes are compared with fingerprints of the forward's: "first" until one
            replay of each block was seen to be right, "always", or "off". Integer and boolean values (routing, masks)
            are compared in every replay, unless it is "off".

    Returns:
        The plan as it was put on.

    Raises:
        PatternError, PlanError: names that the model doesn't have, or a plan for another model.
        AttachError: the model is on the meta device, something else has replaced a block's forward, or a block is
            compiled and the plan asks for what compiled code can't do.
    """
    if check not in get_args(Checked):
        raise InputError(f"check must be one of {', '.join(map(repr, get_args(Checked)))}, not {check!r}")
    plan = resolve_plan(model, what)
    by_path = modules_by_path(model)
    forwards = _targets(plan, by_path)
    _check_attachable(model, {path: by_path[path] for path in [*forwards, *([plan.head.path] if plan.head else [])]})
    if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
        from reforward._runtime import compiled

        compiled.check_compiled(model, plan, check)
        if plan.head is not None and compiled.is_compiled(model, plan.head.path):
            raise compiled_head_error(plan.head.path)
    detach(model)
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            module.__dict__["gradient_checkpointing"] = _TakenOver()
    attachment = Attachment(plan, check)
    for path, node in forwards.items():
        module = by_path[path]
        module.forward = (
            SubmoduleForward(module, path) if node is None else RegionForward(module, path, node, attachment)
        )
    if plan.head is not None:
        module = check_head(model, plan.head.path)
        module.forward = HeadForward(module, plan.head, attachment)
    return plan


def detach(model: nn.Module) -> None:
    """Takes the plan off a model and leaves it as it was; does nothing if there is none.

    Raises:
        InputError: what is given isn't a model.
    """
    check_model(model)
    for module in model.modules():
        for name in _ours(module):
            if name == "forward":
                del module.__dict__[name]
            else:
                module.__dict__[name] = True


def _ours(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are there because a plan is on its model."""
    return {k: v for k, v in module.__dict__.items() if isinstance(v, (_Forward, _TakenOver))}


@contextmanager
def attached(model: nn.Module, what: Any, *, check: Checked = "first") -> Iterator[Plan]:
    """A plan on a model for the duration of a `with` block, as `attach` puts it on; what was on it comes back as it
    was, suspended or not."""
    check_model(model)
    before = [(module, _ours(module)) for module in model.modules()]
    plan = attach(model, what, check=check)
    try:
        yield plan
    finally:
        detach(model)
        for module, ours in before:
            module.__dict__.update(ours)


@contextmanager
def suspended(model: nn.Module) -> Iterator[None]:
    """Plain forwards inside the `with` block; what was recorded before can still be replayed."""
    check_model(model)
    attachments = _attachments(model)
    before = [a.active for a in attachments]
    for attachment in attachments:
        attachment.active = False
    try:
        yield
    finally:
        for attachment, active in zip(attachments, before, strict=True):
            attachment.active = active


def _attachments(model: nn.Module) -> list[Attachment]:
    found: dict[int, Attachment] = {}
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, (RegionForward, HeadForward)):
            found[id(forward.attachment)] = forward.attachment
    return list(found.values())


def _targets(plan: Plan, by_path: dict[str, nn.Module]) -> dict[str, Node | None]:
    """Which modules get another forward: blocks with their top-level node, submodules that selectors name with None."""
    targets: dict[str, Node | None] = {}
    named: list[str] = []
    for node in plan.nodes:
        for leaf in leaves(node):
            if isinstance(node, Run) or isinstance(leaf.policy, Recompute):
                targets[leaf.path] = node
            named += _selected_submodules(leaf, by_path)
    for path in dict.fromkeys(named):
        if path in targets:
            raise PlanError(
                f"{path!r} is a block of the plan and is named by a selector of the block around it; drop one"
            )
        targets[path] = None
    return targets


def _selected_submodules(leaf: Region, by_path: dict[str, nn.Module]) -> list[str]:
    patterns = leaf.policy.patterns if isinstance(leaf.policy, Recompute) else []
    if not patterns:
        return []
    inside = [path for path in by_path if _patterns.is_inside(path, leaf.path)]
    return [path for path in inside if any(_patterns.matches(pattern, path) for pattern in patterns)]


def _check_attachable(model: nn.Module, targets: dict[str, nn.Module]) -> None:
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise AttachError(f"{path!r} is on the meta device and has no values; materialise the model, then attach")
    for path, module in targets.items():
        foreign = module.__dict__.get("forward")
        if foreign is not None and not isinstance(foreign, _Forward):
            what = getattr(foreign, "__qualname__", type(foreign).__name__)
            raise AttachError(
                f"block {path!r} has a forward of its own on the instance ({what}), put there by another library or by"
                " hand; take that off first, or attach before it is put on"
            )
    for name, module in model.named_modules():
        if type(module).__name__ == "CheckpointWrapper":
            _refuse_wrapper(_patterns.canonical(name), module, targets)


def _refuse_wrapper(wrapped: str, wrapper: nn.Module, targets: Iterable[str]) -> None:
    for path in targets:
        if _patterns.is_within(path, wrapped) or _patterns.is_within(wrapped, path):
            raise AttachError(
                f"{wrapped!r} is wrapped by {type(wrapper).__module__}.CheckpointWrapper, which recomputes it as well;"
                " unwrap it first"
            )


def _wants_gradient(given: list[Any]) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in given)
