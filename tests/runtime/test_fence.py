"""What must not happen twice or differently in a replay: draws, buffers, attributes, settings around the call."""

import functools
import gc
import queue
import random
import subprocess
import sys
import warnings
import weakref
from collections import Counter
from types import SimpleNamespace

import numpy
import pytest
import same
import torch
import torch.nn.functional as F
from test_replay import Block, Stack, compare
from test_run import one_backward
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import TorchFunctionMode

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


def test_what_has_no_state_is_no_generator():
    class Names(Block):
        def __init__(self):
            super().__init__()
            self.entropy = random.SystemRandom()

        def forward(self, x):
            assert 0 <= SYSTEM.random() <= 1
            return torch.tanh(super().forward(x))

    check(Names)


SYSTEM = random.SystemRandom()


class SeldomDraws(Draws):
    """Draws in its second step only, when nothing is compared any more."""

    def __init__(self):
        super().__init__()
        self.own, self.calls = self.make(), 0

    def draw(self, x):
        self.calls += 1
        return 1.0 if self.calls < 3 else self.seldom(x)

    def make(self):
        raise NotImplementedError

    def seldom(self, x):
        raise NotImplementedError


class SeldomSpawns(SeldomDraws):
    def make(self):
        return numpy.random.default_rng(3)

    def seldom(self, x):
        return self.own.spawn(1)[0].random() + self.own.random()


class SeldomRaw(SeldomDraws):
    def make(self):
        return numpy.random.PCG64(3)

    def seldom(self, x):
        return float(self.own.random_raw() % 100)


class SeldomSobol(SeldomDraws):
    def make(self):
        return torch.quasirandom.SobolEngine(8, scramble=True, seed=3)

    def seldom(self, x):
        return self.own.draw(len(x))


@pytest.mark.parametrize("block", [SeldomSpawns, SeldomRaw, SeldomSobol])
def test_generators_of_other_libraries_and_what_they_spawn(block):
    def build():
        model = Stack(block(), block())
        x = torch.randn(4, 8)
        return model, lambda: model(x).square().sum()

    def next_draws(model):
        return [torch.as_tensor(layer.seldom(torch.ones(4, 8))) for layer in model.layers]

    same.assert_same(build, FULL, steps=3, after=next_draws)


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

    same.assert_same(build, plan, after=state)


def test_the_same_objects_are_in_place_after_the_step():
    model = Stack(Stateful())
    rf.attach(model, {"layers.0": rf.Recompute()})
    block = model.layers[0]
    before = (block.history, block.counts, block.written, block.bn.running_mean, block.up.weight)
    model(torch.randn(4, 8)).sum().backward()
    after = (block.history, block.counts, block.written, block.bn.running_mean, block.up.weight)
    assert all(one is other for one, other in zip(before, after, strict=True))


class Only:
    """There is one of it."""

    instance = None

    def __new__(cls):
        if cls.instance is None:
            cls.instance = object.__new__(cls)
            cls.instance.reset()
        return cls.instance

    def reset(self):
        self.count, self.seen, self.mean = 0, [], torch.zeros(8)

    def note(self, x):
        self.count += 1
        self.seen.append(self.count)
        self.mean += x.detach().mean(0)


class Ends(Only):
    """Does something when it ends, which must happen once."""

    ended = 0

    def __new__(cls):
        return object.__new__(cls)

    def __init__(self):
        self.reset()

    def __del__(self):
        Ends.ended += 1


class Steps(Ends):
    """An iterator, whose end is nothing special."""

    def __del__(self):
        pass

    def __next__(self):
        return self.count


