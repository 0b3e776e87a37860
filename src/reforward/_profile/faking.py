"""A model, its optimizer and its batches with fake tensors in place of the real ones: shapes, and no memory."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from reforward import _torch
from reforward._measure.state import preserved
from reforward._measure.static import step_inputs
from reforward._profile.integers import RealIntegers, is_integer
from reforward._step import Step


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A step to be traced, and the tensors that it finds in memory, by what they are.

    Attributes:
        step: the step, with a copy of the optimizer that updates the traced parameters.
        stand_in: what stands for a tensor of the step: a fake, or the tensor itself.
        parameters, buffers, gradients, optimizer, batch: each tensor once.
    """

    step: Step
    stand_in: Callable[[torch.Tensor], torch.Tensor]
    parameters: tuple[torch.Tensor, ...]
    buffers: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor, ...]
    optimizer: tuple[torch.Tensor, ...]
    batch: tuple[torch.Tensor, ...]


class _NoCopies:
    """Nothing is written to real tensors in a dry run, so `preserved` needn't copy them."""

    def keep(self, flat: torch.Tensor) -> Any:
        return lambda: None

    def close(self) -> None:
        pass


@contextmanager
def faked(model: nn.Module, step: Step) -> Iterator[TracedStep]:
    """Inside, the model's parameters and buffers are fake and a fake mode is active; afterwards all is as before.

    Python state that the forward changes, and random streams, are put back as well.
    """
    held = step_inputs(step)
    modules = modules_of(model, held)
    mode = _torch.fake_mode()
    with preserved(model, step.optimizer, also=held, copies=_NoCopies()):
        fakes = _Fakes(mode)
        exchanged = [(module, *_torch.named_own(module)) for module in modules]
        try:
            with mode, RealIntegers():
                for module, parameters, buffers in exchanged:
                    for name, parameter in parameters.items():
                        _torch.put_parameter(module, name, fakes.of(parameter))
                    for name, buffer in buffers.items():
                        _torch.put_buffer(module, name, fakes.of(buffer))
                batch = [fakes.stand_in(item) for item in held if isinstance(item, torch.Tensor)]
                optimizer = _fake_optimizer(step.optimizer, fakes) if step.optimizer is not None else None
                parameters = unique(fakes.of(p) for _, own, _ in exchanged for p in own.values())
                yield TracedStep(
                    step=replace(step, optimizer=optimizer),
                    stand_in=fakes.stand_in,
                    parameters=parameters,
                    buffers=unique(fakes.of(b) for _, _, own in exchanged for b in own.values()),
                    gradients=unique(p.grad for p in parameters if p.grad is not None),
                    optimizer=unique(_torch.tensors_in([*optimizer.state.values()])) if optimizer is not None else (),
                    batch=unique(batch),
                )
        finally:
            for module, parameters, buffers in exchanged:
                for name, parameter in parameters.items():
                    _torch.put_parameter(module, name, parameter)
                for name, buffer in buffers.items():
                    _torch.put_buffer(module, name, buffer)


def modules_of(model: nn.Module, held: Iterable[Any]) -> list[nn.Module]:
    """The modules that a step runs: the model's, and those that its function holds besides; each once."""
    return list(dict.fromkeys(m for root in (model, *held) if isinstance(root, nn.Module) for m in root.modules()))


class _Fakes:
    """The fake of each real tensor: the same one for the same tensor, with a gradient if the real one has one."""

    def __init__(self, mode: Any):
        self._mode = mode
        self._by_id: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._by_id:
            fake = self._fake(tensor)
            self._by_id[id(tensor)] = tensor, fake
            if tensor.is_leaf:
                fake.grad = None if tensor.grad is None else self._mode.from_tensor(tensor.grad)
        return self._by_id[id(tensor)][1]

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor becomes that the step's function holds: integers are used as they are."""
        return tensor if is_integer(tensor) or _torch.is_fake(tensor) else self.of(tensor)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if not is_integer(tensor):
            return self._mode.from_tensor(tensor)
        with _torch.outside_fake_mode():
            return tensor.detach().clone()  # integers stay real, but the model's own aren't written


def _fake_optimizer(optimizer: torch.optim.Optimizer, fakes: _Fakes) -> torch.optim.Optimizer:
    """A copy that updates the fakes. Its state is there, as it is from the second step of a training on."""
    fake = copy.copy(optimizer)
    fake.__dict__.pop("step", None)  # a scheduler's wrapper, which would step the real one
    fake.param_groups = [
        {**group, "params": [fakes.of(parameter) for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    fake.state = defaultdict(
        dict,
        {fakes.of(p): {key: _fake_state(value, fakes) for key, value in s.items()} for p, s in optimizer.state.items()},
    )
    fill_state(fake)
    return fake


def _fake_state(value: Any, fakes: _Fakes) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.copy(value)
    if value.dim() or value.device.type != "cpu":
        return fakes.of(value)
    # A count of steps, which optimizers read with .item(): a fake that is made from a number knows it.
    with _torch.outside_fake_mode():
        number = value.item()
    return torch.tensor(number, dtype=value.dtype)


def fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Steps once, so that an optimizer that makes its state in its first step has it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    before = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient


def unique(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors, each once."""
    return tuple({id(tensor): tensor for tensor in tensors}.values())
