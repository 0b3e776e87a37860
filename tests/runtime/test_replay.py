"""One region: what backward may do with it, what it holds, what it computes again."""

import gc
import weakref
from typing import ClassVar

import pytest
import same
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import models
import reforward as rf
from reforward._measure.tracker import StorageTracker


class Block(nn.Module):
    """Norm, two layers, dropout, around a shortcut."""

    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x, *args, **kwargs):
        for layer in self.layers:
            x = layer(x, *args, **kwargs)
        return x


def stack(depth=3, width=8):
    return Stack(*(Block(width) for _ in range(depth)))


STEPS = 5

PLANS = {
    "full": rf.full(),
    "matmul": rf.selective(save="matmul"),
    "random": rf.selective(save="random"),
    "submodule": rf.selective(save="*.down"),
    "run": rf.segments(1),
    "nested": rf.segments(1, nested=2),
}
each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def compare(work, plan, build=stack, check="first"):
    """`work(model, input)` gives equal results, gradients, buffers and streams, plain and planned."""
    found = []
    for attached in (False, True):
        same.seed(0)
        model = build()
        if attached:
            rf.attach(model, plan, check=check)
        x = torch.randn(4, 8).requires_grad_()
        results = list(work(model, x))
        gradients = [same.clone(p.grad) for p in [x, *model.parameters()]]
        buffers = [same.clone(buffer) for buffer in model.buffers()]
        found.append({"results": results, "gradients": gradients, "buffers": buffers, **same.streams()})
    assert same.differences(*found) == []


def several_steps(model, x):
    """Values are compared in the first replays only, so the later ones must be right by themselves."""
    for _ in range(STEPS):
        loss = model(x).square().sum()
        loss.backward()
        yield loss.detach()


@each_plan
def test_backward_twice_with_a_kept_graph(plan):
    def work(model, x):
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        yield same.clone(x.grad)
        loss.backward()

    compare(work, plan)


@each_plan
def test_gradient_penalty(plan):
    def work(model, x):
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        penalty = (gradient.norm() - 1).square()
        penalty.backward()
        yield penalty.detach()

    compare(work, plan)


@each_plan
def test_third_derivative(plan):
    def work(model, x):
        value = model(x).pow(3).sum()
        for _ in range(2):
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            value = gradient.pow(2).sum()
        value.backward()
        yield value.detach()

    compare(work, plan)


@each_plan
def test_gradients_of_some_inputs_then_of_the_rest(plan):
    def work(model, x):
        loss = model(x).square().sum()
        yield torch.autograd.grad(loss, x, retain_graph=True)[0]
        yield torch.autograd.grad(loss, model.layers[1].up.weight, retain_graph=True)[0]
        yield torch.autograd.grad(loss, list(model.parameters()))[-1]

    compare(work, plan)


@each_plan
def test_backward_of_one_of_two_losses(plan):
    def work(model, x):
        y = model(x)
        y[:2].sum().backward(retain_graph=True)
        yield same.clone(x.grad)
        y[2:].square().sum().backward()

    compare(work, plan)


@each_plan
def test_two_forwards_before_their_backwards_in_either_order(plan):
    def work(model, x):
        first, second = model(x).square().sum(), model(x * 2).square().sum()
        first.backward()
        second.backward()
        first, second = model(x).square().sum(), model(x * 2).square().sum()
        second.backward()
        first.backward()
        (model(x).sum() * model(x).sum()).backward()
        yield None

    compare(work, plan)


class Inner(nn.Module):
    """Takes a gradient in its own forward, as energy models and forces do."""

    def __init__(self, create_graph):
        super().__init__()
        self.net = Block()
        self.create_graph = create_graph

    def forward(self, x):
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.net(y).square().sum()
            (force,) = torch.autograd.grad(energy, y, create_graph=self.create_graph)
        return x + F.gelu(self.net.up(force))[:, :8]


@each_plan
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradient_inside_the_region(plan, create_graph):
    if plan is PLANS["submodule"]:
        plan = rf.selective(save="*.net.down")

    def work(model, x):
        loss = model(x).square().sum()
        loss.backward()
        yield loss.detach()

    compare(work, plan, lambda: Stack(Inner(create_graph), Inner(create_graph)))


