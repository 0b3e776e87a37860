"""What the code of a block refers to beside its modules and arguments: closures and globals.

Generators among them are rewound for a replay, like those that modules and arguments hold. So are numbers, lists and
dicts that a forward of the block was seen to change. Other state is out of reach: when a replay is seen to change it, a
warning says so.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from reforward import _torch
from reforward._runtime.parts import Parts, Ref
from reforward._runtime.streams import OwnStream

_MOST_VARIABLES = 500
_STATE = frozenset({bool, int, float, str, list, dict, set, deque, Counter, OrderedDict, defaultdict})

#: Where a name of a function lives: the dict of globals and the name, or the cell.
Variable = tuple[dict[str, Any], str] | types.CellType


_SYSTEM = ("torch", "builtins")


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


def variables_of_function(function: Any) -> list[Variable]:
    """The variables that a function may use."""
    return _variables([function])


def those_with_generators(variables: Iterable[Variable]) -> list[Variable]:
    """Those that hold a generator object."""
    return [variable for variable in variables if OwnStream.among([value_of(variable)])]


class Outside:
    """Numbers and containers of some variables, before a forward.

    Args:
        variables: the variables.
        bound: those of them that count also if the forward doesn't change them.
    """

    def __init__(self, variables: Iterable[Variable], bound: Sequence[Variable] = ()):
        self._parts = Parts()
        self._bound = set(map(_identity, bound))
        found = [(variable, value) for variable in variables if type(value := value_of(variable)) in _STATE]
        self._refs: list[tuple[Variable, Ref]] = [(variable, self._parts.take(value)) for variable, value in found]
        self._parts.close()

    def keep_changed(self) -> list[Variable]:
        """To be called when the forward has ended: from now on only what it changed counts, which is returned, and what
        is bound."""
        changed = [v for v, ref in self._refs if not self._parts.matches(ref, value_of(v), {})]
        wanted = self._bound.union(map(_identity, changed))
        self._refs = [(v, ref) for v, ref in self._refs if _identity(v) in wanted]
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


def _identity(variable: Variable) -> Any:
    """Equal for one and the same variable; two dicts of globals mustn't be compared."""
    return (id(variable[0]), variable[1]) if isinstance(variable, tuple) else id(variable)


def _put(variable: Variable, value: Any) -> None:
    if isinstance(variable, tuple):
        variable[0][variable[1]] = value
    else:
        variable.cell_contents = value


def _variables(functions: Iterable[Any]) -> list[Variable]:
    found: dict[Any, Variable] = {}
    queue, seen = list(functions), set[int]()
    while queue and len(found) < _MOST_VARIABLES:
        plain = _plain_function(queue.pop(0))
        if plain is None or id(plain.__code__) in seen or (plain.__module__ or "").partition(".")[0] in _SYSTEM:
            continue
        seen.add(id(plain.__code__))
        names = [name for name in _names_in(plain.__code__) if name in plain.__globals__]
        variables: list[Variable] = [*(plain.__closure__ or ()), *[(plain.__globals__, name) for name in names]]
        found.update((_identity(variable), variable) for variable in variables)
        queue += [
            value for variable in variables if callable(value := value_of(variable)) and not isinstance(value, type)
        ]
    return list(found.values())


def _plain_function(value: Any) -> types.FunctionType | None:
    while True:
        if isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, types.MethodType):
            value = value.__func__
        elif isinstance(value, types.FunctionType) and "__wrapped__" in value.__dict__:
            value = value.__dict__["__wrapped__"]
        else:
            return value if isinstance(value, types.FunctionType) else None


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


def _name(variable: Variable) -> str:
    return f"the global {variable[1]!r}" if isinstance(variable, tuple) else "a variable of an enclosing function"
