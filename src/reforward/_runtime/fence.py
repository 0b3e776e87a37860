"""What must not happen twice or differently: random streams, buffers, attributes, hooks, settings.

A `Fence` is taken before a call's forward and sealed after it. `rewind()` puts the world back to where that forward
began and returns a function that undoes it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

import torch

from reforward._runtime.ambient import Ambient
from reforward._runtime.hooks import Hooks
from reforward._runtime.learnt import Learnt
from reforward._runtime.module_state import ModuleState
from reforward._runtime.parts import Ref
from reforward._runtime.reach import (
    Bindings,
    Outside,
    Reached,
    Variable,
    key_of,
    streams_in,
    those_with_generators,
    those_with_tensors,
    variables_of,
    variables_of_function,
)
from reforward._runtime.streams import OwnStream, RngState

NO_CONTEXT = nullcontext()


class Fence:
    """The world before one call's forward. See the module's docstring.

    Args:
        state: of the call's modules.
        devices: accelerators that the call may draw random numbers on.
        hooks: those inside the call.
        learnt: of earlier calls: which variables outside of modules and arguments count.
    """

    __slots__ = ("_ambient", "_bindings", "_hooks", "_learnt", "_new", "_outside", "_rng", "_state", "_streams")

    def __init__(
        self,
        state: ModuleState,
        devices: tuple[torch.device, ...],
        hooks: Hooks,
        learnt: Learnt,
    ):
        self._state = state
        self._learnt = learnt
        self._hooks = hooks
        self._new: list[tuple[FunctionType | None, list[Variable]]] = []
        generators, outside, bound = learnt.generators, learnt.outside, learnt.bound
        if learnt.variables is None or state.functions or hooks.any:
            generators, outside, bound = self._look_around(learnt)
        self._outside = Outside(outside, bound) if outside else None
        self._bindings = Bindings(bound) if bound else None
        self._rng = RngState.capture(devices)
        self._ambient = Ambient.capture(devices)
        self._streams: list[OwnStream] = streams_in(generators) if generators else []

    def _look_around(self, learnt: Learnt) -> Reached:
        """What counts of all variables; of code that was never looked through, all may hold generators or change."""
        found = Reached(learnt.generators.copy(), learnt.outside.copy(), learnt.bound.copy())
        if learnt.variables is None:
            self._new.append((None, variables_of(self._state.modules)))
        for function in (*self._state.functions, *self._hooks.functions):
            known = learnt.functions.get(function)
            if known is None:
                self._new.append((function, variables_of_function(function)))
            else:
                for all_of_them, of_this in zip(found, known, strict=True):
                    all_of_them += of_this
        for _, variables in self._new:
            found.generators.extend(variables)
            found.outside.extend(variables)
            found.bound.extend(those_with_tensors(variables))
        return found

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The parameters and buffers of the modules, as they are in place now."""
        return self._state.tensors

    def expect_in_place(self, storages: set[int]) -> None:
        """Refuses parameters whose memory isn't among these storages, which it was when the forward ran.

        Raises:
            MutationError: there is one.
        """
        self._state.expect_in_place(storages)

    def overwritten_outside(self) -> str | None:
        """The name of a variable whose tensor was written in place since; None if there is none."""
        return self._bindings.overwritten() if self._bindings is not None else None

    def snapshot_outside(self) -> Outside:
        """What the code of the modules refers to beside modules and arguments."""
        return Outside(self._learnt.variables or [])

    @property
    def needs_the_end(self) -> bool:
        """Whether a replay must run to its end, for the sake of a hook."""
        return self._hooks.act

    def watched(self) -> AbstractContextManager[Any]:
        """To be put around the forward."""
        return self._hooks.watched() if self._hooks.any else NO_CONTEXT

    def seal(self) -> None:
        """To be called when the forward has ended."""
        self._state.seal()
        changed = self._outside.keep_changed() if self._outside is not None else []
        if self._new:
            self._learn(changed)

    def _learn(self, changed: list[Variable]) -> None:
        keys, learnt = set(map(key_of, changed)), self._learnt
        for function, variables in self._new:
            # Looked at again: a generator may be made when it is first needed.
            reached = Reached(
                those_with_generators(variables),
                [v for v in variables if key_of(v) in keys],
                those_with_tensors(variables),
            )
            if function is not None:
                learnt.functions[function] = reached
            else:
                learnt.variables, (learnt.generators, learnt.outside, learnt.bound) = variables, reached
        self._new = []

    def rewind(self) -> tuple[Callable[[], None], dict[Ref, Any]]:
        """Puts random streams, modules, hooks and settings as the forward found them.

        Returns:
            A function that puts modules, hooks, generator objects and settings as they are now; and what was made of
            the call's parts. The global streams are left where the replay takes them: whoever replays restores them
            once, when all calls are done.
        """
        undo_modules, made = self._state.rewind()
        undoing = [undo_modules]

        def undo() -> None:
            while undoing:
                undoing.pop()()

        try:
            if self._bindings is not None:
                undoing.append(self._bindings.rewind())
            if self._outside is not None:
                undoing.append(self._outside.rewind())
            undoing.append(self._hooks.rewind())
            undoing += [stream.now().apply for stream in self._streams]
            settings = self._ambient.enter()
            if settings is not None:
                undoing.append(settings.close)
            self._rng.apply()
            for stream in self._streams:
                stream.apply()
        except BaseException:
            undo()
            raise
        return undo, made
