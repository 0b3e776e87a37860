"""Techniques: rules for a whole model, which `resolve(model)` turns into a plan; and plans from what a user attaches.

    none()                            nothing is recomputed
    full(), every(n)                  Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174
    segments(k | "sqrt", nested=m)    the same paper: runs of about √n blocks, and its recursion
    selective(save=… | recompute=…)   Korthikanti et al., Reducing Activation Recomputation, arXiv:2205.05198
    chunked_head(chunks)              Hsu et al., Liger Kernel, arXiv:2410.10989: the loss head a part at a time

They are rules of thumb, blind to bytes and seconds; `solve` is not.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec
from torch import nn

from reforward import _patterns
from reforward._blocks import Block, check_model, find_blocks, modules_by_path
from reforward._errors import InputError, PlanError
from reforward._heads import check_head, find_head
from reforward._plan import Head, Node, Plan, Region, Run, When, leaves
from reforward._policy import FAMILIES, Device, Modules, Ops, Place, Policy, Recompute, Save, Selector, selectors
from reforward._units import check_count

_HERE = Device()

Selectors = str | Selector | Iterable[str | Selector]


@dataclass(frozen=True, kw_only=True)
class Technique(ABC):
    """A rule that makes a plan for any model.

    Attributes:
        when: "grad": blocks recompute whenever gradients are wanted; "training": only while they are in training mode.
    """

    when: When = "grad"

    def __post_init__(self):
        if self.when not in get_args(When):
            raise InputError(f"when must be one of {', '.join(map(repr, get_args(When)))}, not {self.when!r}")

    def resolve(self, model: nn.Module, blocks: Sequence[Block] | None = None) -> Plan:
        """The plan that this rule gives on a model.

        Args:
            model: the model; it isn't changed.
            blocks: its blocks, if not those that `find_blocks(model)` finds.

        Raises:
            InputError: the model has no block, or `blocks` aren't blocks of it.
            PatternError: a pattern for submodules matches nothing in the blocks.
        """
        blocks = blocks_of(model) if blocks is None else check_blocks(blocks, model)
        plan = Plan(nodes=self._nodes(model, blocks), model_type=type_name(model), when=self.when)
        check_plan(plan, model)
        return plan

    @abstractmethod
    def _nodes(self, model: nn.Module, blocks: Sequence[Block]) -> tuple[Node, ...]:
        """The plan's nodes, in the order of the blocks."""


@dataclass(frozen=True, kw_only=True)
class Plain(Technique):
    """Nothing is recomputed."""

    def resolve(self, model: nn.Module, blocks: Sequence[Block] | None = None) -> Plan:
        return Plan(nodes=(), model_type=type_name(model), when=self.when)

    def _nodes(self, model: nn.Module, blocks: Sequence[Block]) -> tuple[Node, ...]:
        return ()


@dataclass(frozen=True, kw_only=True)
class Every(Technique):
    """The first block of each stack, and every n-th after it, gets the policy.

    Attributes:
        n: 1 means every block.
        policy: what these blocks do.
    """

    n: int
    policy: Recompute

    def __post_init__(self):
        super().__post_init__()
        check_count("n", self.n)

    def _nodes(self, model: nn.Module, blocks: Sequence[Block]) -> tuple[Node, ...]:
        return tuple(
            _region(block, self.policy) for block in blocks if block.index % self.n == 0 and not block.overwrites_input
        )


@dataclass(frozen=True, kw_only=True)
class Segments(Technique):
    """Each stack is cut into runs of near-equal length; a run keeps only its first input.

    Attributes:
        count: runs per stack, at most one per block; "sqrt": the square root of the stack's size, rounded.
        nested: inner runs per run, if the runs nest.
    """

    count: int | Literal["sqrt"]
    nested: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.count != "sqrt":
            check_count("the number of segments", self.count, alternative=" or 'sqrt'")
        if self.nested is not None:
            check_count("nested", self.nested)

    def _nodes(self, model: nn.Module, blocks: Sequence[Block]) -> tuple[Node, ...]:
        order = {block.path: position for position, block in enumerate(blocks)}
        nodes = [node for stack in _stacks(blocks) for node in self._cut(stack)]
        return tuple(sorted(nodes, key=lambda node: order[next(leaves(node)).path]))

    def _cut(self, stack: Sequence[Block]) -> Iterator[Node]:
        count = max(1, round(math.sqrt(len(stack)))) if self.count == "sqrt" else self.count
        for run in _runs(stack, count):
            yield _run(run) if self.nested is None else _nested_run(run, self.nested)


