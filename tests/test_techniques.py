"""What each technique turns into on a model, and what is refused before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import models
import reforward as rf
from models import GPT, LSTMModel, build
from reforward._blocks import Block, find_blocks
from reforward._errors import InputError, PatternError, PlanError
from reforward._plan import Node, Plan, Region, Run, leaves
from reforward._policy import FAMILIES, Device, Modules, Ops, Recompute, Save
from reforward._techniques import Technique, check_plan, resolve_plan


def gpt(layers: int) -> nn.Module:
    return GPT(layers=layers, width=8, heads=1)


def stack(size: int, overwriting: frozenset[int] = frozenset()) -> list[Block]:
    """Blocks of one stack `s`, those in `overwriting` in place."""
    return [
        Block(
            path=f"s.{i}",
            module_type="Identity",
            stack="s",
            index=i,
            stack_size=size,
            overwrites_input=i in overwriting,
        )
        for i in range(size)
    ]


def shape(node: Node) -> object:
    """A node in short: last index of a region's path, bracketed per run; "!" marks what recomputes."""
    if isinstance(node, Run):
        return [shape(member) for member in node.members]
    return node.path.rpartition(".")[2] + ("!" if isinstance(node.policy, Recompute) else "")


def shapes(plan: Plan) -> list[object]:
    return [shape(node) for node in plan.nodes]


def nodes_of(technique: Technique, blocks: list[Block]) -> tuple[Node, ...]:
    model = nn.ModuleDict({"s": nn.ModuleList(nn.Identity() for _ in blocks)})
    return technique.resolve(model, blocks).nodes


def test_none_names_nothing():
    assert rf.none().resolve(gpt(2)).nodes == ()
    assert rf.none().resolve(nn.Linear(2, 2)).nodes == ()


def test_full_recomputes_every_block():
    plan = rf.full(at=Device()).resolve(gpt(3))
    assert shapes(plan) == ["0!", "1!", "2!"]
    assert plan.nodes[0] == Region(path="layers.0", policy=Recompute(), module_type="Layer")
    assert (plan.model_type, plan.when) == ("GPT", "grad")


@pytest.mark.parametrize(
    ("n", "expected"),
    [(1, ["0!", "1!", "2!", "3!", "4!"]), (2, ["0!", "2!", "4!"]), (3, ["0!", "3!"]), (9, ["0!"])],
)
def test_every_takes_the_first_and_each_nth_after_it(n: int, expected: list[str]):
    assert shapes(rf.every(n).resolve(gpt(5))) == expected


def test_every_counts_in_each_stack_by_itself():
    paths = [region.path for region in rf.every(2).resolve(build("whisper").model).regions()]
    assert paths == [
        "model.encoder.layers.0",
        "model.encoder.layers.2",
        "model.decoder.layers.0",
        "model.decoder.layers.2",
    ]


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", True, None])
def test_every_needs_a_count(n: object):
    with pytest.raises(InputError, match=rf"at least 1, not {n!r}"):
        rf.every(n)


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (1, [["0", "1", "2", "3", "4"]]),
        (2, [["0", "1"], ["2", "3", "4"]]),
        (3, ["0!", ["1", "2"], ["3", "4"]]),
        (5, ["0!", "1!", "2!", "3!", "4!"]),
        (99, ["0!", "1!", "2!", "3!", "4!"]),
        ("sqrt", [["0", "1"], ["2", "3", "4"]]),
    ],
)
def test_segments_cut_a_stack_into_runs(k: object, expected: list[object]):
    assert shapes(rf.segments(k).resolve(gpt(5))) == expected


def test_segments_cut_each_stack_and_keep_the_order_of_the_blocks():
    plan = rf.segments(2).resolve(build("whisper").model)
    assert [[leaf.path for leaf in leaves(node)] for node in plan.nodes] == [
        ["model.encoder.layers.0"],
        ["model.encoder.layers.1", "model.encoder.layers.2"],
        ["model.decoder.layers.0"],
        ["model.decoder.layers.1", "model.decoder.layers.2"],
    ]


