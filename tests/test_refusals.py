"""What isn't what it should be is refused in one sentence by every public function that takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import reforward as rf

NOTHING: Any = None
TEXT: Any = "x"


def model() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(3)])


def step() -> torch.Tensor:
    return torch.zeros((), requires_grad=True)


X = torch.ones(2, 8)
CALLS: dict[str, Callable[[], Any]] = {
    "find_blocks of nothing": lambda: rf.find_blocks(NOTHING),
    "profile of nothing": lambda: rf.profile(NOTHING, step),
    "measure of nothing": lambda: rf.measure(NOTHING, step),
    "measure, repeats": lambda: rf.measure(model(), step, repeats=TEXT),
    "measure, half a repeat": lambda: rf.measure(model(), step, repeats=0.5),  # pyright: ignore[reportArgumentType]
    "measure, no repeats": lambda: rf.measure(model(), step, repeats=NOTHING),
    "measure, variant": lambda: rf.measure(model(), step, variant=TEXT),
    "measure, no variant": lambda: rf.measure(model(), step, variant=NOTHING),
    "measure, variant below 0": lambda: rf.measure(model(), step, variant=-1),
    "solve of nothing": lambda: rf.solve(NOTHING, "60%"),
    "Allow, depth": lambda: rf.Allow(depth=TEXT),
    "Allow, depth below 0": lambda: rf.Allow(depth=-1),
    "Allow, half a depth": lambda: rf.Allow(depth=1.5),  # pyright: ignore[reportArgumentType]
    "Allow, selective": lambda: rf.Allow(selective=TEXT),
    "checkpoint, context_fn": lambda: rf.checkpoint(torch.sin, X, context_fn=TEXT),
    "checkpoint, context_fn that makes nothing": lambda: rf.checkpoint(torch.sin, X, context_fn=lambda: NOTHING),
    "checkpoint, context_fn that makes one": lambda: rf.checkpoint(torch.sin, X, context_fn=lambda: (NOTHING,)),
    "Ops, nth": lambda: rf.Ops(family="matmul", nth=TEXT),
    "Ops, nth below 0": lambda: rf.Ops(family="matmul", nth=-1),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(rf.InputError):
        call()


def test_solve_takes_allow_only() -> None:
    one = model()
    with pytest.raises(rf.InputError, match="allow must be"):
        rf.solve(rf.profile(one, lambda: one(X).sum()), "90%", allow=TEXT)
