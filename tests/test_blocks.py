"""Blocks are found without being told, hold nearly all that a step saves, and can be chosen by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from models import ARCHITECTURES, BUILDERS, Case, build
from reforward._blocks import Block, find_blocks, modules_by_path, watching
from reforward._errors import InputError, PatternError


def numbered(path: str, count: int) -> list[str]:
    return [f"{path}.{i}" for i in range(count)]


EXPECTED = {
    "gpt2": numbered("transformer.h", 3),
    "llama": numbered("model.layers", 3),
    "qwen2_moe": numbered("model.layers", 3),
    "mamba": numbered("backbone.layers", 3),
    "t5": [*numbered("encoder.block", 2), *numbered("decoder.block", 2)],
    "bert": numbered("bert.encoder.layer", 3),
    "vit": numbered("vit.layers", 3),
    "swin": [
        *numbered("swin.encoder.layers.0.blocks", 2),
        "swin.encoder.layers.0.downsample",
        *numbered("swin.encoder.layers.1.blocks", 2),
    ],
    "resnet50": [
        "resnet.embedder.embedder",
        *(path for i, n in enumerate([3, 4, 6, 3]) for path in numbered(f"resnet.encoder.stages.{i}.layers", n)),
    ],
    "convnext": [
        path for i, n in enumerate([3, 3, 9, 3]) for path in numbered(f"convnext.encoder.stages.{i}.layers", n)
    ],
    "unet": [
        *numbered("down_blocks.0.resnets", 2),
        *numbered("down_blocks.1.resnets", 2),
        "mid_block",
        *numbered("up_blocks.0.resnets", 2),
        *numbered("up_blocks.1.resnets", 2),
    ],
    "whisper": [*numbered("model.encoder.layers", 3), *numbered("model.decoder.layers", 3)],
    "gpt": numbered("layers", 4),
    "gpt_sdpa": numbered("layers", 4),
    "resnet": ["stem", *numbered("layer1", 2), *numbered("layer2", 2), *numbered("layer3", 2)],
    "lstm": ["lstm"],
}


class Layer(nn.Module):
    """Two weights and a norm: the smallest thing that is a unit of recomputation."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)))


class Model(nn.Module):
    """A module with the given children."""

    def __init__(self, **children: nn.Module):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def layers(count: int) -> nn.ModuleList:
    return nn.ModuleList(Layer() for _ in range(count))


def paths(model: nn.Module) -> list[str]:
    return [block.path for block in find_blocks(model)]


def saved_share(case: Case, blocks: tuple[Block, ...]) -> float:
    """Share of the bytes saved for backward that lie inside blocks, or are a block's input.

    Storages are counted once; parameters and buffers aren't counted, the batch is.
    """
    modules = modules_by_path(case.model)
    own = {t.untyped_storage().data_ptr() for t in (*case.model.parameters(), *case.model.buffers())}
    saved: dict[int, int] = {}
    inside: set[int] = set()
    alive: list[Tensor] = []  # so that no storage is given out twice
    running = 0

    def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
        nonlocal running
        running += 1
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor):
                alive.append(value)
                inside.add(value.untyped_storage().data_ptr())

    def leave(module: nn.Module, args: tuple, output: object) -> None:
        nonlocal running
        running -= 1

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            alive.append(value)
            saved[storage.data_ptr()] = storage.nbytes()
            if running:
                inside.add(storage.data_ptr())
        return value

    for block in blocks:
        modules[block.path].register_forward_pre_hook(enter, with_kwargs=True)
        modules[block.path].register_forward_hook(leave)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        loss = case.loss()
    assert loss.requires_grad
    return sum(size for storage, size in saved.items() if storage in inside) / sum(saved.values())


@pytest.mark.parametrize("name", BUILDERS)
def test_finds_the_repeated_units(name: str):
    assert paths(build(name).model) == EXPECTED[name]


@pytest.mark.parametrize("name", BUILDERS)
def test_blocks_hold_what_the_step_saves(name: str):
    case = build(name)
    assert saved_share(case, find_blocks(case.model)) >= 0.9


def test_twelve_architectures():
    assert len(ARCHITECTURES) == 12


