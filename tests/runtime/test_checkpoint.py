"""`rf.checkpoint` stands in for torch's own, argument by argument."""
# ruff: noqa: B023 - functions that a loop makes are a subject here

import functools
import warnings

import pytest
import same
import torch
from test_replay import MATMULS, Block, Stack, Work
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import reforward as rf

CALLS = {
    "as it is": {},
    "use_reentrant False": {"use_reentrant": False},
    "use_reentrant True": {"use_reentrant": True},
    "preserve_rng_state False": {"preserve_rng_state": False},
    "determinism_check none": {"determinism_check": "none"},
    "debug": {"debug": True},
    "early_stop False": {"early_stop": False},
    "selective": {"policy": rf.Recompute(save="matmul")},
    "saved": {"policy": rf.Save()},
}


class Model(nn.Module):
    """Calls its blocks through `how`."""

    def __init__(self, how):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.bn = nn.BatchNorm1d(8)
        self.how = how

    def forward(self, x):
        for block in self.blocks:
            x = self.how(lambda x, factor, block: self.bn(block(x)) * factor["by"], x, factor={"by": 2.0}, block=block)
        return x


def build(how):
    def made():
        model = Model(how)
        x = torch.randn(4, 8)
        return model, lambda: model(x).square().sum()

    return made


def directly(function, *args, **kwargs):
    return function(*args, **kwargs)


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_every_argument_is_accepted_and_exact(options):
    expected = same.record(*same.built(build(directly)))
    found = same.record(*same.built(build(functools.partial(rf.checkpoint, **options))))
    assert same.differences(expected, found) == []


WAYS = {
    "module": lambda block, x: rf.checkpoint(block, x),
    "bound method": lambda block, x: rf.checkpoint(block.forward, x),
    "closure": lambda block, x: rf.checkpoint(lambda x: block(x), x),
    "list in a closure": lambda block, x: (lambda blocks: rf.checkpoint(lambda x: blocks[0](x), x))([block]),
    "partial": lambda block, x: rf.checkpoint(functools.partial(lambda b, x: b(x), block), x),
    "argument": lambda block, x: rf.checkpoint(lambda b, x: b(x), block, x),
    "nested function": lambda block, x: (lambda inner: rf.checkpoint(lambda x: inner(x), x))(lambda x: block(x)),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_buffers_are_found_however_the_module_is_reached(way):
    def made(call):
        def build():
            model = Stack(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh()))
            x = torch.randn(4, 8)
            return model, lambda: call(model.layers[0], x).square().sum()

        return build

    expected = same.record(*same.built(made(lambda block, x: block(x))))
    assert same.differences(expected, same.record(*same.built(made(way)))) == []


