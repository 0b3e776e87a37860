"""One call of a block: its arguments as the forward was given them, and the world around it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from reforward import _torch
from reforward._errors import MutationError, ReplayError
from reforward._runtime.fence import NO_CONTEXT, Fence
from reforward._runtime.fingerprint import Check
from reforward._runtime.hooks import Hooks
from reforward._runtime.learnt import Learnt
from reforward._runtime.module_state import ModuleState
from reforward._runtime.parts import Parts, Ref, Weak, is_iterator

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str})


class Arguments:
    """The arguments of a call, taken apart.

    Args:
        parts: to take them apart with, before anything else.

    Attributes:
        leaves: tensors, and what isn't taken apart.
    """

    __slots__ = ("_count", "_names", "_refs", "_steady", "leaves", "parts")

    def __init__(self, parts: Parts, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.parts = parts
        self._names = tuple(kwargs)
        self._count = len(args) + len(kwargs)
        values = (*args, *kwargs.values())
        self._steady: list[tuple[Ref, weakref.ref[Any]]] = []
        self._refs: list[Ref] | None = None
        if _PLAIN.issuperset(map(type, values)):
            parts.leaves.extend(values)
        else:
            self._refs = [parts.take(value) for value in values]
            for value, ref in zip(values, self._refs, strict=True):
                self._note_steady(value, ref)
        self.leaves = parts.leaves.copy()

    @property
    def nested(self) -> bool:
        """Whether there is more among them than tensors, numbers and the like."""
        return self._refs is not None

    def let_go(self) -> list[Any]:
        """The leaves; from now on their tensors aren't kept alive here."""
        leaves, self.leaves = self.leaves, []
        for ref, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                self.parts.leaves[ref] = Weak(leaf) if self._refs is not None else None
        return leaves

    def _note_steady(self, value: Any, ref: Ref) -> None:
        """Objects stay themselves as long as nothing in them changes: code may ask which one it has."""
        if ref < 0 and type(value).__weakrefoffset__:
            self._steady.append((ref, weakref.ref(value)))

    def seal(self) -> None:
        """To be called when the forward has ended: forgets the objects that it changed."""
        self._steady = [(ref, kept) for ref, kept in self._steady if self.parts.matches(ref, kept(), {})]

    def again(self, leaf: Callable[[Ref], Any], made: dict[Ref, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments like these.

        Args:
            leaf: what stands for a leaf.
            made: what was made already for this replay.
        """
        if self._refs is None:
            values = [leaf(ref) for ref in range(self._count)]
        else:
            for ref, kept in self._steady:
                same: dict[Ref, Any] = {}
                if self.parts.matches(ref, kept(), same):
                    made.update(same)
            values = [self.parts.rebuild(ref, leaf, made) for ref in self._refs]
        count = len(values) - len(self._names)
        return tuple(values[:count]), dict(zip(self._names, values[count:], strict=True))


class _Previous:
    """Stands for a leaf of the output of the call before."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


class Kept:
    """A tensor argument: its memory, whether it wants a gradient, its version when the call began, and attributes that
    Python code put on it."""

    __slots__ = ("_attributes", "_itself", "requires_grad", "tensor", "version")

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor.detach()
        self.requires_grad = tensor.requires_grad
        self.version = _torch.version(tensor)
        self._attributes = tensor.__dict__.copy() if tensor.__dict__ else None
        # One without a graph can be given again as it is, for code that asks which tensor it has.
        self._itself = tensor if not tensor.requires_grad or type(tensor) is torch.nn.Parameter else None

    @property
    def intact(self) -> bool:
        """Whether nobody wrote to it since."""
        return _torch.version(self.tensor) == self.version

    def fresh(self) -> torch.Tensor:
        """The tensor, as a leaf of a new graph."""
        if self._itself is not None:
            return self._itself
        fresh = self.tensor.detach().requires_grad_(self.requires_grad)
        for name, value in (self._attributes or {}).items():
            setattr(fresh, name, value)
        return fresh


class Call:
    """One call of a block, with all that is needed to make it again.

    Args:
        name: the block, for messages.
        function: what to call; never a region itself.
        arguments: what it is called with.
        previous: leaves of the output of the call before, if this one belongs to the same run.
        fence: the world before the call.
        in_replay: makes a further context for the replay.
        early_stop: whether a replay may end after the last tensor that is needed.
        check: what of a replay is compared with the forward.
        learnt: is told when a replay was seen to compute the same values.
        compiled: whether modules inside it are.
    """

    __slots__ = (
        "_arguments",
        "_held",
        "_leaves",
        "check",
        "compiled",
        "early_stop",
        "fence",
        "function",
        "in_replay",
        "learnt",
        "name",
    )

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Arguments,
        *,
        previous: list[Any],
        fence: Fence,
        check: Check,
        learnt: Learnt,
        in_replay: Callable[[], AbstractContextManager[Any]] = lambda: NO_CONTEXT,
        early_stop: bool = True,
        compiled: bool = False,
    ):
        self.name = name
        self.function = function
        self.fence = fence
        self.in_replay = in_replay
        self.early_stop = early_stop
        self.check: Check = check
        self.learnt = learnt
        self.compiled = compiled
        self._arguments = arguments
        self._held: tuple[list[torch.Tensor], set[int]] | None = None
        positions = {id(leaf): i for i, leaf in enumerate(previous) if isinstance(leaf, torch.Tensor)}
        kept: dict[int, Kept] = {}  # a tensor that is given twice is kept once
        self._leaves = [
            leaf
            if not isinstance(leaf, torch.Tensor)
            else _Previous(positions[id(leaf)])
            if id(leaf) in positions
            else kept.setdefault(id(leaf), Kept(leaf))
            for leaf in arguments.let_go()
        ]
        if arguments.nested:
            self._refuse_iterators()

    def _refuse_iterators(self) -> None:
        for leaf in self._leaves:
            if is_iterator(leaf):
                raise ReplayError(
                    f"block {self.name!r} is given an iterator ({type(leaf).__name__}), which can't be read again"
                    " when the block is computed again; give it a list, or leave this block out of the plan"
                )

    def watched(self) -> AbstractContextManager[Any]:
        """To be put around the forward."""
        return self.fence.watched()

    def seal(self) -> None:
        """To be called when the forward has ended.

        Raises:
            MutationError: the block changed an argument in place, so its value before is lost.
            ReplayError: it changed something else that can't be brought back.
        """
        for leaf in self._leaves:
            if isinstance(leaf, Kept) and not leaf.intact:
                raise self._mutated(leaf, "in its own forward")
        self._arguments.seal()
        self.fence.seal()
        self.early_stop = self.early_stop and not self.fence.needs_the_end

    def begin_again(self, previous: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any], Callable[[], None]]:
        """Puts the world as the forward found it and makes fresh arguments, cut off from the graph that made them.

        Args:
            previous: leaves of the output of the call before.

        Returns:
            The arguments, and a function that puts the world as it is now.

        Raises:
            MutationError: an argument, a parameter or a buffer was changed in place since the call.
        """
        for kept in self._leaves:
            if isinstance(kept, Kept):
                self._expect_intact(kept)
        if self._held is not None:
            self.fence.expect_in_place(self._held[1])
        if (variable := self.fence.overwritten_outside()) is not None:
            raise MutationError(
                f"block {self.name!r}: the tensor that {variable} stands for was changed in place after its forward"
                " began, so the block can't be computed again from it; write that operation out of place, or pass the"
                " tensor as an argument"
            )
        undo, made = self.fence.rewind()
        try:
            fresh: dict[Kept, torch.Tensor] = {}  # and given twice again: attention asks whether `query is key`

            def leaf(ref: Ref) -> Any:
                kept = self._leaves[ref]
                if isinstance(kept, Kept):
                    if kept not in fresh:
                        fresh[kept] = kept.fresh()
                    return fresh[kept]
                # The output before isn't cut off: the block may overwrite it, as it did in forward.
                return previous[kept.index] if isinstance(kept, _Previous) else kept

            return *self._arguments.again(leaf, made), undo
        except BaseException:
            undo()
            raise

    def watched_again(self) -> AbstractContextManager[Any]:
        """To be put around a replay."""
        return self._warned_of_changes() if self.check == "values" else NO_CONTEXT

    @contextmanager
    def _warned_of_changes(self) -> Iterator[None]:
        """Warns if something beyond the reach of the fence is changed."""
        outside = self.fence.snapshot_outside()
        try:
            yield
        finally:
            if changed := outside.changed():
                warnings.warn(
                    f"block {self.name!r} changed {', '.join(changed)} when it was computed again for backward;"
                    " write `if not rf.is_replaying():` around that, or keep the value in the block, which is put back",
                    stacklevel=2,
                )

    def entry_of(self, previous: list[Any]) -> list[Kept | None]:
        """What a recording that begins with this call keeps of the output of the call before: the leaves that it
        takes."""
        needed = {leaf.index for leaf in self._leaves if isinstance(leaf, _Previous)}
        return [Kept(leaf) if i in needed else None for i, leaf in enumerate(previous)]

    def enter(self, entry: list[Kept | None]) -> list[Any]:
        """The inverse of `entry_of`.

        Raises:
            MutationError: a tensor was changed in place since.
        """
        for kept in entry:
            if kept is not None:
                self._expect_intact(kept)
        return [kept and kept.fresh() for kept in entry]

    def _expect_intact(self, kept: Kept) -> None:
        if not kept.intact:
            raise self._mutated(kept, "after its forward")

    def _mutated(self, leaf: Kept, when: str) -> MutationError:
        return MutationError(
            f"block {self.name!r}: an argument of shape {tuple(leaf.tensor.shape)} ({leaf.tensor.dtype}) was changed in"
            f" place {when}, so the block can't be computed again from it; write that operation out of place, pass a"
            " clone, or leave this block out of the plan"
        )

    def held_storages(self) -> set[int]:
        """Storages that live whether or not this call is recorded, or that the recording holds anyway."""
        tensors = self.fence.tensors
        if self._held is None or self._held[0] is not tensors:  # a replay may see copies of buffers
            held = [*tensors, *[leaf.tensor for leaf in self._leaves if isinstance(leaf, Kept)]]
            self._held = tensors, set(map(_torch.storage_key, held))
        return self._held[1]


def new_call(
    name: str,
    function: Callable[..., Any],
    arguments: Arguments,
    modules: list[torch.nn.Module],
    *,
    devices: tuple[torch.device, ...],
    learnt: Learnt,
    check: Check,
    previous: list[Any],
    called_modules: int = 1,
    in_replay: Callable[[], AbstractContextManager[Any]] = lambda: NO_CONTEXT,
    early_stop: bool = True,
) -> Call:
    """Takes down the world before a call, and the call itself.

    Args:
        modules: those that the call may reach.
        devices: accelerators that it may draw random numbers on.
        called_modules: how many of the first modules are called outside of the function, with their hooks.

    The others are those of `Call`.
    """
    state = ModuleState(name, modules, learnt, arguments.parts)
    fence = Fence(state, devices, Hooks(state.modules, called_modules), learnt)
    return Call(
        name,
        function,
        arguments,
        previous=previous,
        fence=fence,
        check=check,
        learnt=learnt,
        in_replay=in_replay,
        early_stop=early_stop,
        compiled=_torch.any_compiled(state.modules),
    )