@pytest.mark.parametrize("name", BUILDERS)
def test_equal_seeds_build_equal_cases(name: str):
    before = torch.get_rng_state()
    losses = []
    for seed in (1, 1, 2):
        case = build(name, seed)
        assert torch.equal(torch.get_rng_state(), before)
        losses.append(case.loss().item())
        torch.set_rng_state(before)
    assert losses[0] == losses[1] != losses[2]


def test_stacks_have_their_own_counters():
    blocks = find_blocks(build("whisper").model)
    assert [(block.stack, block.index, block.stack_size) for block in blocks] == [
        *(("model.encoder.layers", i, 3) for i in range(3)),
        *(("model.decoder.layers", i, 3) for i in range(3)),
    ]
    assert {block.module_type for block in blocks} == {"WhisperEncoderLayer", "WhisperDecoderLayer"}


def test_a_lone_block_is_its_own_stack():
    (block,) = find_blocks(build("lstm").model)
    assert block == Block(path="lstm", module_type="LSTM", stack="lstm", index=0, stack_size=1)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Model(embedding=nn.Embedding(9, 4), layers=layers(1), head=nn.Linear(4, 9)), ["layers.0"]),
        (nn.Sequential(nn.Embedding(9, 4), Layer(), Layer(), nn.LayerNorm(4), nn.Linear(4, 9)), ["1", "2"]),
        (nn.Sequential(nn.Sequential(Layer(), Layer()), nn.Sequential(Layer(), Layer())), ["0.0", "0.1", "1.0", "1.1"]),
        (Model(layers=nn.ModuleDict({"0": Layer(), "1": Layer()})), ["layers.0", "layers.1"]),
        (Model(transformer=nn.ModuleDict({"wte": nn.Embedding(9, 4), "h": layers(2)})), numbered("transformer.h", 2)),
        (
            Model(towers=nn.ModuleDict({"text": Model(layers=layers(2)), "image": Model(layers=layers(2))})),
            [*numbered("towers.text.layers", 2), *numbered("towers.image.layers", 2)],
        ),
        (Model(trunk=Layer(), heads=layers(3)), ["trunk"]),
        (Model(net=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))), ["net"]),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), ["0", "1", "2"]),
        (Model(first=nn.Linear(4, 4), second=nn.Linear(4, 8), head=nn.Linear(8, 99)), ["second"]),
        (nn.Linear(4, 4), []),
        (Model(embedding=nn.Embedding(9, 4)), []),
    ],
)
def test_shapes_of_models(model: nn.Module, expected: list[str]):
    assert paths(model) == expected


def test_experts_and_parts_of_a_layer_are_not_blocks():
    def moe() -> nn.Module:
        return Model(attention=Layer(), gate=nn.Linear(4, 8), experts=layers(8))

    assert paths(Model(layers=nn.ModuleList([moe(), moe()]))) == ["layers.0", "layers.1"]


def test_a_chain_of_convolutions_is_a_block_even_with_another_part_in_it():
    def link() -> nn.Module:
        return Model(conv=nn.Conv2d(4, 4, 3), norm=nn.BatchNorm2d(4), act=nn.ReLU())

    def bottleneck() -> nn.Module:  # RegNet-Y's: squeeze and excitation stands between its convolutions
        return Model(layer=nn.Sequential(link(), link(), Layer(), link()), shortcut=link())

    stages = nn.ModuleList(Model(layers=nn.Sequential(bottleneck(), bottleneck())) for _ in range(2))
    assert paths(Model(stages=stages)) == [*numbered("stages.0.layers", 2), *numbered("stages.1.layers", 2)]


def test_pooling_between_units_belongs_to_the_stack():
    features = nn.Sequential(nn.Conv2d(3, 4, 3), Layer(), nn.MaxPool2d(2), Layer(), nn.Flatten())
    assert paths(Model(features=features)) == ["features.1", "features.2", "features.3"]


