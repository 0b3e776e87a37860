"""Selected values of a call: kept in forward, handed back in the replay instead of being computed.

What is selected is recognised where the user writes it, at the level of `torch.nn.functional` and tensor methods, by a
function mode. Only while such a call runs, a dispatch mode looks at the operations that it becomes and keeps the
outputs of those that compute something. In the replay the same call runs again, so that autograd saves the same
tensors, but these operations return what was kept. So `scaled_dot_product_attention` is attention also where it becomes
bmm, softmax, bmm.

A value is named by submodule, family and ordinal, and checked by function and shapes: a reordering fails loudly.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from reforward import _patterns, _torch
from reforward._errors import ReplayMismatchError
from reforward._policy import Modules, Ops, Policy, Recompute
from reforward._runtime.effects import Effects, Watch
from reforward._runtime.families import family_of
from reforward._runtime.learnt import Learnt
from reforward._runtime.parts import IMMUTABLE
from reforward._runtime.streams import TORCH_PARTS, RngState, accelerators

if TYPE_CHECKING:
    from reforward._runtime.frames import Recorder

_aten = torch.ops.aten
# They move data or reserve memory: running them again costs less than keeping what they return.
_MOVES = {
    _aten.clone.default, _aten._to_copy.default, _aten.copy_.default, _aten.empty_like.default,
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.new_empty.default, _aten.new_empty_strided.default,
}  # fmt: skip

_Key = tuple[str, str, int]


class CountsSaved(Protocol):
    """Knows how many tensors autograd has saved so far in a forward."""

    @property
    def saved(self) -> int:
        """The number."""
        ...


@dataclass
class _Output:
    """A kept tensor, or a result that isn't one."""

    value: Any
    requires_grad: bool = False
    version: int = 0

    @classmethod
    def of(cls, value: Any, alias: Callable[[torch.Tensor], torch.Tensor]) -> _Output:
        if not isinstance(value, torch.Tensor):
            return cls(value)
        return cls(alias(value), value.requires_grad, _torch.version(value))

    @property
    def intact(self) -> bool:
        return not isinstance(self.value, torch.Tensor) or _torch.version(self.value) == self.version

    def fresh(self) -> Any:
        return (
            self.value.detach().requires_grad_(self.requires_grad)
            if isinstance(self.value, torch.Tensor)
            else self.value
        )


@dataclass
class _KeptOp:
    """One operation: its outputs, and where it left the random stream if it draws.

    Attributes:
        saved_before: tensors that autograd had saved when it was about to compute, to tell whether a replay, which
            stops at the last saved tensor, ever gets here. Autograd saves an operation's inputs before it computes.
    """

    outputs: list[_Output]
    in_place: bool
    rng: RngState | None
    saved_before: int

    def storages(self) -> set[int]:
        return {_torch.storage_key(o.value) for o in self.outputs if isinstance(o.value, torch.Tensor)}


@dataclass
class KeptCall:
    """One call of a selected function: its kept operations by name and ordinal.

    Attributes:
        returned: its results, as far as they share memory with what is kept.
    """

    func: Any
    ops: dict[tuple[Any, int], _KeptOp] = field(default_factory=dict)
    returned: list[_Output] = field(default_factory=list)

    def seal(self, result: Any) -> None:
        """To be called when the call has ended; `result` is what it returned.

        In-place operations of the same call (dropout's division of its mask) belong to the kept values. Later ones are
        counted by the tensors that the caller has, which may be reshaped (matmul of more than two dimensions) and then
        don't share the operation's own count.
        """
        for output in self._made():
            output.version = _torch.version(output.value)
        storages = self._storages()
        returned = [tensor for tensor in _torch.tensors_in(result) if _torch.storage_key(tensor) in storages]
        self.returned = [_Output.of(tensor, torch.Tensor.detach) for tensor in returned]

    def drop_unneeded(self, saved: int) -> bool:
        """Whether any operation is left that computes before the last of so many saved tensors is saved."""
        self.ops = {key: op for key, op in self.ops.items() if op.saved_before < saved}
        storages = self._storages()
        self.returned = [output for output in self.returned if _torch.storage_key(output.value) in storages]
        return bool(self.ops)

    def drop(self, storages: set[int]) -> None:
        """Keeps no operation whose results lie in these storages."""
        self.ops = {key: op for key, op in self.ops.items() if op.storages().isdisjoint(storages)}

    @property
    def intact(self) -> bool:
        return all(output.intact for output in [*self._made(), *self.returned])

    @property
    def nbytes(self) -> int:
        """What it keeps alive."""
        return sum({_torch.storage_key(o.value): o.value.untyped_storage().nbytes() for o in self._made()}.values())

    def _made(self) -> Iterator[_Output]:
        """The kept tensors."""
        return (o for op in self.ops.values() for o in op.outputs if isinstance(o.value, torch.Tensor))

    def _storages(self) -> set[int]:
        return {_torch.storage_key(output.value) for output in self._made()}


