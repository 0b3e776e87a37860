"""Regions under torch.compile.

The compiler can't look into hooks on saved tensors, but it knows torch's own checkpoint: what is called through it is
marked in the graph, and computed again in the backward graph. So a block of a plan becomes one such region, with a
choice of operations to keep. What the compiler can't take into its graph as a region (a forward that sets attributes)
runs outside of the graph, as it would without the compiler, with a warning. What can't be kept at all is refused.

Loading this module loads the compiler, which takes seconds: import it where something is compiled, never at the top of
another module.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import get_current_meta
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from reforward import __version__, _patterns, _torch
from reforward._errors import AttachError
from reforward._plan import Node, Plan, Region, Run, leaves
from reforward._policy import FAMILIES, Modules, Ops, Recompute, Selector
from reforward._runtime.families import family_of
from reforward._runtime.selective import draws, is_in_place, worth_keeping

_KEEP, _RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
_Operation = type(torch.ops.aten.add.Tensor)
_SILENT_VIEW = torch.ops.aten._unsafe_view.default  # a view that doesn't say so; `reshape` ends with it


# What is called while the compiler traces
# ----------------------------------------------------------------------------------------------------------------------


def block(
    function: Callable[..., Any], node: Node, check: str, path: str, args: Any, kwargs: Any, eager: Callable[..., Any]
) -> Any:
    """Calls a block of a plan.

    Args:
        function: the block's own forward.
        node: the top-level node of the plan that the block belongs to.
        check: when replays are compared with their forwards.
        eager: calls the block as it is called without the compiler.

    Raises:
        AttachError: compiled code can't do what the plan says. The compiler shows it as an error of its own.
    """
    problem = _problem(node, check) if _wants_regions() else None
    if problem is not None:
        _refuse(path, problem)
    if isinstance(node, Region) and isinstance(node.policy, Recompute):
        return region(function, node.policy, path, args, kwargs, eager)
    return function(*args, **kwargs)


def region(
    function: Callable[..., Any],
    policy: Recompute,
    name: str,
    args: Any,
    kwargs: Any,
    eager: Callable[..., Any],
    context_fn: Callable[[], Any] | None = None,
) -> Any:
    """Calls a function as a region that the backward graph computes again.

    Args:
        policy: which families of operations are kept.
        name: of the function or block, for messages.
        eager: calls the function as it is called without the compiler.
        context_fn: the user's own contexts, as torch's checkpoint takes them.

    Raises:
        AttachError: as `block`.
    """
    if not _wants_regions():
        return function(*args, **kwargs)
    problem = _problem_of_policy(policy, context_fn is not None)
    if problem is not None:
        _refuse(name, problem)

    def call() -> Any:
        if not torch.compiler.is_compiling():
            raise _NotTraced
        return function(*args, **kwargs)

    families = " ".join([selector.family for selector in policy.save if isinstance(selector, Ops)])
    try:
        return torch_checkpoint(call, use_reentrant=False, context_fn=context_fn or _CONTEXTS[families])
    except _NotTraced:  # the compiler gave the region up; torch's checkpoint by itself is less exact
        return _outside(eager, name, args, kwargs)  # pyright: ignore[reportCallIssue]


class _NotTraced(AttachError):
    """A region is really called: by the compiler that gave it up, where `region` catches this, or by a backend."""

    def __init__(self):
        super().__init__(
            "the backend of torch.compile calls regions as they are, without AOTAutograd (backend='eager' does), and"
            " torch doesn't restore random streams there; use backend='aot_eager' or 'inductor', or suspend the plan"
            " (rf.suspended)"
        )


def _wants_regions() -> bool:
    return torch.is_grad_enabled() and not torch.compiler.is_exporting() and not _in_transform()


@torch.compiler.disable
def _outside(eager: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    warnings.warn(
        f"block {name!r} can't be compiled as a region that is computed again (TORCH_LOGS=graph_breaks says why), so it"
        " runs outside of the compiled graph, as without torch.compile: the result is exact, but the block isn't"
        " compiled; if it is because its forward sets attributes, set"
        " torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True",
        stacklevel=2,
    )
    return eager(*args, **kwargs)


@torch.compiler.assume_constant_result
def _in_transform() -> bool:
    return _torch.in_transform()


@torch.compiler.assume_constant_result
def _refuse(path: str, problem: str) -> None:
    raise _refusal(path, problem)


def _problem(node: Node, check: str) -> str | None:
    """What compiled code can't do of a node."""
    if isinstance(node, Run):
        return "belongs to a run, and compiled code computes single blocks again"
    if check == "always":
        return "is to be checked at every replay, and the values inside compiled code can't be read"
    return _problem_of_policy(node.policy) if isinstance(node.policy, Recompute) else None


