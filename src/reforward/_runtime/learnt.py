"""What the runtime remembers of a block from one call to the next."""

from __future__ import annotations

from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from reforward._runtime.reach import Reached, Variable


class Learnt:
    """What earlier calls of one block taught.

    Attributes:
        seen: modules by index, and whether in training, of which a forward was seen: batch norm writes in training
            only.
        written: tensors that a forward wrote, by index of the module and name.
        proven: a replay was seen to compute the very values of its forward.
        adds_gradients: a forward differentiated something itself, and may have added to gradients.
        seen_through: the graph of a forward was looked through for these:
        uses_contexts: custom autograd functions keep tensors as attributes of their contexts.
        variables: what its code refers to; None: not looked yet. Then, of these:
        generators: those that hold generators.
        outside: those that a forward changed.
        bound: those that mustn't be another's in the replay: a bare function's, and those that hold tensors.
        submodules: the same of submodules that are kept whole, by path.
        functions: the same of functions that attributes and arguments hold, as long as these live.
    """

    __slots__ = (
        "adds_gradients",
        "bound",
        "functions",
        "generators",
        "outside",
        "proven",
        "seen",
        "seen_through",
        "submodules",
        "uses_contexts",
        "variables",
        "written",
    )

    def __init__(self):
        self.seen: set[tuple[int, bool]] = set()
        self.written: set[tuple[Any, ...]] = set()
        self.proven = False
        self.adds_gradients = False
        self.seen_through = False
        self.uses_contexts = False
        self.variables: list[Variable] | None = None
        self.generators: list[Variable] = []
        self.outside: list[Variable] = []
        self.bound: list[Variable] = []
        self.submodules: dict[str, Learnt] = {}
        self.functions: WeakKeyDictionary[FunctionType, Reached] = WeakKeyDictionary()