def test_a_chain_of_plain_layers_is_a_stack_and_its_in_place_layers_are_marked():
    convolutions = [(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(inplace=True)) for _ in range(4)]
    model = Model(features=nn.Sequential(*sum(convolutions, ())), classifier=nn.Sequential(Layer(), nn.Linear(4, 2)))
    blocks = find_blocks(model)
    assert [block.path for block in blocks] == numbered("features", 8)
    assert [block.overwrites_input for block in blocks] == [False, True] * 4


def test_a_shared_module_appears_once():
    layer = Layer()
    assert paths(Model(layers=nn.ModuleList([layer, Layer(), layer]))) == ["layers.0", "layers.1"]


def test_an_alias_of_a_stack_adds_nothing():
    stack = layers(2)
    assert paths(Model(layers=stack, alias=stack)) == ["layers.0", "layers.1"]


def test_parametrized_layers_are_still_plain():
    model = Model(first=nn.Linear(4, 4), layers=layers(2))
    torch.nn.utils.parametrizations.weight_norm(model.get_submodule("first"))
    assert paths(model) == ["layers.0", "layers.1"]


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch's own, when it loads its compiler
def test_wrappers_do_not_show():
    model = Model(layers=layers(2))
    model.layers[0] = torch.compile(model.layers[0])
    wrapped = Model(module=model)
    assert paths(wrapped) == ["layers.0", "layers.1"]
    assert find_blocks(wrapped)[0].module_type == "Layer"
    modules = modules_by_path(wrapped)
    assert modules[""] is model
    assert modules["layers.0"] is model.layers[0]._orig_mod
    assert modules["layers.1.up"] is model.layers[1].up


def test_a_module_of_the_users_own_called_module_hides_nothing():
    layer = Layer()
    layer.module = nn.Linear(4, 4)
    assert modules_by_path(Model(layer=layer))["layer"] is layer


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("layers[1:3]", ["layers.1", "layers.2"]),
        ("*.mlp", ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp", "layers.3.mlp"]),
        ("layers.2.attention", ["layers.2.attention"]),
        (["layers.0", "layers.2.mlp"], ["layers.0", "layers.2.mlp"]),
        (nn.LayerNorm, [*(f"layers.{i}.norm{j}" for i in range(4) for j in (1, 2)), "norm"]),
        ((nn.Embedding, "head"), ["embedding", "position", "head"]),
    ],
)
def test_selection(select: object, expected: list[str]):
    assert [block.path for block in find_blocks(build("gpt").model, select)] == expected


def test_selected_units_count_within_their_stack():
    first, second = find_blocks(build("gpt").model, "layers[2:4]")
    assert (first.stack, first.index, second.index, second.stack_size) == ("layers", 0, 1, 2)


@pytest.mark.parametrize("select", ["lairs.*", nn.LSTM, ["layers.0", "nothing"]])
def test_a_selection_that_matches_nothing(select: object):
    with pytest.raises(PatternError, match=r"matches no|no submodule of class 'LSTM'"):
        find_blocks(build("gpt").model, select)


def test_nested_selections_are_refused():
    with pytest.raises(InputError, match=r"'layers.1.mlp' is inside 'layers.1'"):
        find_blocks(build("gpt").model, ["layers.1", "*.mlp"])


@pytest.mark.parametrize("select", [3, int, [None]])
def test_a_selection_must_be_a_pattern_or_a_class(select: object):
    with pytest.raises(InputError, match="pattern or a module class"):
        find_blocks(build("gpt").model, select)


def test_watchers_see_what_blocks_get_and_give_and_leave_no_trace():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].register_forward_pre_hook(lambda module, args: (args[0] * 0,))
    model[1].register_forward_hook(lambda module, args, output: output * 0)
    seen = []

    def begin(path: str, module: nn.Module, args: tuple, kwargs: dict):
        seen.append(("begins", path, bool(args[0].any())))
        return (args[0] + 1,), kwargs

    def end(path: str, module: nn.Module, args: tuple, kwargs: dict, output: Tensor):
        seen.append(("ends", path, bool(output.any())))

    with watching(model, ["1", "1"], begin, end), watching(model, ["1"], lambda *_: seen.append("inner"), end):
        model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert seen == [("begins", "1", False), "inner", ("ends", "1", True), ("ends", "1", True)]