def _problem_of_policy(policy: Recompute, has_contexts: bool = False) -> str | None:
    for selector in policy.save:
        if isinstance(selector, Modules):
            return f"saves submodules by name ({selector.pattern!r}), and compiled code has operations only"
        if selector.within is not None:
            return f"saves operations by submodule ({selector.within!r}), and compiled code has operations only"
        if selector.nth is not None:
            return f"saves one operation by its number ({selector!r}), and compiled code has no such order"
    if has_contexts and policy.save:
        return "has both a context_fn and a policy that saves, and compiled code takes one of them"
    return None


def _refusal(path: str, problem: str) -> AttachError:
    return AttachError(
        f"block {path!r} {problem}; under torch.compile attach single blocks that save families of operations over the"
        " whole block (rf.full(), rf.every(2), rf.selective(save='matmul')), or compile the submodules inside the"
        " blocks instead of the blocks"
    )


# What a region keeps
# ----------------------------------------------------------------------------------------------------------------------


def _contexts(families: str) -> Any:
    """The contexts of a region's forward and replay, made when its operations are about to enter the graph.

    Raises:
        AttachError: they don't enter a graph: the region is really called.
    """
    if not torch.compiler.is_compiling():
        raise _NotTraced
    mode = get_proxy_mode()
    graph = mode.tracer.graph if mode is not None else None
    if graph is not None:
        _keep_what_leaves_regions(graph)
    return create_selective_checkpoint_contexts(_Choice(frozenset(families.split()), graph))


def _context_fn(families: str) -> Callable[[], Any]:
    made: Any = functools.partial(_contexts, families)
    made.cache_hash = f"reforward {__version__} {families}"  # lets the compiler find the graph in its cache on disk
    return made


# The compiler takes functions that were made before it began to trace: one for each choice of families.
_CONTEXTS = {
    " ".join(chosen): _context_fn(" ".join(chosen))
    for count in range(len(FAMILIES) + 1)
    for chosen in itertools.combinations(sorted(FAMILIES), count)
}


class _Choice:
    """Says of every operation of a region whether its results are kept.

    They are if the policy selects the family of the function that the user called; and if the operation reads a tensor
    from outside that the region overwrites (a buffer): compiled code writes it in forward, so a replay would read what
    was written.

    Args:
        families: what the policy selects.
        graph: the graph that the operations enter; None in the pass in which the compiler only looks at the types of
            the results.
    """

    def __init__(self, families: frozenset[str], graph: fx.Graph | None):
        self._families = families
        self._graph = graph
        self._seen = len(graph.nodes) if graph is not None else 0
        self._made: set[int] = set()
        self._overwritten: set[int] = set()
        self._readers: dict[int, list[fx.Node]] = {}

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nodes = self._new_nodes()
        if not isinstance(operation, _Operation):
            return _RECOMPUTE
        family = _family_of_named(_function_called())
        if family in self._families and _computes(operation, family, kwargs):
            return _KEEP
        return _KEEP if self._meets_overwritten(operation, context.op_output, (args, kwargs), nodes) else _RECOMPUTE

    def _new_nodes(self) -> list[fx.Node]:
        if self._graph is None:
            return []
        count, self._seen = len(self._graph.nodes) - self._seen, len(self._graph.nodes)
        return list(itertools.islice(reversed(self._graph.nodes), count))

    def _meets_overwritten(self, operation: Any, output: Any, given: Any, nodes: list[fx.Node]) -> bool:
        inputs = [_torch.storage_key(tensor) for tensor in _torch.tensors_in(given)]
        outer = {key for key in inputs if key not in self._made}
        self._made.update(key for t in _torch.tensors_in(output) if (key := _torch.storage_key(t)) not in outer)
        if "batch_norm" in operation.__name__:  # no gradient depends on the running statistics that it overwrites
            return False
        if _torch.writes(operation):
            written = outer.intersection(inputs[:1] if is_in_place(operation) else inputs)
            self._overwritten |= written
            for reader in itertools.chain.from_iterable(self._readers.get(key, ()) for key in written):
                reader.meta["recompute"] = _KEEP
        for key in outer:
            self._readers.setdefault(key, []).extend(nodes)
        return not outer.isdisjoint(self._overwritten)


