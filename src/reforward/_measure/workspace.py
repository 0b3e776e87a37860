"""Workspaces: bytes that a kernel allocates and frees within one operation, learnt from a profiled run.

A dispatch mode sees memory before and after an operation. Convolutions, recurrent layers and fused attention need
more in between (packed weights, scratch buffers). For each operation and shapes of its inputs the table holds the
most that any call needed beyond the larger of live-before and live-after; `StorageTracker(workspace=table.lookup)`
adds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from reforward._measure.storages import storages
from reforward._measure.trace import Trace
from reforward._measure.tracker import tensors_in
from reforward._torch import TorchDispatchMode


class Input(NamedTuple):
    """Shape of one tensor argument and its type as the profiler writes it ("" for members of a list)."""

    shape: tuple[int, ...]
    type: str


class OpKey(NamedTuple):
    """An operation (`aten::mm`) and its tensor arguments of at least one dimension.

    Strides and non-tensor arguments aren't part of it: the table holds the largest value over them.
    """

    op: str
    inputs: tuple[Input, ...]


@dataclass(frozen=True)
class Workspaces:
    """Bytes of workspace by operation and inputs; what isn't listed needs none."""

    bytes_by_op: dict[OpKey, int] = field(default_factory=dict)

    @classmethod
    def from_trace(cls, trace: Trace) -> Workspaces:
        """The workspaces seen in a trace that was recorded with shapes."""
        live = [0, *accumulate(event.bytes for event in trace.memory)]
        found: dict[OpKey, int] = {}
        for call in trace.ops:
            during = trace.between(call.begin, call.end)
            if during.stop - during.start < 2:
                continue
            inside = live[during.start : during.stop + 1]
            extra = max(inside) - max(inside[0], inside[-1])
            if extra > 0:
                key = OpKey(call.name, tuple(_recorded_inputs(call.input_shapes, call.input_types)))
                found[key] = max(extra, found.get(key, 0))
        return cls(found)

    def merged(self, *others: Workspaces) -> Workspaces:
        """The largest value of each key."""
        result = dict(self.bytes_by_op)
        for other in others:
            for key, count in other.bytes_by_op.items():
                result[key] = max(count, result.get(key, 0))
        return Workspaces(result)

    def lookup(self, func: Any, args: tuple[Any, ...], outputs: Any = None) -> int:
        """Bytes of workspace of one operation as a dispatch mode sees it; fits `StorageTracker(workspace=...)`."""
        count = self.bytes_by_op.get(_key(func, args))
        if count is None:
            # The profiler doesn't write down lists of optional tensors (the indices of aten::index).
            count = self.bytes_by_op.get(_key(func, [arg for arg in args if not isinstance(arg, list)]))
        return count or 0


class OutputSizes(TorchDispatchMode):
    """Learns the sizes of operations' outputs from a real run inside of it, for `StorageTracker(output_bytes=...)`.

    Needed for a dry run of operations whose fake kernels leave an opaque output empty, such as what oneDNN's LSTM keeps
    for its backward.
    """

    def __init__(self):
        super().__init__()
        self.bytes_by_output: dict[tuple[OpKey, int], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        key = _key(func, (*args, *kwargs.values()) if kwargs else args)
        for position, tensor in enumerate(tensors_in(outputs)):
            size = sum(storage.nbytes() for storage in storages(tensor))
            self.bytes_by_output[key, position] = max(size, self.bytes_by_output.get((key, position), 0))
        return outputs

    def merged(self, other: OutputSizes) -> OutputSizes:
        """The largest size of each output."""
        result = OutputSizes()
        for key in {**self.bytes_by_output, **other.bytes_by_output}:
            result.bytes_by_output[key] = max(self.bytes_by_output.get(key, 0), other.bytes_by_output.get(key, 0))
        return result

    def lookup(self, func: Any, args: tuple[Any, ...], position: int) -> int:
        """The largest size seen of that output, for inputs of these shapes; 0 if none was."""
        return self.bytes_by_output.get((_key(func, args), position), 0)


def _key(func: Any, args: Iterable[Any]) -> OpKey:
    return OpKey(func.name().split(".")[0], tuple(_inputs(args)))


def _recorded_inputs(shapes: Iterable[Any], types: Iterable[str]) -> Iterator[Input]:
    for shape, kind in zip(shapes, types, strict=False):
        if shape and isinstance(shape[0], list):
            yield from (Input(tuple(member), "") for member in shape if member)
        elif shape and not _is_opaque(len(shape), kind):
            yield Input(tuple(shape), kind)


def _is_opaque(dimensions: int, kind: str) -> bool:
    """Whether an input is a kernel's own buffer of bytes (oneDNN's LSTM passes one on): its fake has no size."""
    return dimensions == 1 and kind == _TYPE_NAMES[torch.uint8]


def _inputs(args: Iterable[Any]) -> Iterator[Input]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            kind = _TYPE_NAMES.get(arg.dtype, str(arg.dtype))
            if arg.dim() and not _is_opaque(arg.dim(), kind):
                yield Input(tuple(arg.shape), kind)
        else:
            yield from (Input(tuple(member.shape), "") for member in tensors_in(arg) if member.dim())


#: How the profiler names element types.
_TYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.int16: "short int",
    torch.int32: "int",
    torch.int64: "long int",
    torch.bool: "bool",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
    torch.float8_e4m3fn: "c10::Float8_e4m3fn",
    torch.float8_e5m2: "c10::Float8_e5m2",
}
