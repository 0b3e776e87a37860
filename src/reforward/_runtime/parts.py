"""Python values taken apart before a forward and put together again for its replay.

A forward may append to a list, fill a cache object, set attributes of a state that it was given. A replay must find all
these as the forward found them, and what it does to them must not be seen outside. So lists, dicts and plain objects
that a forward can reach are taken apart down to what they hold; a replay gets new ones, put together from that. What
was one object in two places is one again.

Nothing of what is taken apart is kept itself: a value that holds the forward's own output would keep the whole graph
alive, in a cycle that no garbage collector sees. What it held *before* the forward can't.
"""

from __future__ import annotations

import abc
import enum
import functools
import io
import sys
import types
import weakref
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol

import torch
from torch import nn

from reforward import _torch

#: A leaf, or ~n for the n-th node.
Ref = int

# Types of which every value stays as it is.
IMMUTABLE = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(...), torch.dtype, torch.Size, torch.device, torch.layout,
     torch.memory_format, range, slice}
)  # fmt: skip
_OPAQUE = (
    nn.Module, torch.Tensor, torch.Generator, type, types.ModuleType, types.FunctionType, functools.partial, enum.Enum,
    BaseException,
)  # fmt: skip
# Classes of these are the system's own and lead anywhere (loggers, threads, files), but for the bases listed.
_SYSTEM = sys.stdlib_module_names | {"torch", "numpy"}
_BASE_MODULES = {"collections.abc", "typing"}
_PLAIN = {
    "argparse.Namespace", "argparse._AttributeHolder", "collections.ChainMap", "contextlib.AbstractContextManager",
    "contextlib.AbstractAsyncContextManager", "contextlib.ContextDecorator", "contextlib.AsyncContextDecorator",
    "queue.Queue", "queue.LifoQueue", "queue.PriorityQueue",
}  # fmt: skip
_BASES = {
    object, dict, list, deque, set, OrderedDict, defaultdict, Counter, types.SimpleNamespace, Generic, Protocol,
    abc.ABC, UserDict, UserList, *UserDict.__mro__, *UserList.__mro__,
}  # fmt: skip
_POINTER_BYTES = 8
# A value that leads to more than this (a trainer, the whole program) is left alone from there on, and so is a container
# that holds more (a vocabulary).
_MOST_NODES = 1000
_MOST_ITEMS = 10_000
_DEEPEST = 40


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """How values of one type are taken apart and put together.

    Attributes:
        open: the children and the context of a value.
        make: a value from its children and context.
        fill: puts children into a value that `make` made of none; None: `make` needs them.
        frozen: values can't be changed once made.
    """

    open: Callable[[Any], tuple[list[Any], Any]]
    make: Callable[[type, list[Any], Any], Any]
    fill: Callable[[Any, list[Any], Any], None] | None = None
    frozen: bool = False


def _open_dict(value: dict[Any, Any]) -> tuple[list[Any], Any]:
    return _with_keys(list(dict.keys(value)), list(dict.values(value)))


def _with_keys(keys: list[Any], values: list[Any]) -> tuple[list[Any], Any]:
    """Keys that are objects are taken apart as well, since they may be found elsewhere, too."""
    return (values, keys) if IMMUTABLE.issuperset(map(type, keys)) else ([*keys, *values], None)


def _items(children: list[Any], keys: list[Any] | None) -> Iterable[tuple[Any, Any]]:
    half = len(children) // 2
    return zip(keys, children, strict=True) if keys is not None else zip(children[:half], children[half:], strict=True)


def _open_defaultdict(value: defaultdict[Any, Any]) -> tuple[list[Any], Any]:
    children, keys = _open_dict(value)
    return children, (value.default_factory, keys)


def _fill_defaultdict(value: defaultdict[Any, Any], children: list[Any], context: Any) -> None:
    value.default_factory = context[0]
    dict.update(value, _items(children, context[1]))


def _fill_ordered(value: OrderedDict[Any, Any], children: list[Any], keys: Any) -> None:
    for key, child in _items(children, keys):
        OrderedDict.__setitem__(value, key, child)


# Methods of these stay themselves, as these do.
_STAYS = (nn.Module, type, types.ModuleType, type(None))


def _open_partial(value: functools.partial[Any]) -> tuple[list[Any], Any]:
    given = [*value.args, *value.keywords.values()]
    if IMMUTABLE.issuperset(map(type, given)) and isinstance(value.func, (types.FunctionType, *_STAYS)):
        return [], None
    return [value.func, *given], (len(value.args), tuple(value.keywords))


def _make_partial(cls: type, children: list[Any], context: Any) -> Any:
    count, names = context
    return cls(*children[: count + 1], **dict(zip(names, children[count + 1 :], strict=True)))


