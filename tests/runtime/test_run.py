"""Runs across block calls: which call continues which run, what a run holds, nesting by the module tree."""

import warnings

import pytest
import same
import torch
from test_replay import Block, Stack, compare, each_plan, held_after, stack
from torch import nn

import reforward as rf


def run_of(*indices, prefix="layers"):
    return rf.Plan(nodes=(rf.Run(members=tuple(rf.Region(path=f"{prefix}.{i}", policy=rf.Save()) for i in indices)),))


def one_backward(model, x):
    loss = model(x).square().sum()
    loss.backward()
    yield loss.detach()


class Masked(Block):
    """Takes a mask, positions by keyword, and returns a tuple; different arguments at every layer."""

    def forward(self, pair, mask, *, positions=None, cache=None):
        x, total = pair
        y = super().forward(x * mask + (positions if positions is not None else 0))
        return y, total + y.mean()


class MaskedStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Masked() for _ in range(4)])
        self.bias = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        pair = (x, torch.zeros(()))
        for i, layer in enumerate(self.layers):
            mask = (torch.arange(8) % (i + 2) != 0).float()
            pair = layer(pair, mask, positions=self.bias[i] if i % 2 else None, cache=None)
        return pair[0] + pair[1]


def test_extra_arguments_differ_by_layer_and_outputs_are_tuples():
    compare(one_backward, run_of(0, 1, 2, 3), MaskedStack)
    compare(one_backward, rf.segments(1, nested=2), MaskedStack)


class Skips(nn.Module):
    """The last block takes the first one's output as well, and so does the head."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), Merge()])

    def forward(self, x):
        a = self.layers[0](x)
        return self.layers[2](self.layers[1](a), a) * a


class Merge(Block):
    def forward(self, x, skip):
        return super().forward(x) * skip


def test_skips_inside_a_run():
    compare(one_backward, run_of(0, 1, 2), Skips)


class Between(nn.Module):
    """Overwrites the tensor that flows, between two blocks: it is the same object and another value."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x):
        x = self.layers[0](x)
        x = self.layers[1](x)
        x += 1
        x.mul_(0.5)
        return self.layers[2](x)


@pytest.mark.filterwarnings("ignore:block .* wasn't given")
@pytest.mark.parametrize("plan", [run_of(0, 1, 2), rf.segments(1, nested=3)], ids=["run", "nested"])
def test_an_output_overwritten_between_two_blocks_is_exact(plan):
    compare(one_backward, plan, Between)


def test_an_output_overwritten_between_two_blocks_breaks_the_chain_once_and_by_name():
    model = Between()
    rf.attach(model, run_of(0, 1, 2))
    with pytest.warns(UserWarning, match=r"'layers\.2'"):
        model(torch.randn(4, 8)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(4, 8)).sum().backward()


class InPlaceRelu(nn.Module):
    def forward(self, x):
        return torch.relu_(x)


def test_a_member_of_a_run_may_overwrite_its_input():
    def build():
        return Stack(nn.Linear(8, 8), InPlaceRelu(), nn.Linear(8, 8), InPlaceRelu(), nn.Linear(8, 8))

    compare(one_backward, run_of(0, 1, 2, 3, 4), build)


class Frozen(nn.Module):
    """The first blocks are frozen and get no gradient, so the run begins in its middle."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.layers[:2].requires_grad_(False)

    def forward(self, x):
        x = x.detach()
        for layer in self.layers:
            x = layer(x)
        return x


def test_frozen_blocks_at_the_beginning_of_a_run_are_plain_and_raise_no_warning():
    model = Frozen()
    rf.attach(model, run_of(0, 1, 2, 3))
    with same.counted(model) as calls:
        model(torch.randn(4, 8)).sum().backward()
    assert calls.of(*(f"layers.{i}" for i in range(4))) == [1, 1, 2, 2]
    compare(one_backward, run_of(0, 1, 2, 3), Frozen)


class Interleaved(nn.Module):
    """Two streams go through the blocks in turn, as in a pipeline with two micro-batches in flight."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        parts = [x[:2], x[2:]]
        for layer in self.layers:
            parts = [layer(part) for part in parts]
        return torch.cat(parts)


def test_interleaved_calls_make_runs_of_their_own():
    model = Interleaved()
    rf.attach(model, run_of(0, 1, 2))
    with same.counted(model) as calls:
        model(torch.randn(4, 8)).sum().backward()
    assert calls.of("layers.0", "layers.1", "layers.2") == [4, 4, 4]
    compare(one_backward, run_of(0, 1, 2), Interleaved)


class Branches(nn.Module):
    """Two blocks take the output of one; the run goes on with the first taker."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.layers[0](x)
        return self.layers[1](x) + 2 * self.layers[1](x)


@pytest.mark.filterwarnings("ignore:block .* wasn't given")
def test_an_output_taken_twice():
    compare(one_backward, run_of(0, 1), Branches)


class Restarts(nn.Module):
    """Leaves a run in its middle, ends it early, and calls a member out of order."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x):
        y = self.layers[1](self.layers[0](x))
        z = self.layers[3](self.layers[0](y))
        with torch.no_grad():
            y = y + self.layers[1](self.layers[0](x))
        return self.layers[2](z) + y


