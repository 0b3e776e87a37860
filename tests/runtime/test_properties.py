"""Random modules under random plans leave the same behind as without, bit for bit."""

import random
from types import SimpleNamespace

import hypothesis
import numpy
import pytest
import same
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

import reforward as rf
from reforward._measure.tracker import StorageTracker
from reforward._profile import dry_run
from reforward._profile.dry import Operations

WIDTH, ROWS = 4, 3
KINDS = (
    "linear",
    "dropout",
    "batchnorm",
    "inplace",
    "branch",
    "shared",
    "skip",
    "outputs",
    "attention",
    "stateful",
    "cell",
    "custom",
    "hooked",
    "deep",
    "draws",
)


class Keeps(torch.autograd.Function):
    """tanh that keeps its results on the context instead of saving them."""

    @staticmethod
    def forward(ctx, x):
        ctx.results = [torch.tanh(x)]
        return ctx.results[0] * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 - ctx.results[0] ** 2)


class Part(nn.Module):
    """One piece of a block; (rows, width) → (rows, width)."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "batchnorm" else nn.LayerNorm(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.count = 0
        self.state = {"seen": [SimpleNamespace(mean=torch.zeros(WIDTH), count=0)]}
        if kind == "hooked":
            self.a.register_forward_hook(lambda module, args, output: output.sin())
            self.b.register_forward_pre_hook(lambda module, args: setattr(module, "calls", 1))

    def forward(self, x):
        return getattr(self, self.kind)(x)

    def linear(self, x):
        return torch.tanh(self.b(F.gelu(self.a(x))))

    def dropout(self, x):
        return F.dropout(self.a(F.dropout(x, 0.2, self.training)), 0.5, self.training)

    def batchnorm(self, x):
        return self.a(self.norm(x))

    def inplace(self, x):
        y = torch.relu_(self.norm(self.a(x)))
        return self.b(y).add_(x).sigmoid_()

    def branch(self, x):
        return self.a(x) * 2 if torch.rand(()) < 0.5 else self.b(self.norm(x))

    def shared(self, x):
        return self.a(torch.sin(self.a(self.a(x))))

    def skip(self, x):
        return x + self.norm(self.a(x))

    def outputs(self, x):
        first, second = self.a(x).chunk(2, -1)
        return self.b(torch.cat([second.exp().clamp(max=2), first], -1))

    def attention(self, x):
        q, k, v = self.a(x)[None], self.b(x)[None], self.norm(x)[None]
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0)[0]

    def stateful(self, x):
        self.count += 1
        self.mean.lerp_(x.detach().float().mean(0), 0.1)
        return self.a(x - self.mean) / self.count

    def cell(self, x):
        state = torch.zeros_like(x)
        for _ in range(3):
            state = torch.tanh(self.a(x) + self.b(state))
        return state

    def custom(self, x):
        return self.b(Keeps.apply(self.a(x)))

    def hooked(self, x):
        return self.b(self.a(x)) * self.b.calls

    def deep(self, x):
        state = self.state["seen"][-1]
        state.count += 1
        state.mean.add_(x.detach().float().mean(0))
        self.state["seen"].append(SimpleNamespace(mean=state.mean * 0.5, count=state.count))
        return torch.tanh(self.a(x - state.mean)) / len(self.state["seen"])

    def draws(self, x):
        return self.a(x) * (random.random() + numpy.random.rand())


class Block(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.parts = nn.ModuleList([Part(kind) for kind in kinds])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


class Model(nn.Module):
    """Blocks in a loop; `calls` says which comes when, so one may come again or out of turn."""

    def __init__(self, blocks, calls, skip_from):
        super().__init__()
        self.layers = nn.ModuleList([Block(kinds) for kinds in blocks])
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.calls, self.skip_from = calls, skip_from

    def forward(self, x):
        x = self.inlet(x)
        skip = x
        for position, index in enumerate(self.calls):
            if position == self.skip_from:
                skip = x
            x = self.layers[index](x)
        return x + skip


@st.composite
def models(draw):
    """A function that builds a model and its loss, and the kinds of the model's blocks."""
    blocks = draw(st.lists(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3), min_size=1, max_size=5))
    again = draw(st.lists(st.integers(0, len(blocks) - 1), max_size=2))
    calls = [*range(len(blocks)), *again]
    skip_from = draw(st.integers(0, len(calls)))
    frozen = draw(st.lists(st.integers(0, len(blocks) - 1), max_size=2))
    tied = draw(st.booleans())
    forwards = draw(st.integers(1, 2))

    def build():
        model = Model(blocks, calls, skip_from)
        for index in frozen:
            model.layers[index].requires_grad_(False)
        if tied:
            model.layers[-1].parts[0].a.weight = model.layers[0].parts[0].a.weight
        batches = [torch.randn(ROWS, WIDTH) for _ in range(forwards)]
        return model, lambda: sum(model(x).square().mean() for x in batches)

    return build, blocks


