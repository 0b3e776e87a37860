"""Sets of values to keep inside a block."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from reforward._solve import Value, nested_choices

VALUES = st.lists(
    st.builds(Value, nbytes=st.integers(1, 50), work=st.integers(0, 50).map(float)), min_size=0, max_size=7
)


@given(VALUES, st.integers(1, 8))
def test_each_set_holds_the_one_before_it(values: list[Value], most: int) -> None:
    choices = nested_choices(values, most)
    assert len(choices) == min(most, len(values))
    assert all({*before} < {*after} for before, after in itertools.pairwise(choices))
    if values:
        assert choices[-1] == tuple(range(len(values)))


@given(VALUES)
def test_no_other_set_spares_more_in_the_bytes_of_one_of_these(values: list[Value]) -> None:
    """By brute force: the sets lie on the hull, so any set of no more bytes spares no more work."""
    every = [some for count in range(len(values) + 1) for some in itertools.combinations(range(len(values)), count)]
    for choice in nested_choices(values, len(values) or 1):
        held, spared = sum(values[i].nbytes for i in choice), sum(values[i].work for i in choice)
        for other in every:
            if sum(values[i].nbytes for i in other) <= held:
                assert sum(values[i].work for i in other) <= spared + 1e-9


@given(VALUES.filter(lambda values: len(values) > 2))
def test_what_is_left_out_is_nearest_to_its_neighbours(values: list[Value]) -> None:
    def corner(choice: tuple[int, ...]) -> tuple[int, float]:
        return sum(values[i].nbytes for i in choice), sum(values[i].work for i in choice)

    full = [(), *nested_choices(values, len(values))]
    kept = [(), *nested_choices(values, len(values) - 1)]
    (gone,) = [i for i, choice in enumerate(full) if choice not in kept]
    areas = []
    for (a, b), (c, d), (e, f) in zip(*[map(corner, full[at:]) for at in range(3)], strict=False):
        areas.append(abs((c - a) * (f - b) - (e - a) * (d - b)))
    assert areas[gone - 1] == min(areas)


def test_a_transformer_block() -> None:
    """Bytes in units of the input's: attention first, then the products, the widest last."""
    qkv, attention = Value(nbytes=3, work=3.0), Value(nbytes=1, work=1.5)
    out, up = Value(nbytes=1, work=1.0), Value(nbytes=4, work=4.0)
    assert nested_choices([qkv, attention, out, up], 4) == [(1,), (1, 2), (0, 1, 2), (0, 1, 2, 3)]
