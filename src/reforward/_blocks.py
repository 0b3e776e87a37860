"""Finds the blocks of any nn.Module: the submodules whose forward is one unit of recomputation.

Only the module tree is looked at; nothing runs. Blocks are the units of *stacks* (ModuleList, Sequential, ModuleDict),
at any depth, and large submodules that stand alone. A unit that is itself little more than a stack (a Swin or ResNet
stage) is entered; a decoder layer with a list of experts isn't, because its experts don't feed one another.

What is known to fall short: whether units are called in order, or at all, can't be seen in the tree, so names decide
what is an edge of the model (embedding, head) or a set of alternatives (experts). `select` overrides everything.
"""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from reforward import _patterns
from reforward._errors import InputError, PatternError

#: What a user may select blocks by: a path or pattern, a module class, or several of them.
Selection = str | type[nn.Module] | Sequence[str | type[nn.Module]]

#: A unit is entered when stacks that are its direct children hold at least this share of its parameters.
_NESTED_SHARE = 0.6
#: A submodule that stands alone and has no convolution is a block from this share of the model's parameters on.
_LONE_SHARE = 0.01
#: So many weights make a Sequential of plain layers (VGG's `features`) a stack of its own.
_PLAIN_CHAIN = 4

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_EDGE_NAME = re.compile(
    r"embed|classifier|pooler|predictions?$|router|experts?$|^cls$|(?<!multi)(?<!multi_)heads?$", re.IGNORECASE
)
_EDGE_TYPE = re.compile(
    r"(Embed|Embedder|Embeddings?|Classifier|Pooler|Predictions?|Router|Experts?|(?<!Multi)(?<!multi)Head)$"
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One unit of recomputation.

    Attributes:
        path: canonical module path (`_patterns.canonical`); of a shared module, the first of its paths.
        module_type: class name of the module.
        stack: canonical path of the container whose unit it is ("" for the model itself); its own path if it is alone.
        index: position among the blocks of its stack, from 0.
        stack_size: number of blocks in its stack.
        overwrites_input: it changes its input in place, so no recomputation can begin with it (an in-place ReLU).
    """

    path: str
    module_type: str
    stack: str
    index: int
    stack_size: int
    overwrites_input: bool = False


def find_blocks(model: nn.Module, select: Selection | None = None) -> tuple[Block, ...]:
    """The blocks of a model, in the order in which its modules are registered.

    Args:
        model: any module, wrapped or not.
        select: None finds the repeated units and large lone submodules; text is an exact path or a pattern
            (`_patterns`) over all submodules; a class means all its instances; a sequence means all that it lists.

    Returns:
        The blocks, none inside another; empty if the model has no submodule that is worth recomputing.

    Raises:
        PatternError: a pattern, path or class in `select` matches nothing.
        InputError: what is given isn't a model, one selected module lies inside another, or a parameter has no shape
            yet.
    """
    check_model(model)
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise InputError(f"parameter {name!r} has no shape yet (a lazy module); run one forward of the model first")
    if select is None:
        found = list(_walk("", _unwrap(model), _count(model))) or _largest_leaf(model)
    else:
        found = _selected(model, select)
    unique = {id(unit.module): unit for unit in reversed(found)}
    kept = [unit for unit in found if unique[id(unit.module)] is unit]
    return _number(kept)


def check_model(model: object) -> None:
    """Refuses what isn't a model.

    Raises:
        InputError: it isn't.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"the model must be a torch.nn.Module, not {reprlib.repr(model)}")


def modules_by_path(model: nn.Module) -> dict[str, nn.Module]:
    """`{canonical path: module}` of the model itself ("") and all its submodules, in the order of registration.

    Where a wrapper and what it wraps share a canonical path, the wrapped module is meant. A shared module appears once,
    under its first path.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        path = _patterns.canonical(name)
        if path not in found or _wrapped(found[path]) is module:
            found[path] = module
    return found


@contextmanager
def watching(
    model: nn.Module, paths: Iterable[str], begin: Callable[..., Any], end: Callable[..., Any]
) -> Iterator[None]:
    """Watches the calls of modules from outside: what the user's hooks on them do to their arguments happens before
    `begin`, what they do to their outputs after `end`. Of two watchers, the first is the outer one.

    Args:
        begin: is given path, module, arguments and keyword arguments, and may return others: `(args, kwargs)`.
        end: is given the same and the output, and may return another.
    """
    by_path = modules_by_path(model)
    with ExitStack() as stack:
        for path in dict.fromkeys(paths):
            module = by_path[path]
            stack.callback(module.register_forward_pre_hook(partial(begin, path), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(partial(end, path), prepend=True, with_kwargs=True).remove)
        yield


@dataclass(frozen=True)
class _Unit:
    stack: str
    path: str
    module: nn.Module


def _number(units: Sequence[_Unit]) -> tuple[Block, ...]:
    sizes = Counter(unit.stack for unit in units)
    position: Counter[str] = Counter()
    blocks = []
    for unit in units:
        blocks.append(
            Block(
                path=unit.path,
                module_type=type(unit.module).__name__,
                stack=unit.stack,
                index=position[unit.stack],
                stack_size=sizes[unit.stack],
                overwrites_input=bool(getattr(unit.module, "inplace", False)),
            )
        )
        position[unit.stack] += 1
    return tuple(blocks)


# The user's selection


def _selected(model: nn.Module, select: str | type[nn.Module] | Sequence[str | type[nn.Module]]) -> list[_Unit]:
    modules = {path: module for path, module in modules_by_path(model).items() if path}
    items = select if isinstance(select, (list, tuple, set, frozenset)) else [select]
    wanted = {path for item in items for path in _matching(item, modules)}
    paths = [path for path in modules if path in wanted]
    for path in paths:
        if outer := next((other for other in paths if _patterns.is_inside(path, other)), None):
            raise InputError(f"blocks can't lie inside one another: {path!r} is inside {outer!r}; select one of them")
    return [_Unit(_stack_of(path, modules), path, modules[path]) for path in paths]


def _matching(item: object, modules: dict[str, nn.Module]) -> list[str]:
    if isinstance(item, str):
        return _patterns.select(item, modules)
    if not isinstance(item, type) or not issubclass(item, nn.Module):
        raise InputError(f"blocks are selected by a pattern or a module class, not {item!r}")
    found = [path for path, module in modules.items() if isinstance(module, item)]
    if not found:
        names = ", ".join(sorted({type(module).__name__ for module in modules.values()})[:8])
        raise PatternError(f"the model has no submodule of class {item.__name__!r}; it has for example {names}")
    return found


def _stack_of(path: str, modules: dict[str, nn.Module]) -> str:
    parent = path.rpartition(".")[0]
    return parent if isinstance(modules.get(parent), _CONTAINERS) else path


# The search


def _walk(path: str, module: nn.Module, total: int) -> Iterator[_Unit]:
    """Units at or below a module that isn't a unit itself; `total` counts the whole model's parameters."""
    if units := _stack_units(module, _PLAIN_CHAIN if path else 2):
        for name, unit in units:
            if _is_nest(unit):
                yield from _walk(_join(path, name), unit, total)
            else:
                yield _Unit(path, _join(path, name), unit)
        return
    for name, child in _children(module):
        child_path = _join(path, name)
        if _has_stack(child):
            if not (_is_edge(name, child) and isinstance(child, _CONTAINERS)):
                yield from _walk(child_path, child, total)
        elif _is_lone(name, child, total):
            yield _Unit(child_path, child_path, child)
        elif not _is_edge(name, child):
            yield from _walk(child_path, child, total)


def _stack_units(module: nn.Module, plain_chain: int = _PLAIN_CHAIN) -> list[tuple[str, nn.Module]]:
    """The units of a container, or none if it isn't a stack.

    Layers between two units belong to the stack as well: without a pooling layer the chain of blocks would break there.
    Embedding and head at the ends of a Sequential don't.
    """
    if not isinstance(module, _CONTAINERS):
        return []
    children = _children(module)
    units = [i for i, (name, child) in enumerate(children) if _is_substantial(child) and not _is_edge(name, child)]
    if not units:
        weights = sum(_weights(child.parameters()) for _, child in children if not isinstance(child, nn.Embedding))
        return children if isinstance(module, nn.Sequential) and weights >= plain_chain else []
    if isinstance(module, nn.ModuleDict) and (len(units) < len(children) or not _repeats(children)):
        return []
    between = children[units[0] : units[-1] + 1]
    return [(name, child) for name, child in between if not _is_edge(name, child)]


def _is_nest(unit: nn.Module) -> bool:
    """Whether a unit is little more than stacks of its own: a stage rather than a layer."""
    if _is_repeated_stack(unit):
        return True
    stacks = [child for name, child in _children(unit) if not _is_edge(name, child) and _is_repeated_stack(child)]
    return sum(map(_count, stacks)) >= _NESTED_SHARE * max(_count(unit), 1)


def _is_repeated_stack(module: nn.Module) -> bool:
    """Whether it holds several units of one class, each with several weights.

    A bottleneck's chain of convolution + norm + activation has one weight per link: it is a block, not a stack. T5
    lists the different parts of one layer: no class occurs twice.
    """
    return _repeats([(name, unit) for name, unit in _stack_units(module) if _weights(unit.parameters()) >= 2])


def _repeats(units: Sequence[tuple[str, nn.Module]]) -> bool:
    types = Counter(type(unit) for _, unit in units)
    return bool(types) and types.most_common(1)[0][1] >= 2


def _has_stack(module: nn.Module) -> bool:
    return any(_stack_units(_unwrap(inner)) for inner in module.modules())


def _is_lone(name: str, module: nn.Module, total: int) -> bool:
    """Whether a submodule without stacks is a block by itself.

    Convolutions have few parameters where the picture, and so what they leave for backward, is largest: no share of the
    parameters is asked of them.
    """
    if _is_edge(name, module) or isinstance(module, (nn.ModuleList, nn.ModuleDict)) or not _is_substantial(module):
        return False
    inside = list(module.named_modules())[1:]
    if any(_is_edge(path.rpartition(".")[2], inner) for path, inner in inside):
        return False
    return any(isinstance(inner, _CONVOLUTIONS) for _, inner in inside) or _count(module) >= _LONE_SHARE * total


def _largest_leaf(model: nn.Module) -> list[_Unit]:
    leaves = [
        _Unit(path, path, module)
        for path, module in modules_by_path(model).items()
        if path and not any(_EDGE_NAME.search(part) for part in path.split("."))
        if not _is_edge("", module) and not _children(module) and _count(module)
    ]
    return [max(leaves, key=lambda unit: _count(unit.module))] if leaves else []


# What a module is


def _is_substantial(module: nn.Module) -> bool:
    """Whether it computes more than one plain layer does: it has parts, or several weights of its own."""
    if _children(module):
        return _weights(module.parameters()) > 0
    return isinstance(module, nn.RNNBase) or _weights(module.parameters(recurse=False)) >= 2


def _is_edge(name: str, module: nn.Module) -> bool:
    """Whether name or class say that it is an embedding, a head, or one of several alternatives.

    What has batch norm inside is a part of a convolutional network, and leaves much, even where it is called an
    embedder (the stem of Transformers' ResNet) or a head (segmentation).
    """
    if isinstance(module, nn.Embedding):
        return True
    if not _EDGE_NAME.search(name) and not _EDGE_TYPE.search(type(module).__name__):
        return False
    return not any(isinstance(inner, _BATCH_NORMS) for inner in module.modules())


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Named children with wrappers taken off; what `torch.nn.utils.parametrize` adds isn't one."""
    return [(name, _unwrap(child)) for name, child in module.named_children() if name != "parametrizations"]


def _unwrap(module: nn.Module) -> nn.Module:
    while (inner := _wrapped(module)) is not None:
        module = inner
    return module


def _wrapped(module: nn.Module) -> nn.Module | None:
    """The only child of a wrapper, or None if the module isn't one."""
    children = list(module.named_children())
    return children[0][1] if len(children) == 1 and not _patterns.canonical(children[0][0]) else None


def _weights(parameters: Iterable[nn.Parameter]) -> int:
    """How many are matrices or kernels, rather than biases, scales or the magnitudes of weight norm (n, 1, 1)."""
    return sum(sum(size > 1 for size in parameter.shape) >= 2 for parameter in parameters)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _join(path: str, name: str) -> str:
    return _patterns.canonical(f"{path}.{name}" if path else name)