def test_segments_recompute_a_lone_block():
    assert rf.segments("sqrt").resolve(LSTMModel()).nodes == (
        Region(path="lstm", policy=Recompute(), module_type="LSTM"),
    )


@pytest.mark.parametrize(
    ("size", "k", "nested", "expected"),
    [
        (8, 2, 2, [[["0", "1"], "2", "3"], [["4", "5"], "6", "7"]]),
        (4, 1, 4, [["0!", "1!", "2!", "3"]]),
        (4, 1, 1, [["0", "1", "2", "3"]]),
        (4, 4, 2, ["0!", "1!", "2!", "3!"]),
        (6, 1, 9, [["0!", "1!", "2!", "3!", "4!", "5"]]),
    ],
)
def test_nested_segments_save_their_last_inner_run(size: int, k: int, nested: int, expected: list[object]):
    assert [shape(node) for node in nodes_of(rf.segments(k, nested=nested), stack(size))] == expected


def test_nested_segments_of_64_blocks():
    plan = rf.segments(16, nested=4).resolve(gpt(64))
    assert len(plan.nodes) == 16
    assert all(shape(node)[:3] == [f"{4 * i}!", f"{4 * i + 1}!", f"{4 * i + 2}!"] for i, node in enumerate(plan.nodes))


@given(st.integers(1, 40), st.integers(1, 50), st.none() | st.integers(1, 9))
def test_segments_name_every_block_once_and_in_order(size: int, k: int, nested: int | None):
    nodes = nodes_of(rf.segments(k, nested=nested), stack(size))
    sizes = [len(list(leaves(node))) for node in nodes]
    assert [leaf.path for node in nodes for leaf in leaves(node)] == [f"s.{i}" for i in range(size)]
    assert len(nodes) == min(k, size)
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 12), st.integers(1, 12), st.frozensets(st.integers(0, 11)), st.none() | st.integers(1, 4))
def test_no_recomputation_begins_with_a_block_that_overwrites_its_input(
    size: int, k: int, overwriting: frozenset[int], nested: int | None
):
    blocks = stack(size, overwriting)

    def begins(node: Node) -> list[str]:
        if isinstance(node, Run):
            return [next(leaves(node)).path, *(path for member in node.members for path in begins(member))]
        return [node.path] if isinstance(node.policy, Recompute) else []

    nodes = [*nodes_of(rf.segments(k, nested=nested), blocks), *nodes_of(rf.full(), blocks)]
    overwriters = {block.path for block in blocks if block.overwrites_input}
    assert not overwriters & {path for node in nodes for path in begins(node)}


@pytest.mark.parametrize("k", [0, -2, 2.0, "half", True])
def test_segments_need_a_count(k: object):
    with pytest.raises(InputError, match=rf"at least 1 or 'sqrt', not {k!r}"):
        rf.segments(k)
    if k != "half":
        with pytest.raises(InputError, match=rf"nested must be .* not {k!r}"):
            rf.segments(2, nested=k)


def test_selective_saves_families_in_every_block():
    plan = rf.selective(save=["matmul", "*.attention"]).resolve(gpt(2))
    policy = Recompute(save=(Ops(family="matmul"), Modules(pattern="*.attention")))
    assert [(region.path, region.policy) for region in plan.nodes] == [("layers.0", policy), ("layers.1", policy)]


def test_selective_recomputing_families_saves_the_others():
    plan = rf.selective(recompute=["elementwise", "norm"]).resolve(gpt(1))
    saved = {item.family for item in plan.nodes[0].policy.save}
    assert saved == {*FAMILIES} - {"elementwise", "norm"}


def test_selective_recomputing_submodules():
    plan = rf.selective(recompute=["*.mlp", "*.norm*"]).resolve(gpt(2))
    assert [(region.path, region.module_type, region.policy) for region in plan.nodes] == [
        (f"layers.{i}.{name}", kind, Recompute())
        for i in range(2)
        for name, kind in [("norm1", "LayerNorm"), ("norm2", "LayerNorm"), ("mlp", "Sequential")]
    ]  # not the model's own final norm, which is in no block


