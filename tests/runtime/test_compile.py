"""torch.compile on models with a plan: what is computed again, exactness, what is refused.

Most tests run the compiler's first half only: its graphs call the same kernels as eager code, so losses and gradients
are equal bit for bit. The code that inductor generates is compared to rounding.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import same
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from test_replay import Block
from test_selective import Everything
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import models
import reforward as rf

pytestmark = [  # torch's own, when it loads its compiler, and when it guards a block's input
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

Build = Callable[[], tuple[nn.Module, Callable[[], Tensor]]]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


class Graphs:
    """A backend that runs graphs as they are, and shows what is in them.

    Args:
        decompose: into the operations that inductor generates code for.
    """

    def __init__(self, *, decompose: bool = False):
        self.forwards: list[torch.fx.GraphModule] = []
        self.backwards: list[torch.fx.GraphModule] = []
        self._backend = aot_autograd(
            fw_compiler=functools.partial(self._keep, self.forwards),
            bw_compiler=functools.partial(self._keep, self.backwards),
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table() if decompose else None,
        )

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return self._backend(graph, inputs)

    @staticmethod
    def _keep(graphs: list[torch.fx.GraphModule], graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def in_backward(self) -> list[str]:
        """The operations of the backward graphs, in order."""
        return [called(node) for graph in self.backwards for node in graph.graph.nodes if node.op == "call_function"]


def called(node: torch.fx.Node) -> str:
    """The operation's name; operations that draw are wrapped when they are repeated."""
    target = node.args[1] if "run_with_rng_state" in str(node.target) else node.target
    return str(target).removeprefix("aten.").split(".")[0]


def record(model: nn.Module, loss: Callable[[], Tensor], steps: int = 1) -> same.Record:
    """Losses, gradients, buffers and random streams after some steps, and what the last forward held, in bytes."""
    found: same.Record = {}
    for step in range(steps):
        same.seed(step)
        held: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(_weigh, held), lambda tensor: tensor):
            value = loss()
        value.backward()
        found |= {f"loss {step}": value.detach(), "held": sum(held)}
    found |= {f"gradient {name}": same.clone(p.grad) for name, p in model.named_parameters()}
    found |= {f"buffer {name}": same.clone(buffer) for name, buffer in model.named_buffers()}
    return found | same.streams()


def _weigh(held: list[int], tensor: Tensor) -> Tensor:
    held.append(tensor.nbytes)
    return tensor


def compiled(build: Build, plan: Any, steps: int = 1, **options: Any) -> same.Record:
    """`record` of a model that is compiled as a whole after the plan was attached; without a graph break, if nothing
    else is said."""
    model, loss = same.built(build)
    if plan is not None:
        rf.attach(model, plan)
    model.compile(**({"backend": Graphs(), "fullgraph": True} | options))
    return record(model, loss, steps)


def differences(expected: same.Record, found: same.Record) -> list[str]:
    return [name for name in same.differences(expected, found) if name != "held"]


class Net(nn.Module):
    """A layer, then blocks, with something between them."""

    def __init__(self, block: Callable[[], nn.Module], count: int, between: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        self.inlet = nn.Linear(8, 8)
        self.layers = nn.ModuleList(block() for _ in range(count))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x)
            if self.between is not None:
                x = self.between(x)
        return x


def net(block: Callable[[], nn.Module] = Block, count: int = 2, *, shape: tuple[int, ...] = (4, 8), **options: Any):
    """A model with blocks under `layers`, and its loss."""
    model, x = Net(block, count, **options), torch.randn(*shape)
    return model, lambda: model(x).square().mean()


def gpt(dropout: float = 0.1):
    return models.gpt(layers=2, width=16, heads=2, sdpa=True, dropout=dropout)


@functools.cache
def plainly_compiled(build: Build) -> same.Record:
    return compiled(build, None)


BLOCKS = ["layers.0", "layers.1"]
FULL = {path: rf.Recompute() for path in BLOCKS}
MATMUL = {path: rf.Recompute(save="matmul") for path in BLOCKS}


# What is computed again
# ----------------------------------------------------------------------------------------------------------------------

# Of two blocks: layers of weights, matrix products, copies, softmax, dropout, norms, gelu.
AGAIN = ("addmm", "bmm", "clone", "_safe_softmax", "native_dropout", "native_layer_norm", "gelu")
IN_BACKWARD_ANYWAY = Counter(bmm=8, clone=4)


