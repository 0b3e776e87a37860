"""What a forward may write to its modules: attributes and what they hold, buffers, gradients of parameters.

A `ModuleState` is taken before a forward and sealed after it. `rewind` then shows a replay the modules as that forward
found them, also if they were changed since by other code (`model.eval()` before backward, weights swapped by
`torch.func.functional_call`), and puts everything back when the replay has ended.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from reforward import _torch
from reforward._errors import MutationError, ReplayError
from reforward._runtime.fingerprint import fingerprint, is_dense
from reforward._runtime.learnt import Learnt
from reforward._runtime.parts import IMMUTABLE, Parts, Ref, keeps_its_identity
from reforward._runtime.streams import OwnStream

# Buffers up to this size are copied before every forward; of larger ones, only those that a forward was seen to write,
# and all in a module's first forward in training and in evaluation.
_SMALL_BUFFER_BYTES = 64 * 1024
# What nn.Module itself keeps, and a forward put on the instance: parameters, buffers and submodules are dealt with one
# by one, hooks and code aren't state.
_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__) | {"forward"}
# Types that `torch.equal` knows.
_COMPARABLE = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool,
     torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)  # fmt: skip
_MOST_OBJECTS = 100  # a value that leads to more is the whole program
_NO_MODULE = nn.Module()  # a bare function may reach none
_TENSORS = IMMUTABLE | {torch.Tensor, nn.Parameter}


class _HeldTensor:
    """A buffer, or a tensor that an attribute holds, before the forward.

    Attributes:
        key: names it among the tensors of the block.
        home: the dict in which the module keeps it; None if it lies deeper.
        copy: its value before; None if it isn't copied, and the tensor's version alone tells whether it was written.
        expected: whether it will be written, as far as is known; a dry run, which has no values, goes by that.
    """

    __slots__ = ("copy", "expected", "home", "key", "name", "tensor", "version")

    def __init__(
        self, home: dict[str, Any] | None, key: tuple[Any, ...], tensor: torch.Tensor, *, known: bool, expected: bool
    ):
        self.expected = expected
        self.home = home
        self.key = key
        self.name = key[1]
        self.tensor = tensor
        self.version = _torch.version(tensor)
        copied = is_dense(tensor) and (not known or tensor.nbytes <= _SMALL_BUFFER_BYTES)
        self.copy = tensor.detach().clone() if copied else None

    def written(self) -> bool:
        """Whether it was written. Batch norm's kernel writes its running statistics without counting it as a write."""
        if _torch.version(self.tensor) != self.version:
            return True
        if self.copy is None:
            return False
        return self.expected if _torch.in_fake_mode() else not _same_values(self.tensor, self.copy)

    def shown(self) -> torch.Tensor:
        """What a replay finds in its place: a copy that it may write, if the forward wrote it.

        Exchanged rather than overwritten, so that versions stay and autograd's own checks go on working.
        """
        if self.copy is None:
            return self.tensor
        return self.copy.clone().requires_grad_(self.tensor.requires_grad)


