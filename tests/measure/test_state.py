"""What `preserved` and `measure(restore=True)` put back: everything, bit for bit, as the same objects."""

from __future__ import annotations

import pickle
import random

import numpy
import pytest
import torch
from torch import Tensor, nn

import reforward as rf
from models import OWN, build
from reforward._measure.state import Copies, FileCopies, HostCopies, preserved


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    """Every number that training depends on, pickled."""
    return pickle.dumps(
        (
            {name: _bits(t) for name, t in [*model.named_parameters(), *model.named_buffers()]},
            {name: None if p.grad is None else _bits(p.grad) for name, p in model.named_parameters()},
            [(i, k, _bits(v)) for i, state in enumerate(optimizer.state.values()) for k, v in state.items()],
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
            [module.training for module in model.modules()],
            _bits(torch.get_rng_state()),
            random.getstate(),
            numpy.random.get_state()[1].tobytes(),
        )
    )


def _bits(value: Tensor) -> bytes:
    return (
        value.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()
        if value.dim()
        else pickle.dumps(value.item())
    )


@pytest.mark.parametrize("begun", [False, True], ids=["before training", "amid training"])
@pytest.mark.parametrize("name", sorted(OWN))
def test_measure_leaves_everything_as_it_was(name: str, begun: bool) -> None:
    case = build(name)
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-2)
    step = rf.Step(case.loss, optimizer=optimizer)
    if begun:
        step.run()
        step.run(optimize=False)
    grads = [p.grad for p in case.model.parameters()]
    before, copy = fingerprint(case.model, optimizer), step.run
    rf.measure(case.model, step, repeats=1)
    assert fingerprint(case.model, optimizer) == before
    assert all(p.grad is g for p, g in zip(case.model.parameters(), grads, strict=True))
    assert bool(optimizer.state) is begun
    copy()
    assert fingerprint(case.model, optimizer) != before


def test_training_after_measure_is_as_if_it_never_was() -> None:
    def train(measured: bool) -> bytes:
        case = build("resnet")
        optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1, momentum=0.9)
        step = rf.Step(case.loss, optimizer=optimizer)
        torch.manual_seed(3)
        step.run()
        if measured:
            rf.measure(case.model, step, repeats=1)
        step.run()
        return fingerprint(case.model, optimizer)

    assert train(measured=True) == train(measured=False)


def test_without_restore_the_model_trains() -> None:
    case = build("gpt")
    optimizer = torch.optim.AdamW(case.model.parameters())
    rf.measure(case.model, rf.Step(case.loss, optimizer=optimizer), repeats=2, restore=False)
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}


class Restless(nn.Module):
    """Changes, in forward, whatever can be changed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("updated", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("absent", None)
        self.plain_tensor = torch.zeros(3)
        self.count = 0
        self.seen: list[int] = []
        self.named: dict[str, int] = {}
        self.members: set[int] = set()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        self.updated += 1
        self.replaced = self.replaced + 1
        self.absent = torch.ones(1)
        self.plain_tensor.add_(1)
        self.count += 1
        self.seen.append(self.count)
        self.named[str(self.count)] = self.count
        self.members.add(self.count)
        self.fresh = "attribute"
        noise = torch.rand(3, generator=self.generator)
        self.eval()
        with torch.no_grad():
            self.weight.data = self.weight + 1
        return (self.weight * x + noise).sum() + random.random() + float(numpy.random.rand())


@pytest.mark.parametrize("copies", [HostCopies, FileCopies])
def test_module_attributes_come_back(copies: type[Copies]) -> None:
    model = Restless()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, address = fingerprint(model, optimizer), model.weight.data_ptr()
    attributes, replaced, draws = set(vars(model)), model.replaced, model.generator.get_state()
    with preserved(model, optimizer, copies=copies()):
        model(torch.ones(3)).backward()
        optimizer.param_groups[0]["lr"] = 7.0
        assert fingerprint(model, optimizer) != before
    assert fingerprint(model, optimizer) == before
    assert set(vars(model)) == attributes
    assert model.weight.data_ptr() == address
    assert model.replaced is replaced
    assert model.absent is None
    assert (model.count, model.seen, model.named, model.members) == (0, [], {}, set())
    assert torch.equal(model.plain_tensor, torch.zeros(3))
    assert torch.equal(model.generator.get_state(), draws)


@pytest.mark.parametrize("copies", [HostCopies, FileCopies])
def test_contents_of_awkward_tensors_come_back(copies: type[Copies]) -> None:
    """NaNs, an expanded tensor, a view into a larger storage, no elements, a storage freed meanwhile."""
    base = torch.arange(12.0)
    odd = {
        "nan": torch.tensor([float("nan"), -0.0]),
        "expanded": torch.ones(1).expand(4),
        "view": base[3:6],
        "empty": torch.empty(0),
        "half": torch.randn(5, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
    }
    before = {name: _bits(tensor) for name, tensor in odd.items()} | {"base": _bits(base)}
    with preserved(nn.Identity(), also=[odd], copies=copies()):
        base.zero_()
        odd["nan"].zero_()
        odd["expanded"][:1].zero_()
        odd["flags"].logical_not_()
        odd["half"].untyped_storage().resize_(0)
    assert {name: _bits(tensor) for name, tensor in odd.items()} | {"base": _bits(base)} == before


def test_pieces_larger_than_a_chunk_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reforward._measure.state._CHUNK_BYTES", 64)
    tensor = torch.randn(101)
    before = tensor.clone()
    with preserved(nn.Identity(), also=[tensor], copies=FileCopies()):
        tensor.zero_()
    assert torch.equal(tensor, before)


def test_state_comes_back_after_an_error() -> None:
    model = nn.BatchNorm1d(3)

    def fail() -> None:
        with preserved(model):
            model(torch.ones(2, 3))
            raise KeyError("in between")

    with pytest.raises(KeyError):
        fail()
    assert int(model.num_batches_tracked) == 0


def test_versions_are_not_bumped() -> None:
    """Restoring writes below autograd: a tensor that nobody changed keeps its version."""
    model = nn.Linear(2, 2)
    before = model.weight._version
    with preserved(model):
        pass
    assert model.weight._version == before