SELECTORS = st.sampled_from(
    [
        "matmul",
        "attention",
        "norm",
        "elementwise",
        "random",
        "*.parts.0",
        "*.a",
        rf.Ops(family="matmul", within="*.b"),
        rf.Ops(family="matmul", nth=1),
    ]
)
POLICIES = st.one_of(
    st.just(rf.Save()),
    st.just(rf.Recompute()),
    st.lists(SELECTORS, min_size=1, max_size=2).map(lambda s: rf.Recompute(save=s)),
)


@st.composite
def plans(draw, blocks):
    """A forest over the blocks in order: regions, runs, runs of runs; sometimes regions inside blocks as well."""

    def nodes(paths, depth):
        found = []
        while paths:
            length = draw(st.integers(1, len(paths)))
            group, paths = paths[:length], paths[length:]
            if len(group) == 1 and draw(st.booleans()):
                found.append(rf.Region(path=group[0], policy=draw(POLICIES)))
            elif depth == 0 or (len(group) > 1 and draw(st.booleans())):
                found.append(rf.Run(members=tuple(rf.Region(path=p, policy=draw(POLICIES)) for p in group)))
            else:
                found.append(rf.Run(members=tuple(nodes(group, depth - 1))))
        return found

    whole = nodes([f"layers.{i}" for i in range(len(blocks))], depth=2)
    named = {
        s.pattern
        for n in rf.Plan(nodes=tuple(whole)).regions()
        for s in getattr(n.policy, "save", ())
        if isinstance(s, rf.Modules)
    }
    inner = []
    if "*.parts.0" not in named:
        for i in draw(st.lists(st.integers(0, len(blocks) - 1), max_size=2, unique=True)):
            inner.append(
                rf.Region(
                    path=f"layers.{i}.parts.0",
                    policy=draw(st.sampled_from([rf.Recompute(), rf.Recompute(save="norm")])),
                )
            )
    return rf.Plan(nodes=(*whole, *inner))


def check(data, autocast):
    build, blocks = data.draw(models())
    plan = data.draw(plans(blocks))
    model, _ = same.built(build)
    if not any(p.requires_grad for p in model.parameters()):
        return
    same.assert_same(build, plan, autocast=autocast, after=None)


@pytest.mark.filterwarnings("ignore:block .* wasn't given", "ignore:.*selects nothing")
@hypothesis.settings(max_examples=60)
@hypothesis.given(st.data(), st.booleans())
def test_random_modules_under_random_plans(data, autocast):
    check(data, autocast)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:block .* wasn't given", "ignore:.*selects nothing")
@hypothesis.settings(max_examples=2000)
@hypothesis.given(st.data(), st.booleans())
def test_two_thousand_random_modules_under_random_plans(data, autocast):
    check(data, autocast)


# Kinds whose memory depends on values or on earlier steps.
UNSTEADY = {"branch", "deep"}


def check_peak(data):
    build, blocks = data.draw(models())
    plan = data.draw(plans(blocks))
    model, loss = same.built(build)
    hypothesis.assume(any(p.requires_grad for p in model.parameters()))
    hypothesis.assume(not UNSTEADY.intersection(kind for kinds in blocks for kind in kinds))
    rf.attach(model, plan)
    loss().backward()  # from now on gradients exist and values aren't compared
    expected = dry_run(model, rf.Step(loss), rf.find_blocks(model, Block))
    # Autograd adds gradients in place where it can, but not under a dispatch mode: so the dry run's does it for it.
    with StorageTracker() as tracker, Operations():
        rf.Step(loss).run()
    assert tracker.peak_bytes == expected.peak_bytes - expected.static_bytes


@pytest.mark.filterwarnings("ignore:block .* wasn't given", "ignore:.*selects nothing")
@hypothesis.settings(max_examples=30)
@hypothesis.given(st.data())
def test_the_peak_of_random_modules_under_random_plans_is_the_dry_runs(data):
    check_peak(data)