class ModuleState:
    """The modules of a block before a forward.

    Args:
        name: the block, for messages.
        modules: the block's modules, each once; the first is the block itself. Modules that their attributes hold
            without registering them are added.
        learnt: of earlier calls.
        parts: takes apart what attributes hold; the call's arguments have been taken.

    Attributes:
        modules: all modules.
        functions: that attributes and arguments hold.
        tensors: parameters, buffers and tensors held by attributes, as they are in place: during a replay, copies stand
            for those that it may write.
    """

    def __init__(self, name: str, modules: list[nn.Module], learnt: Learnt, parts: Parts):
        self._name = name
        self._learnt = learnt
        self._parts = parts
        self._homes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._empty: list[dict[str, Any]] = []  # homes in which there was nothing, as in most
        self._parameters: list[tuple[torch.Tensor, int, bool]] = []
        self._held: list[_HeldTensor] = []
        self._scripted: list[_HeldTensor] = []  # can't be exchanged
        self._deep: dict[Ref, _HeldTensor] = {}
        self._attributes: list[tuple[dict[str, Any], str, Ref]] = []
        self._steady: set[Ref] = set()
        self._streams: list[OwnStream] = []
        self._objects: set[int] = set()
        self.functions: list[types.FunctionType] = []
        self.modules = modules
        self._known = set(modules)
        self._given: list[nn.Parameter] = []
        for leaf in parts.leaves.copy():  # of the arguments
            if type(leaf) is nn.Parameter:
                self._given.append(leaf)
            elif type(leaf) not in _TENSORS:
                self._add_reached(leaf, (0, "an argument"), modules[0] if modules else _NO_MODULE)
        index = 0
        while index < len(self.modules):
            self._look_at(index, self.modules[index])
            index += 1
        parts.close()
        # Not looked at in every step: another thread's backward may be about to write there.
        self._gradients = None if learnt.proven or learnt.adds_gradients else self._gradients_now()
        self.tensors: list[torch.Tensor] = [p for p, *_ in self._parameters] + [
            held.tensor for held in self._all_held()
        ]

    def _gradients_now(self) -> list[tuple[int, int]]:
        gradients = [leaf.grad for leaf in self._leaves()]
        return [(id(g), _torch.version(g)) for g in gradients if g is not None]

    def _leaves(self) -> list[torch.Tensor]:
        """To which a backward inside the block may add gradients."""
        held = [held.tensor for held in self._all_held()]
        return [t for t in (*[p for p, *_ in self._parameters], *self._given, *held) if t.is_leaf and t.requires_grad]

    def _all_held(self) -> list[_HeldTensor]:
        return [*self._held, *self._deep.values()] if self._deep else self._held

    def _look_at(self, index: int, module: nn.Module) -> None:
        attributes, parameters, buffers = _torch.live_state(module)
        first = len(self._held)
        homes = self._homes
        homes.append((attributes, attributes.copy()))
        if children := _torch.children_of(module):
            homes.append((children, children.copy()))
        else:
            self._empty.append(children)
        if parameters:
            homes.append((parameters, parameters.copy()))
            self._parameters += [(p, _torch.version(p), p.requires_grad) for p in parameters.values() if p is not None]
        else:
            self._empty.append(parameters)
        if buffers:
            homes.append((buffers, buffers.copy()))
            for key, buffer in buffers.items():
                if buffer is not None:
                    self._held.append(self._hold(buffers, (index, key), buffer, module))
        else:
            self._empty.append(buffers)
        for key in attributes.keys() - _MODULE_ATTRIBUTES:
            kind = type(value := attributes[key])
            if kind not in IMMUTABLE and not (kind is tuple and IMMUTABLE.issuperset(map(type, value))):
                self._add_attribute(attributes, (index, key), value, module)
        if len(self._held) > first and isinstance(module, torch.jit.ScriptModule):
            self._scripted += self._held[first:]
        self._learnt.seen.add((index, module.training))

    def _hold(
        self, home: dict[str, Any] | None, key: tuple[Any, ...], tensor: torch.Tensor, module: nn.Module
    ) -> _HeldTensor:
        written = key in self._learnt.written
        known = (key[0], module.training) in self._learnt.seen and not written
        keeps_statistics = module.training and getattr(module, "track_running_stats", False) is True
        return _HeldTensor(home, key, tensor, known=known, expected=written or keeps_statistics)

    def _add_attribute(self, home: dict[str, Any], key: tuple[Any, ...], value: Any, module: nn.Module) -> None:
        if issubclass(type(value), torch.Tensor):
            self._held.append(self._hold(home, key, value, module))
            return
        first = len(self._parts.leaves)
        ref = self._parts.take(value)
        if ref < 0:
            self._attributes.append((home, key[1], ref))
        for leaf_ref, leaf in enumerate(self._parts.leaves[first:], first):
            if issubclass(type(leaf), torch.Tensor):
                self._deep[leaf_ref] = self._hold(None, (*key, leaf_ref - first), leaf, module)
            else:
                self._add_reached(leaf, (*key, leaf_ref - first), module)

    def _add_reached(self, leaf: Any, key: tuple[Any, ...], module: nn.Module) -> None:
        """What a leaf stands for: a module that isn't registered, whose method a bound one is; a function; a
        generator; an object that stays itself."""
        while isinstance(leaf, (types.MethodType, functools.partial)):
            leaf = leaf.__self__ if isinstance(leaf, types.MethodType) else leaf.func
        kind = type(leaf)
        if kind is types.FunctionType:
            self.functions.append(leaf)
        elif issubclass(kind, nn.Module):
            inside = _torch.submodules(leaf)
            is_around = self.modules and self.modules[0] in inside  # the block is a part of it
            if leaf not in self._known and not is_around:
                self.modules += [m for m in inside if m not in self._known]
                self._known.update(inside)
        elif kind not in IMMUTABLE:
            if keeps_its_identity(kind):
                self._add_object(leaf, key, module)
            else:
                self._streams += OwnStream.among([leaf])

    def _add_object(self, value: Any, key: tuple[Any, ...], module: nn.Module) -> None:
        """Its attributes are dealt with like a module's."""
        attributes = object.__getattribute__(value, "__dict__")
        if len(self._objects) >= _MOST_OBJECTS or id(attributes) in self._objects:
            return
        self._objects.add(id(attributes))
        self._homes.append((attributes, attributes.copy()))
        for name, held in attributes.copy().items():
            if type(held) not in IMMUTABLE:
                self._add_attribute(attributes, (key[0], name, *key[1:]), held, module)

    @property
    def holds_generators(self) -> bool:
        """Whether the modules reach a generator."""
        return bool(self._streams)

    def written_in_place(self) -> list[tuple[dict[str, Any], str, torch.Tensor]] | None:
        """To be called when the forward has ended: the buffers and tensor attributes that it wrote, each as its home,
        its name and a copy of its value; None if it changed anything else."""
        if any(self._empty) or any(_differ(before, home) for home, before in self._homes):
            return None
        if any(_torch.version(parameter) != version for parameter, version, _ in self._parameters):
            return None
        if not all(self._parts.matches(ref, home[key], {}) for home, key, ref in self._attributes):
            return None
        written = [held for held in self._all_held() if held.written()]
        self._learnt.written.update(held.key for held in written)
        buffers = [(held.home, held.name, held.tensor.detach().clone()) for held in written if held.home is not None]
        return buffers if len(buffers) == len(written) else None

    def seal(self) -> None:
        """To be called when the forward has ended. Drops copies that aren't needed, remembers what was written and
        which attributes hold what they held.

        Raises:
            ReplayError: a large buffer was written that no earlier forward wrote, so its value before is lost.
        """
        if self._gradients is not None and self._gradients != self._gradients_now():
            self._learnt.adds_gradients = True
        self._steady = {ref for home, key, ref in self._attributes if self._parts.matches(ref, home.get(key), {})}
        written: list[_HeldTensor] = []
        for held in self._all_held():
            if not held.written():
                held.copy = None
                continue
            written.append(held)
            self._learnt.written.add(held.key)
            if held in self._scripted:
                raise ReplayError(
                    f"block {self._name!r} wrote the buffer {held.name!r} of a scripted submodule, which can't be"
                    " brought back for the replay; use that submodule unscripted, or leave this block out of the plan"
                )
            if held.copy is None and not is_dense(held.tensor):
                raise ReplayError(
                    f"block {self._name!r} wrote {held.name!r}, a tensor of a kind that isn't copied"
                    f" ({type(held.tensor).__name__}, {held.tensor.dtype}, {held.tensor.layout}), so its value can't be"
                    " brought back for the replay; write it outside of the block, or leave this block out of the plan"
                )
            if held.copy is None:
                raise ReplayError(
                    f"block {self._name!r} wrote its buffer {held.name!r} ({held.tensor.nbytes} bytes) in place in this"
                    " forward but in none before, so its value can't be brought back for the replay; run one forward of"
                    " the whole step before training, or leave this block out of the plan"
                )

        if written:
            self._refuse_views(written)

    def _refuse_views(self, written: list[_HeldTensor]) -> None:
        """A replay finds copies of what was written, and two of one memory would go apart."""
        seen: dict[int, _HeldTensor] = {}
        for held in [*written, *self._all_held()]:
            other = seen.setdefault(_torch.storage_key(held.tensor), held)
            if other.tensor is not held.tensor and (other.copy is not None or held.copy is not None):
                raise ReplayError(
                    f"block {self._name!r} wrote the buffer {other.name!r}, which shares its memory with"
                    f" {held.name!r}, so the two can't be brought back for the replay; keep one of them and take the"
                    " other as a view of it in forward, or leave this block out of the plan"
                )

    def rewind(self) -> tuple[Callable[[], None], dict[Ref, Any]]:
        """Puts the modules as the forward found them.

        Returns:
            A function that puts them as they are now, and what was made for the replay.

        Raises:
            MutationError: a parameter or buffer was written in place since.
        """
        self._check_unchanged()
        now = [(home, home.copy()) for home, _ in self._homes]
        registered = [(home, home.copy()) for home in self._empty if home]
        tensors, streams = self.tensors, [stream.now() for stream in self._streams]
        switched = [(p, wanted) for p, _, wanted in self._parameters if p.requires_grad is not wanted]
        gradients = [(leaf, leaf.grad) for leaf in self._leaves()] if self._learnt.adds_gradients else []

        def undo() -> None:
            _restore(now)
            for stream in streams:
                stream.apply()
            for parameter, wanted in switched:
                parameter.requires_grad_(not wanted)
            for leaf, gradient in gradients:
                leaf.grad = gradient
            _clear(self._empty)
            _restore(registered)
            self.tensors = tensors

        try:
            for parameter, wanted in switched:
                parameter.requires_grad_(wanted)
            for leaf, _ in gradients:
                leaf.grad = None  # a backward inside the block has had its effect
            return undo, self._show()
        except BaseException:
            undo()
            raise

    def _show(self) -> dict[Ref, Any]:
        _restore(self._homes)
        _clear(self._empty)
        for stream in self._streams:
            stream.apply()
        return self._show_values()

    def _show_values(self) -> dict[Ref, Any]:
        made: dict[Ref, Any] = {}
        held = self._all_held()
        if not held and not self._attributes:
            return made
        # Kept alive by this list: if a copy were freed in the replay, another tensor could take its address and be
        # taken for it.
        once: dict[int, torch.Tensor] = {}  # a buffer of two modules is one again
        shown = [once[id(o.tensor)] if id(o.tensor) in once else once.setdefault(id(o.tensor), o.shown()) for o in held]
        for one, tensor in zip(held, shown, strict=True):
            if one.home is not None:
                one.home[one.name] = tensor
        self.tensors = [p for p, *_ in self._parameters] + shown
        stands_for = dict(zip(self._deep, shown[len(self._held) :], strict=True))
        for home, key, ref in self._attributes:
            same: dict[Ref, Any] = {}
            as_it_was = ref in self._steady and self._parts.matches(ref, home[key], same)
            if as_it_was and all(stands_for.get(r, value) is value for r, value in same.items()):
                made.update(same)

        def leaf(at: Ref) -> Any:
            return stands_for[at] if at in stands_for else self._parts.leaf(at)

        for home, key, ref in self._attributes:
            home[key] = self._parts.rebuild(ref, leaf, made)
        return made

    def expect_in_place(self, storages: set[int]) -> None:
        """As of `Fence`."""
        for parameter, *_ in self._parameters:
            if _torch.storage_key(parameter) not in storages:
                raise self._mutated("parameter", self._name_of(parameter), parameter)

    def _check_unchanged(self) -> None:
        for parameter, version, _ in self._parameters:
            if _torch.version(parameter) != version:
                raise self._mutated("parameter", self._name_of(parameter), parameter)
        for held in self._all_held():
            if held.copy is None and _torch.version(held.tensor) != held.version:
                raise self._mutated("buffer", held.name, held.tensor)

    def _name_of(self, tensor: torch.Tensor) -> str:
        return next(key for _, before in self._homes for key, value in before.items() if value is tensor)

    def _mutated(self, kind: str, key: str, tensor: torch.Tensor) -> MutationError:
        return MutationError(
            f"block {self._name!r}: its {kind} {key!r} of shape {tuple(tensor.shape)} ({tensor.dtype}) was changed in"
            " place between forward and backward, so the block can't be computed again as it was; run backward before"
            " changing it (optimizer step, clipping of weights), or leave this block out of the plan"
        )


def _same_values(tensor: torch.Tensor, copied: torch.Tensor) -> bool:
    if tensor.dtype not in _COMPARABLE:
        return bool(fingerprint(tensor) == fingerprint(copied))
    return torch.equal(tensor, copied) or bool(((tensor == copied) | ((tensor != tensor) & (copied != copied))).all())


def _differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two dicts don't hold the same objects under the same names."""
    return one.keys() != other.keys() or any(value is not other[key] for key, value in one.items())


def _restore(homes: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for home, wanted in homes:
        home.update(wanted)  # quicker than to look what differs
        if len(home) != len(wanted):
            for key in home.keys() - wanted.keys():
                del home[key]


def _clear(homes: list[dict[str, Any]]) -> None:
    for home in homes:
        if home:
            home.clear()
