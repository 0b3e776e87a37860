"""The one place that uses names of torch which aren't public. Each says what it was checked on.

Everything here was checked on torch 2.13.0.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _module
from torch.overrides import TorchFunctionMode
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


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of a tree."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, while one of them lives; works on fake tensors, which have no address.

    A sparse tensor is known by the storage of its values.

    Checked on 2.13.0: the public `untyped_storage().data_ptr()` raises on fake tensors.
    """
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        if tensor.layout is torch.sparse_coo:
            return sparse_parts(tensor)[1].untyped_storage()._cdata
        if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
            return tensor.values().untyped_storage()._cdata
        return id(tensor)  # another kind without memory that it shows


def version(tensor: torch.Tensor) -> int:
    """How often the tensor's memory was written in place; what autograd itself compares. 0 for inference tensors.

    Checked on 2.13.0: `_version` is what autograd's error message prints.
    """
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor
        return 0


#: `version` of a tensor that autograd saves, which an inference tensor can't be. In C, since it is asked often.
version_of_saved: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


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
            if current._modules:
                stack += [child for child in current._modules.values() if child is not None]
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


def backward_pass() -> int | None:
    """The number of the backward pass that is running in this thread; None outside of one.

    Checked on 2.13.0: the engine numbers its passes; -1 means none.
    """
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Calls back when the running backward pass ends.

    Checked on 2.13.0: DDP and FSDP2 queue their final callbacks the same way.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # pyright: ignore[reportAttributeAccessIssue]


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


def is_sum_of_its_own(tensor: torch.Tensor) -> bool:
    """Whether autograd, which is adding to a gradient, alone holds it and its memory: then it adds in place. To be
    asked inside a dispatch mode, of an operand.

    Checked on 2.13.0: `can_accumulate_inplace` in the engine; the numbers are 1 there, and here include the references
    of the call and of Python. The engine itself always answers no while a dispatch mode is active.
    """
    from torch._prims_common import is_non_overlapping_and_dense_or_false

    held = tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # pyright: ignore[reportAttributeAccessIssue]
    return held == (4, 2) and is_non_overlapping_and_dense_or_false(tensor)


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


@cache
def is_plain_class(cls: type) -> bool:
    """Whether tensors of a class know all operations: the class has no implementations of its own, or they are those of
    fake tensors and of DTensor.

    Checked on 2.13.0: a class without `__torch_dispatch__` inherits the very object of `torch.Tensor`.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    if cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:  # pyright: ignore[reportAttributeAccessIssue]
        return True
    return issubclass(cls, FakeTensor) or f"{cls.__module__}.{cls.__name__}" == "torch.distributed.tensor.DTensor"


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

    Those of a scripted module can be read only: it keeps them elsewhere.

    Checked on 2.13.0: `torch.func.functional_call` exchanges parameters and buffers here.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return {}, dict(module.named_parameters(recurse=False)), dict(module.named_buffers(recurse=False))
    return module.__dict__, module._parameters, module._buffers


#: Settings of the whole process that a replay needs. Read before and after every block call, so without the Python
#: functions around them; checked on 2.13.0, where those do nothing else.
attention_switches: tuple[Callable[[], bool], ...] = (
    torch._C._get_flash_sdp_enabled,  # pyright: ignore[reportAttributeAccessIssue]
    torch._C._get_mem_efficient_sdp_enabled,  # pyright: ignore[reportAttributeAccessIssue]
    torch._C._get_math_sdp_enabled,  # pyright: ignore[reportAttributeAccessIssue]
    torch._C._get_cudnn_sdp_enabled,  # pyright: ignore[reportAttributeAccessIssue]
)
is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
warns_of_nondeterminism: Callable[[], bool] = torch._C._get_deterministic_algorithms_warn_only
_PRECISIONS = [
    ("generic", "all"),
    *[(backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")],
]


def float32_precision() -> Any:
    """Which precision float32 products are computed with, by whichever of torch's two interfaces was used to set it.

    Checked on 2.13.0: once it was set per backend, the older interface raises.
    """
    try:
        return torch._C._get_float32_matmul_precision()
    except RuntimeError:
        return tuple([torch._C._get_fp32_precision_getter(*place) for place in _PRECISIONS])  # pyright: ignore[reportAttributeAccessIssue]


def set_float32_precision(value: Any) -> None:
    """Puts back what `float32_precision` gave."""
    if isinstance(value, str):
        torch.set_float32_matmul_precision(value)
        return
    for place, precision in zip(_PRECISIONS, value, strict=True):
        if torch._C._get_fp32_precision_getter(*place) != precision:  # pyright: ignore[reportAttributeAccessIssue]
            torch._C._set_fp32_precision_setter(*place, precision)  # pyright: ignore[reportAttributeAccessIssue]


#: Which kernels are allowed: how each switch is read and written.
kernel_switches: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_mkldnn_deterministic, torch._C._set_mkldnn_deterministic),  # pyright: ignore[reportAttributeAccessIssue]
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
)


def in_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp) or forward-mode AD is active.

    Checked on 2.13.0: these forbid hooks on saved tensors, or differentiate without saving any.
    """
    in_func = torch._C._functorch.maybe_current_level() is not None  # pyright: ignore[reportAttributeAccessIssue]
    return in_func or torch.autograd.forward_ad._current_level >= 0