class InnerBackward(Inner):
    """The same with a backward that adds to the `grad` of a leaf of its own."""

    def forward(self, x):
        y = x.detach().requires_grad_()
        torch.autograd.backward(self.net(y).square().sum(), inputs=[y])
        return x + F.gelu(self.net.up(y.grad))[:, :8]


@each_plan
def test_backward_inside_the_region(plan):
    if plan is PLANS["submodule"]:
        plan = rf.selective(save="*.net.down")

    def work(model, x):
        loss = model(x).square().sum()
        loss.backward()
        yield loss.detach()

    compare(work, plan, lambda: Stack(InnerBackward(False), InnerBackward(False)))


class Outputs(nn.Module):
    """Several outputs in containers, some of which go unused, some without gradient."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x, scale=None, *, parts=()):
        y = self.block(x if scale is None else x * scale)
        return {"y": y, "more": [y.exp(), (y.argmax(-1), None)], "text": "x", "sum": sum(part.sum() for part in parts)}


@pytest.mark.parametrize("policy", [rf.Recompute(), rf.Recompute(save="matmul"), rf.Recompute(save="*.up")])
def test_containers_of_tensors_go_in_and_out(policy):
    def work(model, x):
        out = model.part(x, torch.full((8,), 2.0), parts=[x, (x * 3).detach()])
        (out["more"][0].sum() + out["sum"]).backward()
        yield out["y"].detach()
        yield out["more"][1][0]

    def build():
        model = nn.Module()
        model.part = Outputs()
        return model

    compare(work, {"part": policy}, build)


class Loops(nn.Module):
    """One block called several times, as ALBERT and recurrent cells do, with tied weights elsewhere."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.layers[1].up.weight = self.layers[0].up.weight

    def forward(self, x):
        for _ in range(3):
            x = self.layers[0](x)
        return self.layers[1](self.layers[0](x)) + self.layers[1](x)


@each_plan
@pytest.mark.filterwarnings("ignore:block .* wasn't given")
def test_one_block_called_several_times(plan):
    def work(model, x):
        loss = model(x).square().sum()
        loss.backward()
        yield loss.detach()

    compare(work, plan, Loops)


@each_plan
def test_nothing_is_recorded_where_no_gradient_can_flow(plan):
    model = stack()
    rf.attach(model, plan)
    x = torch.randn(4, 8)
    with same.counted(model) as calls:
        with torch.no_grad():
            assert not model(x).requires_grad
        with torch.inference_mode():
            model(x)
        model.requires_grad_(False)
        assert model(x).grad_fn is None
        with StorageTracker() as tracker:
            out = model(x)
        assert tracker.live_bytes == out.nbytes
    assert calls.of("layers.0") == [4]


def test_only_the_part_of_a_model_that_learns_is_recorded():
    model = stack(4)
    model.layers[:2].requires_grad_(False)
    rf.attach(model, rf.full())
    with same.counted(model) as calls:
        model(torch.randn(4, 8)).sum().backward()
    assert calls.of("layers.0", "layers.1", "layers.2", "layers.3") == [1, 1, 2, 2]


def test_training_convention_leaves_evaluation_mode_alone():
    model = stack(2)
    rf.attach(model, rf.full(when="training"))
    with same.counted(model) as calls:
        model.eval()(torch.randn(4, 8)).sum().backward()
        assert calls.of("layers.0", "layers.1") == [1, 1]
        model.train()(torch.randn(4, 8)).sum().backward()
        assert calls.of("layers.0", "layers.1") == [3, 3]


def test_is_replaying_tells_forward_from_replay():
    class Telling(Block):
        seen: ClassVar[list] = []  # of the class, which no fence looks at

        def forward(self, x):
            self.seen.append(rf.is_replaying())
            return super().forward(x)

    model = Stack(Telling(), Telling())
    rf.attach(model, rf.full())
    loss = model(torch.randn(4, 8)).sum()
    assert not rf.is_replaying()
    loss.backward()
    assert Telling.seen == [False, False, True, True]
    assert not rf.is_replaying()


# Memory