@pytest.mark.parametrize("kind", [Only, Ends, Steps])
def test_objects_that_stay_themselves_are_written_once(kind):
    class Notes(Block):
        def __init__(self):
            super().__init__()
            self.notes = [kind()]

        def forward(self, x):
            self.notes[0].note(x)
            if kind is Only:
                assert self.notes[0] is Only()
            noted = self.notes[0]
            return torch.tanh(super().forward(x + noted.mean) * noted.count * len(noted.seen))

    def build():
        Only.instance = None
        model = Stack(Notes(), Notes())
        x = torch.randn(4, 8)
        return model, lambda: model(x).square().sum()

    def state(model):
        return [(layer.notes[0].count, layer.notes[0].seen, layer.notes[0].mean) for layer in model.layers]

    for plan in ({"layers[0:2]": rf.Recompute()}, rf.Plan(nodes=(run(),))):
        model, loss = same.built(build)
        expected = same.record(model, loss, after=state)
        model, loss = same.built(build)
        rf.attach(model, plan)
        gc.collect()
        ended = Ends.ended
        found = same.record(model, loss, after=state)
        assert same.differences(expected, found) == []
        assert Ends.ended == ended


def test_a_queue_is_filled_once():
    class Fills(Block):
        def __init__(self):
            super().__init__()
            self.queue = queue.Queue()

        def forward(self, x):
            self.queue.put(1)
            return torch.tanh(super().forward(x) * self.queue.qsize())

    model = Stack(Fills())
    rf.attach(model, FULL)
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
    assert model.layers[0].queue.qsize() == 2


class Registers(nn.Module):
    """Registers what it needs when it is first called, or in its second step."""

    def __init__(self, what, late):
        super().__init__()
        self.what, self.calls_before, self.calls = what, 2 * late, 0

    def forward(self, x):
        self.calls += 1
        if self.calls <= self.calls_before:
            return F.dropout(x, 0.3)
        if not hasattr(self, "own"):
            self.register()
        if self.what == "counter":
            self.own += 1
        return F.dropout(self.own(x) if self.what == "submodule" else x * self.own, 0.3)

    def register(self):
        if self.what == "submodule":
            self.own = nn.Linear(8, 8)
        elif self.what == "parameter":
            self.own = nn.Parameter(torch.randn(8))
        else:
            self.register_buffer("own", torch.randn(8) if self.what == "buffer" else torch.zeros(()))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("what", ["buffer", "counter", "parameter", "submodule"])
def test_what_a_forward_registers(what, late):
    def trained(plan):
        same.seed(0)
        model = Stack(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Registers(what, late)) for _ in range(2)])
        x = torch.randn(4, 8)
        if plan is not None:
            rf.attach(model, plan)
        found = {}
        for step in range(4):
            model.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            found |= {f"loss {step}": loss.detach(), **same.streams()}
            found |= {f"gradient {step} {name}": same.clone(p.grad) for name, p in model.named_parameters()}
            found |= {f"state {step} {name}": value.clone() for name, value in model.state_dict().items()}
        return found

    for plan in ({"layers[0:2]": rf.Recompute()}, rf.Plan(nodes=(run(),))):
        assert same.differences(trained(None), trained(plan)) == []


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


# State beyond the module's own attributes


class Memory:
    """Keys and values by layer, as caches of attention are."""

    def __init__(self):
        self.keys, self.seen = {}, [0]

    def update(self, layer, key):
        self.keys[layer] = torch.cat([self.keys[layer], key], 1) if layer in self.keys else key
        self.seen[0] += 1
        return self.keys[layer]