def is_from_transform(error: RuntimeError) -> bool:
    """Whether a transform of torch.func refused to run because there are hooks on saved tensors.

    Checked on 2.13.0: only the message says so.
    """
    return str(error).startswith("torch.func.") and "saved tensor hooks" in str(error)


def needs_values(error: Exception) -> bool:
    """Whether an exception says that an operation needs a tensor's values and the tensor is fake.

    Checked on 2.13.0: these are what a fake mode raises for `.item()` and for shapes that depend on data.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))


def registered_node(cls: type) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]] | None:
    """How values of a class that was registered with the pytree (ModelOutput) are taken apart and put together."""
    node = pytree.SUPPORTED_NODES.get(cls)
    return (node.flatten_fn, node.unflatten_fn) if node is not None else None


class OwnFunctionMode(TorchFunctionMode):
    """Base of the function modes of our own: no setting that a replay would have to find."""


def function_modes() -> tuple[Any, ...]:
    """The user's function modes that are active, from the outermost in; `with torch.device(...)` is one.

    Checked on 2.13.0: torch itself walks the stack this way; there is no public way to see which modes are on.
    """
    count = torch._C._len_torch_function_stack()
    if not count:
        return ()
    modes = [torch._C._get_function_stack_at(i) for i in range(count)]
    return tuple([mode for mode in modes if not isinstance(mode, OwnFunctionMode)])


@contextmanager
def under_function_modes(modes: Sequence[Any]) -> Iterator[None]:
    """A context in which these modes are active, and those of our own that are on already; no others.

    Checked on 2.13.0: `torch.overrides._pop_mode_temporarily` is what torch itself sets modes aside with.
    """
    with ExitStack() as stack:
        own = []
        for _ in range(torch._C._len_torch_function_stack()):
            mode = stack.enter_context(torch.overrides._pop_mode_temporarily())
            if isinstance(mode, OwnFunctionMode):
                own.insert(0, mode)
        for mode in [*modes, *own]:
            stack.enter_context(mode)
        yield


class CachedParametrizations:
    """What `torch.nn.utils.parametrize.cached()` holds; equal if it holds the very same tensors.

    Checked on 2.13.0: the cache is two globals of that module.
    """

    def __init__(self, values: dict[Any, Any]):
        self._values = values.copy()

    @classmethod
    def now(cls) -> CachedParametrizations | None:
        """What is held; None outside of `cached()`."""
        module = sys.modules.get("torch.nn.utils.parametrize")
        return cls(module._cache) if module is not None and module._cache_enabled else None

    @staticmethod
    @contextmanager
    def shown(wanted: CachedParametrizations | None) -> Iterator[None]:
        """A context in which `cached()` holds this, or isn't on."""
        module: Any = sys.modules["torch.nn.utils.parametrize"]
        before = module._cache_enabled, module._cache
        module._cache_enabled = int(wanted is not None)
        module._cache = wanted._values.copy() if wanted is not None else {}
        try:
            yield
        finally:
            module._cache_enabled, module._cache = before

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, CachedParametrizations)
            and self._values.keys() == other._values.keys()
            and all(value is other._values[key] for key, value in self._values.items())
        )

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def hook_tables(module: nn.Module) -> list[tuple[dict[int, Any], tuple[dict[int, Any], ...]]]:
    """The forward hooks of a module: pre-hooks and hooks, each with the dicts that hold their options by the same keys.

    Checked on 2.13.0: `register_forward_hook` fills these dicts, and nothing else says which hooks there are.
    """
    return [
        (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
        (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
    ]


def have_hooks(modules: Sequence[nn.Module]) -> bool:
    """Whether any of some modules has forward hooks, or there are some for all modules."""
    if _module._global_forward_hooks or _module._global_forward_pre_hooks:
        return True
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def global_hook_tables() -> list[tuple[dict[int, Any], tuple[dict[int, Any], ...]]]:
    """The forward hooks of all modules, as `hook_tables` gives them.

    Checked on 2.13.0: `register_module_forward_hook` fills these dicts.
    """
    return [
        (_module._global_forward_pre_hooks, ()),
        (
            _module._global_forward_hooks,
            (_module._global_forward_hooks_with_kwargs, _module._global_forward_hooks_always_called),
        ),
    ]


@contextmanager
def unseen_by_modes() -> Iterator[None]:
    """A context whose operations no function mode and no dispatch mode sees.

    Checked on 2.13.0: the guards that modes use for what they compute themselves.
    """
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def graph_position() -> int:
    """The number that the next node of this thread's autograd graph gets; nodes are numbered as they are made.

    Checked on 2.13.0: the engine orders nodes by this number; torch's own profiler reads it here.
    """
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


def node_position(node: Any) -> int:
    """The number of a node of an autograd graph."""
    return node._sequence_nr()


def counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that shares the version counter of another, and none of its memory, unless it can't be emptied (a nested
    tensor, a wrapper subclass)."""
    alias = tensor.detach()
    if is_plain_class(type(tensor)) and not tensor.is_nested:
        alias.data = alias.new_empty(0)
    return alias


def children_of(module: nn.Module) -> dict[str, Any]:
    """The dict in which the module keeps its submodules; empty for a scripted one, which keeps them elsewhere.

    Checked on 2.13.0, like `submodules`.
    """
    children = module._modules
    return children if type(children) is dict else {}


def any_compiled(modules: Sequence[nn.Module]) -> bool:
    """Whether any of some modules was compiled in place.

    Checked on 2.13.0: `Module.compile` leaves its result here.
    """
    return any(module._compiled_call_impl is not None for module in modules)


def without_memory(cls: type, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of a subclass with shape, type and device, and no memory.

    Checked on 2.13.0: DTensor is made this way.
    """
    return torch.Tensor._make_wrapper_subclass(cls, list(shape), dtype=dtype, device=device)  # pyright: ignore[reportAttributeAccessIssue]


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is there; FSDP2 frees that of parameters, which stay where they are."""
    return tensor.untyped_storage().nbytes() > 0


def keeps_graph() -> bool:
    """Inside a backward: whether another one through the same graph may follow (`retain_graph=True`).

    Checked on 2.13.0: torch's own AOTAutograd decides by it whether it may free what was saved.
    """
    return torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]


def reading_logits() -> Any:
    """A context in which a tensor subclass isn't asked, so that its own shape and type can be read.

    Checked on 2.13.0: what `torch.Tensor.__torch_function__` itself uses.
    """
    return torch._C.DisableTorchFunctionSubclass()
