"""Every technique on every kind of model leaves the same behind as the plain step, bit for bit."""

from functools import cache

import pytest
import same

import models
import reforward as rf
from reforward import Modules, Ops, Recompute, Region, Run, Save

TECHNIQUES = {
    "full": rf.full(),
    "every 2": rf.every(2),
    "segments 2": rf.segments(2),
    "segments sqrt": rf.segments("sqrt"),
    "segments nested": rf.segments(1, nested=2),
    "save matmul": rf.selective(save="matmul"),
    "save attention": rf.selective(save="attention"),
    "save conv and norm": rf.selective(save=["conv", "norm"]),
    "save elementwise and random": rf.selective(save=["elementwise", "random"]),
    "save all but matmul": rf.selective(recompute="matmul"),
}


@cache
def plain(name, autocast=False):
    try:
        return same.record(*models.build(name), autocast=autocast)
    except RuntimeError as error:
        if "primitive descriptor" not in str(error):
            raise
        pytest.skip(f"this CPU has no bfloat16 kernels for {name}: {error}")


def planned(name, plan, autocast=False):
    model, loss = models.build(name)
    rf.attach(model, plan)
    return same.record(model, loss, autocast=autocast)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("name", models.OWN)
def test_own_models(name, technique, autocast):
    assert same.differences(plain(name, autocast), planned(name, TECHNIQUES[technique], autocast)) == []


@pytest.mark.parametrize("technique", ["full", "segments 2", "segments nested", "save matmul", "save attention"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "qwen2_moe", "swin", "whisper"])
def test_transformers(name, technique):
    assert same.differences(plain(name), planned(name, TECHNIQUES[technique])) == []


def region(index, policy):
    return Region(path=f"layers.{index}", policy=policy)


PLANS = {
    "two levels": Run(
        members=(Run(members=(region(0, Save()), region(1, Save()))), region(2, Save()), region(3, Save()))
    ),
    "three levels": Run(
        members=(
            Run(members=(Run(members=(region(0, Save()), region(1, Save()))), region(2, Save()))),
            region(3, Save()),
        )
    ),
    "recomputing members": Run(members=tuple(region(i, Recompute()) for i in range(4))),
    "selective members": Run(
        members=(
            region(0, Recompute(save="attention")),
            region(1, Recompute(save="*.mlp")),
            Run(members=(region(2, Recompute(save="matmul")), region(3, Save()))),
        )
    ),
    "a run of runs of one": Run(members=tuple(Run(members=(region(i, Recompute(save="norm")),)) for i in range(4))),
}
RULES = {
    "a submodule is kept": {"layers[0:4]": Recompute(save="*.mlp")},
    "submodules and families": {"layers[0:4]": Recompute(save=["*.attention.qkv", "random"])},
    "families within a submodule": {
        "layers[0:4]": Recompute(
            save=[Ops(family="matmul", within="*.mlp"), Ops(family="random", within="*.attention")]
        )
    },
    "a kept submodule within which nothing else is kept": {
        "layers[0:4]": Recompute(save=[Modules(pattern="*.mlp"), Ops(family="matmul")])
    },
    "each block another policy": {
        "layers.0": Recompute(),
        "layers.1": Recompute(save="matmul"),
        "layers.2": Save(),
        "layers.3": Recompute(save=["attention", "*.norm*"]),
    },
}


@pytest.mark.parametrize("name", ["gpt", "gpt_sdpa"])
@pytest.mark.parametrize("plan", PLANS)
def test_nested_plans(name, plan):
    assert same.differences(plain(name), planned(name, rf.Plan(nodes=(PLANS[plan],)))) == []


@pytest.mark.parametrize("name", ["gpt", "gpt_sdpa"])
@pytest.mark.parametrize("rules", RULES)
def test_rules_by_block(name, rules):
    assert same.differences(plain(name), planned(name, RULES[rules])) == []


@pytest.mark.parametrize("recompute", ["*.mlp", "*.attention", ["*.norm1", "*.mlp.1"]])
def test_recomputed_submodules(recompute):
    assert same.differences(plain("gpt"), planned("gpt", rf.selective(recompute=recompute))) == []


@pytest.mark.parametrize("technique", ["full", "segments 2", "save matmul"])
def test_evaluation_mode_recomputes_and_is_exact(technique):
    model, loss = models.build("gpt")
    expected = same.record(model.eval(), loss)
    model, loss = models.build("gpt")
    rf.attach(model.eval(), TECHNIQUES[technique])
    with same.counted(model) as calls:
        found = same.record(model, loss)
    assert same.differences(expected, found) == []
    assert calls.of("layers.0.norm1") == [8]
