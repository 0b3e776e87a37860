"""What the code of a block refers to beside its modules and arguments: closures and globals.

Generators that they hold at any depth are rewound for a replay, like those that modules and arguments hold. So are
numbers, lists and dicts that a forward of the block was seen to change. Other state is out of reach: when a replay is
seen to change it, a warning says so.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from reforward import _torch
from reforward._runtime.parts import IMMUTABLE, Parts, Ref, leaves_in
from reforward._runtime.streams import OwnStream

_MOST_VARIABLES = 500
# None: what is made when it is first needed.
_STATE = frozenset({type(None), bool, int, float, str, list, dict, set, deque, Counter, OrderedDict, defaultdict})

#: Where a name of a function lives: the dict of globals and the name, or the cell.
Variable = tuple[dict[str, Any], str] | types.CellType


_HOLD_NOTHING = IMMUTABLE | {types.FunctionType, types.ModuleType, type}
_SYSTEM = ("torch", "builtins", "reforward")


def variables_of(modules: Iterable[nn.Module]) -> list[Variable]:
    """The variables that the code of some modules' classes may use."""
    return [variable for cls in dict.fromkeys(map(type, modules)) for variable in _variables_of_class(cls)]


def _variables_of_class(cls: type) -> list[Variable]:
    if cls not in _by_class:
        # Not asked for by its name: the one of a scripted module's class is a descriptor that fails without a module.
        forward = inspect.getattr_static(cls, "forward")
        own = [base for base in cls.__mro__ if (base.__module__ or "").partition(".")[0] not in _SYSTEM]
        _by_class[cls] = _variables([forward, *[value for base in own for value in vars(base).values()]])
    return _by_class[cls]


_by_class: WeakKeyDictionary[type, list[Variable]] = WeakKeyDictionary()


def variables_of_function(*functions: Any) -> list[Variable]:
    """The variables that functions may use."""
    return _variables(functions)


class Reached(NamedTuple):
    """What counts of the variables that a function may use.

    Attributes:
        generators: those that hold generators.
        outside: those that a forward changed.
        bound: those that hold tensors, which mustn't be others, or overwritten, in the replay.
    """

    generators: list[Variable]
    outside: list[Variable]
    bound: list[Variable]


def those_with_generators(variables: Iterable[Variable]) -> list[Variable]:
    """Those that hold a generator object, at any depth."""
    return [variable for variable in variables if streams_in([variable])]


def streams_in(variables: Iterable[Variable]) -> list[OwnStream]:
    """The generators that variables hold at any depth, with their states now."""
    values = [value for variable in variables if type(value := value_of(variable)) not in _HOLD_NOTHING]
    return [stream for value in values for stream in OwnStream.among(leaves_in(value))]


def those_with_tensors(variables: Iterable[Variable]) -> list[Variable]:
    """Those that hold a tensor."""
    return [variable for variable in variables if isinstance(value_of(variable), torch.Tensor)]


class Outside:
    """Numbers and containers of some variables, before a forward.

    Args:
        variables: the variables.
        bound: those of them that count also if the forward doesn't change them.
    """

    def __init__(self, variables: Iterable[Variable], bound: Sequence[Variable] = ()):
        self._parts = Parts()
        self._bound = set(map(key_of, bound))
        found = [(variable, value) for variable in variables if type(value := value_of(variable)) in _STATE]
        self._refs: list[tuple[Variable, Ref]] = [(variable, self._parts.take(value)) for variable, value in found]
        self._parts.close()

    def keep_changed(self) -> list[Variable]:
        """To be called when the forward has ended: from now on only what it changed counts, which is returned, and what
        is bound."""
        changed = [v for v, ref in self._refs if not self._parts.matches(ref, value_of(v), {})]
        wanted = self._bound.union(map(key_of, changed))
        self._refs = [(v, ref) for v, ref in self._refs if key_of(v) in wanted]
        return changed

    def changed(self) -> list[str]:
        """The names of those that aren't as they were."""
        return list(dict.fromkeys(_name(p) for p, ref in self._refs if not self._parts.matches(ref, value_of(p), {})))

    def rewind(self) -> Callable[[], None]:
        """Puts values of these variables as they were; the function that is returned puts back those of now."""
        now = [(v, value, ref) for v, ref in self._refs if not self._parts.matches(ref, value := value_of(v), {})]
        made: dict[Ref, Any] = {}
        for variable, _, ref in now:
            _put(variable, self._parts.rebuild(ref, self._parts.leaf, made))

        def undo() -> None:
            for variable, value, _ in now:
                _put(variable, value)

        return undo


