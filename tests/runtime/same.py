"""Exactness, bit for bit: what a few steps leave behind, with and without a plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import reforward as rf

Record = dict[str, Any]


def seed(value: int) -> None:
    """Sets every stream."""
    random.seed(value)
    numpy.random.seed(value)
    torch.manual_seed(value)


def record(
    model: nn.Module,
    loss: Callable[[], Tensor],
    *,
    steps: int = 2,
    accumulate: int = 2,
    autocast: bool = False,
    after: Callable[[nn.Module], Any] | None = None,
) -> Record:
    """Everything that a plan must not change, after `steps` optimizer steps: losses, gradients, weights, buffers,
    streams.

    Args:
        accumulate: forwards and backwards per step.
        after: called with the model at the end; its result belongs to the record.
    """
    seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found: Record = {}
    for step in range(steps):
        for part in range(accumulate):
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                value = loss()
            value.backward()
            found[f"loss {step}.{part}"] = value.detach()
        found |= {f"gradient {step} {name}": clone(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    found |= {f"state {name}": clone(value) for name, value in model.state_dict().items()}
    found |= {f"buffer {name}": clone(value) for name, value in model.named_buffers()}
    found |= streams()
    found["after"] = after(model) if after is not None else None
    return found


def streams() -> Record:
    """The states of the global random streams."""
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": repr(numpy.random.get_state())}


def clone(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def differences(expected: Record, found: Record) -> list[str]:
    """The names under which two records differ in any bit."""
    names = [name for name in expected if name not in found or not equal(expected[name], found[name])]
    return names + [name for name in found if name not in expected]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        one, other = one.to_dense(), other.to_dense()
        same_kind = one.dtype == other.dtype and one.shape == other.shape
        return same_kind and (torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all()))
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


def assert_same(build: Callable[[], tuple[nn.Module, Callable[[], Tensor]]], plan: Any, **options: Any) -> None:
    """A model and its loss, built twice, leave the same behind plain and with a plan attached.

    Args:
        plan: whatever `rf.attach` takes.
        options: of `record`.
    """
    expected = record(*built(build), **options)
    model, loss = built(build)
    rf.attach(model, plan)
    found = record(model, loss, **options)
    assert differences(expected, found) == []


def built(build: Callable[[], tuple[nn.Module, Callable[[], Tensor]]]) -> tuple[nn.Module, Callable[[], Tensor]]:
    seed(0)
    return build()


class Calls:
    """How often each module ran its forward, by path."""

    def __init__(self):
        self.count: dict[str, int] = {}

    def of(self, *paths: str) -> list[int]:
        return [self.count.get(path, 0) for path in paths]


@contextmanager
def counted(model: nn.Module) -> Iterator[Calls]:
    """Counts the forwards of every submodule, replays included; by wrapping classes, so attached forwards count too."""
    calls = Calls()
    paths = {id(module): path for path, module in model.named_modules()}
    originals = {kind: kind.forward for kind in {type(module) for module in model.modules()}}

    def counting(forward: Callable[..., Any]) -> Callable[..., Any]:
        def counting_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = paths[id(self)]
            calls.count[path] = calls.count.get(path, 0) + 1
            return forward(self, *args, **kwargs)

        return counting_forward

    try:
        for kind, forward in originals.items():
            kind.forward = counting(forward)  # pyright: ignore[reportAttributeAccessIssue]
        yield calls
    finally:
        for kind, forward in originals.items():
            kind.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