@dataclass(frozen=True, kw_only=True)
class SelectiveModules(Technique):
    """Only the submodules that match are recomputed; of nested matches the outermost.

    Attributes:
        patterns: globs on the full path of submodules that lie inside a block or are one.
        policy: what these submodules do.
    """

    patterns: tuple[str, ...]
    policy: Recompute

    def _nodes(self, model: nn.Module, blocks: Sequence[Block]) -> tuple[Node, ...]:
        modules = modules_by_path(model)
        roots = [block.path for block in blocks]
        inside = [path for path in _called(modules) if any(_patterns.is_within(path, r) for r in roots)]
        found = {path for pattern in self.patterns for path in _patterns.select(pattern, inside)}
        paths = _outermost(path for path in inside if path in found)
        return tuple(_module_region(path, modules, self.policy) for path in paths)


@dataclass(frozen=True, kw_only=True)
class ChunkedHead(Technique):
    """The loss head in chunks, and a technique for the blocks.

    Attributes:
        chunks: in how many parts the rows are taken.
        head: path of the head; None: it is found.
        blocks: what the blocks do; `when` is that of this technique.
    """

    chunks: int
    head: str | None
    blocks: Technique

    def __post_init__(self):
        super().__post_init__()
        check_count("chunks", self.chunks)
        if self.head is not None and not isinstance(self.head, str):
            raise InputError(f"head is the path of a linear layer, such as 'lm_head', not {self.head!r}")
        if not isinstance(self.blocks, Technique) or isinstance(self.blocks, ChunkedHead):
            raise InputError(
                f"blocks is a technique for the blocks, such as full() or selective(save='matmul'), not {self.blocks!r}"
            )

    def resolve(self, model: nn.Module, blocks: Sequence[Block] | None = None) -> Plan:
        plan = self.blocks.resolve(model, blocks)
        plan = msgspec.structs.replace(plan, head=resolve_head(model, self.chunks, path=self.head, blocks=blocks))
        check_plan(plan, model)
        return plan

    def _nodes(self, model: nn.Module, blocks: Sequence[Block]) -> tuple[Node, ...]:
        return self.blocks._nodes(model, blocks)


def resolve_head(
    model: nn.Module, chunks: int, *, path: str | None = None, blocks: Sequence[Block] | None = None
) -> Head:
    """The head of a model in so many chunks, found if it isn't named.

    Raises:
        InputError: it isn't clear which it is, or it can't be done in chunks.
        PatternError: the model has no module of that name.
    """
    if path is None:
        path = find_head(model, find_blocks(model) if blocks is None else blocks)
    return Head(path=path, chunks=chunks, module_type=type(check_head(model, path)).__name__)


def none() -> Technique:
    """Nothing is recomputed: the plain step."""
    return Plain()


def full(*, at: Place = _HERE, when: When = "grad") -> Technique:
    """Every block keeps its inputs only and is recomputed in backward.

    Args:
        at: where the kept inputs live until backward.
        when: "grad", or "training" (Transformers' convention: nothing is recomputed in evaluation mode).
    """
    return every(1, at=at, when=when)


def every(n: int, *, at: Place = _HERE, when: When = "grad") -> Technique:
    """The first block of each stack, and every n-th after it, is recomputed; the others save everything.

    Raises:
        InputError: `n` isn't a whole number of at least 1.
    """
    return Every(n=n, policy=Recompute(at=at), when=when)


def segments(k: int | Literal["sqrt"], *, nested: int | None = None, when: When = "grad") -> Technique:
    """Each stack is cut into `k` consecutive runs of near-equal length, all of them recomputed, the last included.

    Args:
        k: runs per stack; more than there are blocks means one per block. "sqrt": about √n runs of √n blocks.
        nested: each run is cut into so many again. While the outer run is replayed, an inner one again keeps only its
            first input; the last one keeps everything, because its backward follows at once.
        when: as for `full`.

    Raises:
        InputError: a number isn't whole or isn't at least 1.
    """
    return Segments(count=k, nested=nested, when=when)


