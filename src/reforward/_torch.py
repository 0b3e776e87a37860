"""The one place that uses names of torch which aren't public. Each says what it was checked on.

Everything here was checked on torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _python_dispatch
from torch.utils import _pytree as pytree


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves of nested tuples, lists, dicts, named tuples and registered classes (ModelOutput), and their structure.

    Checked on 2.13.0: `torch.utils._pytree` is what torch.func, export and FSDP use; there is no public name for it.
    """
    if type(tree) is torch.Tensor:  # the pytree takes longer than a small operation
        return [tree], None
    return pytree.tree_flatten(tree)


def unflatten(leaves: list[Any], structure: Any) -> Any:
    """The inverse of `flatten`."""
    return leaves[0] if structure is None else pytree.tree_unflatten(leaves, structure)


_PLAIN_LEAVES = frozenset({torch.Tensor, nn.Parameter, type(None), bool, int, float, str})


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """`flatten` of a call's arguments, quick where none of them is a container."""
    if _PLAIN_LEAVES.issuperset(map(type, args)) and _PLAIN_LEAVES.issuperset(map(type, kwargs.values())):
        return [*args, *kwargs.values()], (len(args), tuple(kwargs))
    return pytree.tree_flatten((args, kwargs))


def unflatten_call(leaves: list[Any], structure: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inverse of `flatten_call`."""
    if type(structure) is tuple:
        count, names = structure
        return tuple(leaves[:count]), dict(zip(names, leaves[count:], strict=True))
    return pytree.tree_unflatten(leaves, structure)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of a tree."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, while one of them lives; works on fake tensors, which have no address.

    Sparse tensors have no storage of their own; they share memory with nothing but themselves.

    Checked on 2.13.0: the public `untyped_storage().data_ptr()` raises on fake tensors.
    """
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        return id(tensor)


def version(tensor: torch.Tensor) -> int:
    """How often the tensor's memory was written in place; what autograd itself compares. 0 for inference tensors.

    Checked on 2.13.0: `_version` is what autograd's error message prints.
    """
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor
        return 0


def alias_below_autograd(tensor: torch.Tensor) -> torch.Tensor:
    """A detached alias made inside a dispatch mode that still shares the version counter.

    Checked on 2.13.0: below autograd a plain `detach()` starts a counter of its own, and in-place writes go unseen;
    torch's own selective checkpointing excludes the key in the same way.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def submodules(module: nn.Module) -> list[nn.Module]:
    """The module and all below it, each once. Ten times faster than `module.modules()`: this runs at every block call.

    Checked on 2.13.0: `_modules` is how nn.Module stores its children.
    """
    seen: dict[nn.Module, None] = {}
    stack = [module]
    while stack:
        current = stack.pop()
        if current not in seen:
            seen[current] = None
            stack.extend(child for child in current._modules.values() if child is not None)
    return list(seen)


def parameters_of(modules: list[nn.Module]) -> list[nn.Parameter]:
    """The parameters that the modules hold themselves, without their children's."""
    return [p for module in modules for p in module._parameters.values() if p is not None]


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that the module holds itself, without its children's."""
    return {name: b for name, b in module._buffers.items() if b is not None} if module._buffers else {}


def in_fake_mode() -> bool:
    """Whether a FakeTensorMode is active: nothing is computed, so no random number is drawn either."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def in_backward() -> bool:
    """Whether a backward pass is running in this thread.

    Checked on 2.13.0: the engine numbers its passes; -1 means none.
    """
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> bool:
    """Calls back when the running backward pass ends; False (and nothing is queued) outside of one.

    Checked on 2.13.0: DDP and FSDP2 queue their final callbacks the same way.
    """
    if not in_backward():
        return False
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # pyright: ignore[reportAttributeAccessIssue]
    return True


# --- used by _measure -------------------------------------------------------------------------------------------------

#: Base of the dispatch modes of our own. Checked on 2.13.0: the documented extension point has no public path.
TorchDispatchMode = _python_dispatch.TorchDispatchMode


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a COO tensor.

    Checked on 2.13.0: the public accessors refuse tensors that aren't coalesced.
    """
    return tensor._indices(), tensor._values()


def fake_mode() -> Any:
    """A context in which tensors have shapes and no values; real tensors that are met count as fake ones.

    Checked on 2.13.0: the one way to trace a step for another device's kernels without memory; torch.export and
    FSDP's memory tracker are built on it. Its form of a grouped product (the experts of a mixture) takes bfloat16 only,
    where the kernels take other types, too; it ends with the function that is called here.
    """
    from torch._meta_registrations import _create_grouped_mm_output_tensor
    from torch._subclasses.fake_tensor import FakeTensorMode

    def grouped(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> torch.Tensor:
        return _create_grouped_mm_output_tensor(a, b, offs, out_dtype)

    class Mode(FakeTensorMode):
        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not torch.ops.aten._grouped_mm.default:
                return super().dispatch(func, types, args, kwargs)
            with self:
                return grouped(*args, **(kwargs or {}))

    return Mode(allow_non_fake_inputs=True)


def put_parameter(module: nn.Module, name: str, parameter: torch.Tensor) -> None:
    """Exchanges a parameter for any tensor, which `setattr` refuses."""
    module._parameters[name] = parameter  # pyright: ignore[reportArgumentType]


def put_buffer(module: nn.Module, name: str, buffer: torch.Tensor) -> None:
    """Exchanges a buffer."""
    module._buffers[name] = buffer


def named_own(module: nn.Module) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """The parameters and the buffers that the module holds itself, by name."""
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    return parameters, own_buffers(module)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values.

    Checked on 2.13.0: `torch._subclasses.FakeTensor` is what `fake_mode()` makes.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def outside_fake_mode() -> Any:
    """A context in which operations compute again although a fake mode is active around it.

    Checked on 2.13.0: torch.export uses the same one to evaluate constants.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def writes(func: Any) -> bool:
    """Whether an operation writes one of its arguments.

    Checked on 2.13.0: an overload's `_schema` is the only place that says so.
    """
    return func._schema.is_mutable


def returns_numbers(func: Any) -> bool:
    """Whether an operation returns something, and no tensor in it (`.item()`, `.equal()`)."""
    kinds = [str(returned.type) for returned in func._schema.returns]
    return bool(kinds) and not any("Tensor" in kind for kind in kinds)


def packet(func: Any) -> Any:
    """The operation that an overload belongs to (`aten.mm` of `aten.mm.default`), as torch's tables of FLOPs name it.

    Checked on 2.13.0: `_overloadpacket` is what torch's own FLOP counter looks at.
    """
    return func._overloadpacket


# --- used by _runtime -------------------------------------------------------------------------------------------------


def live_state(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The dicts in which the module keeps attributes, parameters and buffers, for reading and exchanging them.

    Checked on 2.13.0: `torch.func.functional_call` exchanges parameters and buffers here.
    """
    return module.__dict__, module._parameters, module._buffers


def in_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp) or forward-mode AD is active.

    Checked on 2.13.0: these forbid hooks on saved tensors, or differentiate without saving any.
    """
    in_func = torch._C._functorch.maybe_current_level() is not None  # pyright: ignore[reportAttributeAccessIssue]
    return in_func or torch.autograd.forward_ad._current_level >= 0


def needs_values(error: Exception) -> bool:
    """Whether an exception says that an operation needs a tensor's values and the tensor is fake.

    Checked on 2.13.0: these are what a fake mode raises for `.item()` and for shapes that depend on data.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))
