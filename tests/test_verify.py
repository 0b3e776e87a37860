"""The proof: it holds for every technique, it names what differs when something is wrong, and it leaves no trace."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
import reforward as rf
from reforward._profile import dry_run
from reforward._runtime import holders, hooks, replay
from reforward._runtime.fence import Fence
from reforward._runtime.streams import Bookmark
from reforward._techniques import none, resolve_plan
from reforward._verify import Proof, verify_regions
from untouched import fingerprint

PLANS: dict[str, Any] = {
    "full": rf.full(),
    "every 2": rf.every(2),
    "selective": rf.selective(save=["matmul", "attention", "conv"]),
    "segments": rf.segments("sqrt"),
    "one segment": rf.segments(1),
    "nested": rf.segments(1, nested=2),
}


def by_region(model: nn.Module, step: rf.Step, plan: Any) -> Proof:
    """The proof region by region, as `fit` takes it."""
    with rf.attached(model, none()):
        calls = dry_run(model, step, rf.find_blocks(model)).calls
    return verify_regions(model, step, resolve_plan(model, plan), calls)


PROOFS = [pytest.param(rf.verify, id="whole step"), pytest.param(by_region, id="region by region")]


def built(name: str) -> tuple[nn.Module, rf.Step]:
    model, loss = models.build(name)
    return model, rf.Step(loss)


# It holds
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["gpt", "gpt_sdpa", "resnet", "lstm", "unet"])
def test_the_whole_step_is_the_same(name: str, plan: str) -> None:
    model, step = built(name)
    proof = rf.verify(model, step, PLANS[plan])
    assert proof.differences == ()
    assert proof.scope == "whole step"
    assert proof.losses == 1
    assert proof.gradients == len(list(model.parameters()))
    assert proof.buffers == len(list(model.buffers()))
    assert proof.rng_states == 3, "torch, Python and numpy"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["gpt", "resnet", "unet"])
def test_every_region_is_the_same(name: str, plan: str) -> None:
    proof = by_region(*built(name), PLANS[plan])
    assert proof.differences == ()
    assert proof.scope == "region by region"
    assert proof.losses > 0


def test_one_region_of_each_kind_is_proven() -> None:
    model, step = built("gpt")
    layer = len(list(model.layers[0].parameters()))  # pyright: ignore[reportArgumentType, reportIndexIssue]
    assert len(rf.find_blocks(model)) == 4
    once = by_region(model, step, rf.full())
    assert (once.losses, once.gradients, once.buffers, once.rng_states) == (1, layer + 1, 0, 3)
    whole = by_region(model, step, rf.segments(1))
    assert (whole.losses, whole.gradients) == (1, 4 * layer + 1)
    assert by_region(model, step, rf.none()).gradients == 0


def test_each_batch_is_compared() -> None:
    model, _ = models.build("gpt")
    model.layers[0].requires_grad_(False)  # pyright: ignore[reportIndexIssue]
    batches = [torch.randint(0, models.VOCABULARY, (2, time)) for time in (16, 32)]
    step = rf.Step(lambda ids: model(ids).logsumexp(-1).mean(), batches, accumulate=2)
    proof = rf.verify(model, step, rf.full())
    assert proof.differences == ()
    assert (proof.losses, proof.rng_states) == (2, 6)
    assert proof.gradients == 2 * sum(p.requires_grad for p in model.parameters())


class Scaled(nn.Module):
    """As in ConvNeXt; the order in which the gradient of `scale` is summed goes by the strides of what it is given."""

    def __init__(self, width: int):
        super().__init__()
        self.inlet, self.linear = nn.Conv2d(width, width, 3, padding=1), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.scale * F.gelu(self.linear(self.inlet(x).permute(0, 2, 3, 1)))
        return x + h.permute(0, 3, 1, 2)


def test_gradients_pass_between_the_blocks_of_a_run_as_they_come() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(Scaled(12) for _ in range(3))), torch.randn(2, 12, 8, 8)
    batch = batch.to(memory_format=torch.channels_last)  # the loss's gradient is not
    step = rf.Step(lambda: model(batch).square().mean())
    assert rf.verify(model, step, rf.segments(1)).differences == ()
    assert by_region(model, step, rf.segments(1)).differences == ()


# It finds faults
# ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block with a buffer and dropout; `fault` sees its hidden values."""

    def __init__(self, fault: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.dropout(self.fault(self.norm(self.first(x))).relu(), 0.2))