class Remembers(Block):
    """Reads and writes a cache that it is given."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.key = layer, nn.Linear(8, 8)

    def forward(self, x, memory):
        keys = memory.update(self.layer, self.key(x)[None])
        return torch.tanh(super().forward(x) * keys.mean(1)[0] * memory.seen[0])


@pytest.mark.parametrize("plan", [rf.full(), rf.segments(1), rf.selective(save="matmul")])
def test_a_cache_that_all_blocks_write_is_read_and_written_once(plan):
    class Model(Stack):
        def forward(self, x):
            memory = Memory()
            for _ in range(2):
                for layer in self.layers:
                    x = layer(x, memory)
            self.lengths = [key.shape[1] for key in memory.keys.values()], memory.seen
            return x

    def build():
        model = Model(Remembers(0), Remembers(1))
        x = torch.randn(4, 8)
        return model, lambda: model(x).square().sum()

    same.assert_same(build, plan)
    model, loss = same.built(build)
    rf.attach(model, plan)
    loss().backward()
    assert model.lengths == ([8, 8], [4])


class DeepState(Block):
    """Keeps tensors and numbers in objects, tuples and dicts of dicts, changes and reads them."""

    def __init__(self):
        super().__init__()
        self.state = SimpleNamespace(ema=torch.zeros(8), steps=[{"count": 0}], pair=(torch.ones(8), [1.0]))

    def forward(self, x):
        state = self.state
        state.steps[0]["count"] += 1
        state.ema.mul_(0.9).add_(x.detach().mean(0))
        state.pair[0].add_(0.5)
        state.pair[1].append(len(state.pair[1]) * 0.1)
        scale = state.ema.sum() + state.steps[0]["count"] + state.pair[0].sum() + sum(state.pair[1])
        return torch.tanh(super().forward(x) * scale)


def test_state_at_any_depth_is_written_once():
    check(DeepState)

    def seen(plan):
        model = same.built(lambda: (Stack(DeepState()), None))[0]
        if plan is not None:
            rf.attach(model, plan)
        for _ in range(2):
            torch.manual_seed(0)
            model(torch.ones(4, 8)).sum().backward()
        return repr(vars(model.layers[0].state))

    assert seen(rf.full()) == seen(None)


class Unregistered(Block):
    """Holds a batch norm and a layer where the module tree doesn't see them."""

    def __init__(self):
        super().__init__()
        self.hidden = [nn.BatchNorm1d(8), {"layer": nn.Linear(8, 8)}]
        self.__dict__["also"] = nn.BatchNorm1d(8)

    def forward(self, x):
        x = self.also(self.hidden[1]["layer"](self.hidden[0](x)))
        return torch.tanh(super().forward(x))


def test_modules_that_attributes_hold_unregistered_are_part_of_the_block():
    def statistics(plan):
        model = same.built(lambda: (Stack(Unregistered()), None))[0]
        if plan is not None:
            rf.attach(model, plan)
        torch.manual_seed(0)
        model(torch.randn(4, 8)).sum().backward()
        norms = [model.layers[0].hidden[0], model.layers[0].also]
        return [[b.tolist() for b in norm.buffers()] for norm in norms], model.layers[0].up.weight.grad.tolist()

    assert statistics(rf.full()) == statistics(None)


def test_a_block_that_knows_its_parent_covers_only_itself():
    model = Stack(Block(), Block())
    for layer in model.layers:
        layer.parent = [model]
    rf.attach(model, rf.full())
    loss = model(torch.ones(4, 8)).sum()
    loss.backward()
    assert len(model.layers[0].forward._learnt.seen) == 5


def test_batch_norm_first_seen_in_evaluation_updates_large_statistics_once_in_training():
    def statistics(plan):
        torch.manual_seed(0)
        model = Stack(nn.Sequential(nn.Linear(4, 20_000), nn.BatchNorm1d(20_000), nn.Tanh()))
        if plan is not None:
            rf.attach(model, plan)
        model.eval()(torch.randn(4, 4)).sum().backward()
        model.train()(torch.randn(4, 4)).sum().backward()
        return [b.clone() for b in model.buffers()]

    assert all(map(torch.equal, statistics(None), statistics({"layers.0": rf.Recompute()})))


def test_a_backward_inside_a_block_adds_its_gradients_once():
    class Learns(Block):
        def forward(self, x):
            with torch.enable_grad():
                self.up(x.detach()).square().sum().backward()
            return torch.tanh(super().forward(x))

    check(Learns)


