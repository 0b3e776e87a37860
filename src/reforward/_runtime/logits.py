"""Logits that stay a promise until `cross_entropy` takes them, chunk by chunk.

The head's forward returns `Logits`, a tensor with the shape, type, device and graph of the logits and no memory. Views
of its rows, changes of its type and scalings are noted down; `torch.nn.functional.cross_entropy` computes the loss from
what the head was given (`chunked_loss.py`).

Whatever else is done with the logits is done with the whole of them, computed at that moment with a graph of their own:
exact, with the memory that they take, and a warning by name. In-place operations and hooks on them are refused.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from reforward import _torch
from reforward._errors import HeadError, MutationError
from reforward._runtime.ambient import Ambient
from reforward._runtime.chunked_loss import Criterion, Operation, Recipe, Source, chunked_loss, settings_around

_AUTOCAST_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def logits_of(
    path: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, warned: set[str]
) -> Logits | None:
    """The promise of `linear(hidden, weight, bias)`; None where that would fail by itself, or has no row.

    Raises:
        HeadError: the weight is spread over several devices.
    """
    if hasattr(weight, "device_mesh"):
        raise HeadError(
            f"the weight of head {path!r} is sharded over several devices (a DTensor), so its loss can't be computed in"
            " chunks; leave the head out of the plan"
        )
    dtype = _product_type(hidden)
    fits = hidden.dim() >= 2 and hidden.numel() > 0 and hidden.shape[-1] == weight.shape[-1]
    if not fits or not hidden.is_floating_point() or (dtype == hidden.dtype and weight.dtype != dtype):
        return None
    source = Source(path=path, weight=weight, bias=bias, chunks=chunks, dtype=dtype, warned=warned)
    return Logits.of(Recipe(source=source, dtype=dtype), hidden)


def _product_type(hidden: Tensor) -> torch.dtype:
    """In which type a linear operation is computed now."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype in _AUTOCAST_TYPES:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


