"""`rf.checkpoint`: one function call as a region, with the arguments of torch's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from reforward import _torch
from reforward._errors import InputError, ReplayMismatchError
from reforward._plan import Region
from reforward._policy import Modules, Ops, Policy, Recompute, Save
from reforward._runtime.call import Arguments, new_call
from reforward._runtime.current import current
from reforward._runtime.frames import is_open_to_regions
from reforward._runtime.learnt import Learnt
from reforward._runtime.parts import Parts
from reforward._runtime.reach import those_with_generators, variables_of, variables_of_function
from reforward._runtime.replay import Recording
from reforward._runtime.selective import Keeper
from reforward._runtime.streams import accelerators

_RECOMPUTE = Recompute()

ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    policy: Policy = _RECOMPUTE,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], ContextPair] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Calls `function(*args, **kwargs)` and keeps for backward only what the policy says.

    It takes every argument of `torch.utils.checkpoint.checkpoint` and can stand in for it.

    Args:
        function: a module or any other callable.
        policy: Recompute(save=...) by families of operations, or Save().
        use_reentrant: accepted for compatibility: there is one implementation, and it can do what either of torch's
            can.
        preserve_rng_state: False asks not to restore random streams for the replay. That is exact only where nothing is
            drawn, and there it costs nothing either, so the streams are restored in any case.
        context_fn: returns the contexts of the forward and of the replay.
        determinism_check: "default" compares shapes and types of replayed tensors with the forward's; "none" doesn't.
        debug: the error of a replay that differs lists the operations of both.
        early_stop: whether the replay may end after the last tensor that backward needs.

    Raises:
        InputError: an argument that can't be honoured.
        ReplayError: in backward, where the replay can't be exact.
    """
    del use_reentrant, preserve_rng_state
    if not callable(function):
        raise InputError(f"rf.checkpoint calls a function or module, not {function!r}")
    if context_fn is not None and not callable(context_fn):
        raise InputError(f"context_fn must be a function that returns two contexts, not {context_fn!r}")
    if determinism_check not in ("default", "none"):
        raise InputError(f"determinism_check must be 'default' or 'none', not {determinism_check!r}")
    if torch.compiler.is_compiling():
        options = {"determinism_check": determinism_check, "debug": debug, "early_stop": early_stop}
        return _in_compiler(function, policy, args, kwargs, context_fn, options)
    _check_policy(policy)
    in_forward, in_replay = _contexts_of(context_fn)
    frame = current.frame
    if (
        isinstance(policy, Save)
        or not is_open_to_regions(frame)
        or not torch.is_grad_enabled()
        or _torch.in_transform()
    ):
        with in_forward:
            return function(*args, **kwargs)
    arguments = Arguments(Parts(), args, kwargs)
    given = arguments.leaves
    modules = _modules_of(function, given)
    devices = accelerators([leaf for leaf in given if isinstance(leaf, torch.Tensor)] + _torch.parameters_of(modules))
    name = getattr(function, "__qualname__", type(function).__name__)
    record = _Record(in_forward, in_replay) if debug else None
    learnt = Learnt()
    learnt.seen_through = True  # it would be looked through at every call
    learnt.bound = variables_of_function(function)
    learnt.variables = learnt.outside = [*learnt.bound, *variables_of(modules)]
    learnt.generators = those_with_generators(learnt.variables)
    call = new_call(
        name,
        function,
        arguments,
        modules,
        devices=devices,
        learnt=learnt,
        check="discrete" if determinism_check == "default" else "nothing",
        previous=[],
        called_modules=0,
        in_replay=record.replay if record else lambda: in_replay,
        early_stop=early_stop,
    )
    recording = Recording(Region(path=name, policy=policy), devices=devices)
    with call.watched(), record.forward() if record else in_forward:
        result = recording.forward(call, args, kwargs, Keeper.of(policy, name), frame)
    call.seal()
    return result


def _contexts_of(context_fn: Callable[[], ContextPair] | None) -> ContextPair:
    made: Any = context_fn() if context_fn is not None else (nullcontext(), nullcontext())
    if not isinstance(made, (tuple, list)) or len(made) != 2 or not all(hasattr(one, "__enter__") for one in made):
        raise InputError(
            f"context_fn must return two contexts, one for the forward and one for the replay, not {made!r}"
        )
    return made[0], made[1]


def _check_policy(policy: Policy) -> None:
    for selector in policy.save if isinstance(policy, Recompute) else ():
        if isinstance(selector, Modules) or (isinstance(selector, Ops) and selector.within is not None):
            raise InputError(
                f"{selector!r}: submodules have no path inside a bare call; use rf.attach on the model instead"
            )


def _in_compiler(
    function: Callable[..., Any],
    policy: Policy,
    args: Any,
    kwargs: Any,
    context_fn: Callable[[], ContextPair] | None,
    options: dict[str, Any],
) -> Any:
    from reforward._runtime import compiled  # loads the compiler, which takes seconds

    if isinstance(policy, Save):
        return function(*args, **kwargs)
    eager = functools.partial(checkpoint, function, policy=policy, context_fn=context_fn, **options)
    name = getattr(function, "__qualname__", type(function).__name__)
    return compiled.region(function, policy, name, args, kwargs, eager, context_fn)


class _OpNames(_torch.TorchDispatchMode):
    """The names of the operations that run inside it."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class _Record:
    """Contexts with a record of the operations; an error in the replay then shows those of both passes.

    Args:
        in_forward, in_replay: the user's contexts.
    """

    def __init__(self, in_forward: AbstractContextManager[Any], in_replay: AbstractContextManager[Any]):
        self._in_forward, self._in_replay = in_forward, in_replay
        self._first = _OpNames()

    @contextmanager
    def forward(self) -> Iterator[None]:
        with self._in_forward, self._first:
            yield

    @contextmanager
    def replay(self) -> Iterator[None]:
        again = _OpNames()
        try:
            with self._in_replay, again:
                yield
        except ReplayMismatchError as error:
            records = f"\nforward: {' '.join(self._first.names)}\nreplay: {' '.join(again.names)}"
            raise ReplayMismatchError(f"{error}{records}") from error


def _modules_of(function: Callable[..., Any], given: list[Any]) -> list[nn.Module]:
    """The modules that a call may reach: the function itself, what it is bound to or closes over, its arguments, the
    globals that it names; also inside partials and containers of these, and functions that it closes over."""
    found: dict[nn.Module, None] = {}
    queue, seen = [function, *given], set()
    while queue:
        item = queue.pop(0)
        if isinstance(item, nn.Module):
            found.update(dict.fromkeys(_torch.submodules(item)))
        elif id(item) not in seen:
            seen.add(id(item))
            queue += _reached_from(item)
    return list(found)


def _reached_from(item: Any) -> list[Any]:
    if inspect.isfunction(item):
        named = [item.__globals__.get(name) for name in item.__code__.co_names]
        held = [value for value in named if isinstance(value, (nn.Module, list, tuple, dict))]
        return [*map(_content, item.__closure__ or ()), *(item.__defaults__ or ()), *held]
    if inspect.ismethod(item):
        return [item.__self__, item.__func__]
    if isinstance(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if isinstance(item, dict):
        return list(item.values())
    return list(item) if isinstance(item, (list, tuple, set)) else []


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell: the variable isn't bound yet
        return None