def _computes(operation: Any, family: str, kwargs: dict[str, Any]) -> bool:
    if operation.is_view or operation is _SILENT_VIEW or (is_in_place(operation) and not draws(operation)):
        return False
    return worth_keeping(operation, family, kwargs)


def _function_called() -> str:
    """The function that the operation which is being traced comes from, as text: what the user called.

    Checked on 2.13.0: the nodes of the compiler's first graph, whose targets are those functions, are noted in
    `from_node`; `<built-in function linear>`, or the name of a tensor's method.
    """
    sources = get_current_meta().get("from_node")
    return sources[-1].target if sources else ""


@functools.cache
def _family_of_named(function: str) -> str | None:
    """The family of a function that is given as text."""
    found = re.match(r"<.*(?:function|method) (\w+)", function)
    name = found[1] if found else function
    homes = ((F, name), (torch, name), (torch.Tensor, name), (torch.Tensor, f"__{name}__"))  # the last: operators
    families = (family_of(getattr(home, given, None)) for home, given in homes)
    return next((family for family in families if family is not None), None)


def _keep_what_leaves_regions(graph: fx.Graph) -> None:
    """Marks results of regions that are used outside of them as kept.

    Without it, anything that stands between two regions and is cheap (a view, a scaling) is computed again from the
    result of the region before it, and so on back to the first: all would be computed again at once, and backward would
    need as much memory as without regions.

    Checked on 2.13.0: torch itself marks a result only where the next region takes it directly; `recompute` and
    `ac_graph_id` are its own marks.
    """
    for node in graph.nodes:
        own = node.meta.get("ac_graph_id")
        if own is None or all(user.meta.get("ac_graph_id") == own for user in node.users):
            continue
        for part in _made_with(node):
            if part.meta.get("ac_graph_id") == own and part.meta.get("recompute") is _RECOMPUTE:
                part.meta["recompute"] = _KEEP


def _made_with(node: fx.Node) -> Iterator[fx.Node]:
    """A node and, if it is a view or one of several results, those by which its memory is computed."""
    yield node
    if getattr(node.target, "is_view", False):
        yield from _made_with(node.all_input_nodes[0])
    elif node.target is operator.getitem:
        yield from (node.all_input_nodes[0], *node.all_input_nodes[0].users)


# When a plan is attached
# ----------------------------------------------------------------------------------------------------------------------


def check_compiled(model: nn.Module, plan: Plan, check: str) -> None:
    """Refuses a plan that compiled blocks of the model can't follow, and warns of what isn't seen inside compiled
    submodules.

    Raises:
        AttachError: a block that is compiled belongs to a run, say.
    """
    compiled = _compiled_paths(model)
    if not compiled:
        return
    paths = [_patterns.canonical(name) for name, _ in model.named_modules()]
    for node in plan.nodes:
        for leaf in leaves(node):
            if any(_patterns.is_within(leaf.path, outer) for outer in compiled):
                if (problem := _problem(node, check)) is not None:
                    raise _refusal(leaf.path, problem)
            elif isinstance(leaf.policy, Recompute):
                inside = sorted(path for path in compiled if _patterns.is_within(path, leaf.path))
                _warn_of_unseen(leaf.path, leaf.policy.save, inside, paths)


def is_compiled(model: nn.Module, path: str) -> bool:
    """Whether the module of that path, or one around it, is compiled."""
    return any(_patterns.is_within(path, outer) for outer in _compiled_paths(model))


def _compiled_paths(model: nn.Module) -> set[str]:
    return {_patterns.canonical(name) for name, module in model.named_modules() if _is_compiled(module)}


def _warn_of_unseen(path: str, save: Iterable[Selector], compiled: list[str], paths: list[str]) -> None:
    for submodule in compiled:
        inside = [other for other in paths if _patterns.is_within(other, submodule)]
        for selector in save:
            if isinstance(selector, Ops) or any(_patterns.matches(selector.pattern, other) for other in inside):
                warnings.warn(
                    f"block {path!r} saves {selector}, but {submodule!r} inside it is compiled, and nothing is seen in"
                    " there: it is computed again as a whole; compile the whole block, or don't compile that submodule",
                    stacklevel=4,
                )
                break


def _is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called, or it is what `torch.compile(module)` returned."""
    return _torch.any_compiled([module]) or type(module).__name__ == "OptimizedModule"