@pytest.mark.parametrize(
    ("save", "again"),
    [
        (None, (0, 0, 0, 0, 0, 0, 0)),
        ((), (8, 4, 8, 2, 6, 4, 2)),
        ("matmul", (0, 4, 8, 2, 6, 4, 2)),
        ("attention", (8, 0, 8, 0, 4, 4, 2)),
        ("random", (4, 4, 8, 2, 2, 4, 2)),
    ],
    ids=str,
)
def test_backward_computes_again_what_is_not_kept_and_is_bit_identical(save, again):
    """With dropout on a CPU, attention becomes bmm, softmax, dropout, bmm, and is still attention."""
    graphs, expected = Graphs(), plainly_compiled(gpt)
    found = compiled(gpt, None if save is None else {path: rf.Recompute(save=save) for path in BLOCKS}, backend=graphs)
    assert differences(expected, found) == []
    count = Counter(graphs.in_backward())
    assert tuple(count[name] - IN_BACKWARD_ANYWAY[name] for name in AGAIN) == again
    assert save is None or found["held"] < 0.95 * expected["held"]


def test_fused_attention_is_attention():
    def again(save):
        graphs, plan = Graphs(), {path: rf.Recompute(save=save) for path in BLOCKS}
        compiled(functools.partial(gpt, dropout=0.0), plan, backend=graphs)
        return Counter(graphs.in_backward())["_scaled_dot_product_flash_attention_for_cpu"]

    assert [again("matmul"), again("attention")] == [2, 0]


def everything():
    return net(Everything, 1, shape=(2, 4, 8))


@pytest.mark.parametrize("save", ["elementwise", ["attention", "conv", "norm", "random"]], ids=str)
def test_every_family_is_kept_exactly(save):
    assert differences(plainly_compiled(everything), compiled(everything, {"layers.0": rf.Recompute(save=save)})) == []


class LastIsView(Block):
    """Its result is a view of what it computes."""

    def forward(self, x):
        return super().forward(x).unflatten(1, (2, 4)).flatten(1)


@pytest.mark.parametrize(
    ("block", "between", "decompose"),
    [
        (Block, None, False),
        (Block, lambda x: x.view(2, -1, 8).view(-1, 8), False),
        (Block, lambda x: x.half().float(), True),
        (LastIsView, lambda x: x * 1.5, True),
    ],
    ids=["nothing", "view", "cast, as inductor", "scaling, as inductor"],
)
def test_backward_computes_one_block_again_at_a_time(block, between, decompose):
    """Whatever stands between the blocks; were they computed again all at once, the peak would be the plain one."""
    graphs = Graphs(decompose=decompose)
    compiled(functools.partial(net, block, 4, between=between), rf.full(), backend=graphs)
    order = [name for name in graphs.in_backward() if name in ("tanh", "mm")]
    positions = [i for i, name in enumerate(order) if name == "tanh"]
    assert len(positions) == 4
    assert all(later - earlier > 3 for earlier, later in itertools.pairwise(positions))


class LastIsNorm(Block):
    """Its result is one of several that an operation returns, seen through a view."""

    def forward(self, x):
        return F.layer_norm(super().forward(x), (8,)).view(-1, 8)


@pytest.mark.parametrize("between", [None, torch.tanh], ids=["nothing", "tanh"])
def test_a_block_that_ends_in_an_operation_with_several_results(between):
    build = functools.partial(net, LastIsNorm, between=between)
    assert differences(compiled(build, None), compiled(build, rf.full())) == []


def test_batch_norm_and_in_place_activations_are_computed_again():
    def build():
        return models.resnet(batch=2, size=16, depth=1)

    graphs = Graphs()
    plan = {f"layer{i}.0": rf.Recompute() for i in (1, 2, 3)}
    assert differences(compiled(build, None, steps=2), compiled(build, plan, steps=2, backend=graphs)) == []
    assert Counter(graphs.in_backward())["_native_batch_norm_legit_functional"] == 6


class Overwriting(nn.Module):
    """Reads a buffer of its own and overwrites it, in one order or the other."""

    def __init__(self, first: bool):
        super().__init__()
        self.first, self.linear = first, nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        if self.first:
            self.scale[1:].mul_(0.5)
        x = x + torch.tanh(self.linear(x * (1 + self.scale)))
        if not self.first:
            self.scale.copy_(x.detach().mean(0))
        return x


@pytest.mark.parametrize("save", [(), "matmul"], ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["written, read", "read, written"])
def test_a_buffer_that_the_block_overwrites_is_not_read_again(first, save):
    """Compared with eager code: the compiler by itself takes the overwritten buffer for the gradient."""
    build = functools.partial(net, lambda: Overwriting(first))
    expected = record(*same.built(build), 2)
    found = compiled(build, {path: rf.Recompute(save=save) for path in BLOCKS}, backend="aot_eager", steps=2)
    assert differences(expected, found) == []


