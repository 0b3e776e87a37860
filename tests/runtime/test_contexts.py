"""Custom autograd functions that keep tensors as attributes of their context."""

import pytest
import same
import torch
from test_replay import Stack
from torch import nn

import reforward as rf
from reforward._measure.tracker import StorageTracker


class Powers(torch.autograd.Function):
    """The sum of some exponentials, each kept on the context; also in a dict, beside a number."""

    @staticmethod
    def forward(ctx, x):
        ctx.terms = [torch.exp(x * i * 0.1) for i in range(1, 7)]
        ctx.more = {"twice": 2 * x, "count": 6}
        return sum(ctx.terms) + ctx.more["twice"]

    @staticmethod
    def backward(ctx, grad):
        slope = sum(term * i * 0.1 for i, term in enumerate(ctx.terms, 1))
        return grad * (slope + 2) + 0 * ctx.more["twice"] * ctx.more["count"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(32, 32), nn.Dropout(0.2)

    def forward(self, x):
        return torch.tanh(Powers.apply(self.drop(self.linear(x))) * 0.1) + Powers.apply(x * 0.1)


def build():
    model = Stack(Block(), Block(), Block())
    x = torch.randn(64, 32)
    return model, lambda: model(x).square().mean()


@pytest.mark.parametrize("plan", [rf.full(), rf.every(2), rf.segments(1), rf.selective(save="matmul")])
def test_exact(plan):
    same.assert_same(build, plan, steps=3)


@pytest.mark.parametrize("plan", [rf.full(), rf.segments(1), rf.selective(save="random")])
def test_twice_through_a_kept_graph(plan):
    def gradients(plan):
        model, loss = same.built(build)
        if plan is not None:
            rf.attach(model, plan)
        value = loss()
        value.backward(retain_graph=True)
        value.backward()
        return [p.grad for p in model.parameters()]

    assert all(map(torch.equal, gradients(None), gradients(plan)))


def held(plan):
    """Bytes between forward and backward, in a second step."""
    model, loss = same.built(build)
    if plan is not None:
        rf.attach(model, plan)
    loss().backward()
    with StorageTracker() as tracker:
        value = loss()
        bytes_held = tracker.live_bytes
        value.backward()
    return bytes_held


def test_what_they_keep_is_dropped():
    assert held(rf.full()) * 3 < held(None)


def test_a_forward_whose_graph_is_dropped_leaves_nothing():
    model, loss = same.built(build)
    rf.attach(model, rf.full())
    with StorageTracker() as tracker:
        loss()
        assert tracker.live_bytes == 0
