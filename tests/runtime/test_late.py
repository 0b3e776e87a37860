"""What a block begins to do only after its first replays were seen to be right, so that no comparison helps."""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from test_replay import STEPS, Stack, compare, several_steps
from torch import nn

import reforward as rf
from reforward import Recompute

PLANS = [rf.full(), rf.segments(1), rf.segments(1, nested=1), rf.selective(save="matmul")]


class Late(nn.Module):
    """Does something more from its third forward on; (4, 8) → the same."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.steps = nn.Linear(8, 8), nn.Linear(8, 8), 0

    def forward(self, x):
        self.steps += 1
        h = torch.tanh(self.up(x))
        if self.steps > 2:
            h = self.more(h)
        return x + F.dropout(self.down(h), 0.2)

    def more(self, h):
        return h


class InnerBackward(Late):
    """A backward of its own adds to the gradients of its own weights."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 1)

    def more(self, h):
        self.head(h.detach()).pow(2).mean().backward()
        return h


class InnerBackwardElsewhere(InnerBackward):
    """The same of a parameter that isn't registered here."""

    def __init__(self):
        super().__init__()
        self.others = [nn.Parameter(torch.randn(8, 8))]

    def more(self, h):
        (h.detach() @ self.others[0]).pow(2).mean().backward()
        return h


@pytest.mark.parametrize("plan", PLANS, ids=repr)
@pytest.mark.parametrize("block", [InnerBackward, InnerBackwardElsewhere])
def test_a_backward_inside_a_block(block, plan):
    compare(several_steps, plan, lambda: Stack(block(), block()))


# Submodules that are kept whole


class Writes(nn.Module):
    """Writes a buffer, and what `elsewhere` says."""

    def __init__(self, elsewhere=None):
        super().__init__()
        self.linear, self.elsewhere, self.steps = nn.Linear(8, 8), elsewhere, 0
        self.register_buffer("mean", torch.zeros(8))
        self.held = [torch.zeros(8)]

    def forward(self, h):
        y = self.linear(h)
        self.steps += 1
        if self.steps > 2:
            if self.elsewhere is None:
                self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            elif self.elsewhere == "list":
                self.held[0] = y.detach().mean(0)
            elif self.elsewhere == "inside a list":
                self.held[0].add_(y.detach().mean(0))
            else:
                self.mean = y.detach().mean(0)
        return F.dropout(y, 0.2)


class ReadsLater(Late):
    """Reads what its submodule has written."""

    def __init__(self, elsewhere=None):
        super().__init__()
        self.inner = Writes(elsewhere)

    def forward(self, x):
        y = self.inner(torch.tanh(self.up(x)))
        return x + torch.sin(self.down(y) * (1 + self.inner.mean + self.inner.held[0]))


@pytest.mark.parametrize("check", ["first", "off"])
@pytest.mark.parametrize("elsewhere", [None, "list", "inside a list", "another buffer"])
def test_a_kept_submodule_that_writes_what_the_block_reads(elsewhere, check):
    plan = {"layers[0:2]": Recompute(save="*.inner")}
    compare(several_steps, plan, lambda: Stack(ReadsLater(elsewhere), ReadsLater(elsewhere)), check=check)


def test_a_kept_submodule_that_only_writes_buffers_is_not_called_again():
    calls = []

    class Inner(nn.BatchNorm1d):
        def forward(self, input):
            calls.append(rf.is_replaying())
            return super().forward(input)

    class Block(Late):
        def __init__(self):
            super().__init__()
            self.inner = Inner(8)

        def more(self, h):
            return self.inner(h) * self.inner.running_var

    plan = {"layers[0:2]": Recompute(save="*.inner")}
    compare(several_steps, plan, lambda: Stack(Block(), Block()))
    assert calls == [False] * (2 * 2 * (STEPS - 2))


# Operations that are kept


class Alpha(Late):
    """Its dropout reads the mask that it has drawn, and then overwrites it."""

    def more(self, h):
        return F.feature_alpha_dropout(F.alpha_dropout(h, 0.3, training=True), 0.3, training=True)


class Instance(Late):
    """Its norm averages statistics that are written in place within one call."""

    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True, affine=True)

    def more(self, h):
        return self.norm(h)


@pytest.mark.parametrize("check", ["first", "off"])
@pytest.mark.parametrize("save", ["random", "norm", ("random", "norm", "elementwise")], ids=str)
@pytest.mark.parametrize("block", [Alpha, Instance])
def test_values_that_their_own_call_reads_before_it_overwrites_them(block, save, check):
    compare(several_steps, {"layers[0:2]": Recompute(save=save)}, lambda: Stack(block(), block()), check=check)


# Hooks


