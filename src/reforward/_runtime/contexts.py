"""Tensors that custom autograd functions keep as attributes of their context (`ctx.acts = ...`).

No hook on saved tensors sees these. A context is the function's node in the graph, so after a forward the nodes that it
made are looked through: such attributes are taken from them, and a hook in front of each node's backward brings them
back, from the same node of the replay's graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from reforward import _torch
from reforward._errors import ReplayMismatchError
from reforward._runtime.parts import IMMUTABLE, Parts, leaves_in

_TAKEN = object()  # in an attribute's place until the replay has it


class Contexts:
    """The contexts of one call that keep tensors, emptied.

    Args:
        name: the block, for messages.
        result: what the call returned.
        start: the graph's position when the call began.
        held: storages that live anyway.
        bring_back: fills them again, by `fill`.
    """

    def __init__(self, name: str, result: Any, start: int, held: set[int], bring_back: Callable[[], None]):
        self._name = name
        self._places: list[tuple[weakref.ref[Any], list[str]]] = []
        self._filled: dict[tuple[Any, str], _Filled] = {}
        for node in _nodes_made(result, start):
            names = [key for key, value in node.__dict__.items() if _is_worth_taking(value, held)]
            self._places.append((weakref.ref(node), names))
            if names:
                node.register_prehook(_Before(weakref.ref(node), names, bring_back))
        self.empty()

    @property
    def any_taken(self) -> bool:
        """Whether there is anything to bring back."""
        return any(names for _, names in self._places)

    @property
    def alive(self) -> bool:
        """Whether a node may still need it."""
        return any(names and reference() is not None for reference, names in self._places)

    def empty(self) -> None:
        """Takes the attributes away, but for those that a backward has changed: the next one reads them so."""
        for reference, names in self._places:
            node = reference()
            for name in list(names) if node is not None else ():
                filled = self._filled.pop((reference, name), None)
                if filled is None or filled.is_intact(node.__dict__.get(name)):
                    node.__dict__[name] = _TAKEN
                else:
                    names.remove(name)

    def fill(self, result: Any, start: int) -> None:
        """Brings the attributes back from the graph of a replay.

        Args:
            result: what the replay returned.
            start: the graph's position when the replay began.
        """
        again = list(_nodes_made(result, start))
        if len(again) != len(self._places):
            raise ReplayMismatchError(
                f"block {self._name!r} used {len(self._places)} custom autograd functions in its forward, and"
                f" {len(again)} in its replay. Something that its forward depends on was changed between forward and"
                " backward; keep it unchanged, or leave this block out of the plan"
            )
        for (reference, names), other in zip(self._places, again, strict=True):
            node = reference()
            for name in names if node is not None else ():
                if node.__dict__.get(name) is _TAKEN:
                    value = node.__dict__[name] = other.__dict__[name]
                    self._filled[reference, name] = _Filled(value)


class _Filled:
    """A value as it was brought back."""

    def __init__(self, value: Any):
        self._value = value
        tensors = [leaf for leaf in leaves_in(value) if isinstance(leaf, torch.Tensor)]
        self._versions = [(tensor, _torch.version(tensor)) for tensor in tensors]

    def is_intact(self, now: Any) -> bool:
        return now is self._value and all(_torch.version(tensor) == version for tensor, version in self._versions)


class _Before:
    """Runs in front of a node's backward."""

    def __init__(self, node: weakref.ref[Any], names: list[str], bring_back: Callable[[], None]):
        self._node = node
        self._names = names
        self._bring_back = bring_back

    def __call__(self, gradients: Any) -> None:
        node = self._node()
        if node is not None and any(node.__dict__.get(name) is _TAKEN for name in self._names):
            self._bring_back()


def _nodes_made(result: Any, start: int) -> Iterator[Any]:
    """The nodes of custom functions that were made from a position on and lead to a result, in the order of making."""
    found: dict[Any, None] = {}
    queue = [leaf.grad_fn for leaf in leaves_in(result) if isinstance(leaf, torch.Tensor)]
    seen = set[Any]()
    while queue:
        node = queue.pop()
        if node is None or node in seen or _torch.node_position(node) < start:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found[node] = None
        queue += [following for following, _ in node.next_functions]
    return iter(sorted(found, key=_torch.node_position))


def _is_worth_taking(value: Any, held: set[int]) -> bool:
    """Whether a value is made of tensors without a graph, at least one of which would be freed."""
    if type(value) in IMMUTABLE:
        return False
    parts = Parts()
    parts.take(value)
    tensors = [leaf for leaf in parts.leaves if isinstance(leaf, torch.Tensor)]
    if len(tensors) != len(parts.leaves) or any(tensor.requires_grad for tensor in tensors):
        return False  # of a graph of its own: a double backward goes through it
    return any(_torch.storage_key(tensor) not in held for tensor in tensors)
