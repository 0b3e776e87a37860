"""Peak, timeline and breakdown against hand-computed bytes and against the laws that they obey."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from torch import Tensor, nn

import reforward as rf
from models import OWN, Case, build
from reforward._measure.account import balance, thinned
from reforward._measure.static import Holding
from reforward._measure.trace import MemoryEvent, record

FLOAT = 4


class Chain(nn.Module):
    """`depth` blocks of two matrix products each; a product keeps exactly its input and its weight for backward."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.layers = nn.ModuleList(Products(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Products(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_peak_of_a_chain_by_hand() -> None:
    rows, width, depth = 512, 16, 4
    model, batch = Chain(width, depth), torch.randn(rows, width)
    activation, weight = rows * width * FLOAT, width * width * FLOAT

    result = rf.measure(model, rf.Step(model, [batch]), repeats=1)

    parts = result.breakdown
    assert result.static_bytes == 2 * depth * weight + activation
    # Backward of the very last product is the peak. Its output isn't saved; everything before it is. It makes the
    # gradient of its weight, then that of its input, for which the kernel copies the incoming gradient (a scalar that
    # was expanded).
    assert result.peak_phase == "backward"
    assert parts.blocks == {f"layers.{i}": 2 * activation for i in range(depth - 1)} | {"layers.3": activation}
    assert parts.gradients == weight
    scalars = result.peak_bytes - result.static_bytes - (2 * depth - 1) * activation - weight - 2 * activation
    assert 0 < scalars <= 5 * FLOAT
    assert parts.temporaries + parts.loss_head == 2 * activation + scalars


def test_allocation_freed_in_forward_is_in_the_peak() -> None:
    """A scratch tensor a hundred times the rest: the peak lies where it lives, and is it."""
    model = nn.Linear(8, 8)
    x, scratch = torch.randn(4, 8), 200_000

    def loss() -> Tensor:
        big = torch.ones(scratch)
        small = big[0].clone()
        del big
        return model(x).sum() * small

    result = rf.measure(model, loss, repeats=1)
    assert result.peak_phase == "forward"
    assert scratch * FLOAT <= result.activation_peak_bytes <= scratch * FLOAT + 64
    assert scratch * FLOAT <= result.breakdown.temporaries <= scratch * FLOAT + 64


@pytest.mark.parametrize("name", sorted(OWN))
def test_parts_and_timeline_agree_with_the_peak(name: str) -> None:
    case = build(name)
    optimizer = torch.optim.AdamW(case.model.parameters())
    result = rf.measure(case.model, rf.Step(case.loss, optimizer=optimizer), repeats=1)
    parts = result.breakdown
    assert parts.total == result.peak_bytes
    assert min(parts.gradients, parts.loss_head, parts.temporaries, *parts.blocks.values()) >= 0
    assert max(count for _, count in result.timeline) == result.peak_bytes
    assert [phase.name for phase in result.phases] == ["forward", "backward", "optimizer"]
    assert max(phase.peak_bytes for phase in result.phases) == result.peak_bytes
    assert parts.parameters == sum(p.numel() * FLOAT for p in case.model.parameters())
    assert parts.buffers == sum(b.numel() * b.element_size() for b in case.model.buffers())
    assert parts.optimizer_state >= 2 * parts.parameters - 8
    assert sum(parts.blocks.values()) > parts.loss_head
    assert json.loads(json.dumps(result.to_dict()))["peak_bytes"] == result.peak_bytes


def test_gradients_are_named_at_a_peak_in_backward() -> None:
    """Wide weights, a small batch: the peak comes when nearly all gradients are there."""
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(6)))
    batch = torch.randn(2, 128)
    result = rf.measure(model, lambda: model(batch).sum(), repeats=1)
    assert result.breakdown.gradients == 6 * 128 * 128 * FLOAT
    assert result.peak_phase == "backward"


def test_accumulation_keeps_the_gradients_of_the_first_micro_batch() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    batch = torch.randn(256, 64)
    step = rf.Step(lambda x: model(x).square().mean(), [batch], accumulate=2)
    once = rf.measure(model, rf.Step(step.loss_fn, [batch]), repeats=1)
    twice = rf.measure(model, step, repeats=1)
    assert twice.peak_bytes > once.peak_bytes
    assert twice.breakdown.gradients == 3 * 64 * 64 * FLOAT
    assert [phase.name for phase in twice.phases] == ["forward", "backward"] * 2


def test_steady_state_counts_the_optimizer_state_as_static() -> None:
    model, batch = nn.Linear(32, 32, bias=False), torch.randn(4, 32)
    plain = rf.measure(model, lambda: model(batch).sum(), repeats=1)
    adam = rf.measure(model, rf.Step(lambda: model(batch).sum(), optimizer=torch.optim.Adam(model.parameters())))
    assert adam.static_bytes - plain.static_bytes == 2 * 32 * 32 * FLOAT + FLOAT
    assert adam.breakdown.optimizer_state == 2 * 32 * 32 * FLOAT + FLOAT