# Ways of compiling
# ----------------------------------------------------------------------------------------------------------------------


def in_place(model, backend):
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)


def wrapped(model, backend):
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(layer, backend=backend, fullgraph=True)


@pytest.mark.parametrize("attach_first", [True, False], ids=["attach, compile", "compile, attach"])
@pytest.mark.parametrize("way", [in_place, wrapped])
def test_blocks_compiled_one_by_one_share_one_graph(way, attach_first):
    model, loss = same.built(gpt)
    expected, graphs, parameters = plainly_compiled(gpt), Graphs(), dict(model.named_parameters())
    if attach_first:
        rf.attach(model, MATMUL)
    way(model, graphs)
    if not attach_first:
        rf.attach(model, MATMUL)
    found = record(model, loss)
    assert all(same.equal(expected[f"gradient {name}"], p.grad) for name, p in parameters.items())
    assert len(graphs.forwards) == len(graphs.backwards) == 1
    count = Counter(graphs.in_backward())
    assert (count["addmm"], count["gelu"]) == (0, 1)
    assert found["held"] < expected["held"]


def test_attach_suspend_attach_and_detach_after_compiling():
    model, loss = same.built(net)
    graphs = Graphs()
    model.eval().compile(backend=graphs, fullgraph=True)

    def step():
        """Bytes held, and graphs compiled for it."""
        before = len(graphs.forwards)
        return record(model, loss)["held"], len(graphs.forwards) - before

    plain, compiled_plain = step()
    rf.attach(model, FULL)
    full, compiled_full = step()
    with rf.suspended(model):
        suspended = step()
    resumed = step()
    rf.attach(model, MATMUL)
    matmul, compiled_matmul = step()
    rf.detach(model)
    assert compiled_plain == compiled_full == compiled_matmul == 1
    assert full < matmul < plain
    assert suspended == (plain, 1)
    assert resumed == (full, 0)
    assert step() == (plain, 0)


def test_a_plan_for_training_leaves_evaluation_plain():
    model, loss = same.built(net)
    graphs = Graphs()
    rf.attach(model, rf.full(when="training"))
    model.compile(backend=graphs, fullgraph=True)
    record(model.eval(), loss)
    assert Counter(graphs.in_backward())["tanh"] == 0
    record(model.train(), loss)
    assert Counter(graphs.in_backward())["tanh"] == 2


# Blocks that don't fit into a graph
# ----------------------------------------------------------------------------------------------------------------------


class Counting(Block):
    """Counts its calls in an attribute, and has buffers that a forward changes."""

    def __init__(self):
        super().__init__()
        self.calls, self.bn = 0, nn.BatchNorm1d(8)

    def forward(self, x):
        self.calls += 1
        return self.bn(super().forward(x))


def calls_and_warnings(**options):
    same_calls = []

    def build():
        model, loss = net(Counting)
        same_calls.append(model.layers)
        return model, loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = compiled(build, rf.full(), steps=2, **options)
    calls = [layer.calls for layer in same_calls[0]]
    return found, calls, [str(w.message) for w in caught if "outside of the compiled graph" in str(w.message)]


def test_a_block_with_side_effects_runs_outside_of_the_graph_as_without_the_compiler():
    expected = record(*same.built(functools.partial(net, Counting)), 2)
    found, calls, messages = calls_and_warnings(fullgraph=False)
    assert differences(expected, found) == []
    assert calls == [2, 2]
    assert all(any(f"block '{path}'" in message for message in messages) for path in BLOCKS)


def test_a_block_with_side_effects_is_an_error_where_the_graph_must_be_whole():
    with pytest.raises(torch._dynamo.exc.Unsupported, match="side effect"):
        calls_and_warnings()


def test_a_block_with_side_effects_can_be_allowed_into_the_graph():
    expected = record(*same.built(functools.partial(net, Counting)), 2)
    graphs = Graphs()
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        found, calls, messages = calls_and_warnings(backend=graphs)
    assert differences(expected, found) == []
    assert (calls, messages) == ([2, 2], [])
    assert Counter(graphs.in_backward())["tanh"] == 2 * len(graphs.backwards)


class Mixer(nn.Module):
    """What is compiled by itself."""

    def __init__(self, breaks: bool):
        super().__init__()
        self.norm, self.breaks = nn.LayerNorm(8), breaks

    def forward(self, x):
        h = F.scaled_dot_product_attention(x, self.norm(x), x, dropout_p=0.2)
        if self.breaks:
            torch._dynamo.graph_break()
        return F.dropout(F.gelu(h @ h.transpose(-2, -1)) @ x, 0.2)