def test_selective_takes_the_outermost_match():
    plan = rf.selective(recompute="layers.1*").resolve(gpt(11))
    assert [region.path for region in plan.nodes] == ["layers.1", "layers.10"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either save"),
        ({"save": "matmul", "recompute": "norm"}, "either save"),
        ({"recompute": ["matmul", "*.mlp"]}, r"not both: '\*.mlp' is a pattern"),
        ({"recompute": Ops(family="matmul", within="*.mlp")}, "name what to save instead"),
        ({"save": []}, "selects nothing"),
        ({"recompute": []}, "selects nothing"),
        ({"save": "mlp"}, r"write '\*.mlp'"),
        ({"save": 3}, "a selector is .*, not 3"),
        ({"recompute": [3]}, "a selector is .*, not 3"),
        ({"save": "matmul", "at": "host"}, "at must be Device"),
        ({"save": "matmul", "when": "always"}, "when must be one of"),
    ],
)
def test_selective_refuses(arguments: dict, message: str):
    with pytest.raises(InputError, match=message):
        rf.selective(**arguments)


@pytest.mark.parametrize(
    "technique",
    [
        rf.selective(save="*.gate"),
        rf.selective(save=Ops(family="matmul", within="*.gate")),
        rf.selective(recompute="*.gate"),
        rf.selective(recompute="head.*"),
        rf.selective(save="embedding*"),
    ],
)
def test_a_pattern_that_matches_nothing_in_the_blocks(technique: object):
    with pytest.raises(PatternError, match="matches no block or submodule"):
        technique.resolve(gpt(1))


def test_a_list_of_modules_is_never_called_and_so_not_selected():
    class Moe(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.experts = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    model = nn.Sequential(Moe(), Moe())
    plan = rf.selective(recompute="*.experts*").resolve(model)
    assert [region.path for region in plan.nodes] == ["0.experts.0", "0.experts.1", "1.experts.0", "1.experts.1"]
    with pytest.raises(PlanError, match="never called itself"):
        check_plan(Plan(nodes=(Region(path="0.experts", policy=Recompute()),)), model)


def test_when_reaches_the_plan():
    techniques = [
        rf.full(when="training"), rf.every(2, when="training"), rf.segments(2, when="training"),
        rf.selective(save="matmul", when="training"), rf.selective(recompute="*.mlp", when="training"),
    ]  # fmt: skip
    assert {technique.resolve(gpt(2)).when for technique in techniques} == {"training"}


def test_techniques_are_values():
    assert rf.every(2) == rf.every(2) != rf.every(3)
    assert rf.full() == rf.every(1)
    assert len({rf.segments("sqrt"), rf.segments("sqrt"), rf.none()}) == 2


def test_techniques_take_the_blocks_they_are_given():
    model = gpt(3)
    plan = rf.full().resolve(model, find_blocks(model, "*.mlp"))
    assert [region.path for region in plan.nodes] == ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"]


@pytest.mark.parametrize("what", [rf.full(), rf.segments(2), Recompute(), rf.selective(recompute="*.mlp")])
def test_a_model_without_blocks(what: object):
    with pytest.raises(InputError, match="Linear has no blocks"):
        resolve_plan(nn.Linear(2, 2), what)


@pytest.mark.parametrize("model", [None, 3, nn.Linear], ids=repr)
@pytest.mark.parametrize(
    "what", [rf.none(), rf.full(), Save(), {"a": Save()}, Plan(nodes=())], ids=lambda what: type(what).__name__
)
def test_what_is_no_model(model: object, what: object):
    with pytest.raises(InputError, match=r"the model must be a torch\.nn\.Module, not"):
        resolve_plan(model, what)
    with pytest.raises(InputError, match=r"the model must be a torch\.nn\.Module, not"):
        rf.full().resolve(model)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([], "blocks is empty"),
        ("layers.0", "blocks are a list, as find_blocks"),
        (3, "blocks are a list, as find_blocks"),
        (["layers.0"], r"'layers\.0' isn't a block; write blocks=find_blocks\(model"),
        (stack(1), r"GPT has no block 's\.0'"),
    ],
    ids=["empty", "text", "number", "paths", "another model's"],
)
def test_what_are_no_blocks(blocks: object, message: str):
    with pytest.raises(InputError, match=message):
        rf.full().resolve(gpt(2), blocks)


