"""Kept values: recognised where they are written, handed back in the replay, never wrong."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from test_replay import MATMULS, Block, Stack, Work, compare
from test_run import one_backward
from torch import nn

import models
import reforward as rf
from reforward import Ops, Recompute

FAMILIES = ("matmul", "attention", "conv", "norm", "elementwise", "random")


class Everything(nn.Module):
    """Uses every family, in functional form, as methods and as operators, in place and out of place."""

    def __init__(self):
        super().__init__()
        self.inlet, self.outlet = nn.Linear(8, 8), nn.Linear(8, 8)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.bn, self.norm = nn.BatchNorm1d(4), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)

    def forward(self, x):
        h = self.norm(x)
        h = F.dropout(h + self.attention(h, h, h, need_weights=False)[0], 0.3, self.training, inplace=True)
        h = F.scaled_dot_product_attention(h, h * 2, h, dropout_p=0.2)
        h = F.relu(self.bn(self.conv(h)), inplace=True)
        h = F.dropout(h, 0.3, self.training)
        h = (self.inlet(h) @ h.transpose(-2, -1)).softmax(-1) @ h
        h = h.add_(torch.rand_like(h)).mul(1.5).sigmoid_()
        h = h * torch.bernoulli(torch.full_like(h, 0.7)) + torch.empty_like(h).uniform_() * h
        return x + self.outlet(torch.einsum("bth,bsh->bth", F.gelu(h), h))


class Smooth(Everything):
    """Without the fused attention, which has no second derivative on the CPU."""

    def forward(self, x):
        h = F.dropout(self.bn(self.conv(self.norm(x))), 0.3)
        return x + self.outlet((self.inlet(h) @ h.transpose(-2, -1)).softmax(-1) @ torch.tanh(h))


class Deep(nn.Module):
    def __init__(self, block=Everything):
        super().__init__()
        self.layers = nn.ModuleList([block(), block()])
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = x[:, None] * self.scale + torch.arange(4.0)[:, None]
        for layer in self.layers:
            x = layer(x)
        return x


SELECTIONS = [
    *itertools.combinations(FAMILIES, 1),
    *itertools.combinations(FAMILIES, 2),
    FAMILIES,
    ("*.attention",),
    ("*.bn", "*.conv"),
    ("*.inlet", "random"),
    ("*.norm", "*.outlet", "matmul", "elementwise"),
]


@pytest.mark.parametrize("save", SELECTIONS, ids="+".join)
def test_any_selection_is_exact(save):
    compare(one_backward, {"layers[0:2]": Recompute(save=save)}, Deep)


@pytest.mark.parametrize("save", [*itertools.combinations(FAMILIES, 1), ("*.attention", "random")], ids="+".join)
def test_any_selection_can_be_differentiated_twice(save):
    def work(model, x):
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        yield loss.detach()

    compare(work, {"layers[0:2]": Recompute(save=save)}, lambda: Deep(Smooth))


class Overwrites(Block):
    """Overwrites what was kept, so it has to be computed again."""

    def forward(self, x):
        h = self.up(self.norm(x))
        h.mul_(2)
        return x + self.down(torch.tanh(h))


@pytest.mark.parametrize("save", ["matmul", "*.up", ["*.norm", "*.up"]])
def test_a_kept_value_that_is_overwritten_is_computed_again(save):
    compare(one_backward, {"layers[0:2]": Recompute(save=save)}, lambda: Stack(Overwrites(), Overwrites()))


class Gate(nn.Module):
    """Tells its parent more than it returns."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        self.penalty = self.linear(x).square().mean()
        return x * torch.sigmoid(self.linear(x))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = Gate()
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        y = self.gate(x)
        return self.out(y) * self.gate.penalty


def test_a_kept_submodule_that_sets_attributes_runs_again():
    compare(one_backward, {"layers[0:2]": Recompute(save="*.gate")}, lambda: Stack(Gated(), Gated()))


class OverwritingPart(nn.Module):
    def forward(self, x):
        torch.relu_(x)
        return x.sum(-1, keepdim=True)


class WithOverwritingPart(Block):
    def __init__(self):
        super().__init__()
        self.part = OverwritingPart()

    def forward(self, x):
        h = self.up(x)
        total = self.part(h)
        return x + self.down(torch.tanh(h)) * total


def test_a_kept_submodule_that_overwrites_its_input_runs_again():
    compare(one_backward, {"layers[0:2]": Recompute(save="*.part")}, lambda: Stack(WithOverwritingPart(), Block()))


def test_within_restricts_a_family_to_a_submodule():
    model, loss = models.build("gpt")
    rf.attach(model, {"layers[0:4]": Recompute(save=[Ops(family="matmul", within="*.mlp")])})
    with Work() as work:
        loss().backward()
    assert work.of(*MATMULS) == 4 * 4  # qkv, scores, values, out


