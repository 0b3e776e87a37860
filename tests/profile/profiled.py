"""Cases whose activations outweigh everything else, each profiled once for all tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import models
import reforward as rf
from reforward._plan import Plan, Region, Run
from reforward._profile import DryRun, Profiled, dry_run, profile_step


def encoder() -> models.Case:
    """A stack whose layers don't keep their input: it is freed once the layer has run."""
    stack = [nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(6)]
    model, batch = nn.Sequential(*stack), torch.randn(4, 64, 32)
    return models.Case(model, lambda: model(batch).square().mean())


#: A few MB each, so that a step takes tens of milliseconds.
SIZED: dict[str, Callable[[], models.Case]] = {
    "gpt": lambda: models.gpt(layers=4, width=32, batch=4, time=64),
    "gpt_sdpa": lambda: models.gpt(layers=4, width=64, batch=4, time=128, dropout=0.0, sdpa=True),
    "resnet": lambda: models.resnet(width=16, size=32),
    "lstm": lambda: models.lstm(width=64, batch=8, time=64),
    "unet": lambda: models.unet(width=16, size=32),
    "t5": models.t5,
    "encoder": encoder,
}

TECHNIQUES: dict[str, Any] = {
    "none": rf.none(),
    "full": rf.full(),
    "every 2": rf.every(2),
    "matmul": rf.selective(save="matmul"),
    "matmul and attention": rf.selective(save=["matmul", "attention"]),
    "segments": rf.segments("sqrt"),
    "nested": rf.segments(1, nested=2),
}


class Case(NamedTuple):
    """A model, its step and the profile of both."""

    model: nn.Module
    step: rf.Step
    profiled: Profiled

    def dry(self, plan: Any) -> DryRun:
        """The step under a plan, on fake tensors."""
        with rf.attached(self.model, plan):
            return dry_run(self.model, self.step, self.profiled.blocks, knowledge=self.profiled.costs.knowledge)

    def measured(self, plan: Any) -> rf.Measurement:
        """The step under a plan, for real."""
        with rf.attached(self.model, plan):
            return rf.measure(self.model, self.step, repeats=1)


@functools.cache
def case(name: str) -> Case:
    """The case of that name, profiled; tests leave its model as it is."""
    torch.manual_seed(0)
    model, loss = SIZED[name]()
    step = rf.Step(loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return Case(model.train(), step, profile_step(model.train(), step))


@functools.cache
def dry_of(name: str, technique: str) -> DryRun:
    """The dry run of a case under a technique; "mixed" is a plan with a bit of everything."""
    return case(name).dry(mixed(case(name)) if technique == "mixed" else TECHNIQUES[technique])


def mixed(case: Case) -> Plan:
    """A plan with a bit of everything: runs of two and single blocks under the options in turn, the last one plain."""
    calls = case.profiled.profile.calls[:-1]
    nodes: list[Region | Run] = []
    while calls:
        pair = calls[:2]
        if len(nodes) % 2 == 0 and len(pair) == 2 and pair[0].chain == pair[1].chain:
            nodes.append(Run(members=tuple(Region(path=call.path, policy=rf.Save()) for call in pair)))
        else:
            pair = calls[:1]
            nodes.append(Region(path=pair[0].path, policy=pair[0].options[1 + len(nodes) % 2].policy))
        calls = calls[len(pair) :]
    return Plan(nodes=tuple(nodes))