def test_shared_storage_counts_once() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    model[1].weight = model[0].weight
    batch = torch.randn(4, 32)
    result = rf.measure(model, rf.Step(lambda x: model(x[0]).sum() + x[1].sum(), [(batch, batch[:2])]), repeats=1)
    assert result.static_bytes == 32 * 32 * FLOAT + batch.numel() * FLOAT


def test_model_is_left_without_a_trace() -> None:
    case = build("gpt")
    before = {
        id(m): {k: dict(v) if isinstance(v, dict) else v for k, v in vars(m).items()} for m in case.model.modules()
    }
    rf.measure(case.model, case.loss, repeats=1)
    after = {
        id(m): {k: dict(v) if isinstance(v, dict) else v for k, v in vars(m).items()} for m in case.model.modules()
    }
    assert before.keys() == after.keys()
    for key, attributes in before.items():
        assert attributes.keys() == after[key].keys()
        assert all(value is after[key][name] or value == after[key][name] for name, value in attributes.items())


def test_seconds_are_taken_as_often_as_asked() -> None:
    case = build("lstm")
    result = rf.measure(case.model, case.loss, repeats=5)
    assert len(result.seconds_samples) == len(result.cpu_seconds_samples) == 5
    assert min(result.seconds_samples) <= result.seconds <= max(result.seconds_samples)
    assert min(result.cpu_seconds_samples) > 0
    assert result.allocated_bytes is None


def _no_parameters() -> Case:
    return Case(nn.Identity(), lambda: torch.zeros((), requires_grad=True))


def _on_meta() -> Case:
    return Case(nn.Linear(2, 2, device="meta"), lambda: torch.zeros((), requires_grad=True))


@pytest.mark.parametrize(("case", "words"), [(_no_parameters, "no parameters"), (_on_meta, "meta device")])
def test_models_that_have_no_step_are_refused(case, words: str) -> None:
    model, loss = case()
    with pytest.raises(rf.InputError, match=words):
        rf.measure(model, loss)


@pytest.mark.parametrize(("arguments", "words"), [({"repeats": 0}, "repeats"), ({"variant": 1}, "1 batches")])
def test_bad_arguments_are_refused(arguments: dict[str, int], words: str) -> None:
    case = build("lstm")
    with pytest.raises(rf.InputError, match=words):
        rf.measure(case.model, case.loss, **arguments)


def test_failing_step_leaves_no_hooks_and_the_state_restored() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    calls = []

    def loss() -> Tensor:
        calls.append(len(calls))
        if len(calls) == 2:
            raise RuntimeError("second run")
        return model(torch.ones(3, 4)).sum()

    with pytest.raises(RuntimeError, match="second run"):
        rf.measure(model, loss)
    assert int(model[1].num_batches_tracked) == 0
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_account_of_events_by_hand() -> None:
    held = [Holding(address=1, bytes=100, kind="parameters")]
    events = [
        MemoryEvent(time=0.0, address=2, bytes=50),
        MemoryEvent(time=1.0, address=9, bytes=-7),  # older than the run and unknown
        MemoryEvent(time=2.0, address=3, bytes=10),
        MemoryEvent(time=3.0, address=2, bytes=-50),
        MemoryEvent(time=4.0, address=1, bytes=-100),  # static memory freed meanwhile
        MemoryEvent(time=5.0, address=2, bytes=20),
    ]
    account = balance(events, held)
    assert account.live == (100, 150, 150, 160, 110, 10, 30)
    assert (account.peak, account.peak_bytes) == (2, 160)
    assert {a.address for a in account.allocations if a.lives_at(account.peak)} == {1, 2, 3}


def test_the_profiler_is_freed_with_its_trace() -> None:
    gc.collect()
    gc.disable()
    try:
        record(lambda: torch.ones(3), device=torch.device("cpu"))
        assert not [item for item in gc.get_objects() if type(item) is torch.profiler.profile]
    finally:
        gc.enable()


def test_thinning_keeps_extremes_and_order() -> None:
    points = [(float(i), (i * 7919) % 1000) for i in range(10_000)]
    few = thinned(points, 300)
    assert len(few) <= 300
    assert list(few) == sorted(few)
    assert set(few) <= set(points)
    assert max(b for _, b in few) == max(b for _, b in points)
    assert min(b for _, b in few) == min(b for _, b in points)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_on_cuda_is_the_allocators() -> None:
    torch.cuda.empty_cache()
    model, batch = Chain(256, 5).cuda(), torch.randn(4096, 256, device="cuda")
    others = torch.cuda.memory_allocated() - sum(p.numel() * FLOAT for p in model.parameters()) - batch.numel() * FLOAT
    result = rf.measure(model, rf.Step(model, [batch]), repeats=1)
    assert result.allocated_bytes is not None
    assert result.reserved_bytes is not None
    assert result.peak_bytes == pytest.approx(result.allocated_bytes - others, rel=0.01)
    assert result.reserved_bytes >= result.allocated_bytes
    assert result.breakdown.total == result.peak_bytes