def selective(
    *,
    save: Selectors | None = None,
    recompute: Selectors | None = None,
    at: Place = _HERE,
    when: When = "grad",
) -> Technique:
    """Each block keeps its inputs and a part of its values.

    Args:
        save: what is kept beside the inputs: families of operations, patterns for submodules, or both.
        recompute: what is not kept: either families of operations (the other families are kept), or patterns for
            submodules (each is recomputed by itself, and all else is kept).
        at: where the kept values live until backward.
        when: as for `full`.

    Raises:
        InputError: both or neither of `save` and `recompute`, nothing selected, or a mix that has no meaning.
    """
    if save is not None and recompute is None:
        return Every(n=1, policy=Recompute(save=_some("save", save), at=at), when=when)
    if recompute is None or save is not None:
        raise InputError("selective takes either save=... or recompute=..., for example selective(save='matmul')")
    chosen = _some("recompute", recompute)
    patterns = tuple(item.pattern for item in chosen if isinstance(item, Modules))
    if len(patterns) == len(chosen):
        return SelectiveModules(patterns=patterns, policy=Recompute(at=at), when=when)
    return Every(n=1, policy=Recompute(save=_other_families(chosen), at=at), when=when)


def chunked_head(*, chunks: int = 16, head: str | None = None, blocks: Technique | None = None) -> Technique:
    """The projection to the vocabulary and the cross-entropy are done together, a part of the rows (tokens) at a time.

    The logits of one part live at a time, and gradients are made while they are there. Loss and gradients equal the
    plain step's to rounding (`Plan.exactness == "rounding"`), as sums over rows have another order.

    Args:
        chunks: in how many parts, at least 1.
        head: path of the projection, an `nn.Linear`; None: what `get_output_embeddings()` gives, else the linear layer
            outside of all blocks with most outputs.
        blocks: what the blocks do; None saves everything.

    Raises:
        InputError: a value of another type, or fewer than one chunk.
    """
    blocks = none() if blocks is None else blocks
    return ChunkedHead(chunks=chunks, head=head, blocks=blocks, when=getattr(blocks, "when", "grad"))


def resolve_plan(model: nn.Module, what: Plan | Technique | Policy | Mapping[str, Policy]) -> Plan:
    """The plan for a model from whatever a user attaches, checked against the model.

    Args:
        model: the model; it isn't changed.
        what: a plan; a technique; a policy for all blocks; or `{path or pattern: policy}`, where a pattern selects
            blocks or, if it matches none, submodules (of nested matches the outermost).

    Raises:
        PlanError: the plan was made for another model.
        PatternError: a pattern matches nothing, or two match one block.
        InputError: anything else.
    """
    check_model(model)
    if isinstance(what, Plan):
        check_plan(what, model)
        return what
    if isinstance(what, Technique):
        return what.resolve(model)
    if isinstance(what, Policy):
        nodes = tuple(_region(block, what) for block in blocks_of(model) if not block.overwrites_input)
    elif isinstance(what, Mapping):
        nodes = _nodes_of_rules(model, what)
    else:
        raise InputError(
            f"can't attach {what!r}; give a plan, a technique such as every(2), a policy or a dict of these"
        )
    plan = Plan(nodes=nodes, model_type=type_name(model))
    check_plan(plan, model)
    return plan


def check_blocks(blocks: Sequence[Block], model: nn.Module) -> tuple[Block, ...]:
    """Blocks as a user gives them, at least one.

    Raises:
        InputError: they aren't blocks of the model.
    """
    check_model(model)
    if isinstance(blocks, str) or not isinstance(blocks, Iterable):
        raise InputError(f"blocks are a list, as find_blocks(model) gives it, not {blocks!r}")
    blocks, modules = tuple(blocks), modules_by_path(model)
    if not blocks:
        raise InputError("blocks is empty, so there is nothing to recompute; leave it out to have them found")
    for block in blocks:
        if not isinstance(block, Block):
            raise InputError(f"{block!r} isn't a block; write blocks=find_blocks(model, what), with a pattern or class")
        if block.path not in modules:
            raise InputError(f"{type_name(model)} has no block {block.path!r}; find the blocks of this model")
    return blocks