def held_after(work):
    """Bytes that live when `work()` is done and has returned, beyond what it returns, without any garbage
    collection."""
    gc.collect()
    gc.disable()
    try:
        with StorageTracker() as tracker:
            result = work()
            returned = result.nbytes if isinstance(result, torch.Tensor) else 0
        return tracker.live_bytes - returned
    finally:
        gc.enable()


WIDTH, ROWS = 8, 64
INPUT_BYTES = ROWS * WIDTH * 4


def test_a_region_holds_its_input_and_nothing_else():
    model = stack(3, WIDTH)
    rf.attach(model, rf.full())
    x = torch.randn(ROWS, WIDTH)
    output = []
    held = held_after(lambda: output.append(model(x)) or output[0])
    assert held == 2 * INPUT_BYTES  # the inputs of the second and third block; the first's is the caller's


def test_a_run_holds_its_first_input_only():
    model = stack(6, WIDTH)
    rf.attach(model, rf.segments(2))
    x = torch.randn(ROWS, WIDTH)
    output = []
    assert held_after(lambda: output.append(model(x)) or output[0]) == INPUT_BYTES


@pytest.mark.parametrize(("family", "floats"), [("matmul", 4 * WIDTH), ("norm", WIDTH + 2)])
def test_selected_values_are_held_and_no_others(family, floats):
    model = stack(1, WIDTH)
    model.layers[0].drop = nn.Identity()  # so that the down projection is behind the last saved tensor
    rf.attach(model, {"layers.0": rf.Recompute(save=family)})
    x = torch.randn(ROWS, WIDTH)
    output = []
    assert held_after(lambda: output.append(model(x)) or output[0]) == ROWS * floats * 4


@each_plan
def test_nothing_is_left_after_a_step(plan):
    model = stack(4, WIDTH)
    rf.attach(model, plan)
    x = torch.randn(ROWS, WIDTH)
    model(x).sum().backward()
    held = held_after(lambda: model(x).sum().backward())
    assert held == 0


@each_plan
def test_a_forward_without_backward_frees_everything(plan):
    model = stack(4, WIDTH)
    rf.attach(model, plan)
    x = torch.randn(ROWS, WIDTH)
    assert held_after(lambda: (model(x), None)[1]) == 0


@each_plan
def test_a_kept_graph_returns_to_the_checkpointed_level(plan):
    model = stack(4, WIDTH)
    rf.attach(model, plan)
    x = torch.randn(ROWS, WIDTH)
    model(x).sum().backward()  # gradients exist
    with StorageTracker() as tracker:
        loss = model(x).sum()
        level = tracker.live_bytes
        for _ in range(2):
            loss.backward(retain_graph=True)
            assert tracker.live_bytes == level


def test_live_bytes_of_nested_runs_grow_with_one_branch_only():
    """During the replay of the outer run of 8 blocks only one inner run of 2 is expanded at a time."""

    def peak(nodes):
        model = stack(8, WIDTH)
        rf.attach(model, rf.Plan(nodes=nodes))
        x = torch.randn(ROWS, WIDTH)
        model(x).sum().backward()
        with StorageTracker() as tracker:
            model(x).sum().backward()
        return tracker.peak_bytes

    leaves = [rf.Region(path=f"layers.{i}", policy=rf.Save()) for i in range(8)]
    flat = peak((rf.Run(members=tuple(leaves)),))
    nested = peak((rf.Run(members=tuple(rf.Run(members=tuple(leaves[i : i + 2])) for i in range(0, 8, 2))),))
    block = 4 * WIDTH * ROWS * 4  # what one block saves at the least
    assert flat - nested > 5 * block


# Exceptions


class Failing(Block):
    fail_in = ""

    def forward(self, x):
        self.count = getattr(self, "count", 0) + 1
        y = super().forward(x)
        if self.fail_in == ("replay" if rf.is_replaying() else "forward"):
            raise KeyError("the batch is bad")
        return torch.tanh(y)