@pytest.mark.filterwarnings("ignore:block .* wasn't given")
def test_runs_that_are_left_and_entered_anywhere():
    compare(one_backward, run_of(0, 1, 2, 3), Restarts)


class Identity(nn.Module):
    def forward(self, x):
        return x


def test_a_member_that_returns_its_input():
    compare(one_backward, run_of(0, 1, 2, 3), lambda: Stack(Block(), Identity(), Identity(), Block()))


class Stage(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return torch.tanh(x)


class Stages(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([Stage(2), Stage(2)])

    def forward(self, x):
        return self.stages[1](self.stages[0](x))


TREES = {
    "blocks inside stages": {"stages[0:2]": rf.Recompute(), "*.blocks[0:2]": rf.Recompute()},
    "selective blocks inside stages": {"stages[0:2]": rf.Recompute(), "*.blocks[0:2]": rf.Recompute(save="matmul")},
    "blocks inside selective stages": {"stages[0:2]": rf.Recompute(save="matmul"), "*.blocks[0:2]": rf.Recompute()},
    "selective inside selective": {
        "stages[0:2]": rf.Recompute(save="random"),
        "*.blocks[0:2]": rf.Recompute(save="matmul"),
    },
    "submodules inside blocks": {"*.blocks[0:2]": rf.Recompute(), "*.up": rf.Recompute()},
}


def tree_plan(rules):
    regions = []
    for pattern, policy in rules.items():
        paths = {
            "stages[0:2]": ["stages.0", "stages.1"],
            "*.blocks[0:2]": [f"stages.{i}.blocks.{j}" for i in range(2) for j in range(2)],
            "*.up": [f"stages.{i}.blocks.{j}.up" for i in range(2) for j in range(2)],
        }[pattern]
        regions += [rf.Region(path=path, policy=policy) for path in paths]
    return rf.Plan(nodes=tuple(regions))


@pytest.mark.parametrize("rules", TREES.values(), ids=TREES)
def test_regions_nest_along_the_module_tree(rules):
    compare(one_backward, tree_plan(rules), Stages)


def test_an_inner_region_is_computed_once_more_than_its_outer_one():
    model = Stages()
    rf.attach(model, tree_plan(TREES["blocks inside stages"]))
    with same.counted(model) as calls:
        model(torch.randn(4, 8)).sum().backward()
    assert calls.of("stages.0", "stages.0.blocks.0", "stages.0.blocks.1") == [2, 3, 3]


def test_a_run_inside_a_region():
    members = tuple(rf.Region(path=f"stages.0.blocks.{i}", policy=rf.Save()) for i in range(2))
    plan = rf.Plan(nodes=(rf.Region(path="stages.0", policy=rf.Recompute()), rf.Run(members=members)))
    compare(one_backward, plan, Stages)


def test_a_run_of_stages_with_regions_inside():
    stages = tuple(rf.Region(path=f"stages.{i}", policy=rf.Save()) for i in range(2))
    blocks = tuple(rf.Region(path=f"stages.{i}.blocks.0", policy=rf.Recompute()) for i in range(2))
    compare(one_backward, rf.Plan(nodes=(rf.Run(members=stages), *blocks)), Stages)


@each_plan
def test_gradient_accumulation_over_batches_of_other_sizes(plan):
    def work(model, x):
        for rows in (4, 2, 3):
            loss = model(x[:rows]).square().sum()
            loss.backward()
            yield loss.detach()

    compare(work, plan, lambda: stack(4))


class LeftAndEntered(nn.Module):
    """The chain breaks before the second block, and the last one is never called."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x):
        x = self.layers[0](x) + 0
        return self.layers[2](self.layers[1](x))


def left_and_entered_plan():
    first, second, third, fourth = (
        rf.Region(path=f"layers.{i}", policy=rf.Recompute() if i == 1 else rf.Save()) for i in range(4)
    )
    return rf.Plan(nodes=(rf.Run(members=(rf.Run(members=(first, second)), third, fourth)),))


@pytest.mark.filterwarnings("ignore:block .* wasn't given")
def test_a_run_entered_in_the_middle_of_a_member_follows_that_members_plan():
    model = LeftAndEntered()
    rf.attach(model, left_and_entered_plan())
    with same.counted(model) as calls:
        model(torch.randn(4, 8)).sum().backward()
    # The second block: forward, replay of the outer run, of the inner one, and by itself.
    assert calls.of("layers.1", "layers.2") == [4, 2]
    compare(one_backward, left_and_entered_plan(), LeftAndEntered)


@pytest.mark.filterwarnings("ignore:block .* wasn't given")
def test_a_run_that_is_never_ended_is_forgotten_with_its_output():
    model = LeftAndEntered()
    rf.attach(model, left_and_entered_plan())
    x = torch.randn(64, 8)
    assert held_after(lambda: (model(x), None)[1]) == 0