def test_resolving_a_policy_gives_it_to_every_block():
    plan = resolve_plan(gpt(2), Recompute(save="attention"))
    assert [region.policy.save for region in plan.regions()] == [(Ops(family="attention"),)] * 2


def test_resolving_rules_by_block_submodule_and_exact_path():
    rules = {"layers[0:2]": Recompute(), "layers.2": Save(), "layers.3.mlp": Recompute(), "head": Recompute()}
    plan = resolve_plan(gpt(4), rules)
    assert [(region.path, shape(region)[-1] == "!") for region in plan.nodes] == [
        ("layers.0", True), ("layers.1", True), ("layers.2", False), ("layers.3.mlp", True), ("head", True),
    ]  # fmt: skip


def test_a_rule_prefers_blocks_and_else_takes_the_outermost_submodules():
    assert [r.path for r in resolve_plan(gpt(2), {"*": Recompute()}).nodes] == ["layers.0", "layers.1"]
    rules = {"*.attention*": Recompute()}
    assert [r.path for r in resolve_plan(gpt(2), rules).nodes] == ["layers.0.attention", "layers.1.attention"]


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"lairs.*": Recompute()}, PatternError, r"'lairs.\*' matches no block.*'layers.0"),
        ({"layers.*": Recompute(), "layers.0": Save()}, PatternError, "'layers.0' is matched by both"),
        ({"*.mlp": Recompute(), "layers.0.mlp": Save()}, PatternError, "'layers.0.mlp' is matched by both"),
        ({"layers.0": "recompute"}, InputError, r"'layers.0' needs a policy.* not 'recompute'"),
        ({"layers.0": Recompute(save="*.gate")}, PatternError, r"'\*.gate' matches no"),
        ({3: Recompute()}, InputError, r"named by a path or pattern such as .*, not 3"),
        ("full", InputError, "can't attach 'full'"),
        (None, InputError, "can't attach None"),
        (3, InputError, "can't attach 3"),
    ],
)
def test_what_can_not_be_resolved(rules: object, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        resolve_plan(gpt(2), rules)


def test_a_plan_that_fits_is_returned_as_it_is():
    plan = rf.segments(2).resolve(gpt(4))
    assert resolve_plan(gpt(4), plan) is plan


def test_a_plan_for_another_model_is_refused_with_the_first_names():
    plan = rf.full().resolve(gpt(9))
    with pytest.raises(PlanError, match=r"plan for another model.*'layers.4'; .*'layers.5'; .*'layers.6'; and 2 more"):
        resolve_plan(gpt(4), plan)


def test_a_plan_without_nodes_is_for_one_class_of_model_as_well():
    plan = rf.none().resolve(gpt(1))
    assert resolve_plan(gpt(2), plan) is plan
    assert resolve_plan(nn.Linear(2, 2), Plan(nodes=())).nodes == ()
    with pytest.raises(PlanError, match=r"plan for another model \(GPT, not Linear\)\. Make one for this model"):
        resolve_plan(nn.Linear(2, 2), plan)


class Wrapped(nn.Module):
    """Puts a model where a wrapper does."""

    def __init__(self, name: str, model: nn.Module):
        super().__init__()
        self.add_module(name, model)


@pytest.mark.parametrize("names", [["module"], ["_orig_mod", "module"], ["model", "base_model"]], ids=".".join)
def test_one_plan_serves_a_model_with_and_without_wrappers(names: list[str]):
    wrapped = model = gpt(1)
    for name in names:
        wrapped = Wrapped(name, wrapped)
    for technique in (rf.none(), rf.full()):
        bare, inside = technique.resolve(model), technique.resolve(wrapped)
        assert bare == inside
        assert resolve_plan(wrapped, bare) is bare
        assert resolve_plan(model, inside) is inside


def test_members_of_a_run_stand_in_the_order_in_which_a_sequential_calls_them():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(12)))
    forwards = [Region(path=str(index), policy=Save()) for index in (2, 10)]
    plan = Plan(nodes=(Run(members=tuple(forwards)),))
    assert resolve_plan(model, plan) is plan
    with pytest.raises(PlanError, match="'2' runs before '10'; name a run's members in the order"):
        resolve_plan(model, Plan(nodes=(Run(members=tuple(forwards[::-1])),)))


