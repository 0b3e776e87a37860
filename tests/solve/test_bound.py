"""No plan costs less than the bound, or needs less: checked against all plans of small chains."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import UNIT, block, decoder, step
from test_solve import members, uneven

from reforward._plan import Plan
from reforward._profile_type import Profile
from reforward._solve import Planner, Timeline, simulate
from reforward._solve.bound import cost_bound, peak_bound


def timelines(profile: Profile, depth: int) -> list[Timeline]:
    return [simulate(profile, Plan(nodes=nodes)) for nodes in members(profile, 0, len(profile.calls), depth)]


def check(profile: Profile, depth: int) -> None:
    every, pools = timelines(profile, depth), Planner(profile).pools
    low, high = min(one.peak_bytes for one in every), simulate(profile, Plan(nodes=())).peak_bytes
    assert peak_bound(pools) <= low
    for budget in [low + (high - low) * i // 6 for i in range(7)]:
        bound = cost_bound(pools, budget)
        assert bound is not None
        best = min(pools.weights(one.seconds, one.replay_flops) for one in every if one.peak_bytes <= budget)
        assert bound <= best * (1 + 1e-9)
    below = cost_bound(pools, peak_bound(pools) - UNIT // 100)
    assert below is None, "nothing can be below the bound on the peak"


@pytest.mark.parametrize("gradient", [0, UNIT, 3 * UNIT])
def test_chains_of_equal_blocks(gradient: int) -> None:
    check(decoder(5, selective=False, gradient=gradient), depth=2)


@pytest.mark.parametrize("changes", [{}, {"head": 60 * UNIT}, {"optimizer": 90 * UNIT}], ids=str)
def test_chains_of_different_blocks(changes: dict[str, int]) -> None:
    check(uneven(4, **changes), depth=2)


BLOCKS = st.lists(
    st.fixed_dictionaries(
        {
            "plain": st.integers(4, 30),
            "full": st.integers(1, 3),
            "selective": st.dictionaries(st.integers(3, 20), st.floats(0.1, 0.9), max_size=1),
            "gradient": st.integers(0, 3 * UNIT),
            "seconds": st.floats(0.1, 3.0),
        }
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(BLOCKS, st.integers(1, 60))
def test_random_chains(kinds: list[dict], head: int) -> None:
    profile = step([block(i, **kind) for i, kind in enumerate(kinds)], head=head * UNIT)
    check(profile, depth=2)


def test_several_passes() -> None:
    """Two forwards of each block, one after the other, as in accumulation: one policy for both."""
    calls = [block(i % 3, chain=i // 3, gradient=0 if i >= 3 else 2 * UNIT) for i in range(6)]
    one = step(calls[:3]).events
    events = [e if e.kind == "gap" else replace(e, call=e.call + shift) for shift in (0, 3) for e in one]
    profile = replace(step(calls), events=tuple(events))
    planner = Planner(profile)
    low, high = planner.smallest.timeline.peak_bytes, planner.plain.peak_bytes
    assert peak_bound(planner.pools) <= low
    for budget in [low + (high - low) * i // 4 for i in range(5)]:
        solution, bound = planner.find(budget), cost_bound(planner.pools, budget)
        assert bound is not None
        assert bound <= planner.pools.weights(solution.timeline.seconds, solution.timeline.replay_flops) * (1 + 1e-9)


@pytest.mark.parametrize(("count", "most"), [(12, 0.05), (80, 0.02)])
def test_plans_are_near_the_bound(count: int, most: float) -> None:
    """Blocks like those of a transformer, under budgets down to where every block is recomputed."""
    calls = [block(i, plain=16, selective={6: 0.3, 10: 0.05}, gradient=UNIT) for i in range(count)]
    planner = Planner(step(calls, head=8 * UNIT))
    plain = planner.plain.peak_bytes - planner.profile.static_bytes
    for share in (0.8, 0.6, 0.5, 0.4, 0.3):
        budget = planner.profile.static_bytes + int(share * plain)
        above = planner.above_bound(planner.find(budget), budget)
        assert above is not None
        assert above <= most


def test_a_plan_that_adds_nothing_is_at_the_bound() -> None:
    planner = Planner(decoder(4))
    budget = 2 * planner.plain.peak_bytes
    assert planner.above_bound(planner.find(budget), budget) == 0.0