class Bindings:
    """What some variables stand for when a function is called: a loop may bind them to something else before the
    function is called again."""

    def __init__(self, variables: Iterable[Variable]):
        self._values = [(variable, value_of(variable)) for variable in variables]
        self._versions = [(v, t, _torch.version(t)) for v, t in self._values if isinstance(t, torch.Tensor)]

    def overwritten(self) -> str | None:
        """The name of a variable whose tensor was written in place since; None if there is none."""
        return next((_name(v) for v, tensor, version in self._versions if _torch.version(tensor) != version), None)

    def rewind(self) -> Callable[[], None]:
        """Binds the variables as they were; the function that is returned binds them as they are now."""
        moved = [(v, value, now) for v, value in self._values if (now := value_of(v)) is not value]
        for variable, value, _ in moved:
            _put(variable, value)

        def undo() -> None:
            for variable, _, now in moved:
                _put(variable, now)

        return undo


def _put(variable: Variable, value: Any) -> None:
    if isinstance(variable, tuple):
        variable[0][variable[1]] = value
    else:
        variable.cell_contents = value


def _variables(functions: Iterable[Any]) -> list[Variable]:
    found: dict[Any, Variable] = {}
    queue = deque(functions)
    seen: dict[int, Any] = {}  # by identity: the functions that a factory makes share their code, not their cells
    while queue and len(found) < _MOST_VARIABLES:
        function = queue.popleft()
        if id(function) in seen:
            continue
        seen[id(function)] = function
        queue += _inside(function)
        if isinstance(function, types.FunctionType):
            variables = _variables_of_code(function)
            found.update((key_of(variable), variable) for variable in variables)
            queue += [value for variable in variables if callable(value := value_of(variable))]
    return list(found.values())


def _inside(value: Any) -> list[Any]:
    """What a callable calls that isn't a function of Python, or wraps."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, (types.MethodType, staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    inside = [value.__dict__["__wrapped__"]] if "__wrapped__" in getattr(value, "__dict__", ()) else []
    return [*inside, *(value.__defaults__ or ())] if isinstance(value, types.FunctionType) else inside


def _variables_of_code(function: types.FunctionType) -> list[Variable]:
    """A function's cells, the globals that it names, its defaults and its attributes."""
    space = function.__globals__
    if (space.get("__name__") or "").partition(".")[0] in _SYSTEM:  # a decorator, if its cells hold anything
        return [*(function.__closure__ or ())]
    variables: list[Variable] = [*(function.__closure__ or ())]
    variables += [(space, name) for name in _names_in(function.__code__) if name in space]
    for own in (function.__kwdefaults__ or {}, function.__dict__):
        variables += [(own, name) for name in own if name != "__wrapped__"]
    if function.__defaults__:
        variables.append(({"__defaults__": function.__defaults__}, "__defaults__"))
    return variables


def _names_in(code: types.CodeType) -> list[str]:
    """The names that a function's code refers to, and those of the functions written inside it."""
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _names_in(const)]
    return [*code.co_names, *inner]


def value_of(variable: Variable) -> Any:
    """What is there now; None if nothing is."""
    if isinstance(variable, tuple):
        return variable[0].get(variable[1])
    try:
        return variable.cell_contents
    except ValueError:  # an empty cell: the variable isn't bound yet
        return None


def key_of(variable: Variable) -> Any:
    """Tells variables apart, while they live; two dicts of globals mustn't be compared."""
    return (id(variable[0]), variable[1]) if isinstance(variable, tuple) else id(variable)


def _name(variable: Variable) -> str:
    if not isinstance(variable, tuple):
        return "a variable of an enclosing function"
    return f"the global {variable[1]!r}" if "__name__" in variable[0] else f"a function's {variable[1]!r}"