def test_a_plan_for_blocks_of_another_class_is_refused():
    plan = Plan(nodes=(Region(path="layers.0", policy=Recompute(), module_type="T5Block"),))
    with pytest.raises(PlanError, match=r"'layers\.0' is a Layer, not a T5Block"):
        resolve_plan(gpt(1), plan)


def test_a_class_made_on_the_fly_is_still_its_original():
    model = gpt(1)
    plan = rf.full().resolve(model)
    layer = model.layers[0]
    layer.__class__ = type("FSDPLayer", (type(layer),), {})
    assert resolve_plan(model, plan) is plan


# The head in chunks
# ---------------------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """Two heads of equal width beside a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
        self.policy, self.value = nn.Linear(4, 9), nn.Linear(4, 9)


class OwnLinear(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def test_the_head_is_found() -> None:
    model = models.build("gpt").model
    plan = rf.chunked_head(chunks=4).resolve(model)
    assert plan == rf.Plan(nodes=(), head=rf.Head(path="head", chunks=4, module_type="Linear"), model_type="GPT")
    both = rf.chunked_head(blocks=rf.full(when="training")).resolve(model)
    assert both.nodes == rf.full().resolve(model).nodes
    assert (both.when, both.head.chunks, both.exactness) == ("training", 16, "rounding")  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_transformers_say_which_head_is_theirs(name: str) -> None:
    pytest.importorskip("transformers")
    plan = rf.chunked_head().resolve(models.build(name).model)
    assert plan.head is not None
    assert plan.head.path == "lm_head"


def test_a_head_can_be_named() -> None:
    plan = rf.chunked_head(head="value").resolve(TwoHeads())
    assert plan.head is not None
    assert plan.head.path == "value"


@pytest.mark.parametrize(
    ("make", "named", "error", "message"),
    [
        (TwoHeads, None, rf.InputError, r"TwoHeads has several heads as wide \('policy', 'value'\)"),
        (lambda: models.build("unet").model, None, rf.InputError, "UNet has no nn.Linear outside its blocks"),
        (TwoHeads, "head", rf.PatternError, "TwoHeads has no module 'head' that could be its head"),
        (TwoHeads, "layers", rf.InputError, "the head 'layers' is a ModuleList"),
        (lambda: nn.Sequential(nn.Linear(2, 2), OwnLinear(2, 9)), "1", rf.InputError, "is a OwnLinear, whose forward"),
        (TwoHeads, "layers.0.1", rf.PlanError, "lie in one another"),
    ],
)
def test_heads_that_cannot_be_chunked(make: Any, named: str | None, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rf.chunked_head(head=named, blocks=rf.full()).resolve(make())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunks": 0}, "chunks must be"),
        ({"chunks": 2.0}, "chunks must be"),
        ({"head": 3}, "head is the path of a linear layer, such as 'lm_head', not 3"),
        ({"blocks": "full"}, "blocks is a technique for the blocks, such as full.*, not 'full'"),
        ({"blocks": rf.chunked_head()}, "blocks is a technique for the blocks"),
    ],
)
def test_arguments_of_a_chunked_head(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(rf.InputError, match=message):
        rf.chunked_head(**arguments)


def test_a_plan_for_a_head_of_another_model() -> None:
    plan = rf.chunked_head().resolve(models.build("gpt").model)
    with pytest.raises(rf.PlanError, match="it has no module 'head'"):
        rf.attach(TwoHeads(), plan)
