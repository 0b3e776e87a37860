"""Programs that broke earlier versions of the runtime: each is a plain step and the same step with a plan."""

import threading
import weakref
from collections import UserDict
from types import SimpleNamespace

import pytest
import same
import torch
from torch import nn

import reforward as rf


def build(forward, prepare=lambda block: None, *, steps_input=None):
    """Two blocks with two linear layers and a forward of choice; a new input in every step."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.l, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
            prepare(self)

        def forward(self, x, *rest):
            return forward(self, x, *rest)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Block(), Block()])

        def forward(self, x, *rest):
            for layer in self.layers:
                x = layer(x, *rest)
            return x

    def made():
        model = Model()
        rest = steps_input() if steps_input is not None else ()
        return model, lambda: model(torch.randn(3, 8), *rest).square().sum()

    return made


PLANS = (rf.full(), rf.selective(save="matmul"))


def check(forward, prepare=lambda block: None, *, plans=PLANS, **options):
    for plan in plans:
        same.assert_same(build(forward, prepare, **options), plan, steps=3)


def test_a_cache_that_is_keyed_by_the_identity_of_an_argument():
    def attribute(self, x, mask):
        if mask is not self.source:
            self.source, self.cached = mask, torch.exp(mask * 2).sin()
        return torch.tanh(self.l(x) * self.cached)

    def mapping(self, x, mask):
        if mask not in self.memo:
            self.memo[mask] = mask * 2
        return torch.tanh(self.l(x) * self.memo[mask])

    check(attribute, lambda b: b.__dict__.update(source=None, cached=None), steps_input=lambda: (torch.ones(3, 8),))
    check(mapping, lambda b: b.__dict__.update(memo={}), steps_input=lambda: (torch.ones(3, 8),))


def test_a_context_that_keeps_a_tensor_of_the_graph_through_a_double_backward():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            ctx.h = h
            return h**3

        @staticmethod
        def backward(ctx, grad):
            return grad * 3 * ctx.h**2

    def gradient(plan):
        model, _ = same.built(build(lambda self, x: Cube.apply(torch.sin(self.l(x))).cos()))
        if plan is not None:
            rf.attach(model, plan)
        x = torch.ones(3, 8, requires_grad=True)
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        first.square().sum().backward()
        return x.grad, model.layers[0].l.weight.grad

    assert all(map(torch.equal, gradient(None), gradient(rf.full())))


@pytest.mark.parametrize("kind", ["in place", "kwargs", "child", "draws", "autocast"])
def test_hooks_that_act_without_returning_anything(kind):
    def prepare(block):
        if kind == "in place":
            block.l.register_forward_hook(lambda module, args, output: [None, output.mul_(2)][0])
        elif kind == "kwargs":
            block.drop = Scaled()
            block.drop.register_forward_pre_hook(lambda m, args, kwargs: kwargs.update(scale=5), with_kwargs=True)
        elif kind == "child":
            block.drop = nn.Sequential(Scaled())
            block.drop.register_forward_pre_hook(lambda m, args: setattr(m[0], "factor", m[0].factor + 1))
        elif kind == "draws":
            block.l.register_forward_pre_hook(lambda m, args: [None, torch.rand(1)][0])
        else:
            context = torch.autocast("cpu", torch.bfloat16)
            block.l.register_forward_pre_hook(lambda m, args: [None, context.__enter__()][0])
            block.l.register_forward_hook(lambda m, args, output: [None, context.__exit__(None, None, None)][0])

    def forward(self, x):
        y = self.l(x).float()
        y = self.drop(y) if hasattr(self, "drop") else y
        return torch.tanh(nn.functional.dropout(y, 0.3))

    check(forward, prepare)


class Scaled(nn.Module):
    factor = 1

    def forward(self, x, scale=2):
        return x * scale * self.factor


def test_modules_that_come_as_arguments_or_behind_methods_are_part_of_the_block():
    def given(self, x, norm):
        return torch.tanh(norm(self.l(x)))

    def inside(self, x, box):
        return torch.tanh(box.norms["one"](self.l(x)))

    def behind(self, x):
        return torch.tanh(self.call(self.l(x)))

    check(given, steps_input=lambda: (nn.BatchNorm1d(8),))
    check(inside, steps_input=lambda: (SimpleNamespace(norms={"one": nn.BatchNorm1d(8)}),))

    def statistics(plan):
        model, loss = same.built(build(behind, lambda b: b.__dict__.update(call=nn.BatchNorm1d(8).forward)))
        if plan is not None:
            rf.attach(model, plan)
        loss().backward()
        return [layer.call.__self__.running_mean.tolist() for layer in model.layers]

    assert statistics(rf.full()) == statistics(None)


def test_submodules_that_a_forward_exchanges():
    def forward(self, x):
        y = self.current(x).tanh()
        self.n += 1
        self.current = self.k if self.n % 2 else self.l
        return y.sin()

    check(forward, lambda block: (block.__dict__.update(n=0), setattr(block, "current", block.l)))


def test_conjugate_tensors_and_attributes_of_tensors_and_parameters_as_arguments():
    def spectrum(self, x):
        z = torch.fft.rfft(self.l(x))
        return torch.tanh(torch.fft.irfft(z * z.conj(), n=8))

    def scaled(self, x, given, weight):
        assert weight is not None
        assert isinstance(weight, nn.Parameter)
        return torch.tanh(self.l(x) * given.scale) @ weight

    def extras():
        given = torch.ones(1)
        given.scale = 2.0
        return given, nn.Parameter(torch.eye(8))

    check(spectrum)
    check(scaled, steps_input=extras)


def test_objects_that_are_keys_weak_references_proxies_and_user_dicts():
    def forward(self, x, extra):
        for thing in self.things:
            thing.n += 1
            self.counts[thing] += 1
        extra["steps"] = extra.get("steps", 0) + 1
        return torch.tanh(self.l(x) * self.things[0].n * self.counts[self.things[0]] * extra["steps"])

    def prepare(block):
        thing = Thing()
        block.things, block.counts = [thing], {thing: 1.0}
        block.__dict__["owner"] = weakref.proxy(block)

    check(forward, prepare, steps_input=lambda: (UserDict(),))


class Thing:
    def __init__(self):
        self.n = 0


def test_a_model_output_that_a_block_fills():
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def forward(self, x, box):
        box.last_hidden_state = torch.tanh(self.l(x))
        return box.last_hidden_state

    check(forward, steps_input=lambda: (outputs.BaseModelOutput(),), plans=(rf.full(),))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_buffers_of_types_that_torch_cannot_compare():
    def prepare(block):
        block.register_buffer("odd", torch.zeros(4, dtype=torch.complex64).to(torch.complex32))

    def loss(plan):
        model, loss = same.built(build(lambda self, x: torch.tanh(self.l(x)), prepare))
        if plan is not None:
            rf.attach(model, plan)
        loss().backward()
        return model.layers[0].l.weight.grad

    assert torch.equal(loss(None), loss(rf.full()))


def test_backwards_of_one_model_in_several_threads_at_once():
    def gradient(plan):
        model, loss = same.built(build(lambda self, x: self.l(x).tanh() * 0.5))
        if plan is not None:
            rf.attach(model, plan)
        loss().backward()
        model.zero_grad()
        losses = [loss() for _ in range(24)]
        threads = [threading.Thread(target=lambda i=i: [v.backward() for v in losses[i::4]]) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return model.layers[0].l.weight.grad

    assert torch.allclose(gradient(None), gradient(rf.full()), rtol=1e-5)


def test_large_containers_that_attributes_hold_are_no_burden():
    def prepare(block):
        block.words = {str(i): i for i in range(200_000)}
        block.objects = [Thing() for _ in range(20_000)]

    model, loss = same.built(build(lambda self, x: torch.tanh(self.l(x)), prepare))
    rf.attach(model, rf.full())
    loss().backward()
    assert len(model.layers[0].words) == 200_000


def test_a_traced_graph_module():
    def build_traced():
        layers = [torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))) for _ in range(2)]
        model = nn.Sequential(*layers)
        x = torch.randn(3, 8)
        return model, lambda: model(x).square().sum()

    same.assert_same(build_traced, {"0": rf.Recompute(), "1": rf.Recompute()})


NUMBER = 0
STREAM = torch.Generator()


class DrawsFromGlobal(nn.Module):
    def forward(self, x):
        return torch.sin(x * torch.rand(8, generator=STREAM))


def test_globals_behind_a_bare_call():
    def counts(x):
        global NUMBER
        NUMBER += 1
        return torch.sin(x * NUMBER)

    def results(call):
        global NUMBER
        NUMBER = 0
        STREAM.manual_seed(1)
        module = DrawsFromGlobal()
        x = torch.linspace(0, 1, 8).requires_grad_()
        (call(counts, x) + call(module, x) + call(lambda y: module(y), x)).sum().backward()
        return x.grad, torch.tensor(NUMBER), STREAM.get_state()

    assert all(map(torch.equal, results(lambda f, x: f(x)), results(rf.checkpoint)))


@pytest.mark.parametrize("change", ["in place", "taken away"])
def test_an_argument_that_the_block_holds_too_and_that_is_changed_before_backward(change):
    def forward(self, x, state):
        return torch.sin(self.l(state.h + 1) * x)

    model, _ = same.built(build(forward))
    state = SimpleNamespace(h=torch.ones(3, 8))
    for layer in model.layers:
        layer.state = state
    rf.attach(model, rf.full())
    model(torch.ones(3, 8), state).sum().backward()
    expected, model.layers[0].l.weight.grad = model.layers[0].l.weight.grad, None
    loss = model(torch.ones(3, 8), state).sum()
    if change == "in place":
        state.h.mul_(2)
        with pytest.raises(rf.MutationError, match=r"block 'layers\.1'"):
            loss.backward()
    else:
        state.h = None
        loss.backward()
        assert torch.equal(model.layers[0].l.weight.grad, expected)
