"""The chunked loss head: logits that stay a promise until `cross_entropy` takes them, chunk by chunk.

The head's forward returns `Logits`, a tensor with the shape, type, device and graph of the logits and no memory. Views
of its rows, changes of its type and scalings are noted down. `torch.nn.functional.cross_entropy` computes the loss from
what the head was given: for each chunk of rows the logits, their part of the loss and their part of the gradients, so
that the logits of one chunk live at a time. The gradients are made in forward; backward only scales them by the loss's
own. (Making them in backward would compute the product a second time. With `reduction="none"` each row has a gradient
of its own, which only backward knows, so it is done there.)

Whatever else is done with the logits is done with the whole of them, computed at that moment with a graph of their own:
exact, with the memory that they take, and a warning by name. In-place operations and hooks on them are refused.

Hsu et al., Liger Kernel, arXiv:2410.10989, and Wijmans et al., Cut Your Losses, arXiv:2411.09009, do the same in
kernels of their own. Here each chunk runs torch's own operations, so class weights, label smoothing, `ignore_index` and
autocast mean what they mean in torch; only the order of sums over rows is another.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from reforward import _torch
from reforward._errors import HeadError, MutationError

_AUTOCAST_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_HALF_TYPES = (torch.float16, torch.bfloat16)

Operation = Callable[[Tensor], Tensor]


# What logits are made of
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Source:
    """One call of a head: all of it but its input.

    Attributes:
        path: of the head, for messages.
        weight, bias: (vocabulary, width) and (vocabulary) or None.
        chunks: in how many parts the rows are taken.
        dtype: that the product is computed in: autocast's, or the input's own.
        warned: heads of which it was said that their logits were made whole.
        versions: of the weight and the bias at the call.
    """

    path: str
    weight: Tensor
    bias: Tensor | None
    chunks: int
    dtype: torch.dtype
    warned: set[str]
    versions: tuple[int, ...] = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "versions", tuple(map(_torch.version, self._parameters)))

    @property
    def _parameters(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def vocabulary(self) -> int:
        return self.weight.shape[0]

    def check(self) -> None:
        """To be called before the parameters are used, which may be long after the head's call.

        Raises:
            MutationError: they were changed or freed since.
        """
        if tuple(map(_torch.version, self._parameters)) != self.versions:
            raise MutationError(
                f"the parameters of head {self.path!r} were changed after its forward, so its logits can't be computed"
                " from them; take the loss, and read the logits, before the optimizer steps, or leave the head out of"
                " the plan"
            )
        if any(p.numel() and not _torch.has_memory(p) for p in self._parameters):
            raise MutationError(
                f"the parameters of head {self.path!r} were freed after its forward, as FSDP does it, so its loss can't"
                " be computed in chunks; keep the head unsharded until backward (reshard_after_forward=False), or leave"
                " it out of the plan"
            )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How logits come from the head's input.

    Attributes:
        source: the call of the head.
        steps: changes of type and scalings, element by element.
        dtype: of the result.
        class_dim: where the vocabulary stands among the dimensions; None: at the end.
    """

    source: Source
    steps: tuple[Operation, ...] = ()
    dtype: torch.dtype
    class_dim: int | None = None

    def shape(self, hidden: Tensor) -> tuple[int, ...]:
        """Of the logits."""
        lead = list(hidden.shape[:-1])
        lead.insert(len(lead) if self.class_dim is None else self.class_dim, self.source.vocabulary)
        return tuple(lead)

    def whole(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The logits, in full."""
        with without_autocast(hidden.device):
            value = F.linear(*(None if t is None else t.to(self.source.dtype) for t in (hidden, weight, bias)))  # pyright: ignore[reportArgumentType]
        value = self.finished(value)
        return value if self.class_dim is None else value.movedim(-1, self.class_dim)

    def finished(self, product: Tensor) -> Tensor:
        """What the steps make of the head's own output."""
        for step in self.steps:
            product = step(product)
        return product


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
            inputs = [None if t is None else t.detach().requires_grad_(n) for t, n in zip(ctx.saved_tensors, needed, strict=True)]
            value = ctx.recipe.whole(*inputs)
        wanted = [t for t, n in zip(inputs, needed, strict=True) if n]
        found = iter(torch.autograd.grad(value, wanted, gradients[0]))
        return None, *[next(found) if n else None for n in needed]


class Logits(torch.Tensor):
    """Logits that aren't computed yet.

    Attributes:
        recipe: how they come from `hidden`.
        hidden: the head's input, with its graph: (..., width).
        version: of the input when the head was called.
    """

    recipe: Recipe
    hidden: Tensor
    version: int

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
        made.recipe, made.hidden, made.version = recipe, hidden, _torch.version(hidden)
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
        source = self.recipe.source
        return self.recipe.whole(self.hidden, source.weight, source.bias)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READ:
            with _torch.reading_logits():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None and args and isinstance(args[0], Logits):
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return _on_whole(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What comes past `__torch_function__`: operations of C++ code, and aliases that autograd makes."""
        lazy = _first(args, kwargs)
        if func in _ALIASES and (func is not _aten.view.default or list(args[1]) == list(lazy.shape)):
            made = Logits.empty(lazy.recipe, lazy.hidden)
            made.recipe, made.hidden, made.version = lazy.recipe, lazy.hidden, lazy.version
            return made
        if _torch.writes(func):
            raise _refusal(lazy, str(func))
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
    with _torch.unseen_by_modes():

        def stand_in(value: Any) -> Any:
            return torch.empty(0, dtype=value.dtype, device=value.device) if isinstance(value, Logits) else value

        probe = func(stand_in(lazy), *map(stand_in, args), **{key: stand_in(value) for key, value in kwargs.items()})
    dtype = probe.dtype
    if probe.device != lazy.device or not dtype.is_floating_point:
        return NotImplemented
    return lazy if dtype == lazy.dtype else lazy.with_step(lambda t: t.to(dtype), dtype)


def _same(func: Any, lazy: Logits, **kwargs: Any) -> Any:
    return lazy


def _cut_off(func: Any, lazy: Logits) -> Any:
    source = lazy.recipe.source
    bias = None if source.bias is None else source.bias.detach()
    lazy.check()
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
_READ = {
    *[getattr(_T, name).__get__ for name in (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf", "is_cuda", "is_cpu", "is_meta",
        "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes", "output_nr", "_version",
    )],
    _T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.is_floating_point, _T.is_complex, _T.__len__, _T.element_size,
    _T.get_device, _T.is_contiguous, _T.stride, _T.is_inference, torch.is_floating_point, torch.is_complex,
    torch.numel,
}  # fmt: skip
_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (_T.view, _T.reshape, torch.reshape, _T.flatten, torch.flatten, _T.unflatten, torch.unflatten, _T.unsqueeze,
         torch.unsqueeze, _T.squeeze, torch.squeeze), _reshaped),
    **dict.fromkeys(
        (_T.transpose, torch.transpose, _T.permute, torch.permute, _T.movedim, torch.movedim, _T.swapaxes, _T.swapdims),
        _permuted),
    _T.mT.__get__: _transposed,
    _T.__getitem__: _picked,
    **dict.fromkeys((_T.to, _T.float, _T.half, _T.bfloat16, _T.double, _T.type_as), _cast),
    **dict.fromkeys((_T.contiguous, _T.clone, torch.clone), _same),
    **dict.fromkeys((_T.detach, torch.detach, _T.data.__get__), _cut_off),
    **dict.fromkeys(
        (_T.mul, torch.mul, _T.div, torch.div, _T.__mul__, _T.__rmul__, _T.__truediv__, _T.tanh, torch.tanh), _scaled),
}  # fmt: skip
_HOOKS = {_T.register_hook, _T.retain_grad, _T.register_post_accumulate_grad_hook, _T.requires_grad.__set__, _T.data.__set__, _T.grad.__set__}  # fmt: skip
_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__", "__ifloordiv__", "__imod__"}  # fmt: skip


# The loss
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """What `cross_entropy` was asked for: its own arguments."""

    weight: Tensor | None = None
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0

    def total(self, target: Tensor) -> Tensor:
        """What a mean divides by: the rows that count, or the sum of their classes' weights."""
        counts = target != self.ignore_index
        if self.weight is None:
            return counts.sum()
        return (self.weight[target.masked_fill(~counts, 0).long()] * counts).sum()

    def __call__(self, logits: Tensor, target: Tensor, reduction: str) -> Tensor:
        return F.cross_entropy(
            logits,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=reduction,
            label_smoothing=self.label_smoothing,
        )


@dataclass(frozen=True, kw_only=True)
class SeenLoss:
    """A loss that was taken of a head's logits.

    Attributes:
        recipe: of the logits.
        rows: the head's input, (rows, width).
        target: class indices, (rows).
        criterion: what was asked for.
    """

    recipe: Recipe
    rows: Tensor
    target: Tensor
    criterion: Criterion


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
    lazy.check()
    rows, flat = lazy.hidden.reshape(-1, lazy.hidden.shape[-1]), target.reshape(-1)
    if (seen := _seen.get()) is not None:
        seen.append(SeenLoss(recipe=lazy.recipe, rows=rows.detach(), target=flat, criterion=criterion))
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


def chunked_loss(recipe: Recipe, rows: Tensor, target: Tensor, criterion: Criterion) -> Tensor:
    """The loss of rows (rows, width) against class indices (rows), one chunk of logits at a time."""
    source, graded = recipe.source, torch.is_grad_enabled()
    return cast("Tensor", _Loss.apply(recipe, criterion, graded, rows, source.weight, source.bias, target))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        recipe: Recipe,
        criterion: Criterion,
        graded: bool,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
    ) -> Tensor:
        ctx.recipe, ctx.criterion = recipe, criterion
        work = _Pass(recipe, criterion, rows, weight, bias, target)
        if criterion.reduction == "none":
            ctx.save_for_backward(rows, weight, bias, target)
            return torch.cat(work.run((False, False, False))[0])
        losses, gradients = work.run(ctx.needs_input_grad[3:6] if graded else (False, False, False))
        total = criterion.total(target) if criterion.reduction == "mean" else None
        ctx.save_for_backward(total, *gradients)
        wide = torch.stack([loss.to(_wide(loss.dtype)) for loss in losses]).sum()
        return (wide if total is None else wide / total).to(losses[0].dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise HeadError(
                f"the loss of head {ctx.recipe.source.path!r} is computed in chunks and can't be differentiated twice"
                " (create_graph=True); run that step in `with rf.suspended(model):`, or leave the head out of the plan"
            )
        (gradient,) = gradients
        if ctx.criterion.reduction == "none":
            work = _Pass(ctx.recipe, ctx.criterion, *ctx.saved_tensors)
            made = work.run(ctx.needs_input_grad[3:6], gradient)[1]
        else:
            total, *sums = ctx.saved_tensors
            if total is not None:  # where no row counts the loss isn't a number, and the gradients are 0
                gradient = (gradient / total).masked_fill(total == 0, 0)
            # Without a second backward nobody needs the sums again; two weight gradients would be the step's peak.
            scale = Tensor.mul if _torch.keeps_graph() else Tensor.mul_
            made = [None if t is None else scale(t, gradient) for t in sums]
        return None, None, None, *made, None


class _Pass:
    """Forward through all chunks, and backward through each while its logits are there."""

    def __init__(
        self, recipe: Recipe, criterion: Criterion, rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor
    ):
        dtype = recipe.source.dtype
        self._recipe, self._criterion, self._target = recipe, criterion, target
        self._given = rows, weight, bias
        self._inputs = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        size = -(-len(rows) // min(recipe.source.chunks, len(rows)))
        self._parts = [slice(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]

    def run(
        self, needed: Sequence[bool], row_gradients: Tensor | None = None
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """The losses of the chunks, and the gradients of rows, weight and bias where they are needed.

        The losses are sums over a chunk's rows, or those of its rows where that is asked for.

        Args:
            row_gradients: the gradient of each row's loss, where the losses aren't added up.
        """
        gradients = _Gradients(*self._given, needed)
        reduction = "none" if self._criterion.reduction == "none" else "sum"
        graded, losses = any(needed), []
        for part in self._parts:
            product = self._product(part).requires_grad_(graded)
            with torch.set_grad_enabled(graded):
                loss = self._criterion(self._recipe.finished(product), self._target[part], reduction)
            losses.append(loss.detach())
            if graded:
                (of_product,) = torch.autograd.grad(loss, product, None if row_gradients is None else row_gradients[part])
                del loss, product  # with them, the chunk's logits
                with without_autocast(of_product.device):
                    gradients.add(part, of_product, self._inputs)
                del of_product
        return losses, gradients.finished()

    def _product(self, part: slice) -> Tensor:
        rows, weight, bias = self._inputs
        with torch.no_grad(), without_autocast(rows.device):
            return F.linear(rows[part], weight, bias)


class _Gradients:
    """Gradients of the head's input, weight and bias, chunk by chunk.

    Those of half precision are added up in float32, as a product over all rows is; the chunk's own product is made a
    slice of the vocabulary at a time then.
    """

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]):
        self._type = weight.dtype
        self._rows = torch.empty_like(rows, memory_format=torch.contiguous_format) if needed[0] else None
        self._weight = torch.zeros(weight.shape, dtype=_wide(weight.dtype), device=weight.device) if needed[1] else None
        wants_bias = bias is not None and needed[2]
        self._bias = torch.zeros(len(weight), dtype=_wide(weight.dtype), device=weight.device) if wants_bias else None

    def add(self, part: slice, of_product: Tensor, inputs: tuple[Tensor, Tensor, Tensor | None]) -> None:
        """Adds a chunk's.

        Args:
            of_product: the gradient of the head's own output, (rows of the chunk, vocabulary).
            inputs: rows, weight and bias in the type of the product.
        """
        rows, weight, _ = inputs
        if self._bias is not None:
            self._bias += of_product.sum(0)
        if self._weight is not None:
            if self._weight.dtype == of_product.dtype:
                self._weight.addmm_(of_product.t(), rows[part])
            else:
                for piece in range(0, len(weight), max(1, len(of_product))):
                    columns = slice(piece, piece + max(1, len(of_product)))
                    self._weight[columns] += of_product[:, columns].t() @ rows[part]
        if self._rows is not None and self._rows.dtype == of_product.dtype:
            torch.mm(of_product, weight, out=self._rows[part])
        elif self._rows is not None:
            self._rows[part] = of_product @ weight

    def finished(self) -> list[Tensor | None]:
        """Of rows, weight and bias, each in its type; float16, which can't hold their sums, comes when they are scaled."""
        dtype = torch.float32 if self._type == torch.float16 else self._type
        return [self._rows, *[None if t is None else t.to(dtype) for t in (self._weight, self._bias)]]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF_TYPES else dtype


# The head's own forward
# ----------------------------------------------------------------------------------------------------------------------


def logits(
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


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which operations take the types that they are given."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