def watched(write):
    """Blocks in which a hook of a submodule that returns nothing writes to the block, from the third time on."""

    class Block(Late):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(8))
            self.notes, self.last = {"mean": torch.zeros(8)}, torch.zeros(8)
            self.up.register_forward_hook(self.look)

        def look(self, module, args, output):
            if self.steps > 2:
                write(self, output.detach().mean(0))

        def forward(self, x):
            self.steps += 1
            h = torch.tanh(self.up(x))
            return x + F.dropout(self.down(h * (1 + self.seen + self.notes["mean"] + self.last)), 0.2)

    return Block


WRITES = {
    "buffer": lambda block, value: block.seen.copy_(value),
    "attribute": lambda block, value: setattr(block, "last", value),
    "dict": lambda block, value: block.notes.update(mean=value),
    "inside a dict": lambda block, value: block.notes["mean"].add_(value),
}


@pytest.mark.parametrize("plan", PLANS, ids=repr)
@pytest.mark.parametrize("where", WRITES)
def test_a_hook_that_writes_to_the_block_around_it(where, plan):
    block = watched(WRITES[where])
    compare(several_steps, plan, lambda: Stack(block(), block()))


def test_an_acting_hook_counts_once_and_draws_as_in_forward():
    def steps(plan):
        torch.manual_seed(0)
        counts, generator = {"calls": 0}, torch.Generator().manual_seed(3)

        def act(module, args, output):
            counts["calls"] += 1
            return output + torch.rand(output.shape, generator=generator)

        model = Stack(Late(), Late())
        for layer in model.layers:
            layer.up.register_forward_hook(act)
        if plan is not None:
            rf.attach(model, plan)
        losses = list(several_steps(model, torch.ones(4, 8)))
        return torch.stack([*losses, *[p.grad.sum() for p in model.parameters()]]), counts["calls"]

    (expected, calls), (found, again) = steps(None), steps(rf.full())
    assert torch.equal(expected, found)
    assert calls == again == 2 * STEPS


# Code that minds how it ends


class Finishes(Late):
    """Refuses to be left in the middle."""

    def forward(self, x):
        done = False
        try:
            y = super().forward(x)
            done = True
        finally:
            if not done:
                raise ValueError("left in the middle")
        return y


class Swallows(Late):
    def forward(self, x):
        try:
            return super().forward(x)
        except BaseException as error:
            raise RuntimeError("exchanged") from error


class GoesOn(Late):
    def forward(self, x):
        with contextlib.suppress(BaseException):
            return super().forward(x)
        return torch.zeros_like(x)


@pytest.mark.parametrize("plan", PLANS, ids=repr)
@pytest.mark.parametrize("block", [Finishes, Swallows, GoesOn])
def test_code_that_sees_the_end_of_a_replay(block, plan):
    compare(several_steps, plan, lambda: Stack(block(), block()))


class Doubles(torch.autograd.Function):
    """Its backward changes what it keeps."""

    @staticmethod
    def forward(ctx, x, in_place):
        ctx.value, ctx.in_place = torch.tanh(x), in_place
        return ctx.value.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.value = ctx.value.mul_(2) if ctx.in_place else ctx.value * 2
        return gradient * ctx.value, None


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_a_context_that_backward_changes_is_found_so_by_the_next(plan, in_place):
    class Block(Late):
        def forward(self, x):
            return F.dropout(Doubles.apply(self.up(x), in_place), 0.2)

    def twice(model, x):
        loss = model(x).square().sum()
        for retained in (True, True, False):
            loss.backward(retain_graph=retained)
        yield loss.detach()

    compare(twice, plan, lambda: Stack(Block(), Block()))


TABLE = torch.ones(8)


def test_a_global_tensor_that_is_overwritten_is_refused():
    class Reads(Late):
        def more(self, h):
            return h * TABLE

    model = Stack(Reads(), Reads())
    rf.attach(model, rf.full())
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
    loss = model(torch.ones(4, 8)).sum()
    with torch.no_grad():
        TABLE.mul_(2)
    with pytest.raises(rf.MutationError, match=r"'layers\.1': the tensor that the global 'TABLE' stands for"):
        loss.backward()


def test_a_transform_inside_a_block_is_refused_by_name():
    class Transforms(Late):
        def more(self, h):
            return h * torch.func.grad(lambda z: z.square().sum())(h)

    model = Stack(Transforms())
    rf.attach(model, rf.full())
    model.layers[0].steps = 5
    with pytest.raises(rf.ReplayError, match=r"'layers\.0' differentiates with torch.func .* leave this block out"):
        model(torch.ones(4, 8))


def test_functions_made_for_each_step_are_not_remembered():
    model, seen = Stack(Late()), []
    rf.attach(model, rf.full())
    for _ in range(3):
        table = torch.ones(8)
        seen.append(weakref.ref(table))
        handle = model.layers[0].up.register_forward_hook(lambda module, args, out, table=table: out * table)
        inner = model.layers[0].up.register_forward_hook(closing_over(table))
        model(torch.ones(4, 8)).sum().backward()
        handle.remove()
        inner.remove()
    del table, handle, inner
    gc.collect()
    assert [reference() for reference in seen] == [None] * 3


def closing_over(table):
    return lambda module, args, out: out + table