def check_plan(plan: Plan, model: nn.Module) -> None:
    """Refuses a plan that was made for another model.

    Raises:
        PlanError: the model is of another class; a region's or the head's path is unknown, is of another class, or is
            a list of modules, which is never called; a run's members aren't in the order of their calls.
        InputError: the head isn't a plain linear layer.
        PatternError: a pattern of a `Recompute(save=...)` matches nothing in the regions that have it.
    """
    check_model(model)
    modules = modules_by_path(model)
    places = [*plan.regions(), *([plan.head] if plan.head else [])]
    faults = [fault for place in places if (fault := _fault(place, modules)) is not None]
    if faults or not _is_a(_unwrapped(modules), plan.model_type):
        shown = "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")
        raise PlanError(
            f"this is a plan for another model ({plan.model_type or 'of unknown type'}, not {type_name(model)})"
            + (f": {shown}" if shown else "")
            + ". Make one for this model"
        )
    if plan.head is not None:
        check_head(model, plan.head.path)
    for node in plan.nodes:
        _check_order(node, modules)
    _check_save_patterns(plan, list(modules))


def _fault(region: Region | Head, modules: Mapping[str, nn.Module]) -> str | None:
    module = modules.get(region.path)
    if module is None:
        return f"it has no module {region.path!r}"
    if not _is_a(module, region.module_type):
        return f"{region.path!r} is a {type(module).__name__}, not a {region.module_type}"
    if not _is_called(module):
        return f"{region.path!r} is a {type(module).__name__}, which is never called itself; name its members"
    return None


def _is_a(module: nn.Module, name: str | None) -> bool:
    """Whether a module is of the named class; a class made on the fly (FSDP2) has the original among its bases."""
    return name is None or any(base.__name__ == name for base in type(module).__mro__)


def _check_order(node: Node, modules: Mapping[str, nn.Module]) -> None:
    """Refuses a run whose members stand in another order in the Sequential that calls them.

    In which order other models call their modules isn't known before they run.
    """
    for before, after in itertools.pairwise(leaf.path for leaf in leaves(node)):
        (parent, _, first), (other, _, second) = before.rpartition("."), after.rpartition(".")
        container = modules.get(parent)
        if parent != other or container is None or type(container).forward is not nn.Sequential.forward:
            continue
        order = [name for name, _ in container.named_children()]
        if first in order and second in order and order.index(first) > order.index(second):
            raise PlanError(f"{after!r} runs before {before!r}; name a run's members in the order of their calls")


def _check_save_patterns(plan: Plan, paths: Sequence[str]) -> None:
    roots: dict[str, list[str]] = {}
    for region in plan.regions():
        for pattern in region.policy.patterns if isinstance(region.policy, Recompute) else ():
            roots.setdefault(pattern, []).append(region.path)
    for pattern, owners in roots.items():
        _patterns.select(pattern, [path for path in paths if any(_patterns.is_inside(path, o) for o in owners)])


# Blocks to nodes


def blocks_of(model: nn.Module) -> tuple[Block, ...]:
    """The blocks that are found in a model, at least one.

    Raises:
        InputError: there is none.
    """
    blocks = find_blocks(model)
    if not blocks:
        raise InputError(
            f"{type_name(model)} has no blocks: no repeated or large submodules to recompute;"
            " name some yourself, for example attach(model, {'encoder': Recompute()})"
        )
    return blocks


def _region(block: Block, policy: Policy) -> Region:
    return Region(path=block.path, policy=policy, module_type=block.module_type)


def _module_region(path: str, modules: Mapping[str, nn.Module], policy: Policy) -> Region:
    return Region(path=path, policy=policy, module_type=type(modules[path]).__name__)


def _stacks(blocks: Iterable[Block]) -> list[list[Block]]:
    stacks: dict[str, list[Block]] = {}
    for block in blocks:
        stacks.setdefault(block.stack, []).append(block)
    return list(stacks.values())