@pytest.mark.parametrize(
    ("within", "nth", "recomputed"),
    [
        (None, 0, 4 * 5),  # qkv; left are scores, values, out, up, down
        (None, 5, 4 * 5),
        ("*.attention", 1, 4 * 5),
        ("*.mlp", 0, 4 * 5),
    ],
)
def test_one_operation_by_its_number(within, nth, recomputed):
    model, loss = models.build("gpt")
    rf.attach(model, {"layers[0:4]": Recompute(save=[Ops(family="matmul", within=within, nth=nth)])})
    with Work() as work:
        loss().backward()
    assert work.of(*MATMULS) == recomputed


@pytest.mark.parametrize(("within", "nth"), [(None, 6), ("*.mlp", 2)])
def test_a_number_that_no_operation_has_is_told(within, nth):
    model, loss = models.build("gpt")
    rf.attach(model, {"layers.0": Recompute(save=[Ops(family="matmul", within=within, nth=nth)])})
    with pytest.warns(UserWarning, match=rf"'layers\.0': Ops\(.*nth={nth}\) selects nothing"), Work() as work:
        loss().backward()
    assert work.of(*MATMULS) == 6


NUMBERED = [
    *[Ops(family=family, nth=nth) for family in FAMILIES for nth in (0, 1, 2)],
    Ops(family="elementwise", within="*.attention", nth=0),
    Ops(family="matmul", within="*.inlet", nth=0),
]


@pytest.mark.filterwarnings("ignore:.*selects nothing")  # not every block has three of every family
@pytest.mark.parametrize("one", NUMBERED, ids=lambda ops: f"{ops.family}-{ops.within}-{ops.nth}")
def test_any_one_operation_is_exact(one):
    compare(one_backward, {"layers[0:2]": Recompute(save=[one])}, Deep)


def test_numbers_begin_anew_in_each_call_of_a_submodule():
    class Twice(Block):
        def forward(self, x):
            return self.down(torch.tanh(self.up(self.norm(x)))) + self.down(torch.sin(self.up(x * 2)))

    plan = {"layers.0": Recompute(save=[Ops(family="matmul", within="*.up", nth=0)])}
    compare(one_backward, plan, lambda: Stack(Twice()))
    model = Stack(Twice())
    rf.attach(model, plan)
    with Work() as work:
        model(torch.randn(4, 8)).sum().backward()
    assert (
        work.of(*MATMULS) == 1
    )  # the first `down`: both `up` are kept, and the last call comes after all that is saved


def test_a_shared_submodule_called_twice_keeps_both_calls_apart():
    class Twice(Block):
        def forward(self, x):
            return self.down(torch.tanh(self.up(self.norm(x)))) + self.down(torch.sin(self.up(x * 2)))

    for save in ("*.up", "matmul", [Ops(family="matmul", within="*.up")]):
        compare(one_backward, {"layers[0:2]": Recompute(save=save)}, lambda: Stack(Twice(), Twice()))


def test_a_call_of_another_function_at_the_same_place_is_refused():
    class Wandering(Block):
        def forward(self, x):
            x = x.sinh() if rf.is_replaying() else x.cosh()
            h = torch.mm(x, x.t()) if rf.is_replaying() else torch.matmul(x, x.t())
            return super().forward(h @ x)

    model = Stack(Wandering())
    rf.attach(model, {"layers.0": Recompute(save="matmul")})
    loss = model(torch.randn(4, 8)).sum()
    with pytest.raises(rf.ReplayMismatchError, match=r"'layers\.0'.*'matmul'"):
        loss.backward()


@pytest.mark.parametrize("nth", [2, 3])
def test_numbers_count_what_a_kept_submodule_does_as_well(nth):
    class Two(Block):
        def __init__(self):
            super().__init__()
            self.inner = Block()

        def forward(self, x):
            return self.down(torch.tanh(self.up(self.inner(self.norm(x))))).sin()

    def kept(save):
        model = Stack(Two())
        rf.attach(model, {"layers.0": Recompute(save=save)})
        x = torch.randn(4, 8)
        with Work() as work:
            model(x).sum().backward()
        return work.of(*MATMULS)

    one = Ops(family="matmul", nth=nth)
    compare(one_backward, {"layers.0": Recompute(save=["*.inner", one])}, lambda: Stack(Two()))
    assert kept(["*.inner", one]) == kept("*.inner") - 1


@pytest.mark.parametrize("inner", ["", "norm", "matmul"])
def test_submodules_are_known_inside_a_region_within_the_replay(inner):
    """The inner region runs in the outer one's replay, whose kept values are told by the submodule that made them."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return torch.tanh(self.b(F.layer_norm(self.a(x), (8,))))

    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Part(), Part()

        def forward(self, x):
            return self.two(self.one(x))

    save = [Ops(family="matmul", within="*.b"), Ops(family="matmul")]
    plan = rf.Plan(
        nodes=(
            rf.Run(
                members=(
                    rf.Region(path="layers.0", policy=rf.Save()),
                    rf.Region(path="layers.1", policy=Recompute(save=save)),
                )
            ),
            rf.Region(path="layers.1.one", policy=Recompute(save=inner.split())),
        )
    )
    compare(one_backward, plan, lambda: Stack(Parts(), Parts()))