class _Promise(torch.autograd.Function):
    """Gives the logits a place in the graph, for what reads their gradient function (DDP's search for unused
    parameters) or takes them as they are (an autograd function): its backward is the plain head's."""

    @staticmethod
    def forward(ctx: Any, recipe: Recipe, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.recipe = recipe
        ctx.save_for_backward(hidden, weight, bias)
        return Logits.empty(recipe, hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        needed = ctx.needs_input_grad[1:]
        with torch.enable_grad():
            inputs = [
                None if t is None else t.detach().requires_grad_(n)
                for t, n in zip(ctx.saved_tensors, needed, strict=True)
            ]
            value = ctx.recipe.whole(*inputs)
        wanted = [t for t, n in zip(inputs, needed, strict=True) if n and t is not None]
        found = iter(torch.autograd.grad([value], wanted, [gradients[0]]))
        return None, *[next(found) if n else None for n in needed]


class _Redeemed(torch.autograd.Function):
    """Whole logits behind a promise that somebody else's function passed on: gradients go back through that."""

    @staticmethod
    def forward(ctx: Any, lazy: Logits) -> Tensor:
        return lazy.recipe.whole(lazy.hidden, lazy.recipe.source.weight, lazy.recipe.source.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class Logits(torch.Tensor):
    """Logits that aren't computed yet.

    Attributes:
        recipe: how they come from `hidden`.
        hidden: the head's input, with its graph: (..., width).
        version: of the input when the head was called.
        passed_on: an autograd function returned them, as DDP's does in some modes; a loss in chunks would go past it.
    """

    recipe: Recipe
    hidden: Tensor
    version: int
    passed_on: bool

    @staticmethod
    def empty(recipe: Recipe, hidden: Tensor) -> Logits:
        """Without a place in the graph, and not usable yet."""
        made = _torch.without_memory(Logits, recipe.shape(hidden), recipe.dtype, hidden.device)
        return cast("Logits", made)

    @staticmethod
    def of(recipe: Recipe, hidden: Tensor) -> Logits:
        """Logits that this recipe gives for an input."""
        source = recipe.source
        made = cast("Logits", _Promise.apply(recipe, hidden, source.weight, source.bias))
        made.recipe, made.hidden, made.version, made.passed_on = recipe, hidden, _torch.version(hidden), False
        return made

    def alias(self) -> Logits:
        """The same, for an autograd function to give them a place in the graph."""
        made = Logits.empty(self.recipe, self.hidden)
        made.recipe, made.hidden, made.version, made.passed_on = self.recipe, self.hidden, self.version, True
        return made

    def with_step(self, step: Operation, dtype: torch.dtype) -> Logits:
        """These, with one more step."""
        return Logits.of(replace(self.recipe, steps=(*self.recipe.steps, step), dtype=dtype), self.hidden)

    def check(self) -> None:
        """To be called before what they are made of is used.

        Raises:
            MutationError: it was changed in place.
        """
        self.recipe.source.check()
        if _torch.version(self.hidden) != self.version:
            raise MutationError(
                f"the input of head {self.recipe.source.path!r} was changed in place after its forward, so its logits"
                " can't be computed from it; write that operation out of place, or leave the head out of the plan"
            )

    def whole(self) -> Tensor:
        """The logits themselves, with a graph of their own where gradients are wanted."""
        self.check()
        if self.passed_on:
            return cast("Tensor", _Redeemed.apply(self))
        source = self.recipe.source
        return self.recipe.whole(self.hidden, source.weight, source.bias)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READ:
            with _torch.reading_logits():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None and args and isinstance(args[0], Logits) and not args[0].passed_on:
            args[0].check()
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return _on_whole(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What comes past `__torch_function__`: operations of C++ code, and aliases that autograd makes."""
        lazy = _first(args, kwargs)
        if func in _ALIASES and (func is not _aten.view.default or list(args[1]) == list(lazy.shape)):
            return lazy.alias()
        if _torch.writes(func):
            raise _refusal(lazy, str(func))
        lazy.check()
        _warn(lazy.recipe.source, str(func))
        return func(*_exchanged(args), **_exchanged(kwargs or {}))


def _on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function with the logits themselves."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = func.__self__.__name__  # a property's
    lazy = _first(args, kwargs)
    if _is_refused(func, name, args, kwargs):
        raise _refusal(lazy, name)
    lazy.check()
    _warn(lazy.recipe.source, name)
    return func(*_exchanged(args), **_exchanged(kwargs))


def _is_refused(func: Any, name: str, args: Any, kwargs: Any) -> bool:
    """Whether a function would write into the logits, hang something on them, or ask for their gradient."""
    if func is torch.autograd.grad:
        inputs = kwargs.get("inputs", args[1] if len(args) > 1 else ())
        return any(isinstance(t, Logits) for t in _torch.flatten(inputs)[0])
    if isinstance(kwargs.get("out"), Logits):
        return True
    writes = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE or _is_inplace(func, args, kwargs)
    return (writes or func in _HOOKS) and isinstance((*args, None)[0], Logits)


def _is_inplace(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function was called with `inplace=True`, by name or by position."""
    if not inspect.isfunction(func):
        return False
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    return bool(given.get("inplace"))


def _refusal(lazy: Logits, name: str) -> HeadError:
    return HeadError(
        f"the logits of head {lazy.recipe.source.path!r} are computed in chunks, so {name} can't act on them: what it"
        " writes, or hangs on them, would never be seen. Do it on a copy of them (logits + 0), in `with"
        " rf.suspended(model):`, or leave the head out of the plan"
    )


def _warn(source: Source, name: str) -> None:
    if source.path not in source.warned:
        source.warned.add(source.path)
        warnings.warn(
            f"the logits of head {source.path!r} were used by {name}, so they were computed whole: the result is exact,"
            " but their memory is taken; give them to torch.nn.functional.cross_entropy with class indices alone, or"
            " leave the head out of the plan",
            stacklevel=5,
        )


def _first(args: Any, kwargs: Any) -> Logits:
    return next(leaf for leaf in _torch.flatten((args, kwargs))[0] if isinstance(leaf, Logits))


def _exchanged(tree: Any) -> Any:
    """The tree with the logits themselves; those that occur twice are computed once."""
    leaves, structure = _torch.flatten(tree)
    made: dict[int, Tensor] = {}
    for leaf in leaves:
        if isinstance(leaf, Logits) and id(leaf) not in made:
            made[id(leaf)] = leaf.whole()
    return _torch.unflatten([made.get(id(leaf), leaf) for leaf in leaves], structure)


# What is noted down
# ----------------------------------------------------------------------------------------------------------------------


def _like(lazy: Logits, func: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
    """The shape that a function of shapes gives."""
    return _shape_of(func, tuple(lazy.shape), args, kwargs)


def _shape_of(func: Any, shape: tuple[int, ...], args: Any, kwargs: Any) -> tuple[int, ...]:
    with _torch.unseen_by_modes():
        return tuple(func(torch.empty(shape, device="meta"), *args, **kwargs).shape)


def _reshaped(func: Any, lazy: Logits, *args: Any, **kwargs: Any) -> Any:
    recipe = lazy.recipe
    if recipe.class_dim is not None or any(isinstance(arg, torch.dtype) for arg in (*args, *kwargs.values())):
        return NotImplemented
    *lead, last = _like(lazy, func, args, kwargs) or (0,)
    if last != recipe.source.vocabulary:
        return NotImplemented
    return Logits.of(recipe, lazy.hidden.reshape(*lead, lazy.hidden.shape[-1]))


def _permuted(func: Any, lazy: Logits, *args: Any, **kwargs: Any) -> Any:
    """Another order of the dimensions; the vocabulary's place is noted, the others are those of the input."""
    recipe, count = lazy.recipe, lazy.dim()
    sizes = tuple(range(1, count + 1))  # of a tensor in which each dimension's size is its number
    order = [size - 1 for size in _shape_of(func, sizes, args, kwargs)]
    was = count - 1 if recipe.class_dim is None else recipe.class_dim
    lead = [dim if dim < was else dim - 1 for dim in order if dim != was]
    place = order.index(was)
    return Logits.of(
        replace(recipe, class_dim=None if place == count - 1 else place), lazy.hidden.permute(*lead, count - 1)
    )


def _transposed(func: Any, lazy: Logits) -> Any:
    return _permuted(lambda t: t.transpose(-2, -1), lazy)


def _picked(func: Any, lazy: Logits, index: Any) -> Any:
    """Some of the rows: an index that leaves the vocabulary alone picks the same rows of the input."""
    recipe = lazy.recipe
    items = index if isinstance(index, tuple) else (index,)
    known = (type(None), type(Ellipsis), slice, int, Tensor)
    if recipe.class_dim is not None or any(isinstance(i, (bool, Logits)) or not isinstance(i, known) for i in items):
        return NotImplemented
    taken = sum(_dimensions(item) for item in items)
    reaches_end = taken == lazy.dim() or (any(i is Ellipsis for i in items) and items[-1] is not Ellipsis)
    if reaches_end and items[-1] != slice(None):
        return NotImplemented
    return Logits.of(recipe, lazy.hidden[index])


def _dimensions(item: Any) -> int:
    """How many dimensions a part of an index takes."""
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) else 1


def _cast(func: Any, lazy: Logits, *args: Any, **kwargs: Any) -> Any:
    """Another type; which, a tensor without elements tells."""

    def kind_of(value: Any) -> Any:
        return (value.dtype, value.device) if isinstance(value, Tensor) else value

    given, named = [kind_of(arg) for arg in (lazy, *args)], {key: kind_of(value) for key, value in kwargs.items()}
    with _torch.unseen_by_modes():

        def stand_in(kind: Any) -> Any:
            return torch.empty(0, dtype=kind[0], device=kind[1]) if isinstance(kind, tuple) else kind

        probe = func(*map(stand_in, given), **{key: stand_in(kind) for key, kind in named.items()})
    dtype = probe.dtype
    if probe.device != lazy.device or not dtype.is_floating_point:
        return NotImplemented
    return lazy if dtype == lazy.dtype else lazy.with_step(lambda t: t.to(dtype), dtype)


def _same(func: Any, lazy: Logits, **kwargs: Any) -> Any:
    return lazy


def _viewed_as(func: Any, lazy: Logits, other: Tensor) -> Any:
    """Autograd asks for this view of what a function returns as it was given it."""
    return lazy.alias() if other is lazy and not torch.is_grad_enabled() else NotImplemented


def _cut_off(func: Any, lazy: Logits) -> Any:
    source = lazy.recipe.source
    bias = None if source.bias is None else source.bias.detach()
    return Logits.of(
        replace(lazy.recipe, source=replace(source, weight=source.weight.detach(), bias=bias)), lazy.hidden.detach()
    )


def _scaled(func: Any, lazy: Logits, *args: Any, **kwargs: Any) -> Any:
    """A scaling by a number or a tanh, of which soft caps are made."""
    if kwargs or not all(isinstance(arg, (int, float)) for arg in args):
        return NotImplemented
    return lazy.with_step(lambda t: func(t, *args), lazy.dtype)


_T = torch.Tensor
_aten = torch.ops.aten
_ALIASES = {_aten.detach.default, _aten.alias.default, _aten.view.default}
_ATTRIBUTES = """
    shape dtype device layout ndim requires_grad grad_fn is_leaf is_cuda is_cpu is_meta is_mps is_xpu is_sparse
    is_quantized is_nested itemsize nbytes output_nr _version
"""
_METHODS = """
    size dim ndimension numel nelement is_floating_point is_complex __len__ element_size get_device is_contiguous stride
    is_inference
"""
_READ = {
    *[getattr(_T, name).__get__ for name in _ATTRIBUTES.split()],
    *[getattr(_T, name) for name in _METHODS.split()],
    *[torch.is_floating_point, torch.is_complex, torch.numel],
}
_HANDLERS: dict[Any, Callable[..., Any]] = {}
for _names, _handler in {
    "view reshape flatten unflatten unsqueeze squeeze": _reshaped,
    "transpose permute movedim swapaxes swapdims": _permuted,
    "to float half bfloat16 double type_as": _cast,
    "contiguous clone": _same,
    "detach": _cut_off,
    "view_as": _viewed_as,
    "mul div __mul__ __rmul__ __truediv__ tanh": _scaled,
}.items():
    for _name in _names.split():
        _HANDLERS[getattr(_T, _name)] = _handler
        if hasattr(torch, _name):
            _HANDLERS[getattr(torch, _name)] = _handler
_HANDLERS |= {getattr(_T, "mT").__get__: _transposed, getattr(_T, "data").__get__: _cut_off, _T.__getitem__: _picked}  # noqa: B009 - type checkers take them for tensors
_HOOKS = {
    *[_T.register_hook, _T.retain_grad, _T.register_post_accumulate_grad_hook],
    *[getattr(_T, name).__set__ for name in ("requires_grad", "data", "grad")],
}
_OPERATORS = "add sub mul truediv div floordiv mod pow and or xor"
_IN_PLACE = {"__setitem__", *[f"__i{name}__" for name in _OPERATORS.split()]}


# The loss
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SeenLoss:
    """A loss that was taken of a head's logits.

    Attributes:
        recipe: of the logits.
        rows: the head's input, (rows, width).
        target: class indices, (rows).
        criterion: what was asked for.
        ambient: the settings around it, autocast among them.
    """

    recipe: Recipe
    rows: Tensor
    target: Tensor
    criterion: Criterion
    ambient: Ambient


_seen: ContextVar[list[SeenLoss] | None] = ContextVar("losses seen", default=None)


@contextmanager
def seen_losses() -> Iterator[list[SeenLoss]]:
    """Inside, heads that a plan chunks do so without gradients as well, and the losses taken of them are noted."""
    found: list[SeenLoss] = []
    token = _seen.set(found)
    try:
        yield found
    finally:
        _seen.reset(token)


def is_watched() -> bool:
    """Whether losses are being noted."""
    return _seen.get() is not None


_ARGUMENTS = inspect.signature(F.cross_entropy)


def _cross_entropy(func: Any, *args: Any, **kwargs: Any) -> Any:
    given = _ARGUMENTS.bind(*args, **kwargs)
    given.apply_defaults()
    asked = given.arguments
    lazy, target, weight = asked["input"], asked["target"], asked["weight"]
    criterion = Criterion(
        weight=weight,
        ignore_index=asked["ignore_index"],
        reduction=asked["reduction"],
        label_smoothing=asked["label_smoothing"],
    )
    if not _is_chunkable(lazy, target, criterion) or asked["size_average"] is not None or asked["reduce"] is not None:
        return NotImplemented
    rows, flat = lazy.hidden.reshape(-1, lazy.hidden.shape[-1]), target.reshape(-1)
    if (seen := _seen.get()) is not None:
        ambient = settings_around(rows)
        seen.append(SeenLoss(recipe=lazy.recipe, rows=rows.detach(), target=flat, criterion=criterion, ambient=ambient))
    loss = chunked_loss(lazy.recipe, rows, flat, criterion)
    return loss.view(target.shape) if criterion.reduction == "none" else loss


_HANDLERS[F.cross_entropy] = _cross_entropy


def _is_chunkable(lazy: Logits, target: Any, criterion: Criterion) -> bool:
    """Whether the vocabulary is where `cross_entropy` looks for it, and each row has one class."""
    at_one = lazy.dim() == 2 if lazy.recipe.class_dim is None else lazy.recipe.class_dim == 1
    return (
        at_one
        and type(lazy) is Logits
        and isinstance(target, Tensor)
        and not isinstance(target, Logits)
        and not target.is_floating_point()
        and target.shape == lazy.hidden.shape[:-1]
        and target.numel() > 0
        and criterion.reduction in ("mean", "sum", "none")
        and not (criterion.weight is not None and criterion.weight.requires_grad)
    )
