"""A plan survives its file; what isn't a plan is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reforward._errors import InputError, PlanError
from reforward._plan import FORMAT, Head, Plan, Region, Run, leaves
from reforward._policy import FAMILIES, Modules, Ops, Recompute, Save, selectors

EXAMPLE = Plan(
    nodes=(
        Region(path="layers.0", policy=Recompute(save=("matmul", "*.gate"))),
        Run(members=(Run(members=(Region(path="layers.1", policy=Save()),)), Region(path="layers.2", policy=Save()))),
    ),
    model_type="GPT",
    predicted_peak_bytes=1024,
    predicted_seconds=0.25,
)

patterns = st.text(min_size=1, max_size=12)
policies = st.just(Save()) | st.builds(
    Recompute,
    save=st.lists(
        st.builds(Ops, family=st.sampled_from(FAMILIES), within=st.none() | patterns)
        | st.builds(Modules, pattern=patterns),
        max_size=3,
    ).map(tuple),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    paths = (f"block.{i}" for i in range(1000))
    regions = st.builds(
        lambda policy, kind: Region(path=next(paths), policy=policy, module_type=kind), policies, st.none() | patterns
    )
    nodes = st.recursive(
        regions, lambda inner: st.builds(lambda m: Run(members=tuple(m)), st.lists(inner, min_size=1, max_size=3)),
        max_leaves=6,
    )  # fmt: skip
    numbers = st.none() | st.integers(0, 2**50)
    seconds = st.none() | st.floats(0, 1e6)
    return Plan(
        nodes=tuple(draw(st.lists(nodes, max_size=4))),
        model_type=draw(st.none() | patterns),
        when=draw(st.sampled_from(["grad", "training"])),
        head=draw(st.none() | st.builds(Head, path=st.just("head"), chunks=st.integers(1, 64), module_type=patterns)),
        budget_bytes=draw(numbers),
        predicted_peak_bytes=draw(numbers),
        predicted_seconds=draw(seconds),
        predicted_plain_peak_bytes=draw(numbers),
        predicted_plain_seconds=draw(seconds),
    )


@given(plans())
def test_a_plan_survives_json(plan: Plan):
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest() == plan.digest()


def test_a_plan_survives_its_file(tmp_path: Path):
    EXAMPLE.to_json(tmp_path / "plan.json")
    assert Plan.from_json(tmp_path / "plan.json") == EXAMPLE
    assert Plan.from_json(str(tmp_path / "plan.json")) == EXAMPLE


def test_regions_come_in_the_order_of_the_calls():
    assert [region.path for region in EXAMPLE.regions()] == ["layers.0", "layers.1", "layers.2"]
    assert [leaf.path for leaf in leaves(EXAMPLE.nodes[1])] == ["layers.1", "layers.2"]


def test_the_digest_depends_on_what_runs_and_on_nothing_else():
    renamed = Plan(nodes=EXAMPLE.nodes, model_type="other", budget_bytes=5)
    assert renamed.digest() == EXAMPLE.digest()
    assert Plan(nodes=EXAMPLE.nodes[:1]).digest() != EXAMPLE.digest()
    assert Plan(nodes=EXAMPLE.nodes, when="training").digest() != EXAMPLE.digest()


def changed(**fields: object) -> str:
    return json.dumps({**json.loads(EXAMPLE.to_json()), **fields})


REGION = {"is": "region", "path": "a"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "isn't a plan"),
        ("{}", "missing required field `nodes`"),
        (changed(colour="red"), "unknown field `colour`"),
        (changed(when="always"), "Invalid enum value 'always'"),
        (changed(budget_bytes="6GiB"), "Expected `int"),
        (changed(format=FORMAT + 1), rf"format {FORMAT + 1}; this version reads format {FORMAT}"),
        (changed(nodes=[{"is": "stage", "path": "a"}]), "Invalid value 'stage'"),
        (changed(nodes=[{**REGION, "policy": {"is": "offload"}}]), "Invalid value 'offload'"),
        (changed(nodes=[{**REGION, "policy": {"is": "save", "rate": 1}}]), "unknown field `rate`"),
        (changed(nodes=[REGION]), "missing required field `policy`"),
        (changed(nodes=[{"is": "run", "members": []}]), "at least one member"),
        (changed(nodes=[{**REGION, "policy": {"is": "save"}}] * 2), "'a' stands in two nodes"),
        (
            changed(nodes=[{**REGION, "policy": {"is": "recompute", "save": [{"is": "ops", "family": "sort"}]}}]),
            "no family of operations 'sort'",
        ),
    ],
)
def test_what_is_not_a_plan_is_refused(text: str, message: str):
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text)


def nested(depth: int) -> str:
    """A plan of one region inside so many runs."""
    region = json.dumps({**REGION, "policy": {"is": "save"}})
    return '{"nodes": [' + '{"is": "run", "members": [' * depth + region + "]}" * depth + "]}"


@pytest.mark.parametrize("depth", [101, 499, 100_000])
def test_a_plan_that_is_nested_too_deep(depth: int):
    assert Plan.from_json(nested(100)).regions()
    with pytest.raises(PlanError, match=r"isn't a plan: .* deep") as refused:
        Plan.from_json(nested(depth))
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("source", [b"{}", 3, None], ids=repr)
def test_what_is_neither_text_nor_a_file(source: Any):
    with pytest.raises(PlanError, match="read from JSON text or from a file, not from"):
        Plan.from_json(source)
    with pytest.raises(PlanError, match=r"written to a file, not to b'x'"):
        EXAMPLE.to_json(b"x")


@pytest.mark.parametrize("text", ["a\0b", '{"\ud800": 1}', "x" * 5000], ids=["null byte", "surrogate", "long"])
def test_text_that_names_no_file(text: str):
    with pytest.raises(PlanError):
        Plan.from_json(text)


@pytest.mark.parametrize("name", ["", "missing/plan.json", "a\0b"])
def test_a_file_that_can_not_be_written(tmp_path: Path, name: str):
    with pytest.raises(InputError, match="can't write the plan to"):
        EXAMPLE.to_json(tmp_path / name)


def test_a_file_that_can_not_be_read(tmp_path: Path):
    with pytest.raises(PlanError, match=r"can't read a plan from '.*missing.json'"):
        Plan.from_json(tmp_path / "missing.json")
    with pytest.raises(PlanError, match="can't read a plan"):
        Plan.from_json(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(PlanError, match="can't read a plan"):
        Plan.from_json(tmp_path / "binary")


def test_a_plan_names_each_block_once():
    region = Region(path="a", policy=Save())
    with pytest.raises(PlanError, match="'a' stands in two nodes"):
        Plan(nodes=(region, Run(members=(region,))))
    with pytest.raises(PlanError, match="at least one member"):
        Run(members=())
    with pytest.raises(PlanError, match="'a' stands twice in a run"):
        Run(members=(region, Run(members=(region,))))
    with pytest.raises(PlanError, match=r"'a\.b' lies inside 'a'"):
        Run(members=(Region(path="a.b", policy=Save()), region))


SAVE = Region(path="a", policy=Save())


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Plan, {"nodes": (), "when": "never"}, r"Plan: when must be Literal\['grad', 'training'\], not 'never'"),
        (Plan, {"nodes": (), "exactness": "about"}, "Plan: exactness must be .*'rounding'.*, not 'about'"),
        (Plan, {"nodes": (), "budget_bytes": "6GiB"}, r"Plan: budget_bytes must be int \| None, not '6GiB'"),
        (Plan, {"nodes": (3,)}, r"Plan: nodes must be tuple\[Region \| Run, \.\.\.\], not \(3,\)"),
        (Plan, {"nodes": SAVE}, "Plan: nodes must be tuple"),
        (Run, {"members": (3,)}, "Run: members must be tuple"),
        (Region, {"path": 3, "policy": Save()}, "Region: path must be str, not 3"),
        (Region, {"path": "a", "policy": "save"}, r"Region: policy must be Save \| Recompute, not 'save'"),
        (Save, {"at": "host"}, "Save: at must be Device, not 'host'"),
        (Recompute, {"at": 3}, "Recompute: at must be Device, not 3"),
        (Recompute, {"save": 3}, r"Ops\(\.\.\.\) or Modules\(\.\.\.\), not 3"),
        (Recompute, {"save": None}, "not None"),
        (Ops, {"family": "matmul", "within": 3}, r"Ops: within must be str \| None, not 3"),
        (Ops, {"family": ["matmul"]}, "Ops: family must be str"),
        (Modules, {"pattern": None}, "Modules: pattern must be str, not None"),
    ],
)
def test_a_value_of_another_type_is_named(kind: type, fields: dict[str, object], message: str):
    with pytest.raises(InputError, match=message):
        kind(**fields)


def test_nodes_may_come_as_a_list():
    assert Plan(nodes=[SAVE]) == Plan(nodes=(SAVE,))
    assert hash(Run(members=[SAVE])) == hash(Run(members=(SAVE,)))


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ("matmul", (Ops(family="matmul"),)),
        ("*.mlp", (Modules(pattern="*.mlp"),)),
        ("layers.0", (Modules(pattern="layers.0"),)),
        (["norm", Ops(family="conv", within="*.a")], (Ops(family="conv", within="*.a"), Ops(family="norm"))),
        (["norm", "conv", "norm"], (Ops(family="conv"), Ops(family="norm"))),
        ([], ()),
    ],
)
def test_selectors_from_text(given_: object, expected: tuple):
    assert selectors(given_) == expected
    assert Recompute(save=given_).save == expected


@pytest.mark.parametrize(
    ("given_", "message"), [("mlp", r"write '\*.mlp'"), ([3], "not 3"), ("sort", "neither a family")]
)
def test_selectors_that_select_nothing_known(given_: object, message: str):
    with pytest.raises(InputError, match=message):
        Recompute(save=given_)


# The head
# ---------------------------------------------------------------------------------------------------------


def test_a_chunked_head_makes_a_plan_equal_to_rounding() -> None:
    plan = Plan(nodes=(), head=Head(path="lm_head", chunks=8))
    assert plan.exactness == "rounding"
    assert Plan.from_json(plan.to_json()).exactness == "rounding"
    assert plan.digest() != Plan(nodes=()).digest()
    assert plan.digest() != Plan(nodes=(), head=Head(path="lm_head", chunks=4)).digest()
    assert '"exactness": "rounding"' in plan.to_json()
    assert "head" not in Plan(nodes=()).to_json()


def test_a_file_that_claims_more_is_read_as_what_it_is() -> None:
    text = '{"nodes": [], "exactness": "bitwise", "head": {"path": "lm_head", "chunks": 8}}'
    assert Plan.from_json(text).exactness == "rounding"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"nodes": [], "exactness": "rounding"}', "only a plan with a chunked head is equal to rounding"),
        ('{"nodes": [], "head": {"path": "lm_head", "chunks": 0}}', "chunks must be at least 1, not 0"),
        ('{"nodes": [], "head": {"path": "lm_head"}}', "chunks"),
        ('{"nodes": [], "head": {"path": "lm_head", "chunks": "8"}}', "chunks"),
        ('{"nodes": [], "head": {"path": "lm_head", "chunks": 8, "size": 1}}', "size"),
    ],
)
def test_heads_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text)


@pytest.mark.parametrize(("head", "region"), [("h.0", "h.0"), ("h.0.fc", "h.0"), ("h", "h.0")])
def test_a_head_and_a_block_in_one_another(head: str, region: str) -> None:
    with pytest.raises(PlanError, match="lie in one another"):
        Plan(nodes=(Region(path=region, policy=Recompute()),), head=Head(path=head, chunks=2))
