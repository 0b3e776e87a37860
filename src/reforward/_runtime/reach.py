"""What the code of a block refers to beside its modules and arguments: closures and globals.

Generators among them are rewound for a replay, like those that modules and arguments hold. Other state that lives there
is out of reach: when a replay is seen to change it again, a warning says so.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterable
from typing import Any

from torch import nn

from reforward._runtime.streams import OwnStream

_MOST_PLACES = 500
_CONTAINERS = (list, dict, set)
_NUMBERS = (int, float)

#: Where a name of a function lives: the dict of globals and the name, or the cell.
Place = tuple[dict[str, Any], str] | types.CellType


def forwards(modules: Iterable[nn.Module]) -> list[Any]:
    """The forward functions of some modules' classes, each once."""
    # Looked up without calling: the one of a scripted module's class is a descriptor that fails without a module.
    return list(dict.fromkeys(inspect.getattr_static(type(module), "forward") for module in modules))


def generator_places(functions: Iterable[Any]) -> list[Place]:
    """Where some functions find generator objects in closures and globals."""
    places = [place for function in dict.fromkeys(functions) for place in _places_of(function)]
    return [place for place in places if OwnStream.among([value_at(place)])]


class Outside:
    """Globals and closure cells that the forwards of some modules refer to, before a forward: to see what it
    changes."""

    def __init__(self, modules: Iterable[nn.Module]):
        places = [place for forward in forwards(modules) for place in _places_of(forward)]
        self._before = [(p, v, _content(v)) for p in places if isinstance(v := value_at(p), (*_CONTAINERS, *_NUMBERS))]

    def changed(self) -> list[str]:
        """The names of those that aren't as they were."""
        return [_name(place) for place, value, content in self._before if self._differs(place, value, content)]

    @staticmethod
    def _differs(place: Place, value: Any, content: Any) -> bool:
        now = value_at(place)
        if isinstance(value, _NUMBERS):
            return type(now) is not type(value) or now != value
        return now is not value or _content(now) != content


def _content(value: Any) -> Any:
    """What a container holds, by identity."""
    if isinstance(value, dict):
        return [(id(key), id(item)) for key, item in value.items()]
    return [id(item) for item in value] if isinstance(value, _CONTAINERS) else None


def _places_of(function: Any) -> list[Place]:
    """Where the values live that a function, and the functions that it refers to, may use."""
    found: list[Place] = []
    queue, seen = [function], set[int]()
    while queue and len(found) < _MOST_PLACES:
        plain = _plain_function(queue.pop(0))
        if plain is None or id(plain.__code__) in seen or plain.__module__.partition(".")[0] == "torch":
            continue
        seen.add(id(plain.__code__))
        names = [name for name in _names_in(plain.__code__) if name in plain.__globals__]
        places: list[Place] = [*(plain.__closure__ or ()), *[(plain.__globals__, name) for name in names]]
        found += places
        queue += [value for place in places if callable(value := value_at(place)) and not isinstance(value, type)]
    return found


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


def value_at(place: Place) -> Any:
    """What is there now; None if nothing is."""
    if isinstance(place, tuple):
        return place[0].get(place[1])
    try:
        return place.cell_contents
    except ValueError:  # an empty cell: the variable isn't bound yet
        return None


def _name(place: Place) -> str:
    return f"the global {place[1]!r}" if isinstance(place, tuple) else "a variable of an enclosing function"
