"""Kinds of models and of use that break activation checkpointing: exact, or refused by name."""

import gc
import random
import threading
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import same
import torch
import torch.nn.functional as F
from test_replay import Block, Stack, stack
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import reforward as rf
from reforward._measure.tracker import StorageTracker

PLANS = {"full": rf.full(), "matmul": rf.selective(save="matmul"), "run": rf.segments(1)}
each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


# What blocks return


@dataclass
class Result:
    hidden: torch.Tensor
    steps: int
    nothing: None = None


class Both(NamedTuple):
    hidden: torch.Tensor
    detached: torch.Tensor


OUTPUTS = {
    "dataclass": lambda hidden: Result(hidden, 3),
    "named tuple": lambda hidden: Both(hidden, hidden.detach()),
    "dict": lambda hidden: {"hidden": hidden, "none": None, "count": 2, "indices": hidden.argsort()},
    "nested": lambda hidden: [{"deep": (hidden, [hidden * 2])}, "text"],
    "view": lambda hidden: (hidden[:, :4], hidden.t()),
    "itself twice": lambda hidden: (hidden, hidden),
}


def hidden_of(output: Any) -> torch.Tensor:
    """The tensor that goes on, wherever it is."""
    if isinstance(output, (Result, Both)):
        return output.hidden
    if isinstance(output, dict):
        return output["hidden"]
    if isinstance(output, list):
        return output[0]["deep"][0] + output[0]["deep"][1][0]
    first, second = output
    return torch.cat([first, second.t()[:, 4:]], 1) if second.shape != first.shape else first + second


BROKEN_CHAIN = pytest.mark.filterwarnings("ignore:block .* wasn't given the very output")  # it holds more, no more


@BROKEN_CHAIN
@pytest.mark.parametrize("kind", OUTPUTS)
@each_plan
def test_outputs_of_every_kind(kind, plan):
    class Returns(Block):
        def forward(self, x):
            return OUTPUTS[kind](torch.tanh(super().forward(x)))

    class Model(Stack):
        def forward(self, x):
            for layer in self.layers:
                x = hidden_of(layer(x))
            return x

    def build():
        model = Model(Returns(), Returns(), Returns())
        x = torch.randn(4, 8)
        return model, lambda: model(x).square().sum()

    same.assert_same(build, plan)


@BROKEN_CHAIN
@each_plan
def test_an_output_changed_in_place_by_the_model(plan):
    class Model(Stack):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x).mul_(2).add_(1)
            return x

    def build():
        model = Model(Block(), Block())
        x = torch.randn(4, 8)
        return model, lambda: model(x).square().sum()

    same.assert_same(build, plan)


def test_a_run_goes_on_through_dataclasses():
    class Wraps(Block):
        def forward(self, given):
            return Result(torch.tanh(super().forward(given.hidden)), given.steps + 1)

    class Model(Stack):
        def forward(self, x):
            return super().forward(Result(x, 0)).hidden

    def build():
        model = Model(Wraps(), Wraps(), Wraps())
        x = torch.randn(4, 8)
        return model, lambda: model(x).square().sum()

    same.assert_same(build, rf.segments(1))  # a broken chain would warn


# Recurrence, packing, dropping


@each_plan
def test_packed_sequences_through_a_recurrent_block(plan):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.out = nn.GRU(8, 8, batch_first=True, dropout=0.2, num_layers=2), nn.Linear(8, 8)

        def forward(self, packed):
            result, _ = self.gru(packed)
            return result._replace(data=torch.tanh(self.out(result.data)))

    class Model(Stack):
        def forward(self, x):
            packed = pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True)
            for layer in self.layers:
                packed = layer(packed)
            return pad_packed_sequence(packed, batch_first=True)[0]

    def build():
        model = Model(Recurrent(), Recurrent())
        x = torch.randn(3, 5, 8)
        return model, lambda: model(x).square().sum()

    same.assert_same(build, plan if plan is not PLANS["run"] else {"layers[0:2]": rf.Recompute(save="elementwise")})