@each_plan
@pytest.mark.parametrize("where", ["forward", "replay"])
def test_an_exception_leaves_nothing_behind(plan, where):
    def build():
        return Stack(Block(), Failing(), Block())

    same.seed(0)
    model = build()
    rf.attach(model, plan)
    x = torch.randn(4, 8)
    model.layers[1].fail_in = where
    try:
        loss = model(x).sum()
        before = same.streams()
        with pytest.raises(KeyError, match="the batch is bad"):
            loss.backward()
        assert same.differences(before, same.streams()) == []
        assert model.layers[1].count == 1
        del loss
    except KeyError:
        assert where == "forward"
    assert not rf.is_replaying()
    model.layers[1].fail_in = ""
    model.layers[1].count = 0
    model.zero_grad()
    found = same.record(model, lambda: model(x).square().sum(), after=lambda model: model.layers[1].count)
    same.seed(0)
    model = build()
    x = torch.randn(4, 8)
    model.layers[1].count = 0
    expected = same.record(model, lambda: model(x).square().sum(), after=lambda model: model.layers[1].count)
    assert same.differences(expected, found) == []


# What can't be exact is refused by name


class Wandering(Block):
    """Does something else when it runs again."""

    kind = ""

    def forward(self, x):
        again = rf.is_replaying()
        if self.kind == "more" and again:
            x = x.exp().log()
        if self.kind == "fewer" and not again:
            x = x.exp()
        if self.kind == "shape" and again:
            x = torch.cat([x, x])
        if self.kind == "dtype" and again:
            x = x.double().exp().float()
        return super().forward(x)


@pytest.mark.parametrize("kind", ["more", "fewer", "shape", "dtype"])
def test_a_replay_that_takes_another_way_is_refused(kind):
    model = Stack(Block(), Wandering())
    model.layers[1].kind = kind
    rf.attach(model, rf.full())
    loss = model(torch.randn(4, 8)).sum()
    with pytest.raises(rf.ReplayMismatchError, match=r"'layers\.1'"):
        loss.backward()


class Overwriting(Block):
    def forward(self, x):
        return super().forward(x.mul_(2))


def test_an_input_overwritten_by_the_block_is_refused():
    model = Stack(Block(), Overwriting())
    rf.attach(model, {"layers.1": rf.Recompute()})
    with pytest.raises(rf.MutationError, match=r"'layers\.1'.*argument"):
        model(torch.randn(4, 8))


def test_an_input_overwritten_after_the_forward_is_refused():
    model = stack(1)
    rf.attach(model, rf.Recompute())
    x = torch.randn(4, 8)
    loss = model(x).sum()
    x.zero_()
    with pytest.raises(rf.MutationError, match=r"'layers\.0'.*argument"):
        loss.backward()


def test_a_parameter_overwritten_after_the_forward_is_refused():
    model = stack(1)
    rf.attach(model, rf.Recompute())
    loss = model(torch.randn(4, 8)).sum()
    with torch.no_grad():
        model.layers[0].up.bias.zero_()  # nobody saved it, so autograd alone wouldn't notice
    with pytest.raises(rf.MutationError, match=r"'layers\.0'.*parameter 'bias'"):
        loss.backward()