def test_requires_grad_turned_off_before_backward_is_as_in_forward_during_the_replay():
    def gradient(plan):
        torch.manual_seed(0)
        model = Stack(Block(), Block())
        if plan is not None:
            rf.attach(model, plan)
        loss = model(torch.ones(4, 8)).sum()
        model.layers[1].down.weight.requires_grad_(False)
        loss.backward()
        assert not model.layers[1].down.weight.requires_grad
        return model.layers[0].up.weight.grad

    assert torch.equal(gradient(None), gradient(rf.full()))


def test_lazy_and_scripted_modules_inside_a_block():
    class Lazy(Block):
        def __init__(self):
            super().__init__()
            self.up = nn.LazyLinear(32)

    class Scripted(Block):
        def __init__(self):
            super().__init__()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.norm = torch.jit.script(nn.Sequential(nn.LayerNorm(8), nn.Tanh()))

    def build(block):
        model = Stack(block(), block())
        x = torch.randn(4, 8)
        model(x)
        return model, lambda: model(x).square().sum()

    for block in (Lazy, Scripted):
        same.assert_same(lambda block=block: build(block), rf.full())
    model = Stack(Lazy())
    with pytest.raises(rf.InputError, match=r"'layers.0.up.weight' has no shape yet"):
        rf.attach(model, rf.full())


def test_a_scripted_submodule_that_writes_its_buffers_is_refused_by_name():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        block = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.BatchNorm1d(8)), nn.Tanh())
    model = Stack(block)
    rf.attach(model, {"layers.0": rf.Recompute()})
    with pytest.raises(rf.ReplayError, match=r"'layers.0' wrote the buffer 'running_mean' of a scripted submodule"):
        model(torch.randn(4, 8)).sum().backward()