_PARTIAL = _Kind(open=_open_partial, make=_make_partial, frozen=True)
_METHOD = _Kind(
    open=lambda value: ([] if isinstance(value.__self__, _STAYS) else [value.__func__, value.__self__], None),
    make=lambda cls, children, context: cls(*children),
    frozen=True,
)
_BUILTIN_METHOD = _Kind(
    open=lambda value: ([] if isinstance(value.__self__, _STAYS) else [value.__self__], value.__name__),
    make=lambda cls, children, name: getattr(children[0], name),
    frozen=True,
)
_LIST = _Kind(
    open=lambda value: (list(list.__iter__(value)), None),
    make=lambda cls, children, context: cls(),
    fill=lambda value, children, context: list.extend(value, children),
)
_DICT = _Kind(
    open=_open_dict,
    make=lambda cls, children, keys: cls(),
    fill=lambda value, children, keys: dict.update(value, _items(children, keys)),
)
_KINDS: dict[type, _Kind | None] = {
    list: _LIST,
    dict: _DICT,
    OrderedDict: _Kind(
        open=lambda value: _with_keys(list(OrderedDict.keys(value)), list(OrderedDict.values(value))),
        make=lambda cls, children, keys: cls(),
        fill=_fill_ordered,
    ),
    Counter: _DICT,
    set: _Kind(
        open=lambda value: (list(set.__iter__(value)), None),
        make=lambda cls, children, context: cls(),
        fill=lambda value, children, context: set.update(value, children),
    ),
    **dict.fromkeys(
        (frozenset, tuple),
        _Kind(open=lambda value: (list(value), None), make=lambda cls, children, context: cls(children), frozen=True),
    ),
    deque: _Kind(
        open=lambda value: (list(deque.__iter__(value)), value.maxlen),
        make=lambda cls, children, context: cls(),
        fill=deque.__init__,
    ),
    types.MappingProxyType: _Kind(
        open=lambda value: _open_dict(dict(value)),
        make=lambda cls, children, keys: cls(dict(_items(children, keys))),
    ),
    types.MethodType: _METHOD,
    types.BuiltinFunctionType: _BUILTIN_METHOD,
    functools.partial: _PARTIAL,
    defaultdict: _Kind(open=_open_defaultdict, make=lambda cls, children, context: cls(), fill=_fill_defaultdict),
    **dict.fromkeys(IMMUTABLE),
}


def _kind_of(cls: type) -> _Kind | None:
    """How values of a type are taken apart; None: they aren't."""
    if cls not in _KINDS:
        _KINDS[cls] = _new_kind(cls)
    return _KINDS[cls]


def _new_kind(cls: type) -> _Kind | None:
    if issubclass(cls, _OPAQUE) or hasattr(cls, "__del__") or hasattr(cls, "__next__"):
        return None
    registered = _torch.registered_node(cls)
    if registered is not None:
        opening, making = registered
        return _Kind(open=opening, make=lambda cls, children, context: making(children, context))
    if issubclass(cls, tuple):  # a named tuple, or PackedSequence, whose own __new__ takes other arguments
        return _Kind(
            open=lambda value: (list(value), None),
            make=lambda cls, children, context: tuple.__new__(cls, children),
            frozen=True,
        )
    return _object_kind(cls)


def _object_kind(cls: type) -> _Kind | None:
    """Plain objects of Python classes, also if they are dicts or lists besides."""
    bases = (OrderedDict, defaultdict, dict, list, deque, set, types.SimpleNamespace)
    base = next((b for b in bases if issubclass(cls, b)), object)
    slots = frozenset(name for b in cls.__mro__ for name in _slots(b))
    most_bytes = base.__basicsize__ + _POINTER_BYTES * (len(slots) + 2)  # more, and it is written in C
    if _is_foreign(cls) or cls.__basicsize__ > most_bytes or cls.__new__ is not base.__new__:
        return None
    if base is object and not slots and not cls.__dictoffset__:  # it holds nothing
        return None
    create: Callable[[type], Any] = base.__new__
    try:
        create(cls)
    except TypeError:  # a class that makes its objects in another way
        return None
    own = _KINDS.get(base)

    def opened(value: Any) -> tuple[list[Any], Any]:
        state = dict(object.__getattribute__(value, "__dict__")) if cls.__dictoffset__ else {}
        for name in slots:
            with suppress(AttributeError):
                state[name] = object.__getattribute__(value, name)
        items, keys = own.open(value) if own is not None else ([], None)
        return [*state.values(), *items], (tuple(state), keys)

    def fill(value: Any, children: list[Any], context: Any) -> None:
        names, keys = context
        for name, child in zip(names, children, strict=False):
            if name in slots:
                object.__setattr__(value, name, child)
            else:
                value.__dict__[name] = child
        if own is not None and own.fill is not None:
            own.fill(value, children[len(names) :], keys)

    return _Kind(open=opened, make=lambda cls, children, context: create(cls), fill=fill)


def _is_foreign(cls: type) -> bool:
    """Whether a class is the system's own, or derived from one that is."""
    return any(
        base not in _BASES
        and base.__module__ not in _BASE_MODULES
        and f"{base.__module__}.{base.__qualname__}" not in _PLAIN
        and base.__module__.partition(".")[0] in _SYSTEM
        for base in cls.__mro__
    )