class Inside(nn.Module):
    """A block around a mixer."""

    def __init__(self, breaks: bool = False):
        super().__init__()
        self.mixer, self.mlp = Mixer(breaks), Block()

    def forward(self, x):
        return x + self.mlp(self.mixer(x))


@pytest.mark.parametrize("breaks", [False, True], ids=["one graph", "with a break"])
@pytest.mark.parametrize(
    "plan",
    [
        rf.full(),
        rf.selective(save=["attention", "elementwise", "matmul", "random"]),
        rf.selective(save="*.mixer"),
        rf.segments(1, nested=2),
    ],
    ids=["full", "families", "submodule", "nested"],
)
def test_a_compiled_submodule_is_kept_or_computed_again_as_a_whole(plan, breaks):
    model, loss = same.built(functools.partial(net, functools.partial(Inside, breaks), shape=(2, 4, 8)))
    for layer in model.layers:
        layer.mixer.compile(backend="aot_eager", fullgraph=not breaks)
    expected = record(model, loss)
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rf.attach(model, plan)
    assert differences(expected, record(model, loss)) == []


@pytest.mark.parametrize("selector", ["matmul", "*.mixer", "*.mixer.norm"])
def test_what_is_selected_inside_a_compiled_submodule_is_warned_of(selector):
    model, _ = net(Inside, 1)
    model.layers[0].mixer.compile()
    with pytest.warns(UserWarning, match=r"block 'layers.0' saves .*'layers.0.mixer' inside it is compiled"):
        rf.attach(model, {"layers.0": rf.Recompute(save=selector)})
    rf.attach(model, {"layers.0": rf.Recompute(save="*.mlp")})  # outside of it: nothing to warn of


# Refusals
# ----------------------------------------------------------------------------------------------------------------------

REFUSED = {
    "run": (rf.segments(1), {}, "block 'layers.0' belongs to a run"),
    "submodules": (rf.selective(save="*.up"), {}, r"block 'layers.0' saves submodules by name \('\*.up'\)"),
    "within": (
        rf.Recompute(save=[rf.Ops(family="matmul", within="*.up")]),
        {},
        r"block 'layers.0' saves operations by submodule \('\*.up'\)",
    ),
    "number": (
        rf.Recompute(save=[rf.Ops(family="matmul", nth=0)]),
        {},
        r"block 'layers.0' saves one operation by its number \(.*nth=0",
    ),
    "checks": (rf.full(), {"check": "always"}, "block 'layers.0' is to be checked at every replay"),
}
each_refused = pytest.mark.parametrize(("plan", "options", "message"), REFUSED.values(), ids=REFUSED)


@each_refused
@pytest.mark.parametrize("way", ["model", "wrapped model", "blocks"])
def test_a_plan_that_compiled_code_cannot_follow_is_refused_by_attach(way, plan, options, message):
    model, _ = net()
    target = model
    if way == "model":
        model.compile()
    elif way == "wrapped model":
        target = torch.compile(model)
    else:
        model.layers[0].compile()
    with pytest.raises(rf.AttachError, match=f"{message}.*rf.full"):
        rf.attach(target, plan, **options)
    assert "forward" not in model.layers[0].__dict__


@each_refused
def test_a_plan_that_compiled_code_cannot_follow_is_refused_when_it_is_compiled(plan, options, message):
    model, loss = net()
    rf.attach(model, plan, **options)
    run = torch.compile(loss, backend="eager")
    with pytest.raises(RuntimeError, match=f"AttachError: {message}.*rf.full"):
        run()
    with torch.no_grad():
        run()
    with rf.suspended(model):
        run()


def test_a_backend_that_really_calls_regions_is_refused():
    """Torch's checkpoint leaves random streams to the compiler there, and gradients would be those of other masks."""
    with pytest.raises(rf.AttachError, match="backend='eager'"):
        compiled(net, rf.full(), backend="eager")


# Arguments, transforms, export, single calls
# ----------------------------------------------------------------------------------------------------------------------


class Named(Block):
    """Takes arguments that have the names of those of torch's checkpoint."""

    def forward(self, x, *, debug=False, use_reentrant=1.0, context_fn=None):
        return super().forward(x) * (2 if debug else 1) * use_reentrant, context_fn