@BROKEN_CHAIN
@each_plan
def test_layers_that_are_dropped_at_random_and_one_cell_called_again_and_again(plan):
    class Model(Stack):
        def forward(self, x):
            for layer in self.layers:
                if random.random() > 0.3:
                    x = layer(x)
            for _ in range(4):
                x = torch.tanh(self.layers[0](x))
            return x

    def build():
        model = Model(Block(), Block(), Block())
        x = torch.randn(4, 8)
        return model, lambda: model(x).square().sum()

    same.assert_same(build, plan, steps=4)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_a_transformer_with_its_cache_left_on():
    transformers = pytest.importorskip("transformers")

    def build():
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
        )
        config.attention_dropout = 0.1
        model = transformers.LlamaForCausalLM(config)
        ids = torch.randint(0, 32, (2, 6))

        def loss():
            cache = transformers.DynamicCache()
            first = model(input_ids=ids[:, :3], past_key_values=cache, use_cache=True)
            second = model(input_ids=ids[:, 3:], past_key_values=first.past_key_values, use_cache=True)
            assert cache.get_seq_length() == 6
            return first.logits.square().mean() + second.logits.square().mean()

        return model, loss

    for plan in (rf.full(), rf.selective(save="matmul")):
        same.assert_same(build, plan, after=None)


# Data parallel


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
@each_plan
def test_distributed_data_parallel(process_group, options, plan):
    def build():
        model = Stack(Block(), Block())
        if options.get("find_unused_parameters"):
            model.unused = nn.Linear(8, 8)
        x = torch.randn(4, 8)
        return model, x

    def gradients(attached):
        same.seed(0)
        model, x = build()
        if attached:
            rf.attach(model, plan)
        parallel = DistributedDataParallel(model, **options)
        same.seed(1)
        for step in range(3):
            with parallel.no_sync() if step == 1 and not options.get("static_graph") else nullcontext():
                parallel(x).square().sum().backward()
        return [p.grad for p in model.parameters()]

    for expected, found in zip(gradients(False), gradients(True), strict=True):
        assert same.equal(expected, found)


# Threads, errors, memory


def test_threads_that_train_models_of_their_own_at_once():
    def train(number, results):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(4, 8, generator=generator)
        models[number](x).square().sum().backward()
        results[number] = [p.grad for p in models[number].parameters()]

    models = []
    for number in range(4):
        torch.manual_seed(number)
        models.append(stack(3).eval())  # no dropout: the stream is one for all threads
    expected: dict[int, Any] = {}
    for number in range(4):
        train(number, expected)
        models[number].zero_grad()
        rf.attach(models[number], rf.full())
    found: dict[int, Any] = {}
    threads = [threading.Thread(target=train, args=(number, found)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        assert all(map(torch.equal, expected[number], found[number]))


class Fails(Block):
    """Fails when it is told to: in forward, in its replay, or in its backward."""

    where = ""

    def forward(self, x):
        if self.where == "forward" and not rf.is_replaying():
            raise KeyError("forward")
        if self.where == "replay" and rf.is_replaying():
            raise KeyError("replay")
        out = torch.tanh(super().forward(x))
        if self.where == "backward":
            out.register_hook(self._fail)
        return out

    def _fail(self, gradient):
        raise KeyError("backward")


@pytest.mark.parametrize("where", ["forward", "replay", "backward", "never"])
@each_plan
def test_a_step_that_ends_early_gives_all_memory_back_and_the_next_is_exact(where, plan):
    def gradients(model):
        same.seed(3)
        model.zero_grad()
        model(torch.ones(4, 8)).square().sum().backward()
        return [p.grad for p in model.parameters()], same.streams()

    same.seed(0)
    model = Stack(Block(), Fails(), Block())
    expected = gradients(model)
    rf.attach(model, plan)
    gradients(model)
    model.zero_grad()
    gc.collect()
    gc.disable()
    try:
        model.layers[1].where = where
        with StorageTracker() as tracker:
            if where == "never":
                model(torch.ones(4, 8))
            else:
                with pytest.raises(KeyError, match=where):
                    model(torch.ones(4, 8)).square().sum().backward()
            model.zero_grad()
            assert tracker.live_bytes == 0
    finally:
        gc.enable()
    model.layers[1].where = ""
    found = gradients(model)
    assert all(map(same.equal, expected[0], found[0]))
    assert same.differences(expected[1], found[1]) == []


@each_plan
def test_an_argument_that_takes_in_the_output_is_no_leak(plan):
    class Stores(Block):
        def forward(self, x, box):
            box["last"] = out = torch.tanh(super().forward(x))
            box.setdefault("all", []).append(out)
            return out

    model = Stack(Stores(), Stores())
    rf.attach(model, plan)
    gc.collect()
    gc.disable()
    try:
        with StorageTracker() as tracker:
            for backward in (True, False):
                box: dict[str, Any] = {}
                loss = model(torch.ones(4, 8), box).sum()
                if backward:
                    loss.backward()
                del box, loss
                model.zero_grad()
                assert tracker.live_bytes == 0
    finally:
        gc.enable()


def test_flash_like_masks_and_shapes_that_change_from_step_to_step():
    class Attends(Block):
        def forward(self, x, mask):
            return x + F.scaled_dot_product_attention(x, x, self.up(x)[..., :8], attn_mask=mask, dropout_p=0.1)

    class Model(Stack):
        def forward(self, x):
            for index, layer in enumerate(self.layers):
                mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril(index)
                x = layer(x, mask)
            return x

    def build():
        model = Model(Attends(), Attends())
        batches = [torch.randn(2, length, 8) for length in (5, 9, 3)]
        return model, lambda: model(batches[random.randrange(3)]).square().sum()

    for plan in PLANS.values():
        same.assert_same(build, plan, steps=4)


# Tensors of other kinds


class Scaled(torch.Tensor):
    """A weight in eight bits, as libraries for quantisation write them: it has a product, and no other operation."""

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values, scale):
        self.values_, self.scale = values, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].values_, args[0].scale)
        if func is torch.ops.aten.mul.Tensor:
            return func(*[a.values_ * a.scale if isinstance(a, Scaled) else a for a in args])
        raise NotImplementedError(func)