def faulty(fault: Callable[[Tensor], Tensor] = lambda h: h) -> tuple[nn.Module, rf.Step]:
    """Four blocks of which the third may be faulty."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(fault if index == 2 else lambda h: h) for index in range(4)))
    batch = torch.randn(8, 16)
    return model, rf.Step(lambda: model(batch).square().mean())


def off_in_replay(hidden: Tensor) -> Tensor:
    return hidden * 1.001 if rf.is_replaying() else hidden


def from_nowhere(hidden: Tensor) -> Tensor:
    """Noise from a stream that nobody can put back."""
    noise = torch.frombuffer(bytearray(os.urandom(hidden.numel())), dtype=torch.uint8).view(hidden.shape)
    return hidden + noise / 255


REGIONS: list[Any] = [
    pytest.param(rf.full(), id="region"),
    pytest.param(rf.segments(1), id="run"),
    pytest.param(rf.segments(1, nested=2), id="nested"),
]
THIRD = {"2": rf.Recompute()}


@pytest.mark.parametrize("plan", [*REGIONS, pytest.param(THIRD, id="third")])
def test_a_block_that_computes_something_else_in_its_replay(plan: Any) -> None:
    differences = rf.verify(*faulty(off_in_replay), plan).differences
    assert "gradient 2.second.weight" in differences
    assert not [name for name in differences if not name.startswith("gradient")]


@pytest.mark.parametrize("plan", [*REGIONS[1:], pytest.param(THIRD, id="third")])
def test_a_region_that_computes_something_else_in_its_replay(plan: Any) -> None:
    differences = by_region(*faulty(off_in_replay), plan).differences
    assert "gradient 2.second.weight" in differences
    assert not [name for name in differences if not name.startswith("gradient")]


@pytest.mark.parametrize("proof", PROOFS)
def test_a_block_that_draws_from_elsewhere(proof: Callable[..., Proof]) -> None:
    differences = proof(*faulty(from_nowhere), THIRD).differences
    assert any(name.startswith("loss") for name in differences)
    assert "gradient 2.second.weight" in differences


@pytest.mark.parametrize("plan", REGIONS)
@pytest.mark.parametrize("proof", PROOFS)
def test_a_holder_that_gives_another_value(proof: Callable[..., Proof], plan: Any, monkeypatch: Any) -> None:
    right = holders.Holder.get

    def wrong(self: holders.Holder) -> Tensor:
        value = right(self)
        return value * 1.0001 if value.is_floating_point() else value

    model, step = faulty()
    assert proof(model, step, plan).differences == ()
    monkeypatch.setattr(holders.Holder, "get", wrong)
    differences = proof(model, step, plan).differences
    assert "gradient 0.first.weight" in differences
    assert not [name for name in differences if name.startswith(("loss", "buffer", "RNG"))]


@pytest.mark.parametrize("plan", REGIONS)
@pytest.mark.parametrize("proof", PROOFS)
def test_a_world_that_is_not_put_back(proof: Callable[..., Proof], plan: Any, monkeypatch: Any) -> None:
    """Without the fence a replay draws other dropout masks and counts the statistics of BatchNorm again."""
    monkeypatch.setattr(Fence, "rewind", lambda self: (lambda: None, {}))
    differences = proof(*faulty(), plan).differences
    assert "gradient 0.second.weight" in differences
    if proof is rf.verify:  # region by region, buffers are compared after the forward
        assert "buffer 0.norm.running_mean" in differences


def test_hooks_are_counted_and_peaks_measured() -> None:
    model, step = built("gpt")
    model.layers[0].norm1.register_forward_hook(lambda module, args, output: None)
    model.layers[1].norm1.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    proof = rf.verify(model, step, rf.full())
    assert (proof.hooks, proof.differences) == (2, ())
    assert proof.planned_peak_bytes < 0.8 * proof.plain_peak_bytes
    assert len(model.layers[0].norm1._forward_hooks) == 1


def test_a_hook_that_fires_again_is_a_difference(monkeypatch: Any) -> None:
    monkeypatch.setattr(hooks.Hooks, "rewind", lambda self: lambda: None)
    model, step = built("gpt")
    model.layers[0].norm1.register_forward_hook(lambda module, args, output: None)
    assert rf.verify(model, step, rf.full()).differences == ("calls of hook 0 of layers.0.norm1",)


def test_streams_that_a_replay_leaves_elsewhere(monkeypatch: Any) -> None:
    class Forgetful(Bookmark):
        def go_back(self) -> None:
            """Leaves the streams where they are."""

    monkeypatch.setattr(replay, "Bookmark", Forgetful)
    differences = rf.verify(*faulty(), rf.full()).differences
    assert "RNG state torch CPU" in differences


def test_the_batch_is_named() -> None:
    model, _ = faulty(off_in_replay)
    batches = [torch.randn(8, 16), torch.randn(4, 16)]
    differences = rf.verify(model, rf.Step(lambda x: model(x).square().mean(), batches), rf.full()).differences
    assert {"batch 0: gradient 2.second.weight", "batch 1: gradient 2.second.weight"} <= set(differences)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_single_bit_counts(value: float) -> None:
    """Minus zero is another number than zero, and a NaN is equal to the same NaN."""
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)

    def loss() -> Tensor:
        return model(batch).sum() * value

    assert rf.verify(model, loss, rf.full()).differences == ()
    plain = torch.tensor([value])
    from reforward._verify import _digest

    assert _digest(plain) != _digest(-plain)
    assert _digest(plain) != _digest(plain.double())
    assert _digest(plain) != _digest(plain[None])


# It leaves no trace
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begun", [False, True], ids=["before training", "amid training"])
@pytest.mark.parametrize("fault", [lambda h: h, off_in_replay], ids=["right", "faulty"])
@pytest.mark.parametrize("proof", PROOFS)
def test_everything_is_left_as_it_was(
    proof: Callable[..., Proof], fault: Callable[[Tensor], Tensor], begun: bool
) -> None:
    model, step = faulty(fault)
    optimizer = torch.optim.AdamW(model.parameters())
    step = rf.Step(step.loss_fn, optimizer=optimizer)
    if begun:
        step.run()
        step.run(optimize=False)
    before = fingerprint(model, optimizer)
    proof(model, step, rf.segments(2))
    assert fingerprint(model, optimizer) == before
    with rf.attached(model, rf.every(2)):
        attached = fingerprint(model)["tensor 0.first.weight"]
        proof(model, step, rf.segments(2))
        assert fingerprint(model)["tensor 0.first.weight"] == attached
        assert "forward" in vars(model[0]), "the plan that was on it is on it again"  # pyright: ignore[reportIndexIssue]
    assert fingerprint(model, optimizer) == before


@pytest.mark.parametrize("proof", PROOFS)
def test_a_replay_that_is_refused_leaves_no_trace_either(proof: Callable[..., Proof]) -> None:
    model, step = faulty(lambda h: h * h.sum(1, keepdim=True).exp() if rf.is_replaying() else h)
    before = fingerprint(model)
    with pytest.raises(rf.ReplayError, match="block '2'"):
        proof(model, step, THIRD)
    assert fingerprint(model) == before


def test_a_plan_for_another_model_is_refused() -> None:
    model, step = faulty()
    before = fingerprint(model)
    with pytest.raises(rf.PatternError, match="nowhere"):
        rf.verify(model, step, {"nowhere": rf.Recompute()})
    assert fingerprint(model) == before