def test_a_replayed_value_overwritten_before_it_is_used_again_is_refused():
    model = stack(1)
    rf.attach(model, rf.Recompute())
    saved = []

    class Grab(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            saved.append(ctx.saved_tensors[0])
            return gradient

    class Grabbing(Block):
        def forward(self, x):
            return Grab.apply(super().forward(x).exp())

    model = Stack(Grabbing())
    rf.attach(model, rf.Recompute())
    loss = model(torch.randn(4, 8)).sum()

    def overwrite(gradient):
        saved[0].zero_()

    loss.grad_fn.next_functions[0][0].register_hook(lambda inputs, outputs: overwrite(outputs[0]))
    with pytest.raises(RuntimeError, match=r"in-place|inplace"):
        loss.backward()


# Work


class Work(TorchDispatchMode):
    """Counts the operations that run while a block is replayed."""

    def __init__(self):
        super().__init__()
        self.count = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if rf.is_replaying():
            name = func.overloadpacket.__name__
            self.count[name] = self.count.get(name, 0) + 1
        return func(*args, **(kwargs or {}))

    def of(self, *names):
        return sum(self.count.get(name, 0) for name in names)


def replayed(plan, name="gpt"):
    model, loss = models.build(name)
    rf.attach(model, plan)
    with Work() as work:
        loss().backward()
    return work


LAYERS = 4
# Per layer: qkv, scores, values, out, up, down.
MATMULS = ("addmm", "bmm", "mm")


def test_a_full_replay_computes_all_but_what_follows_the_last_saved_tensor():
    work = replayed(rf.full())
    assert work.of(*MATMULS) == LAYERS * 6
    assert work.of("native_dropout") + work.of("bernoulli_") == LAYERS * 3


def test_the_last_projection_is_not_computed_again_if_nothing_behind_it_is_saved():
    model, loss = models.build("gpt")
    model.train()
    for layer in model.layers:
        layer.mlp[3].p = 0.0  # no dropout behind it, so the sum is the last operation and saves nothing
    rf.attach(model, rf.full())
    with Work() as work:
        loss().backward()
    assert work.of(*MATMULS) == LAYERS * 5


def test_kept_matmuls_are_not_computed_again():
    assert replayed(rf.selective(save="matmul")).of(*MATMULS) == 0


def test_kept_attention_is_not_computed_again_with_dropout_on_the_cpu():
    work = replayed(rf.selective(save="attention"), "gpt_sdpa")
    names = ("bmm", "_softmax", "_safe_softmax", "_scaled_dot_product_flash_attention_for_cpu")
    assert work.of(*names) == 0
    assert work.of("addmm") == LAYERS * 4
    assert replayed(rf.full(), "gpt_sdpa").of(*names) > 0


def test_a_kept_submodule_is_not_computed_again():
    assert replayed(rf.selective(save="*.mlp")).of("gelu") == 0
    assert replayed(rf.selective(save="*.mlp")).of(*MATMULS) == LAYERS * 4


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([[0, 1, 2, 3]], [2, 2, 2, 2]),
        ([[0, 1], [2, 3]], [2, 2, 2, 2]),
        ([[[0, 1], 2, 3]], [3, 3, 2, 2]),
        ([[[[0, 1], 2], 3]], [4, 4, 3, 2]),
    ],
)
def test_a_run_computes_each_block_again_once_per_level(nodes, expected):
    def node(tree):
        if isinstance(tree, int):
            return rf.Region(path=f"layers.{tree}", policy=rf.Save())
        return rf.Run(members=tuple(map(node, tree)))

    model, loss = models.build("gpt")
    rf.attach(model, rf.Plan(nodes=tuple(map(node, nodes))))
    with same.counted(model) as calls:
        loss().backward()
    assert calls.of(*(f"layers.{i}.norm1" for i in range(4))) == expected


def test_no_tensor_of_a_replay_outlives_the_step():
    class Seen(nn.Linear):
        seen: ClassVar[list] = []  # of the class, which no fence looks at

        def forward(self, x):
            output = super().forward(x)
            self.seen.append(weakref.ref(output))
            return output

    model = stack(2)
    model.layers[0].up = Seen(8, model.layers[0].up.out_features)
    rf.attach(model, rf.full())
    model(torch.randn(4, 8)).sum().backward()
    assert len(Seen.seen) == 2
    assert [reference() for reference in Seen.seen] == [None, None]


class Overwrites(nn.Module):
    """Changes its input in place, which a region can't be replayed from."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x.mul_(2).tanh() * self.gain


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_a_block_may_do_what_a_region_may_not(mode):
    model = nn.Sequential(nn.Linear(4, 4), Overwrites())
    rf.attach(model, {"1": rf.Recompute()})
    with mode():
        found = model(torch.ones(2, 4))
        with rf.suspended(model):
            assert torch.equal(found, model(torch.ones(2, 4)))
    with pytest.raises(rf.MutationError, match="'1'"):
        model(torch.ones(2, 4))


class AsksIdentity(nn.Module):
    """Goes another way if both arguments are one tensor, as attention does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, y):
        return torch.tanh(torch.tanh(self.linear(x)) * (2 if x is y else 1))


def test_a_tensor_that_is_given_twice_is_given_twice_again():
    block = AsksIdentity()
    x = torch.randn(4, 8)
    block(x, x).sum().backward()
    expected = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    model = nn.ModuleList([block])
    rf.attach(model, {"0": rf.Recompute()})
    block(x, x).sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(block.parameters(), expected, strict=True))
