"""Blocks that are run by themselves run as they do in the step."""

from itertools import chain, repeat
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
import reforward as rf
from reforward import profile
from reforward._profile import profile_step
from untouched import fingerprint


def test_under_the_autocast_of_the_step():
    case = models.build("gpt")
    linear = next(m for m in case.model.layers[0].modules() if isinstance(m, nn.Linear))
    seen = set()
    linear.register_forward_hook(lambda module, args, output: seen.add(output.dtype))

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return case.loss()

    profile_step(case.model, rf.Step(loss))
    assert seen == {torch.bfloat16}


class Attentions(nn.Module):
    """Self-attention takes query, key and value packed only where they are one tensor."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x


def test_given_one_tensor_twice_as_in_the_step():
    model, batch = Attentions(), torch.randn(4, 64, 32)
    seen = set()
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: seen.add(args[0] is args[1] is args[2]))
    rf.fit(model, lambda: model(batch).square().mean(), "90%")
    assert seen == {True}


class Descent(nn.Module):
    """A block that goes down the gradient of an energy; of its input itself, or of a copy cut off from it."""

    def __init__(self, cut_off):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        self.cut_off = cut_off

    def forward(self, x):
        y = x.detach().requires_grad_() if self.cut_off else x
        (force,) = torch.autograd.grad(self.energy(y).sum(), y, create_graph=True)
        return x - 0.1 * force


@pytest.mark.parametrize("cut_off", [True, False])
def test_blocks_that_differentiate_in_their_forward(cut_off):
    model, batch = nn.Sequential(nn.Linear(16, 16), *(Descent(cut_off) for _ in range(3))), torch.randn(128, 16)
    blocks = rf.find_blocks(model, Descent)

    def loss():
        return model(batch).square().mean()

    plan = rf.fit(model, loss, "90%", blocks=blocks)
    assert plan.nodes
    assert plan.predicted_peak_bytes == pytest.approx(rf.measure(model, loss, repeats=1).peak_bytes, rel=0.001)
    events = rf.profile(model, loss, blocks=blocks).events
    assert [event.call for event in events if event.kind == "backward"] == [2, 1, 0]


def test_a_gradient_taken_outside_of_the_blocks_is_refused():
    model, batch = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), torch.randn(4, 8)

    def loss():
        x = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().mean()

    with pytest.raises(rf.DryRunError, match=r"Sequential takes a gradient outside of its blocks .* blocks="):
        rf.profile(model, loss)


def test_what_overwrites_its_input_is_no_block():
    model = nn.Sequential(*[part for _ in range(3) for part in (nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True))])
    images = torch.randn(2, 4, 16, 16)
    profile = rf.profile(model, lambda: model(images).square().mean())
    types = {call.module_type for call in profile.calls}
    assert "ReLU" not in types
    assert types


def test_only_the_blocks_that_are_named():
    case = models.build("gpt")
    blocks = rf.find_blocks(case.model, "layers[1:3]")
    profile = rf.profile(case.model, case.loss, blocks=blocks)
    assert [call.path for call in profile.calls] == ["layers.1", "layers.2"]
    assert all(option.replay_flops >= 0 for call in profile.calls for option in call.options)


def test_an_optimizer_with_a_constructor_of_its_own():
    class Own(torch.optim.SGD):
        def __init__(self, model):
            super().__init__(model.parameters(), lr=0.1, momentum=0.9)
            self.model = model

    case = models.build("gpt")
    profile = rf.profile(case.model, rf.Step(case.loss, optimizer=Own(case.model)))
    assert [event.seconds > 0 for event in profile.events if event.name == "optimizer"] == [True]
    assert profile.optimizer_bytes == profile.parameter_bytes


class Stack(nn.Module):
    """Calls so many of its layers, on its input repeated so often, as the next turn says."""

    def __init__(self, turns):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.turns = turns

    def forward(self, x):
        count, repeats = next(self.turns)
        x = x.repeat(repeats, 1)
        for layer in self.layers[:count]:
            x = layer(x).tanh()
        return x.sum()


@pytest.mark.parametrize("times", [1, 6], ids=["at once", "later"])
@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        ((3, 1), (2, 1), r"block call 2 was layers\.2 with \(2, 8\) float32, and is now missing"),
        ((2, 1), (3, 1), r"block call 2 was missing, and is now layers\.2 with \(2, 8\) float32"),
        ((3, 1), (3, 2), r"block call 0 was layers\.0 with \(2, 8\) float32, and is now layers\.0 with \(4, 8\)"),
    ],
    ids=["fewer calls", "more calls", "another shape"],
)
def test_a_step_that_differs_from_time_to_time_is_refused(first, then, words, times):
    model = Stack(chain(repeat(first, times), repeat(then)))
    blocks = rf.find_blocks(model, nn.Linear)
    with pytest.raises(rf.DryRunError, match=words):
        rf.profile(model, lambda: model(torch.ones(2, 8)), blocks=blocks)


class Loops(nn.Module):
    """Does the same `times` over, which its text doesn't show; (batch, 32) → the same."""

    def __init__(self, times: int):
        super().__init__()
        self.times, self.linear = times, nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.linear(x))
        return x


def test_blocks_that_look_alike_and_do_more_or_less_cost_more_or_less() -> None:
    model, x = nn.Sequential(Loops(2), Loops(1), Loops(8), Loops(1)), torch.randn(64, 32)
    calls = profile(model, lambda: model(x).sum()).calls
    once, often, again = [call.options[1] for call in calls[1:]]
    assert calls[1].signature != calls[2].signature
    assert often.replay_flops > 6 * once.replay_flops == 6 * again.replay_flops
    assert often.forward_seconds > once.forward_seconds
    assert once.forward_seconds == again.forward_seconds


def test_a_model_without_blocks_is_refused() -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(rf.InputError, match="has no blocks"):
        profile(model, lambda: model(torch.ones(2, 8)).sum())


@pytest.mark.parametrize("blocks", [[], [1], "a"], ids=repr)
def test_blocks_that_are_none_are_refused(blocks: Any) -> None:
    model = nn.Sequential(Loops(1), Loops(1))
    with pytest.raises(rf.InputError, match=r"block"):
        profile(model, lambda: model(torch.ones(2, 32)).sum(), blocks=blocks)


class Cache:
    """What the blocks of a decoder pass on beside their output."""

    def __init__(self):
        self.layers: list[Tensor] = []


class Caching(nn.Module):
    """Reads what earlier blocks put into the cache, and adds to it; (batch, 16) → the same."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.layers.append(x)
        return x + self.down(torch.tanh(self.up(torch.stack(cache.layers).mean(0))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Caching() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        for layer in self.layers:
            x = layer(x, cache)
        return x


def test_a_cache_among_the_arguments_is_as_it_was_at_the_call() -> None:
    model, x = Decoder(), torch.randn(1024, 16)
    before = fingerprint(model)
    plan = rf.fit(model, lambda: model(x).square().sum(), "80%")
    assert plan.nodes
    rf.detach(model)
    assert fingerprint(model) == before
