"""What must not happen twice or differently in a replay: draws, buffers, attributes, settings around the call."""

import random
from collections import Counter

import numpy
import pytest
import same
import torch
import torch.nn.functional as F
from test_replay import Block, Stack, compare
from test_run import one_backward
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import reforward as rf

FULL = rf.full()


def check(block, **options):
    """Two stacks of such blocks, plain and planned, leave the same behind."""

    def build():
        model = Stack(block(), block())
        x = torch.randn(4, 8)
        return model, lambda: model(x).square().sum()

    for plan in ({"layers[0:2]": rf.Recompute()}, rf.Plan(nodes=(run(),))):
        same.assert_same(build, plan, **options)


def run():
    return rf.Run(members=tuple(rf.Region(path=f"layers.{i}", policy=rf.Save()) for i in range(2)))


# Random streams


class Draws(Block):
    """Draws from one of the streams."""

    def draw(self, x):
        raise NotImplementedError

    def forward(self, x):
        return torch.tanh(super().forward(x * self.draw(x)))


def test_python_and_numpy_draws():
    class Both(Draws):
        def draw(self, x):
            return random.gauss(1, 1) + numpy.random.randn()  # both put a second deviate aside

    check(Both)


def test_numpy_draws_an_odd_number_of_deviates_in_one_block_and_none_in_the_other():
    class Odd(Draws):
        def draw(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            return numpy.random.randn() if self.calls % 2 else 1.0

    check(Odd)


def test_a_stream_that_is_put_back_after_the_draw():
    class Forked(Draws):
        """Draws without moving the streams, so before and after look as if nothing had been drawn."""

        def draw(self, x):
            python, legacy = random.getstate(), numpy.random.get_state()
            with torch.random.fork_rng(devices=[]):
                value = torch.rand(()) + random.random() + numpy.random.rand()
            random.setstate(python)
            numpy.random.set_state(legacy)
            return value

    check(Forked)


def test_streams_seeded_again_between_two_blocks():
    class Seeding(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Block(), Block()])

        def forward(self, x):
            for layer in self.layers:
                same.seed(5)
                x = layer(x)
            return x

    compare(one_backward, FULL, Seeding)


@pytest.mark.parametrize("of_argument", [False, True])
def test_generators_held_by_modules_or_given_as_arguments(of_argument):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.torch = torch.Generator().manual_seed(3)
            self.python = random.Random(3)
            self.numpy = numpy.random.default_rng(3)
            self.legacy = numpy.random.RandomState(3)

        def forward(self, x, generator=None):
            generator = generator or self.torch
            noise = torch.rand(x.shape, generator=generator)
            noise = noise * torch.empty(x.shape).geometric_(0.5, generator=generator)  # of no family, so drawn again
            factor = self.python.random() + self.numpy.random() + self.legacy.rand()
            return torch.tanh(self.linear(x * noise * factor))

    def build():
        model = Stack(Own(), Own())
        x, generator = torch.randn(4, 8), torch.Generator().manual_seed(4)
        model.generator = generator
        return model, lambda: model(x, generator if of_argument else None).square().sum()

    def states(model):
        layers = [(m.torch.get_state(), m.python.getstate(), m.numpy.bit_generator.state) for m in model.layers]
        return [*layers, model.generator.get_state()]

    for plan in ({"layers[0:2]": rf.Recompute()}, {"layers[0:2]": rf.Recompute(save="random")}):
        model, loss = same.built(build)
        expected = same.record(model, loss)
        expected["after"] = repr(states(model))
        model, loss = same.built(build)
        rf.attach(model, plan)
        found = same.record(model, loss)
        found["after"] = repr(states(model))
        assert same.differences(expected, found) == []


def test_a_layer_dropped_in_some_steps_only():
    class Dropping(Block):
        def forward(self, x):
            return self.norm(x) if random.random() < 0.5 else super().forward(x)

    check(Dropping, steps=4)


# Buffers, attributes, containers