def _runs(blocks: Sequence[Block], count: int) -> list[Sequence[Block]]:
    """Cuts blocks into at most `count` consecutive runs whose lengths differ by at most one.

    A run can't begin with a block that overwrites its input: such a cut moves on to the next block, and such blocks at
    the very beginning belong to no run.
    """
    count = min(count, len(blocks))
    starts = set()
    for run in range(count):
        start = run * len(blocks) // count
        while start < len(blocks) and blocks[start].overwrites_input:
            start += 1
        starts.add(start)
    bounds = [*sorted(starts - {len(blocks)}), len(blocks)]
    return [blocks[start:stop] for start, stop in itertools.pairwise(bounds)]


def _run(blocks: Sequence[Block]) -> Node:
    if len(blocks) == 1:
        return _region(blocks[0], Recompute())
    return Run(members=tuple(_region(block, Save()) for block in blocks))


def _nested_run(blocks: Sequence[Block], count: int) -> Node:
    if len(blocks) == 1:
        return _run(blocks)
    *before, last = _runs(blocks, count)
    return Run(members=(*map(_run, before), *(_region(block, Save()) for block in last)))


# Rules and selectors


def _nodes_of_rules(model: nn.Module, rules: Mapping[str, Policy]) -> tuple[Node, ...]:
    for pattern, policy in rules.items():
        if not isinstance(pattern, str):
            raise InputError(f"blocks are named by a path or pattern such as 'layers[0:12]', not {pattern!r}")
        if not isinstance(policy, Policy):
            raise InputError(f"{pattern!r} needs a policy, Save() or Recompute(), not {policy!r}")
    modules = modules_by_path(model)
    blocks = [block.path for block in find_blocks(model)]
    for_blocks = {pattern: rule for pattern, rule in rules.items() if _matches_any(pattern, blocks)}
    for_modules = {pattern: rule for pattern, rule in rules.items() if pattern not in for_blocks}
    chosen: set[str] = set()
    for pattern in for_modules:
        chosen.update(_outermost(_patterns.select(pattern, [path for path in _called(modules) if path])))
    policies = _patterns.assign(for_blocks, blocks) | _patterns.assign(for_modules, [p for p in modules if p in chosen])
    return tuple(_module_region(path, modules, policies[path]) for path in modules if path in policies)


def _matches_any(pattern: str, paths: Iterable[str]) -> bool:
    return any(_patterns.matches(pattern, path) for path in paths)


def _some(argument: str, given: Selectors) -> tuple[Selector, ...]:
    chosen = selectors(given)
    if not chosen:
        raise InputError(f"selective({argument}=...) selects nothing; use full() or none() for the two ends")
    return chosen


def _other_families(recomputed: Iterable[Selector]) -> tuple[Ops, ...]:
    families = set()
    for item in recomputed:
        if isinstance(item, Modules):
            raise InputError(
                "selective(recompute=...) takes families of operations or patterns, not both:"
                f" {item.pattern!r} is a pattern"
            )
        if item.within is not None or item.nth is not None:
            raise InputError(f"selective(recompute=...) can't take {item!r}: name what to save instead")
        families.add(item.family)
    return tuple(Ops(family=family) for family in FAMILIES if family not in families)


def _called(modules: Mapping[str, nn.Module]) -> list[str]:
    return [path for path, module in modules.items() if _is_called(module)]


def _is_called(module: nn.Module) -> bool:
    """Whether it has a forward; a ModuleList has none, so a region on it would never act."""
    return type(module).forward is not nn.Module.forward


def _outermost(paths: Iterable[str]) -> list[str]:
    """Those paths that don't lie inside an earlier one."""
    kept: list[str] = []
    for path in paths:
        if not any(_patterns.is_within(path, outer) for outer in kept):
            kept.append(path)
    return kept


def type_name(model: nn.Module) -> str:
    """Class name of a model without its wrappers, so that a plan serves it with and without them."""
    check_model(model)
    return type(_unwrapped(modules_by_path(model))).__name__


def _unwrapped(modules: Mapping[str, nn.Module]) -> nn.Module:
    return modules.get(_patterns.PEFT_MODEL, modules[""])
