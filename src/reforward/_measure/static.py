"""Static memory: what a step finds in memory when it begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from reforward._measure.storages import dense_parts, is_on, reachable
from reforward._step import Step

PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER, BATCH = "parameters", "buffers", "gradients", "optimizer_state", "batch"


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One storage that is live before the step: its address, its size, and what it belongs to."""

    address: int
    bytes: int
    kind: str


def holdings(model: nn.Module, step: Step, device: torch.device) -> list[Holding]:
    """Every storage on the device that belongs to the step, once, under the first kind that claims it.

    Counted are the model, modules and tensors that the step's function holds, the optimizer's state, and the batches.
    """
    found: dict[int, Holding] = {}
    for kind, tensors in _by_kind(model, step):
        for tensor in tensors:
            for part in dense_parts(tensor):
                storage = part.untyped_storage()
                if is_on(part.device, device) and storage.nbytes():
                    address = storage.data_ptr()
                    found.setdefault(address, Holding(address=address, bytes=storage.nbytes(), kind=kind))
    return list(found.values())


def addresses(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """Where the tensors' storages lie."""
    return frozenset(part.untyped_storage().data_ptr() for tensor in tensors for part in dense_parts(tensor))


def gradients(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The gradients that are there."""
    return (parameter.grad for parameter in parameters if parameter.is_leaf and parameter.grad is not None)


def optimizer_tensors(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """The tensors in the optimizer's state."""
    return [] if optimizer is None else [t for t in reachable(dict(optimizer.state)) if isinstance(t, torch.Tensor)]


def trainable(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """The model's parameters, and those that only the optimizer knows."""
    groups = optimizer.param_groups if optimizer is not None else []
    return list(dict.fromkeys([*model.parameters(), *(p for group in groups for p in group["params"])]))


def step_inputs(step: Step) -> list[torch.Tensor | nn.Module | torch.Generator]:
    """Tensors, modules and random generators that the step's function and its batches hold."""
    return reachable([step.loss_fn, step.batches])


def _by_kind(model: nn.Module, step: Step) -> Iterator[tuple[str, Iterable[torch.Tensor]]]:
    held = step_inputs(step)
    modules = [model, *(item for item in held if isinstance(item, nn.Module))]
    parameters = [*(p for module in modules for p in module.parameters()), *trainable(model, step.optimizer)]
    yield PARAMETERS, parameters
    yield BUFFERS, [b for module in modules for b in module.buffers()]
    yield GRADIENTS, gradients(parameters)
    yield OPTIMIZER, optimizer_tensors(step.optimizer)
    yield BATCH, [item for item in held if isinstance(item, torch.Tensor)]
