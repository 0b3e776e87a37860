"""Names and patterns: what they match, and what they say when they don't."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reforward._errors import PatternError
from reforward._patterns import assign, canonical, is_inside, is_within, matches, select

LAYERS = [f"layers.{i}" for i in range(12)]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("layers.0", "layers.0"),
        ("module.layers.0", "layers.0"),
        ("_orig_mod.layers.0._orig_mod.mlp", "layers.0.mlp"),
        ("module._orig_mod.layers.0", "layers.0"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module", "layers.0"),
        ("layers.0._checkpoint_wrapped_module.mlp", "layers.0.mlp"),
        ("base_model.model.layers.0", "layers.0"),
        ("module.base_model.model.layers.0", "layers.0"),
        ("submodule.layers.0", "submodule.layers.0"),
        ("module", ""),
        ("", ""),
    ],
)
def test_wrappers_leave_no_mark(path: str, expected: str):
    assert canonical(path) == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layers.3", [3]),
        ("layers[2:4]", [2, 3]),
        ("layers[9:]", [9, 10, 11]),
        ("layers[:2]", [0, 1]),
        ("layers[:]", range(12)),
        ("layers.*", range(12)),
        ("layers.?", range(10)),
        ("*.1", [1]),
        ("*1", [1, 11]),
    ],
)
def test_select(pattern: str, expected: list[int]):
    assert select(pattern, LAYERS) == [LAYERS[i] for i in expected]


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("*.mlp", "model.layers.0.mlp", True),
        ("*.mlp", "mlp", False),
        ("**.mlp", "model.layers.0.mlp", True),
        ("*" * 40 + "!", "model.layers.0.mlp", False),
        ("*.mlp", "layers.0.mlp.up", False),
        ("layers[0:2].mlp", "layers.1.mlp", True),
        ("layers[0:2].mlp", "layers.2.mlp", False),
        ("a[0:2].b[3:]", "a.1.b.3", True),
        ("a[0:2].b[3:]", "a.1.b.2", False),
        ("layers.0", "layers.00", False),
        ("layers.0", "layersx0", False),
        ("layers[0:2]", "layers.x", False),
        ("layers[0:2]", "layers", False),
    ],
)
def test_matches(pattern: str, path: str, expected: bool):
    assert matches(pattern, path) is expected


def test_nothing_matched_offers_the_nearest_names():
    with pytest.raises(PatternError, match=r"'layer.3' matches no block or submodule; .*'layers.3'"):
        select("layer.3", LAYERS)
    with pytest.raises(PatternError, match="the model has none"):
        select("layers.0", [])


@pytest.mark.parametrize("pattern", ["layers[-2:]", "layers[:-1]"])
def test_ranges_do_not_count_from_the_end(pattern: str):
    with pytest.raises(PatternError, match="can't count from the end"):
        select(pattern, LAYERS)


def test_assign_keeps_the_order_of_the_paths():
    assert list(assign({"layers[2:4]": "b", "layers.0": "a"}, LAYERS).items()) == [
        ("layers.0", "a"), ("layers.2", "b"), ("layers.3", "b"),
    ]  # fmt: skip


def test_two_patterns_may_not_match_one_path():
    with pytest.raises(PatternError, match=r"'layers.1' is matched by both 'layers\[0:2\]' and 'layers\[1:3\]'"):
        assign({"layers[0:2]": 0, "layers[1:3]": 1}, LAYERS)


@given(st.integers(0, 14), st.integers(0, 14))
def test_a_range_is_a_slice(start: int, stop: int):
    assert [path for path in LAYERS if matches(f"layers[{start}:{stop}]", path)] == LAYERS[start:stop]


@given(st.text(alphabet="ab.()+$^\\|{}", max_size=8))
def test_text_without_wildcards_matches_itself_only(text: str):
    assert matches(text, text)
    assert not matches(text, text + "a")


@given(st.lists(st.sampled_from(["a", "module", "_orig_mod", "layers", "0"]), max_size=6).map(".".join))
def test_canonical_paths_stay_as_they_are(path: str):
    assert canonical(canonical(path)) == canonical(path)


@pytest.mark.parametrize(
    ("path", "outer", "within", "inside"),
    [
        ("a.b", "a", True, True),
        ("a", "a", True, False),
        ("ab", "a", False, False),
        ("a", "a.b", False, False),
        ("a", "", True, True),
        ("", "", True, False),
    ],
)
def test_what_lies_in_what(path, outer, within, inside):
    assert is_within(path, outer) is within
    assert is_inside(path, outer) is inside
