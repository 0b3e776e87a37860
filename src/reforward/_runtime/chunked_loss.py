"""The loss of a head in chunks: projection, cross-entropy and their gradients, a part of the rows at a time.

The gradients are made in forward, while a chunk's logits are there; backward only scales them by the loss's own. (Made
in backward, they would need the product a second time. With `reduction="none"` each row has a gradient of its own that
only backward knows, so it is done there.) Hsu et al., Liger Kernel, arXiv:2410.10989, and Wijmans et al., Cut Your
Losses, arXiv:2411.09009, do the same in kernels of their own. Here each chunk runs torch's own operations, so class
weights, label smoothing, `ignore_index` and autocast mean what they mean in torch; only the order of sums over rows is
another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from reforward import _torch
from reforward._errors import HeadError, MutationError
from reforward._runtime.ambient import Ambient

_HALF_TYPES = (torch.float16, torch.bfloat16)
_FEWEST = 256  # columns of a product that is made slice by slice

Operation = Callable[[Tensor], Tensor]


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
            ctx.ambient = settings_around(rows)
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
            with ctx.ambient.enter() or nullcontext():
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
                (of_product,) = torch.autograd.grad(
                    loss, product, None if row_gradients is None else row_gradients[part]
                )
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
            self._bias += of_product.sum(0, dtype=self._bias.dtype)
        if self._weight is not None:
            if self._weight.dtype == of_product.dtype:
                self._weight.addmm_(of_product.t(), rows[part])
            else:
                size = max(_FEWEST, of_product.numel() // rows.shape[-1])  # a slice then weighs what the logits do
                for start in range(0, len(weight), size):
                    columns = slice(start, start + size)
                    self._weight[columns] += of_product[:, columns].t() @ rows[part]
        if self._rows is not None and self._rows.dtype == of_product.dtype:
            torch.mm(of_product, weight, out=self._rows[part])
        elif self._rows is not None:
            self._rows[part] = of_product @ weight

    def finished(self) -> list[Tensor | None]:
        """Of rows, weight and bias, each in its type; sums that float16 couldn't hold stay in float32."""
        dtype = torch.float32 if self._type == torch.float16 else self._type
        return [self._rows, *[None if t is None else t.to(dtype) for t in (self._weight, self._bias)]]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF_TYPES else dtype


def settings_around(tensor: Tensor) -> Ambient:
    return Ambient.capture(() if tensor.device.type == "cpu" else (tensor.device,))


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which operations take the types that they are given."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