def test_a_sparse_buffer():
    class Graph(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("edges", torch.eye(4).to_sparse())

        def forward(self, x):
            return torch.tanh(super().forward(torch.sparse.mm(self.edges, x)))

    check(Graph)


# Settings


def test_settings_changed_before_backward_are_as_in_forward_during_the_replay():
    class Sensitive(Block):
        def forward(self, x):
            noise = torch.zeros(1)  # of the default type, on the default device
            assert noise.dtype is torch.float64
            assert torch.are_deterministic_algorithms_enabled()
            return torch.tanh(super().forward(x) + noise.to(x.dtype))

    model = Stack(Sensitive())
    rf.attach(model, rf.full())
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        loss = model(torch.ones(4, 8, dtype=torch.float32)).sum()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    loss.backward()
    assert torch.get_default_dtype() is torch.float32
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("forward_device", ["cpu", "meta"])
def test_the_default_device_of_the_forward_holds_in_the_replay(forward_device):
    class Makes(Block):
        def forward(self, x):
            assert torch.empty(1).device.type == forward_device
            return torch.tanh(super().forward(x))

    model = Stack(Makes())
    rf.attach(model, rf.full())
    with torch.device(forward_device):
        loss = model(torch.ones(4, 8, device="cpu")).sum()
    with torch.device("cpu" if forward_device == "meta" else "meta"):
        loss.backward()
    assert model.layers[0].up.weight.grad is not None


def test_weights_cached_in_forward_are_the_replays_weights():
    class Twice(Stack):
        def forward(self, x):
            with parametrize.cached():
                return super().forward(super().forward(x))

    def build():
        shared = weight_norm(nn.Linear(8, 8))
        model = Twice(nn.Sequential(shared, nn.Tanh()), nn.Sequential(shared, nn.Tanh()))
        x = torch.randn(4, 8)
        return model, lambda: model(x).square().sum()

    same.assert_same(build, {"layers[0:2]": rf.Recompute()})


# Beyond reach


COUNTER = 0


LOG: dict[str, list] = {"seen": []}


@pytest.mark.parametrize("plan", [rf.full(), rf.segments(1), rf.selective(save="matmul")])
def test_globals_and_closure_variables_that_a_block_changes_are_written_once(plan):
    depth = 0

    class Counts(Block):
        def note(self):
            global COUNTER
            nonlocal depth
            COUNTER += 1
            depth += 2
            LOG["seen"].append(COUNTER)

        def forward(self, x):
            self.note()
            return torch.tanh(super().forward(x) * COUNTER * len(LOG["seen"]) * depth)

    def seen(plan):
        global COUNTER
        nonlocal depth
        COUNTER, depth = 0, 0
        LOG["seen"].clear()
        torch.manual_seed(0)
        model = Stack(Counts(), Counts())
        if plan is not None:
            rf.attach(model, plan)
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
        return [COUNTER, depth, list(LOG["seen"]), model.layers[0].up.weight.grad.tolist()]

    assert seen(None) == seen(plan)


def test_a_global_that_only_a_replay_changes_is_warned_about():
    class Counts(Block):
        def forward(self, x):
            global COUNTER
            if rf.is_replaying():
                COUNTER += 1
            return torch.tanh(super().forward(x))

    model = Stack(Counts())
    rf.attach(model, rf.full())
    with pytest.warns(UserWarning, match=r"'layers.0' changed the global 'COUNTER'.*is_replaying"):
        model(torch.ones(4, 8)).sum().backward()


GENERATOR = torch.Generator()


def test_generators_of_globals_and_closures():
    own = torch.Generator()

    class Draws(Block):
        def forward(self, x):
            noise = torch.rand(8, generator=GENERATOR) + torch.rand(8, generator=own)
            return torch.tanh(super().forward(x * noise))

    def states(plan):
        GENERATOR.manual_seed(1)
        own.manual_seed(2)
        torch.manual_seed(0)
        model = Stack(Draws(), Draws())
        if plan is not None:
            rf.attach(model, plan)
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
        return [model.layers[0].up.weight.grad, GENERATOR.get_state(), own.get_state()]

    assert all(map(torch.equal, states(None), states(rf.full())))


class Sampler:
    """Has a generator and a counter."""

    def __init__(self, seed=3):
        self.generator, self.count = torch.Generator().manual_seed(seed), 0

    def sample(self):
        self.count += 1
        return torch.rand(8, generator=self.generator) * self.count


def drawing_from(generator):
    return lambda: torch.rand(8, generator=generator)


def defaulting(generator=None, *, other=None):
    def draw(generator=generator, *, other=other):
        return torch.rand(8, generator=generator) + torch.rand(8, generator=other)

    return draw


def noisy(function):
    """A decorator with state of its own."""
    generator, count = torch.Generator().manual_seed(5), 0

    @functools.wraps(function)
    def wrapper(*args):
        nonlocal count
        count += 1
        return function(*args) * torch.rand(8, generator=generator) * count

    return wrapper


def counting():
    def count():
        count.calls += 1
        return float(count.calls)

    count.calls = 0
    return count


LEARNT = {"closure over a closure", "function with an attribute"}  # they count, which the first forward must show
CALLABLES = {
    "partial": lambda: functools.partial(torch.rand, 8, generator=torch.Generator().manual_seed(3)),
    "builtin method": lambda: random.Random(3).random,
    "numpy's method": lambda: numpy.random.default_rng(3).random,
    "method": lambda: Sampler().sample,
    "partial of a method": lambda: functools.partial(Sampler().sample),
    "closure": lambda: drawing_from(torch.Generator().manual_seed(3)),
    "closure over an object": lambda: drawing_from_object(Sampler()),
    "closure over a closure": lambda: noisy(drawing_from(torch.Generator().manual_seed(3))),
    "defaults": lambda: defaulting(torch.Generator().manual_seed(3), other=torch.Generator().manual_seed(4)),
    "function with an attribute": counting,
}


def drawing_from_object(sampler):
    return lambda: torch.rand(8, generator=sampler.generator)


@pytest.mark.parametrize(
    ("kind", "always"),
    [(kind, always) for kind in CALLABLES for always in (True, False) if always or kind not in LEARNT],
)
def test_generators_behind_callables_that_a_block_holds(kind, always):
    """Used in each step, or from the second on, when nothing is compared any more."""

    class Calls(Block):
        def __init__(self):
            super().__init__()
            self.draw, self.steps = CALLABLES[kind](), 0

        def forward(self, x):
            self.steps += 1
            return torch.tanh(super().forward(x * self.draw() if always or self.steps > 2 else x))

    def build():
        model = Stack(Calls(), Calls())
        x = torch.randn(4, 8)
        return model, lambda: model(x).square().sum()

    def next_draws(model):
        return [torch.as_tensor(layer.draw()) for layer in model.layers]

    same.assert_same(build, FULL, after=next_draws)


def test_generators_behind_callables_with_a_bare_checkpoint():
    def gradients(plain):
        torch.manual_seed(0)
        layer, x = Block(), torch.ones(4, 8)
        layer.draw = drawing_from(torch.Generator().manual_seed(3))

        def call(x):
            return torch.tanh(layer(x * layer.draw()))

        for _ in range(2):
            x = call(x) if plain else rf.checkpoint(call, x)
        x.sum().backward()
        return [p.grad for p in layer.parameters()] + [layer.draw()]

    assert all(map(torch.equal, gradients(True), gradients(False)))


def test_a_closure_that_is_made_anew_in_each_forward_is_not_kept():
    class Makes(Block):
        def forward(self, x):
            out = torch.tanh(super().forward(x))
            self.last = lambda: out
            references.append(weakref.ref(self.last))
            return out

    references = []
    model = Stack(Makes())
    rf.attach(model, FULL)
    for _ in range(4):
        model(torch.ones(4, 8)).sum().backward()
    gc.collect()
    assert [reference() is not None for reference in references] == [False, False, False, True]


FIRST, SECOND = torch.Generator(), torch.Generator()
ONE, OTHER = drawing_from(FIRST), drawing_from(SECOND)
HOLDER = SimpleNamespace(generator=torch.Generator(), more={"deep": [torch.Generator()]})
LAZY: torch.Generator | None = None


def lazy():
    global LAZY
    if LAZY is None:
        LAZY = torch.Generator().manual_seed(6)
    return LAZY


def test_generators_behind_globals():
    class Draws(Block):
        @noisy
        def scaled(self, x):
            return x * ONE() * OTHER()

        def forward(self, x):
            more = [HOLDER.generator, HOLDER.more["deep"][0], lazy()]
            noise = sum(torch.rand(8, generator=generator) for generator in more)
            return torch.tanh(super().forward(self.scaled(x) * noise))

    wrapped = {c.cell_contents for c in Draws.scaled.__closure__ if isinstance(c.cell_contents, torch.Generator)}
    count = next(c for c in Draws.scaled.__closure__ if isinstance(c.cell_contents, int))

    def states(plan):
        global LAZY
        LAZY, count.cell_contents = None, 0
        every = [FIRST, SECOND, HOLDER.generator, HOLDER.more["deep"][0], *wrapped]
        for number, generator in enumerate(every):
            generator.manual_seed(number)
        torch.manual_seed(0)
        model = Stack(Draws(), Draws())
        if plan is not None:
            rf.attach(model, plan)
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
        gradients = [model.layers[0].up.weight.grad, model.layers[1].up.weight.grad]
        return [torch.tensor(count.cell_contents), *gradients, *[g.get_state() for g in (*every, LAZY)]]

    assert all(map(torch.equal, states(None), states(FULL)))


def test_state_of_hooks_that_act():
    def build():
        model = Stack(Block(), Block())
        x = torch.randn(4, 8)
        for layer in model.layers:
            draw = noisy(drawing_from(torch.Generator().manual_seed(3)))
            layer.up.register_forward_pre_hook(lambda module, args, draw=draw: (args[0] * draw(),))
        return model, lambda: model(x).square().sum()

    same.assert_same(build, FULL, steps=3)


@pytest.mark.parametrize("give", [iter, lambda values: (value for value in values)], ids=["iterator", "generator"])
def test_iterators_in_and_out_are_refused_by_name(give):
    class Reads(Block):
        def forward(self, x, values):
            return torch.tanh(super().forward(x) * next(values))

    class Yields(Block):
        def forward(self, x):
            return give([super().forward(x)])

    model = Stack(Reads())
    rf.attach(model, rf.full())
    with pytest.raises(rf.ReplayError, match=r"'layers.0' is given an iterator"):
        model(torch.ones(4, 8), give([2.0]))
    model = Stack(Yields())
    rf.attach(model, rf.full())
    with pytest.raises(rf.ReplayError, match=r"'layers.0' \(Yields\) returns an iterator"):
        model(torch.ones(4, 8))


class RefusesAgain(TorchFunctionMode):
    """A setting of the user's that can't be put in force a second time."""

    entered = False

    def __enter__(self):
        if self.entered:
            raise RuntimeError("only once")
        self.entered = True
        return super().__enter__()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_what_fails_while_the_world_is_put_back_leaves_it_as_it_is():
    class Counts(nn.Linear):
        count = 0

        def forward(self, x):
            self.count += 1
            return torch.tanh(super().forward(x))

    model = nn.Sequential(Counts(4, 4))
    rf.attach(model, {"0": rf.Recompute()})
    with RefusesAgain():
        loss = model(torch.randn(2, 4, requires_grad=True)).sum()
    model.eval()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    state = torch.get_rng_state()
    try:
        with pytest.raises(RuntimeError, match="only once"):
            loss.backward()
        assert model[0].count == 1
        assert not model[0].training
        assert torch.get_num_threads() == threads + 1
        assert torch.equal(torch.get_rng_state(), state)
        assert not rf.is_replaying()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("first", [0, 2])
def test_kernels_are_those_of_the_forward(first):
    """Without oneDNN a convolution rounds otherwise."""

    def work(model, x):
        for step in range(4):
            with torch.backends.mkldnn.flags(enabled=step < first):
                loss = model(x).square().sum()
            loss.backward()
            yield loss.detach()

    class Conv(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.more = nn.Conv1d(1, 8, 3, padding=1), nn.Conv1d(8, 1, 3, padding=1)

        def forward(self, x):
            return torch.tanh(self.more(torch.tanh(self.conv(x[:, None]))))[:, 0]

    compare(work, {"layers[0:2]": rf.Recompute()}, lambda: Stack(Conv(), Conv()))


@pytest.mark.parametrize(
    "setting",
    ["cuda.matmul.fp32_precision = 'tf32'", "fp32_precision = 'tf32'", "mkldnn.matmul.fp32_precision = 'bf16'"],
)
def test_precision_set_by_either_interface(setting):
    """In a process of its own: once one interface was used, the other raises."""
    script = f"""
import torch, reforward as rf
from torch import nn
torch.backends.{setting}
model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
rf.attach(model, {{"0": rf.Recompute()}})
model(x).sum().backward()
loss = model(x).sum()
torch.backends.cuda.matmul.fp32_precision = "ieee"
loss.backward()
assert torch.backends.cuda.matmul.fp32_precision == "ieee"
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, capture_output=True)


def test_another_kind_of_numpy_generator():
    script = """
import numpy, torch, reforward as rf
from torch import nn
numpy.random.set_bit_generator(numpy.random.PCG64(1))

class Block(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x) * numpy.random.rand())

torch.manual_seed(0)
model, x = nn.Sequential(Block(4, 4), Block(4, 4)), torch.randn(2, 4)
state = numpy.random.get_state(legacy=False)
model(x).sum().backward()
plain, after = [p.grad.clone() for p in model.parameters()], numpy.random.rand()
model.zero_grad()
numpy.random.set_state(state)
rf.attach(model, {"0": rf.Recompute(), "1": rf.Recompute()})
model(x).sum().backward()
assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain))
assert numpy.random.rand() == after
"""
    subprocess.run([sys.executable, "-c", script], check=True)
