"""What is kept inside a block is kept only if handing it back is all that its operation did."""

import gc

import pytest
import torch
import torch.nn.functional as F
from test_replay import Stack, compare, several_steps
from torch import nn

import reforward as rf
from reforward import Ops, Recompute
from reforward._runtime.holders import Holder


class Block(nn.Module):
    """Two square layers; (4, 8) → the same."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Noise(Block):
    """Draws into a buffer, from its third forward on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(4, 8))
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        if self.steps > 2:
            self.draw()
        h = self.up(x)
        return F.silu(h * self.mask) * h

    def draw(self):
        self.mask.normal_()


class NoiseInView(Noise):
    def draw(self):
        self.mask[:, :4].bernoulli_(0.5)


class NoiseInOwn(Block):
    def forward(self, x):
        h = self.up(x)
        mask = torch.ones_like(h)
        mask[:, :4].bernoulli_(0.5)
        other = torch.empty(32)
        shaped = other.view(4, 8)
        other.uniform_()
        return F.silu(h * mask * shaped) * F.dropout(h, 0.5)


class Renorm(Block):
    """Reads the running statistics that its batch norm has just written."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(8)

    def forward(self, x):
        h = self.bn(self.up(x))
        fixed = F.batch_norm(h, self.bn.running_mean, self.bn.running_var, training=False)
        return torch.tanh(fixed * self.bn.running_var.rsqrt()) * h


class Logs(Block):
    """Looks at statistics once per step, and not in a replay, by the very functions that are kept."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def forward(self, x):
        h = torch.tanh(self.up(x))
        self.steps += 1
        if self.steps % 3 == 0 and not rf.is_replaying():
            with torch.no_grad():
                self.seen = float(F.layer_norm(h, (8,)).norm()), float(F.linear(h, self.up.weight).norm())
        return torch.softmax(F.layer_norm(self.down(h), (8,)), -1) * x


SELECTORS = [
    "random", "norm", "matmul", "elementwise", Ops(family="random", nth=0), Ops(family="norm", nth=0),
    Ops(family="matmul", nth=1),
]  # fmt: skip


@pytest.mark.parametrize("save", SELECTORS, ids=str)
@pytest.mark.filterwarnings("ignore:.*selects nothing")  # before the third forward
@pytest.mark.parametrize("block", [Noise, NoiseInView, NoiseInOwn, Renorm, Logs])
def test_exact(block, save):
    compare(several_steps, {"layers[0:2]": Recompute(save=[save])}, lambda: Stack(block(), block()))


def test_a_kept_call_at_another_place_is_refused():
    """The same function with the same shapes, and in between something else is saved."""

    class Moves(Block):
        def forward(self, x):
            h = x.exp()
            if rf.is_replaying():
                h = self.down(h)
            h = h.cos()
            return self.up(self.down(h)).sin()

    model = Stack(Moves())
    rf.attach(model, {"layers.0": Recompute(save="matmul")}, check="off")
    loss = model(torch.randn(4, 8, requires_grad=True)).sum()
    with pytest.raises(rf.ReplayMismatchError, match="another place"):
        loss.backward()


@pytest.mark.parametrize("change", ["data", "to"])
def test_a_parameter_in_other_memory_is_refused_by_name(change):
    """Which saved tensors are parameters is told by their memory."""
    model = Stack(Block(), Block())
    rf.attach(model, rf.full())
    loss = model(torch.randn(4, 8)).sum()
    if change == "data":
        weight = model.layers[1].up.weight
        weight.data = weight.data.clone()
    else:
        model.double().float()
    with pytest.raises(rf.MutationError, match=r"'layers\.1'.*parameter"):
        loss.backward()


class Shares(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.ones(2, 8))
        self.register_buffer("first", self.state[0])

    def forward(self, x):
        self.first.add_(1)
        return torch.tanh(self.up(x) * self.state.sum(0))


def test_a_buffer_that_is_written_and_shares_memory_is_refused_by_name():
    model = Stack(Shares())
    rf.attach(model, rf.full())
    with pytest.raises(rf.ReplayError, match=r"'layers\.0'.*shares its memory"):
        model(torch.randn(4, 8))


def test_a_buffer_of_two_modules_is_one():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
            total = torch.ones(8)
            self.one.register_buffer("total", total)
            self.other.register_buffer("total", total)

        def forward(self, x):
            self.one.total.add_(x.detach().abs().mean(0))
            return torch.tanh(self.one(x) / self.other.total)

    compare(several_steps, {"layers[0:2]": Recompute()}, lambda: Stack(Twice(), Twice()))


def test_what_a_failed_backward_computed_goes_at_the_end_of_the_next():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("once")

    model = Stack(Block(), Block())
    rf.attach(model, rf.full())
    inner = torch.randn(4, 8, requires_grad=True)
    kept = model(Fails.apply(inner)).sum()
    with pytest.raises(ValueError, match="once"):
        kept.backward(retain_graph=True)
    filled = [holder for holder in gc.get_objects() if type(holder) is Holder and holder.value is not None]
    filled = [holder for holder in filled if holder._recording is not None]
    assert filled
    model(torch.randn(4, 8)).sum().backward()
    assert all(holder.value is None for holder in filled)
