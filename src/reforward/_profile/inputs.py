"""The arguments that block calls really get, taken from a forward without gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from reforward import _torch
from reforward._blocks import watching
from reforward._errors import DryRunError
from reforward._profile.dry import BlockCall, check_same_calls, described, inputs_of
from reforward._runtime import Ambient, Parts, accelerators


class _Link:
    """In a tensor's place: the leaf of the output of the call before."""

    def __init__(self, index: int):
        self.index = index


class _Object:
    """In an object's place: what it held when the call began. A block may change it: append to a cache, say."""

    def __init__(self, value: Any):
        self._parts = Parts()
        self._ref = self._parts.take(value)
        self._parts.close()
        self._parts.leaves = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in self._parts.leaves]

    def fresh(self) -> Any:
        """An object like it."""

        def leaf(ref: int) -> Any:
            value = self._parts.leaf(ref)
            return value.clone() if isinstance(value, torch.Tensor) else value

        return self._parts.rebuild(self._ref, leaf, {})


class CallInputs:
    """Arguments of a block call, kept by value, a tensor that is given twice once; and the autocast that was on.

    Args:
        call: the call, as the dry run met it.
        previous: leaves of the output of the call before; arguments that are among them are linked, not kept.
    """

    def __init__(self, args: Any, kwargs: Any, call: BlockCall, previous: Sequence[Any] = ()):
        self._differentiates = call.differentiates
        leaves, self._structure = _torch.flatten((args, kwargs))
        positions = {id(leaf): index for index, leaf in enumerate(previous) if isinstance(leaf, torch.Tensor)}
        wants = iter([wants for _, _, wants in call.inputs])
        self._ambient = Ambient.capture(accelerators([t for t in leaves if isinstance(t, torch.Tensor)]))
        given = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and id(leaf) not in positions}
        kept = {key: tensor.detach().clone() for key, tensor in given.items()}
        self._leaves = [
            (_Object(leaf), False)
            if not isinstance(leaf, torch.Tensor)
            else (_Link(positions[id(leaf)]), next(wants))
            if id(leaf) in positions
            else (kept[id(leaf)], next(wants))
            for leaf in leaves
        ]

    def fresh(self, previous: Sequence[Any] = ()) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for a call: tensors are leaves of a new graph, but for those linked to `previous`."""
        made = {
            id(leaf): leaf.detach().clone().requires_grad_(wants)
            for leaf, wants in self._leaves
            if isinstance(leaf, torch.Tensor)
        }
        leaves = [
            previous[leaf.index]
            if isinstance(leaf, _Link)
            else made[id(leaf)]  # given twice again: attention asks whether `query is key`
            if isinstance(leaf, torch.Tensor)
            else leaf.fresh()
            for leaf, _ in self._leaves
        ]
        return _torch.unflatten(leaves, self._structure)

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Autocast and attention backends as they were at the call; gradients on if it takes some in its forward."""
        entered = self._ambient.enter()
        try:
            with torch.enable_grad() if self._differentiates else nullcontext():
                yield
        finally:
            if entered is not None:
                entered.close()


@contextmanager
def without_graph(model: nn.Module, calls: Sequence[BlockCall]) -> Iterator[None]:
    """While inside, a forward leaves no graph. Blocks that take gradients in it have one of their own while they run.

    Raises:
        DryRunError: the forward takes a gradient outside of its blocks.
    """

    def begin(path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        torch.set_grad_enabled(True)
        return _exchanged((args, kwargs), lambda t: t.detach().requires_grad_(t.is_floating_point()))

    def end(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        torch.set_grad_enabled(False)
        return _exchanged(output, torch.Tensor.detach)

    try:
        with torch.no_grad(), watching(model, [call.block.path for call in calls if call.differentiates], begin, end):
            yield
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise DryRunError(
            f"the forward of {type(model).__name__} takes a gradient outside of its blocks ({error}), but it is run"
            " without gradients to see what each block is given. Name what takes it as a block with blocks=, or put a"
            " plan on without profiling: rf.attach(model, rf.full())"
        ) from error


def _exchanged(tree: Any, new: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The tree with other tensors; where one occurs twice, so does the new one."""
    leaves, structure = _torch.flatten(tree)
    made = {id(leaf): new(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return _torch.unflatten([made.get(id(leaf), leaf) for leaf in leaves], structure)


def capture_inputs(
    model: nn.Module,
    calls: Sequence[BlockCall],
    run: Callable[[], Any],
    *,
    wanted: Collection[int],
    linked: Collection[int] = (),
) -> dict[int, CallInputs]:
    """The arguments of some of the block calls that `run` makes.

    Args:
        calls: all of them, as the dry run met them.
        wanted: indices of those whose arguments are kept.
        linked: those of them that take the output of the call before as it comes, so that it needn't be kept.

    Raises:
        DryRunError: `run` makes other calls than the dry run did, or with other shapes.
    """
    found: dict[int, CallInputs] = {}
    expected, made = [*map(str, calls)], list[str]()
    last_output: list[Any] = []

    def begin(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        index = len(made)
        made.append(described(path, inputs_of(args, kwargs)))
        if made[index:] != expected[index : index + 1]:
            check_same_calls(model, calls, made)
        if index in wanted:
            found[index] = CallInputs(args, kwargs, calls[index], last_output if index in linked else ())

    def end(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        last_output[:] = _torch.flatten(output)[0]

    with watching(model, [call.block.path for call in calls], begin, end), without_graph(model, calls):
        run()
    check_same_calls(model, calls, made)
    return found