@dataclass
class _KeptModule:
    """One call of a selected submodule: its whole output.

    Attributes:
        effects: what it did besides. If more than writing buffers, it is called again although its output is known.
        calls: how many calls of each family it made.
    """

    outputs: list[_Output]
    structure: Any
    rng: RngState
    saved_before: int
    effects: Effects
    calls: Counter[str]

    @property
    def intact(self) -> bool:
        return not self.effects.others and all(output.intact for output in self.outputs)


class _Nothing:
    saved = 0


class Keeper:
    """The values that a policy selects in one call of a block.

    Args:
        save: the policy's selectors.
        name: the block, for messages.

    Attributes:
        differentiates: the call takes a gradient in its own forward. A kept submodule then runs again all the same,
            since that gradient has to pass through it.
    """

    def __init__(self, save: tuple[Ops | Modules, ...], name: str = ""):
        self._ops = [s for s in save if isinstance(s, Ops)]
        self._modules = [s.pattern for s in save if isinstance(s, Modules)]
        self._unmet = [ops for ops in self._ops if ops.nth is not None]
        self._name = name
        self._calls: dict[_Key, KeptCall] = {}
        self._kept_modules: dict[_Key, _KeptModule] = {}
        self._pass = Pass(_Nothing())
        self.differentiates = False

    @classmethod
    def of(cls, policy: Policy | None, name: str = "") -> Keeper | None:
        """A keeper for the policy; None if it selects nothing."""
        return cls(policy.save, name) if isinstance(policy, Recompute) and policy.save else None

    @contextmanager
    def keeping(self, frame: Recorder) -> Iterator[None]:
        """The context of the forward."""
        with self._passing(Pass(frame=frame, keeps=frame)), _Families(self, self._keep):
            yield

    @contextmanager
    def answering(self, frame: CountsSaved) -> Iterator[None]:
        """The context of the replay."""
        with self._passing(Pass(frame=frame)), _Families(self, self._answer):
            yield

    @contextmanager
    def _passing(self, new: Pass) -> Iterator[None]:
        """Begins a pass; a forward that takes a gradient itself is replayed in the middle of its own pass."""
        outer, self._pass = self._pass, new
        try:
            yield
        finally:
            self._pass = outer

    @property
    def keeps_modules(self) -> bool:
        """Whether whole submodules are kept."""
        return bool(self._modules)

    def drop_unneeded(self, saved: int) -> None:
        """To be called when the forward has ended: a replay stops at the last saved tensor, what comes later is not
        needed."""
        for ops in self._unmet:
            warnings.warn(
                f"block {self._name!r}: {ops!r} selects nothing: this forward doesn't make that many calls of the"
                " family there; count from 0, or leave `nth` out to keep them all",
                stacklevel=2,
            )
        self._calls = {key: call for key, call in self._calls.items() if call.drop_unneeded(saved)}
        self._kept_modules = {key: kept for key, kept in self._kept_modules.items() if kept.saved_before < saved}

    def selects(self, family: str) -> bool:
        """Whether the output of the call of this family that is made now is kept. To be asked once for each call."""
        if not torch.is_grad_enabled():  # nothing is saved of it, and code that only looks may be left out of a replay
            return False
        places = self._pass.count(family)
        meant = [ops for ops in self._ops if ops.family == family and is_meant(ops, places)]
        if self._unmet:
            self._unmet = [ops for ops in self._unmet if ops not in meant]
        return bool(meant) and not self._pass.whole

    # Functions
    # -----------------------------------------------------------------------------------------------------------

    def _keep(self, family: str, func: Any, args: Any, kwargs: Any) -> Any:
        frame = self._pass.frame
        kept = KeptCall(func)
        with KeepOps(kept, family, frame):
            result = func(*args, **kwargs)
        kept.seal(result)
        self._calls[self._pass.next_key(family)] = kept
        return result

    def _answer(self, family: str, func: Any, args: Any, kwargs: Any) -> Any:
        key = self._pass.next_key(family)
        kept = self._calls.get(key)
        if kept is None or not kept.intact:  # behind the last saved tensor, or overwritten since: compute it
            return func(*args, **kwargs)
        if kept.func is not func:
            raise self._mismatch(key, f"calls {_name(func)}, where the forward called {_name(kept.func)}")
        with _AnswerOps(kept, self._pass.frame) as answers:
            result = func(*args, **kwargs)
        if answers.misplaced:
            raise self._mismatch(key, "is made at another place than the one that the forward kept")
        if answers.count != len(kept.ops):
            raise self._mismatch(key, f"runs {answers.count} of the {len(kept.ops)} operations that the forward kept")
        return result

    # Submodules
    # ----------------------------------------------------------------------------------------------------------

    def call_submodule(
        self, path: str, module: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Calls the forward `function` of a submodule that a selector of the policy may name."""
        with self._pass.within(path):
            if self._pass.whole or not any(_patterns.matches(pattern, path) for pattern in self._modules):
                return function(*args, **kwargs)
            key = self._pass.next_key("module")
            with self._pass.as_a_whole():
                if self._pass.keeps is not None:
                    return self._keep_submodule(key, module, function, args, kwargs)
                return self._answer_submodule(key, function, args, kwargs)

    def _keep_submodule(
        self, key: _Key, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        frame = self._pass.keeps
        assert frame is not None
        saved_before = frame.saved
        devices = accelerators(_torch.tensors_in((args, kwargs)))
        learnt = frame.call.learnt.submodules.setdefault(key[0], Learnt())
        before, watch = RngState.capture(devices), Watch(key[0], module, args, kwargs, learnt)
        with torch.autograd.graph.saved_tensors_hooks(frame.pack_kept, lambda holder: holder.get()):
            result = function(*args, **kwargs)
        flat, structure = _torch.flatten(result)
        outputs = [_Output.of(leaf, torch.Tensor.detach) for leaf in flat]
        rng = RngState.capture(devices).moved_since(before)
        calls = self._pass.counted()
        effects = watch.seen()
        if any(not isinstance(leaf, torch.Tensor) and type(leaf) not in IMMUTABLE for leaf in flat):
            effects = effects._replace(others=True)  # an object that the block may change
        self._kept_modules[key] = _KeptModule(outputs, structure, rng, saved_before, effects, calls)
        return result

    def _answer_submodule(self, key: _Key, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        kept = self._kept_modules.get(key)
        if kept is not None and kept.intact and not self.differentiates:
            kept.rng.apply()
            kept.effects.repeat()
            self._pass.skip(kept.calls)
            return _torch.unflatten([output.fresh() for output in kept.outputs], kept.structure)
        # What it saves was kept all the same, so nothing of it is counted.
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
            return function(*args, **kwargs)

    def _mismatch(self, key: _Key, fact: str) -> ReplayMismatchError:
        path, family, ordinal = key
        return ReplayMismatchError(
            f"block {self._name!r}: call {ordinal} of family {family!r}{f' in {path!r}' if path else ''} {fact} when it"
            " runs again; a value that is kept can't be matched. Keep the block's control flow unchanged between"
            " forward and backward, or recompute it in full"
        )


#: A submodule in which a call is made ("" for the block), and the call's number among those of its family there.
CallPlace = tuple[str, int]


def is_meant(ops: Ops, places: Sequence[CallPlace]) -> bool:
    """Whether a selector means a call of its family, which is made at these places: the block, and submodules."""
    for path, number in places:
        there = not path if ops.within is None else bool(path) and _patterns.matches(ops.within, path)
        if there and ops.nth in (None, number):
            return True
    return False


class Pass:
    """Where one pass over the block is: submodules, ordinals.

    Args:
        frame: counts what is saved.
        keeps: the same in a forward, whose values are kept.
    """

    def __init__(self, frame: CountsSaved, keeps: Recorder | None = None):
        self.frame = frame
        self.keeps = keeps
        self.whole = False
        self._scopes: list[tuple[str, Counter[str]]] = [("", Counter())]
        self._ordinals: Counter[tuple[str, str]] = Counter()

    def count(self, family: str) -> list[CallPlace]:
        """Counts one call of the family, and says where it is made."""
        places = [(path, calls[family]) for path, calls in self._scopes]
        for _, calls in self._scopes:
            calls[family] += 1
        return places

    def counted(self) -> Counter[str]:
        """The calls of each family so far in the innermost submodule."""
        return self._scopes[-1][1].copy()

    def skip(self, counts: Counter[str]) -> None:
        """Counts calls that aren't made again."""
        for _, calls in self._scopes:
            calls.update(counts)

    def next_key(self, family: str) -> _Key:
        place = self._scopes[-1][0], family
        self._ordinals[place] += 1
        return (*place, self._ordinals[place] - 1)

    def enter(self, path: str) -> None:
        """To be called when a submodule begins."""
        self._scopes.append((path, Counter()))

    def leave(self) -> None:
        """To be called when the submodule entered last has ended."""
        self._scopes.pop()

    @contextmanager
    def within(self, path: str) -> Iterator[None]:
        """While a submodule runs."""
        self.enter(path)
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def as_a_whole(self) -> Iterator[None]:
        """While a submodule is kept whole, nothing inside it is kept by itself."""
        self.whole = True
        try:
            yield
        finally:
            self.whole = False


class _Families(_torch.OwnFunctionMode):
    """Sends calls of selected families to `handle`."""

    def __init__(self, keeper: Keeper, handle: Callable[[str, Any, Any, Any], Any]):
        super().__init__()
        self._keeper = keeper
        self._handle = handle

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        family = family_of(func) if not torch.compiler.is_compiling() else None  # compiled code isn't looked into
        if family is None or not self._keeper.selects(family):
            return func(*args, **(kwargs or {}))
        return self._handle(family, func, args, kwargs or {})


def worth_keeping(func: Any, family: str, kwargs: dict[str, Any]) -> bool:
    """Whether an operation that a call of the family becomes computes what takes longer than keeping it."""
    if func in _MOVES or kwargs.get("generator") is not None:  # drawing again moves that generator as it should
        return False
    return family == "elementwise" or torch.Tag.pointwise not in func.tags or draws(func)


def draws(func: Any) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def is_in_place(func: Any) -> bool:
    """Whether an operation overwrites its first argument."""
    return func.__name__.split(".")[0].endswith("_") and not func.__name__.startswith("__")


def _updates_statistics(func: Any, args: Any) -> bool:
    """Whether an operation is a batch norm that writes running statistics, which its schema doesn't say.

    They are its fourth and fifth argument, and the sixth says whether it is in training.
    """
    return (
        "batch_norm" in func.__name__ and len(args) > 5 and isinstance(args[3], torch.Tensor) and args[5] is not False
    )


def _written(func: Any, args: Any) -> set[int]:
    """The storages that an operation writes."""
    if is_in_place(func):
        written = args[:1]
    elif _updates_statistics(func, args):
        written = args[3:5]
    else:
        written = args if _torch.writes(func) else ()
    return {_torch.storage_key(tensor) for tensor in _torch.tensors_in(written)}


class _Ordinals:
    """Names the operations of a call by overload and how often it ran before, so that an operation which only one of
    the two passes makes (a device query under a fake mode, a copy that one layout needs) doesn't shift the others."""

    def __init__(self):
        self._seen: dict[Any, int] = {}

    def next(self, func: Any) -> tuple[Any, int]:
        ordinal = self._seen.get(func, 0)
        self._seen[func] = ordinal + 1
        return func, ordinal


class KeepOps(_torch.TorchDispatchMode):
    """Keeps what the operations of one call compute.

    Args:
        kept: where to put it.
        family: of the call.
        frame: says how many tensors are saved so far.
    """

    def __init__(self, kept: KeptCall, family: str, frame: CountsSaved):
        super().__init__()
        self._frame = frame
        self._kept = kept
        self._family = family
        self._ordinals = _Ordinals()
        self._made: set[int] = set()  # storages that the call itself reserved
        self._read: set[int] = set()  # storages that an operation which doesn't write them was given

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        saved_before = self._frame.saved
        result = func(*args, **kwargs)
        key = self._ordinals.next(func)
        tensors = _torch.tensors_in(result)
        if worth_keeping(func, self._family, kwargs) and self._is_all_it_does(func, args, tensors):
            outputs = [_Output.of(t, _torch.alias_below_autograd) for t in _torch.flatten(result)[0]]
            rng = RngState.capture(accelerators(tensors), TORCH_PARTS) if draws(func) else None
            self._kept.ops[key] = _KeptOp(outputs, is_in_place(func), rng, saved_before)
        inputs = {_torch.storage_key(t) for t in _torch.tensors_in(args)}
        self._made.update(key for t in tensors if (key := _torch.storage_key(t)) not in inputs)
        self._drop_overwritten(_written(func, args), inputs)
        return result

    def _drop_overwritten(self, written: set[int], inputs: set[int]) -> None:
        """A kept value is the last that its memory held, so nothing of the call may have read another."""
        if not written.isdisjoint(self._read):
            self._kept.drop(written)
        self._read |= inputs - written

    def _is_all_it_does(self, func: Any, args: Any, tensors: list[torch.Tensor]) -> bool:
        """Whether an operation is done by handing back its results: it writes nothing else that may be read later."""
        if is_in_place(func):  # dropout draws its mask into memory of its own; a buffer or a view has other readers
            return draws(func) and _torch.storage_key(args[0]) in self._made
        if _torch.writes(func) or _updates_statistics(func, args):
            return False
        inputs = {_torch.storage_key(t) for t in _torch.tensors_in(args)}
        return bool(tensors) and not any(_torch.storage_key(t) in inputs for t in tensors)


class _AnswerOps(_torch.TorchDispatchMode):
    """Returns what was kept instead of running the operations of one call."""

    def __init__(self, kept: KeptCall, frame: CountsSaved):
        super().__init__()
        self._kept = kept
        self._frame = frame
        self._ordinals = _Ordinals()
        self._answered: set[int] = set()
        self.count = 0
        self.misplaced = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = self._kept.ops.get(self._ordinals.next(func))
        if op is None:
            if is_in_place(func) and _torch.storage_key(args[0]) in self._answered:
                return args[0]  # the kept value has it already
            return func(*args, **(kwargs or {}))
        self.misplaced = self.misplaced or self._frame.saved != op.saved_before
        if op.rng is not None:
            op.rng.apply()
        result = args[0].set_(op.outputs[0].value) if op.in_place else self._rebuilt(op)
        self._answered.update(_torch.storage_key(t) for t in _torch.tensors_in(result))
        self.count += 1
        return result

    @staticmethod
    def _rebuilt(op: _KeptOp) -> Any:
        values = [
            _torch.alias_below_autograd(o.value) if isinstance(o.value, torch.Tensor) else o.value for o in op.outputs
        ]
        return values[0] if len(values) == 1 else tuple(values)


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))