def quantised(tensor):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(tensor, 0.1, 0, torch.quint8)


def nested(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=layout)


def masked():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.masked.masked_tensor(torch.randn(4), torch.tensor([True, False, True, True]))


HELD = {
    "quantised": (
        lambda: quantised(torch.randn(4)),
        lambda tensor: tensor.dequantize().mean(),
    ),
    "float8": (lambda: torch.randn(5).to(torch.float8_e4m3fn), lambda tensor: tensor.float().mean()),
    "nested": (lambda: nested(torch.strided), lambda tensor: tensor.to_padded_tensor(0.0).mean()),
    "jagged": (lambda: nested(torch.jagged), lambda tensor: tensor.values().mean()),
    "meta": (lambda: torch.empty(3, device="meta"), lambda tensor: tensor.shape[0]),
    "masked": (masked, lambda tensor: tensor.get_data().abs().mean()),
    "wrapper": (
        lambda: Scaled(torch.randint(-9, 9, (8, 8), dtype=torch.int8), torch.tensor(0.05)),
        lambda tensor: (tensor * 1.0).mean(),
    ),
}


@pytest.mark.parametrize("kind", HELD)
def test_blocks_that_hold_tensors_of_other_kinds(kind):
    make, use = HELD[kind]

    class Holds(Block):
        def __init__(self):
            super().__init__()
            self.other, self.more = make(), [make()]
            self.register_buffer("third", make(), persistent=False)

        def forward(self, x):
            return torch.tanh(super().forward(x * (use(self.other) + use(self.more[0]) + use(self.third))))

    class Model(Stack):
        def named_buffers(self, *args, **options):
            return iter(())  # they can't be compared

    def build():
        model = Model(Holds(), Holds())
        x = torch.randn(4, 8)
        return model, lambda: model(x).square().sum()

    same.assert_same(build, rf.full())


def test_a_quantised_buffer_that_a_block_writes_is_refused_by_name():
    class Writes(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", quantised(torch.randn(4)))

        def forward(self, x):
            self.table.copy_(torch.ones(4))
            return torch.tanh(super().forward(x))

    model = Stack(Writes())
    rf.attach(model, {"layers.0": rf.Recompute()})
    with pytest.raises(rf.ReplayError, match=r"'layers.0' wrote 'table'.*quint8"):
        model(torch.ones(4, 8))


def test_a_jagged_tensor_inside_a_block_is_refused_by_name():
    class Jagged(Block):
        def forward(self, x):
            parts = torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged)
            return super().forward(torch.sin(torch.tanh(parts)).values())

    model = Stack(Jagged())
    rf.attach(model, {"layers.0": rf.Recompute()})
    with pytest.raises(rf.ReplayMismatchError, match=r"'layers.0'"):
        model(torch.ones(4, 8, requires_grad=True)).sum().backward()