class Stateful(Block):
    """Keeps all kinds of state that forwards change."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(8, momentum=None)
        self.register_buffer("replaced", torch.ones(8))
        self.register_buffer("written", torch.ones(8))
        self.register_buffer("large", torch.ones(200, 200))
        self.calls, self.history, self.counts, self.load = 0, [], Counter(), None

    def forward(self, x):
        self.calls += 1
        self.history.append(float(x.sum().detach()))
        self.counts["calls"] += self.calls
        batch = x.detach().mean(0)
        self.replaced = self.replaced * 0.9 + batch
        self.written.mul_(0.5).add_(batch)
        self.large.add_(self.calls)
        if self.load is None:
            self.load = batch.clone()
        else:
            self.load += batch
        scale = self.calls + len(self.history) + self.counts["calls"] + self.large[0, 0]
        return super().forward(self.bn(x) * self.replaced + self.written * scale + self.load)


@pytest.mark.parametrize(
    "plan",
    [{"layers[0:2]": rf.Recompute()}, {"layers[0:2]": rf.Recompute(save=["matmul", "norm"])}, rf.Plan(nodes=(run(),))],
    ids=["full", "selective", "run"],
)
def test_state_changed_by_forwards(plan):
    def build():
        model = Stack(Stateful(), Stateful())
        x = torch.randn(4, 8)
        return model, lambda: model(x).square().sum()

    def state(model):
        return [(m.calls, m.history, dict(m.counts), m.load) for m in model.layers]

    model, loss = same.built(build)
    expected = same.record(model, loss, after=lambda: state(model))
    model, loss = same.built(build)
    rf.attach(model, plan)
    found = same.record(model, loss, after=lambda: state(model))
    assert same.differences(expected, found) == []


def test_the_same_objects_are_in_place_after_the_step():
    model = Stack(Stateful())
    rf.attach(model, {"layers.0": rf.Recompute()})
    block = model.layers[0]
    before = (block.history, block.counts, block.written, block.bn.running_mean, block.up.weight)
    model(torch.randn(4, 8)).sum().backward()
    after = (block.history, block.counts, block.written, block.bn.running_mean, block.up.weight)
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_a_large_buffer_that_is_written_for_the_first_time_late_is_refused():
    class Late(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.zeros(300, 300))
            self.writes = False

        def forward(self, x):
            if self.writes:
                self.table.add_(1)
            return super().forward(x) + self.table[0, 0]

    model = Stack(Late())
    rf.attach(model, {"layers.0": rf.Recompute()})
    model(torch.randn(4, 8)).sum().backward()
    model.layers[0].writes = True
    with pytest.raises(rf.ReplayError, match=r"'layers\.0'.*'table'"):
        model(torch.randn(4, 8))


def test_mode_and_attributes_changed_before_backward_do_not_matter():
    def work(model, x):
        loss = model(x).square().sum()
        model.eval()
        for layer in model.layers:
            layer.drop.p = 0.9
        loss.backward()
        model.train()
        yield loss.detach()
        yield torch.tensor([layer.drop.p for layer in model.layers])

    compare(work, FULL, lambda: Stack(Block(), Block()))


def test_weights_exchanged_by_functional_call():
    def work(model, x):
        weights = {name: (p * 0.5).detach().requires_grad_() for name, p in model.named_parameters()}
        loss = torch.func.functional_call(model, weights, x).square().sum()
        loss.backward()
        yield from (weight.grad for weight in weights.values())

    compare(work, FULL, lambda: Stack(Block(), Block()))


def test_weight_norm_and_spectral_norm():
    def build():
        first, second = Block(), Block()
        nn.utils.parametrizations.weight_norm(first.up)
        nn.utils.parametrizations.spectral_norm(first.down)
        return Stack(first, second)

    compare(one_backward, {"layers[0:2]": rf.Recompute()}, build)


def test_a_block_that_is_given_a_weight_by_a_hook():
    def work(model, x):
        loss = model(x).square().sum()
        model.layers[1](x * 2)  # the hook sets another tensor
        loss.backward()
        yield loss.detach()

    def build():
        model = Stack(nn.Linear(8, 8), nn.Linear(8, 8))
        weights = [layer._parameters.pop("weight") for layer in model.layers]
        for i, (layer, weight) in enumerate(zip(model.layers, weights, strict=True)):
            model.register_parameter(f"weight{i}", weight)
            layer.register_forward_pre_hook(lambda m, args, w=weight: setattr(m, "weight", w * args[0].mean().detach()))
        return model

    compare(work, {"layers[0:2]": rf.Recompute()}, build)


# Settings around the call


def test_autocast_left_before_backward_and_inside_blocks():
    class Mixed(Block):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                y = self.norm(x.float())
            with torch.autocast("cpu", torch.float16):
                z = self.down(torch.tanh(self.up(y)))
            return x + z.to(x.dtype)

    check(Mixed, autocast=True)
    check(Mixed)
    check(Block, autocast=True)


def test_autocast_entered_between_forward_and_backward():
    def work(model, x):
        loss = model(x).square().sum()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        yield loss.detach()

    compare(work, FULL, lambda: Stack(Block(), Block()))


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_choice_of_attention_backend(backend):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x)[None, None].chunk(3, -1)
            return x + F.scaled_dot_product_attention(q, k, v)[0, 0]

    def work(model, x):
        with sdpa_kernel(backend):
            loss = model(x).square().sum()
        loss.backward()
        yield loss.detach()

    compare(work, {"layers[0:2]": rf.Recompute()}, lambda: Stack(Attention(), Attention()))
