"""Which memory a tensor holds, and which tensors a Python object holds."""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn

from reforward._torch import sparse_parts


def storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages behind a tensor: one if it is dense, those of its parts if it is sparse or a wrapper subclass."""
    for part in dense_parts(tensor):
        yield part.untyped_storage()


def dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The dense tensors that a tensor is made of; a dense tensor is its own only part."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:  # a wrapper subclass such as DTensor, whose own storage is a sham
        for name in flatten()[0]:
            yield from dense_parts(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from sparse_parts(tensor)
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


def is_on(device: torch.device, wanted: torch.device) -> bool:
    """Whether a tensor's device is the wanted one; without an index, all of the type are."""
    return device.type == wanted.type and (wanted.index is None or device.index == wanted.index)


def reachable(root: Any) -> list[torch.Tensor | nn.Module | torch.Generator]:
    """Tensors, modules and random generators held by containers, objects and functions.

    A function holds its closure, its defaults and the globals that it names, but functions among those globals aren't
    followed. Objects other than containers are opened two deep.
    """
    found: list[torch.Tensor | nn.Module | torch.Generator] = []
    seen: set[int] = set()
    queue: deque[tuple[Any, int]] = deque([(root, 2)])
    while queue:
        item, depth = queue.popleft()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, (torch.Tensor, nn.Module, torch.Generator)):
            found.append(item)
        elif isinstance(item, dict):
            queue.extend((value, depth) for value in item.values())
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            queue.extend((value, depth) for value in item)
        else:
            queue.extend((value, depth - 1) for value in _inside(item, depth))
    return found


def _inside(item: Any, depth: int) -> Iterable[Any]:
    if isinstance(item, functools.partial):
        return (item.func, item.args, item.keywords)
    if inspect.ismethod(item):
        return (item.__self__, item.__func__)
    if inspect.isfunction(item):
        return _captured(item)
    if depth == 0 or inspect.ismodule(item) or inspect.isclass(item) or not hasattr(item, "__dict__"):
        return ()
    return list(vars(item).values())


def _captured(function: FunctionType) -> Iterable[Any]:
    names = inspect.getclosurevars(function)
    named = [value for value in names.globals.values() if not inspect.isfunction(value)]
    return (*names.nonlocals.values(), *named, *(function.__defaults__ or ()))