class Doubling(TorchDispatchMode):
    """A context that changes what is computed, and counts its operations."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.tanh.default
        return func(*args, **(kwargs or {}))


def test_contexts_of_forward_and_replay():
    first, again = Doubling(), Doubling()
    block, x = Block(), torch.randn(4, 8)
    rf.checkpoint(block, x, context_fn=lambda: (first, again)).sum().backward()
    assert (first.count, again.count) == (1, 1)


def test_early_stop_can_be_switched_off():
    def matmuls(**options):
        block = Block().eval()
        loss = rf.checkpoint(block, torch.randn(4, 8), **options).sum()
        with Work() as work:
            loss.backward()
        return work.of(*MATMULS)

    assert matmuls() == 1
    assert matmuls(early_stop=False) == 2


def test_debug_shows_the_operations_of_both_passes():
    def wandering(x):
        return torch.tanh(torch.cat([x, x]) if rf.is_replaying() else x)

    loss = rf.checkpoint(wandering, torch.randn(4, requires_grad=True), debug=True).sum()
    with pytest.raises(rf.ReplayMismatchError, match=r"(?s)forward: .*aten.tanh.*replay: .*aten.cat"):
        loss.backward()


def test_determinism_check_can_be_switched_off():
    def shrinking(x):
        return torch.tanh(x[:1] if rf.is_replaying() else x)

    x = torch.randn(4, requires_grad=True)
    with pytest.raises(rf.ReplayMismatchError, match="shrinking"):
        rf.checkpoint(shrinking, x).sum().backward()
    rf.checkpoint(shrinking, x, determinism_check="none").sum().backward()


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"determinism_check": "always"}, "'always'"),
        ({"policy": rf.Recompute(save="*.mlp")}, r"\*\.mlp"),
        ({"policy": rf.Recompute(save=[rf.Ops(family="matmul", within="*.mlp")])}, r"\*\.mlp"),
    ],
    ids=["determinism_check", "modules", "within"],
)
def test_arguments_that_cannot_be_honoured(options, value):
    with pytest.raises(rf.InputError, match=value):
        rf.checkpoint(Block(), torch.randn(4, 8), **options)


def test_without_gradients_the_function_is_just_called():
    block = Block()
    with torch.no_grad():
        assert rf.checkpoint(block, torch.randn(4, 8)).grad_fn is None
    block.requires_grad_(False)
    assert rf.checkpoint(block, torch.randn(4, 8)).grad_fn is None


NESTS = {
    "ours in ours": (rf.checkpoint, rf.checkpoint),
    "ours in torch's": (functools.partial(torch_checkpoint, use_reentrant=False), rf.checkpoint),
    "torch's in ours": (rf.checkpoint, functools.partial(torch_checkpoint, use_reentrant=False)),
    "ours in torch's reentrant": (functools.partial(torch_checkpoint, use_reentrant=True), rf.checkpoint),
    "torch's reentrant in ours": (rf.checkpoint, functools.partial(torch_checkpoint, use_reentrant=True)),
}


class Nested(nn.Module):
    def __init__(self, outer, inner):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.outer, self.inner = outer, inner

    def pair(self, first, second, x):
        return self.inner(second, self.inner(first, x))

    def forward(self, x):
        for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            x = self.outer(self.pair, first, second, x)
        return x


@pytest.mark.parametrize("ways", NESTS.values(), ids=NESTS)
def test_regions_of_ours_and_of_torch_nest(ways):
    def made(outer, inner):
        def build():
            model = Nested(outer, inner)
            x = torch.randn(4, 8).requires_grad_()
            return model, lambda: model(x).square().sum()

        return build

    expected = same.record(*same.built(made(directly, directly)))
    assert same.differences(expected, same.record(*same.built(made(*ways)))) == []


@pytest.mark.parametrize("plan", [rf.full(), rf.segments(1)], ids=["full", "run"])
def test_inside_an_attached_block(plan):
    class Checkpointing(Block):
        def forward(self, x):
            return x + rf.checkpoint(lambda x: self.drop(self.down(torch.tanh(self.up(x)))), self.norm(x))

    def made():
        model = Stack(Checkpointing(), Checkpointing())
        x = torch.randn(4, 8)
        return model, lambda: model(x).square().sum()

    same.assert_same(made, plan)


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_backward_twice_with_a_kept_graph(options):
    same.seed(0)
    block, x = Block(), torch.randn(4, 8)
    expected, found = [], []
    for results, call in ((expected, directly), (found, functools.partial(rf.checkpoint, **options))):
        same.seed(1)
        loss = call(block, x).square().sum()
        for _ in range(2):
            loss.backward(retain_graph=True)
            results.extend(p.grad.clone() for p in block.parameters())
        block.zero_grad()
    assert same.equal(expected, found)


@pytest.mark.parametrize("policy", [rf.Recompute(), rf.Save()], ids=["recompute", "save"])
def test_compiles_without_a_graph_break(policy):
    block, x = Block().eval(), torch.randn(4, 8)
    block(x).square().sum().backward()
    expected = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()

    def step(x):
        return rf.checkpoint(block, x, policy=policy).square().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        torch.compile(step, backend="aot_eager", fullgraph=True)(x).backward()
    torch.compiler.reset()
    for gradient, parameter in zip(expected, block.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(rf.InputError, match="calls a function or module, not 3"):
        rf.checkpoint(3)


# What a loop binds anew before the replay


def bound_late(kind, run):
    """Three functions made in a loop, which find the loop's variables as they were when they were called."""
    layers, x = [Block() for _ in range(3)], torch.ones(4, 8)
    box, rows = {}, [None]
    for i, layer in enumerate(layers):
        skip = torch.randn(8)
        box["skip"], rows[0] = skip, i + 1.0
        functions = {
            "layer": lambda x: layer(x),
            "index": lambda x: layers[i](x),
            "tensor": lambda x: torch.tanh(layer(x)) * skip,
            "dict": lambda x: torch.tanh(layer(x)) * box["skip"],
            "list": lambda x: torch.tanh(layer(x)) * rows[0],
        }
        x = run(functions[kind], x)
    x.square().sum().backward()
    assert (i, layer, box["skip"], rows) == (2, layers[2], skip, [3.0])  # the same objects, tensors too
    return [p.grad for block in layers for p in block.parameters()]


@pytest.mark.parametrize("kind", ["layer", "index", "tensor", "dict", "list"])
def test_variables_of_a_loop_are_as_they_were(kind):
    torch.manual_seed(0)
    expected = bound_late(kind, directly)
    torch.manual_seed(0)
    assert all(map(torch.equal, expected, bound_late(kind, rf.checkpoint)))


def test_a_tensor_of_the_surroundings_that_is_overwritten_is_refused():
    bias, x, block = torch.ones(8), torch.ones(4, 8), Block()
    for _ in range(2):
        x = rf.checkpoint(lambda x: torch.tanh(block(x) + bias), x)
        bias += 0.5
    with pytest.raises(rf.MutationError, match="a variable of an enclosing function stands for was changed in place"):
        x.sum().backward()