def test_arguments_reach_the_block_whatever_their_names_are():
    model, x = nn.ModuleDict({"block": Named()}).eval(), torch.randn(4, 8)

    def call():
        return model["block"](x, debug=True, use_reentrant=3.0, context_fn={"a": 1})

    expected = call()
    rf.attach(model, {"block": rf.Recompute()})
    result, given = torch.compile(call, backend="aot_eager", fullgraph=True)()
    assert same.equal(expected[0], result)
    assert given == {"a": 1}


def test_transforms_inside_compiled_code_run_the_blocks_plainly():
    def gradients(plan):
        model, _ = same.built(lambda: net(count=1))
        rf.attach(model.eval(), plan)
        weights, x = dict(model.named_parameters()), torch.ones(3, 8)

        def loss(weights, row):
            return torch.func.functional_call(model, weights, row[None]).square().sum()

        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
        return list(torch.compile(per_sample, backend="aot_eager", fullgraph=True)(weights, x).values())

    assert same.equal(gradients({"layers.0": rf.Save()}), gradients(rf.full()))


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_knows_nothing_of_the_plan(strict):
    model, _ = net()
    rf.attach(model.eval(), rf.segments(1))
    program = torch.export.export(model, (torch.randn(4, 8),), strict=strict)
    assert not any("checkpoint" in str(node.target) for node in program.graph.nodes)


def _contexts():
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


@pytest.mark.parametrize(
    ("options", "again"),
    [
        ({}, 2),
        ({"policy": rf.Recompute(save="matmul")}, 0),
        ({"policy": rf.Save()}, 0),
        ({"context_fn": _contexts}, 0),
        ({"debug": True, "early_stop": False, "use_reentrant": True}, 2),
    ],
    ids=["recompute", "matmul", "save", "context_fn", "other options"],
)
def test_single_calls_are_regions_too(options, again):
    block, x, graphs = Block(), torch.randn(4, 8), Graphs()

    def step(call):
        same.seed(0)
        torch.compile(lambda x: call(block, x).square().sum(), backend=graphs, fullgraph=True)(x).backward()
        gradients = [same.clone(p.grad) for p in block.parameters()]
        block.zero_grad()
        return gradients

    expected = step(lambda block, x: block(x))
    assert same.equal(expected, step(functools.partial(rf.checkpoint, **options)))
    assert Counter(graphs.in_backward())["addmm"] == again


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": rf.Recompute(save="*.up")}, "'Block' saves submodules by name"),
        ({"policy": rf.Recompute(save="matmul"), "context_fn": _contexts}, "'Block' has both"),
    ],
    ids=["submodule", "both"],
)
def test_single_calls_that_compiled_code_cannot_follow_are_refused(options, message):
    run = torch.compile(lambda x: rf.checkpoint(Block(), x, **options), backend="eager")
    with pytest.raises(RuntimeError, match=f"AttachError: block {message}"):
        run(torch.randn(4, 8))


def test_a_single_call_with_side_effects_runs_outside_of_the_graph():
    block, x = Counting(), torch.randn(4, 8)
    run = torch.compile(lambda x: rf.checkpoint(block, x, policy=rf.Recompute(save="matmul")), backend="aot_eager")
    with pytest.warns(UserWarning, match="block 'Counting' can't be compiled"):
        run(x).square().sum().backward()
    assert block.calls == 1
    assert block.bn.num_batches_tracked == 1


# Generated code
# ----------------------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """Draws, normalises over the batch, multiplies: as little code to generate as possible."""

    def __init__(self):
        super().__init__()
        self.up, self.bn, self.drop, self.down = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(self.drop(torch.relu(self.bn(self.up(x)))))


@pytest.mark.slow
def test_generated_code_has_the_gradients_of_the_plain_generated_code():
    """To 1e-6 of the largest value, masks included; other fusions may round otherwise."""
    build = functools.partial(net, Small)
    expected = compiled(build, None, backend="inductor")
    for plan in (FULL, MATMUL):
        torch.compiler.reset()
        found = compiled(build, plan, backend="inductor")
        assert found["held"] < expected["held"]
        for name, value in expected.items():
            if isinstance(value, Tensor):
                scale = max(1.0, float(value.abs().max()))
                torch.testing.assert_close(found[name] / scale, value / scale, rtol=0, atol=1e-6)


def test_a_compiled_submodule_inside_a_block_saves_through_hooks_that_are_not_traced():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

        def forward(self, x):
            return x + self.mlp(self.norm(x))

    model = nn.Sequential(Inside(), Inside())
    for block in model:
        block.mlp.compile(backend="aot_eager")
    x = torch.randn(4, 8)

    def gradients():
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    rf.attach(model, {"0": rf.Recompute(), "1": rf.Recompute()})
    for _ in range(3):
        assert all(map(torch.equal, expected, gradients()))
