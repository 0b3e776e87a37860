"""A fingerprint of all that reforward must leave as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Contents and identity of parameters, buffers, gradients and optimizer state; every attribute of every module,
    hooks among them; the random streams. Equal fingerprints mean that nothing was changed or exchanged."""
    found: dict[str, Any] = {
        "streams": (bits(torch.get_rng_state()), random.getstate(), repr(numpy.random.get_state()))
    }
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found[f"tensor {name}"] = _tensor(tensor), None if tensor.grad is None else _tensor(tensor.grad)
    for name, module in model.named_modules():
        found[f"attributes of {name}"] = dict(_attributes(vars(module)))
    if optimizer is not None:
        groups = [{key: _value(value) for key, value in group.items()} for group in optimizer.param_groups]
        states = {id(p): {key: _value(value) for key, value in s.items()} for p, s in optimizer.state.items()}
        found |= {"optimizer": (groups, states, dict(_attributes(vars(optimizer))))}
    return found


def bits(tensor: Tensor) -> bytes:
    """Every bit of a tensor's values."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy(force=True).tobytes()


def _attributes(attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in attributes.items():
        if isinstance(value, dict):
            yield key, {name: id(member) for name, member in value.items()}
        elif isinstance(value, (list, set, tuple)):
            yield key, [id(member) for member in value]
        else:
            yield key, _value(value)


def _value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _tensor(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else id(value)


def _tensor(tensor: Tensor) -> tuple[int, bool, bytes]:
    return id(tensor), tensor.requires_grad, bits(tensor)