@functools.cache
def keeps_its_identity(cls: type) -> bool:
    """Whether objects of a class aren't taken apart and put together, yet have attributes that can be put back: those
    that make or end themselves in a way of their own (`__new__`, `__del__`), and iterators."""
    return (
        _kind_of(cls) is None
        and not issubclass(cls, (*_OPAQUE, functools.partial))
        and bool(cls.__dictoffset__)
        and not _is_foreign(cls)
    )


def _slots(cls: type) -> list[str]:
    slots = cls.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [
        f"_{cls.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    ]


@dataclass(frozen=True, slots=True)
class _Node:
    """A value that was taken apart.

    Attributes:
        children: what it held, as far as that can't change.
        refs: the others, by position.
        context: what else is needed to make it again.
    """

    cls: type
    kind: _Kind
    children: list[Any]
    refs: dict[int, Ref]
    context: Any


class Weak(weakref.ref):
    """Stands for a leaf that somebody else keeps."""


class Parts:
    """Values taken apart.

    Attributes:
        leaves: what isn't taken apart further and may change, each once, in the order in which it was met.
    """

    def __init__(self):
        self.leaves: list[Any] = []
        self._nodes: list[_Node | None] = []
        self._met: dict[int, Ref] = {}

    def take(self, value: Any, depth: int = 0) -> Ref:
        """Takes a value apart. All values must live until `close`."""
        cls = type(value)
        kind = _KINDS[cls] if cls in _KINDS else _kind_of(cls)
        if kind is None:
            return self._leaf(value, cls)
        met = self._met.get(id(value))
        if met is not None:
            return met
        if depth > _DEEPEST or len(self._nodes) > _MOST_NODES:
            return self._leaf(value, cls)
        children, context = kind.open(value)
        open_ones = [i for i, child in enumerate(children) if type(child) not in IMMUTABLE]
        if len(children) > _MOST_ITEMS or len(open_ones) > _MOST_NODES or (kind.frozen and not open_ones):
            return self._leaf(value, cls)
        ref = ~len(self._nodes)
        self._nodes.append(None)
        if kind.fill is not None:
            self._met[id(value)] = ref
        refs = {i: self.take(children[i], depth + 1) for i in open_ones}
        for i in open_ones:
            children[i] = None
        self._nodes[~ref] = _Node(cls, kind, children, refs, context)
        self._met[id(value)] = ref
        return ref

    def _leaf(self, value: Any, cls: type) -> Ref:
        if cls in IMMUTABLE:
            self.leaves.append(value)
            return len(self.leaves) - 1
        ref = self._met.get(id(value))
        if ref is None:
            ref = self._met[id(value)] = len(self.leaves)
            self.leaves.append(value)
        return ref

    def close(self) -> None:
        """To be called when everything is taken: from now on a value that was met may be gone."""
        self._met = {}

    def matches(self, ref: Ref, value: Any, met: dict[Ref, Any]) -> bool:
        """Whether a value holds what the one that was taken apart held.

        Args:
            met: filled with the values that it holds.
        """
        if ref in met:
            return met[ref] is value
        met[ref] = value
        if ref >= 0:
            leaf = self.leaves[ref]
            if type(leaf) is Weak:
                return value is not None and leaf() is value
            return leaf is value or _equal(leaf, value)
        node = self._nodes[~ref]
        assert node is not None
        if type(value) is not node.cls:
            return False
        children, context = node.kind.open(value)
        if len(children) != len(node.children) or context != node.context:
            return False
        return all(
            self.matches(node.refs[i], now, met) if i in node.refs else now is before or _equal(now, before)
            for i, (before, now) in enumerate(zip(node.children, children, strict=True))
        )

    def leaf(self, ref: Ref) -> Any:
        """A leaf; None if nobody keeps it any more."""
        leaf = self.leaves[ref]
        return leaf() if type(leaf) is Weak else leaf

    def rebuild(self, ref: Ref, leaves: Callable[[Ref], Any], made: dict[Ref, Any]) -> Any:
        """A value like the one that was taken apart.

        Args:
            leaves: what stands for a leaf.
            made: what was made so far; to be shared by all values of one replay.
        """
        if ref in made:
            return made[ref]
        if ref >= 0:
            made[ref] = value = leaves(ref)
            return value
        node = self._nodes[~ref]
        assert node is not None
        value = None
        if node.kind.fill is not None:
            made[ref] = value = node.kind.make(node.cls, [], node.context)
        children = node.children.copy()
        for i, child in node.refs.items():
            children[i] = self.rebuild(child, leaves, made)
        if node.kind.fill is not None:
            node.kind.fill(value, children, node.context)
        else:
            made[ref] = value = node.kind.make(node.cls, children, node.context)
        return value


def leaves_in(value: Any) -> list[Any]:
    """What a value holds that isn't taken apart further, each once, in a fixed order."""
    if type(value) is torch.Tensor:
        return [value]
    parts = Parts()
    parts.take(value)
    return parts.leaves


def _equal(one: Any, other: Any) -> bool:
    """Whether two values that can't change are the same."""
    return type(one) is type(other) and type(one) in IMMUTABLE and one == other


def is_iterator(value: Any) -> bool:
    """Whether a value can be read once only. Files, which one writes to, don't count."""
    return hasattr(type(value), "__next__") and not issubclass(type(value), io.IOBase)
