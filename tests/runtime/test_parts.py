"""Values taken apart and put together again: as they were, however they are changed meanwhile."""

import enum
import logging
from argparse import Namespace
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import MutableSet
from contextlib import ContextDecorator
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reforward._runtime.parts import Parts


@dataclass
class Cache:
    keys: dict = field(default_factory=dict)
    lengths: list = field(default_factory=list)


class Slotted:
    __slots__ = ("__hidden", "shown")

    def __init__(self, shown, hidden):
        self.shown, self.__hidden = shown, hidden

    def values(self):
        return self.shown, self.__hidden


class Logged(list):
    """A list with an attribute."""


class Ordered(OrderedDict):
    """A dict with a class of its own."""


class Ring(deque):
    """A deque with a class of its own."""


class Names(set):
    """A set with a class of its own."""


class Ordinals(MutableSet):
    def __init__(self, *items):
        self.items = dict.fromkeys(items)

    def __contains__(self, item):
        return item in self.items

    def __iter__(self):
        return iter(self.items)

    def __len__(self):
        return len(self.items)

    def add(self, item):
        self.items[item] = None

    def discard(self, item):
        self.items.pop(item, None)


class Timer(ContextDecorator):
    def __init__(self):
        self.calls = 0

    def __eq__(self, other):
        return self.calls == other.calls


class Mode(enum.Enum):
    FAST = 1


Pair = namedtuple("Pair", "left right")


def again(value: Any, change: Any = lambda value: None) -> Any:
    parts = Parts()
    ref = parts.take(value)
    parts.close()
    change(value)
    return parts.rebuild(ref, lambda leaf: parts.leaves[leaf], {})


TENSOR = torch.ones(2)
VALUES = [
    [1, [2, 3]],
    {"a": [TENSOR], 1: {"b": None}},
    OrderedDict(b=1, a=[2]),
    defaultdict(list, a=[1]),
    Counter("aab"),
    deque([1, 2], maxlen=2),
    {1, 2},
    (1, [2], {"c": (3, [4])}),
    Pair([1], {"x": 2}),
    SimpleNamespace(a=[1], b=SimpleNamespace(c={2: 3})),
    Cache({"k": [1]}, [2]),
    Ring([1, [2]], maxlen=3),
    Names({1, 2}),
    Ordinals(1, 2),
    Timer(),
    ChainMap({"a": [1]}, {"b": 2}),
    Namespace(a=[1], b=2),
    MappingProxyType({"a": [1]}),
    partial(max, [1], key=[2].index),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_rebuilt_values_are_equal_and_of_the_same_type_and_new(value):
    made = again(value)
    assert type(made) is type(value)
    assert made == value or isinstance(value, partial)
    assert made is not value


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text(max_size=2), inner, max_size=3)
            | st.tuples(inner, inner)
            | st.builds(lambda a: SimpleNamespace(a=a), inner)
        ),
        max_leaves=12,
    )
)
def test_any_nesting_comes_back_and_matches(value):
    parts = Parts()
    ref = parts.take(value)
    assert parts.rebuild(ref, lambda leaf: parts.leaves[leaf], {}) == value
    assert parts.matches(ref, value, {})


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1], lambda value: value.append(2)),
        ([[1]], lambda value: value[0].clear()),
        ({"a": 1}, lambda value: value.pop("a")),
        (Cache({"k": TENSOR}), lambda value: value.keys.update(k=TENSOR * 2)),
        (SimpleNamespace(), lambda value: setattr(value, "new", 1)),
        (Slotted([1], 2), lambda value: value.shown.append(3)),
        (Logged([1]), lambda value: setattr(value, "note", "x")),
        (Ring([1], maxlen=2), lambda value: value.extend([2, 3])),
        (Names({1}), lambda value: value.add(2)),
        (Ordinals(1), lambda value: value.add(2)),
        (Timer(), lambda value: setattr(value, "calls", 1)),
        (ChainMap({}), lambda value: value.update(a=1)),
        (Namespace(a=1), lambda value: setattr(value, "a", 2)),
        (MappingProxyType({"a": [1]}), lambda value: value["a"].append(2)),
        (partial(max, [1]), lambda value: value.args[0].append(2)),
        ([1].append, lambda value: value(2)),
        (Ordinals(1).add, lambda value: value(2)),
    ],
    ids=lambda value: "" if isinstance(value, FunctionType) else type(value).__name__,
)
def test_what_is_changed_after_it_was_taken_comes_back_as_it_was(value, change):
    parts = Parts()
    ref = parts.take(value)
    assert parts.matches(ref, value, {})
    change(value)
    assert not parts.matches(ref, value, {})
    assert parts.matches(ref, parts.rebuild(ref, lambda leaf: parts.leaves[leaf], {}), {})


def test_slots_attributes_and_order_of_subclasses_survive():
    slotted = again(Slotted([1], {"h": 2}))
    assert slotted.values() == ([1], {"h": 2})
    logged = Logged([1, 2])
    logged.note = [3]
    made = again(logged)
    assert (list(made), made.note, type(made)) == ([1, 2], [3], Logged)
    ordered = Ordered(a=1, b=2)
    ordered.move_to_end("a")
    assert list(again(ordered)) == ["b", "a"]


def test_methods_and_partials_are_those_of_the_new_object():
    ordinals = Ordinals(1)
    made, add, later = again([ordinals, ordinals.add, partial(ordinals.discard, 1)])
    add(2)
    later()
    assert list(made) == [2]
    assert list(ordinals) == [1]


def test_a_deque_keeps_its_longest():
    made = again(Ring([1, 2], maxlen=2))
    made.append(3)
    assert (list(made), made.maxlen) == ([2, 3], 2)


def test_what_was_one_object_in_two_places_is_one_again_and_cycles_close():
    shared = [1]
    parent = SimpleNamespace(children=[], shared=shared)
    parent.children.append(SimpleNamespace(parent=parent, shared=shared))
    made = again(parent)
    assert made.children[0].parent is made
    assert made.children[0].shared is made.shared
    assert made.shared is not shared


@pytest.mark.parametrize(
    "value",
    [Mode.FAST, logging.getLogger("x"), torch.nn.Linear(1, 1), TENSOR, len, Cache, iter([1]), object(), "text", 3.5],
    ids=lambda value: type(value).__name__,
)
def test_what_has_an_identity_or_belongs_to_the_system_stays_itself(value):
    assert again([value])[0] is value


def test_a_value_that_leads_to_everything_is_taken_up_to_a_limit():
    words = list(range(20_000))
    assert again([words])[0] is words
    many = [SimpleNamespace(i=i) for i in range(5000)]
    assert again(many) is many
    numbers = list(range(9000))
    assert again(numbers) == numbers
    assert again(numbers) is not numbers


def test_objects_that_are_keys_are_the_ones_that_are_found_elsewhere():
    thing = Slotted(1, 2)
    made = again({"list": [thing], "dict": {thing: 1.0, Slotted: 2}, "user": UserDict(a=[1])})
    assert made["dict"][made["list"][0]] == 1.0
    assert made["dict"][Slotted] == 2, "a class stays itself"
    assert made["user"] == UserDict(a=[1])


def test_a_dict_with_tensors_as_keys_is_compared_by_their_identity():
    one, other = torch.ones(2), torch.ones(2)
    parts = Parts()
    ref = parts.take({one: 1})
    assert parts.matches(ref, {one: 1}, {})
    assert not parts.matches(ref, {other: 1}, {})
