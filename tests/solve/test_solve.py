"""The planner against brute force, its promises on budgets, and its refusals."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import UNIT, block, decoder, step

from reforward import _errors as errors
from reforward._plan import Plan, Region, Run
from reforward._policy import Recompute, Save
from reforward._profile_type import Event, Profile
from reforward._solve import Allow, Peak, Planner, Timeline, explain_peak, find, frontier, options, simulate, solve

SINGLES = Allow(runs=False)
TWO_LEVELS = Allow(depth=2)


def smallest_peak(profile: Profile, allow: Allow | None = None) -> Peak:
    return explain_peak(profile, Planner(profile, allow).smallest.timeline)


def plans_of_single_blocks(profile: Profile):
    for policies in itertools.product(*([o.policy for o in cost.options] for cost in profile.calls)):
        pairs = zip(profile.calls, policies, strict=True)
        yield Plan(nodes=tuple(Region(path=cost.path, policy=policy) for cost, policy in pairs))


def members(profile: Profile, start: int, stop: int, depth: int):
    """All sequences of nodes over an interval, with runs nested up to `depth`."""
    if start == stop:
        yield ()
        return
    for end in range(start + 1, stop + 1):
        heads = [Region(path=profile.calls[start].path, policy=o.policy) for o in profile.calls[start].options]
        if end > start + 1:
            inner = members(profile, start, end, depth - 1) if depth else ()
            heads = [Run(members=nodes) for nodes in inner if len(nodes) > 1]
        for head in heads:
            for rest in members(profile, end, stop, depth):
                yield (head, *rest)


def fastest(timelines: list[Timeline], budget: int) -> float | None:
    return min((t.seconds for t in timelines if t.peak_bytes <= budget), default=None)


def budgets(profile: Profile, count: int = 5) -> list[int]:
    low, high = smallest_peak(profile, allow=SINGLES).peak_bytes, simulate(profile, Plan(nodes=())).peak_bytes
    return [low + (high - low) * i // (count - 1) for i in range(count)]


def uneven(count: int, **changes) -> Profile:
    """Blocks that all differ."""
    calls = [
        block(i, plain=12 + 5 * (i % 3), selective={3 + i % 2: 0.6}, seconds=1 + 0.25 * i, gradient=UNIT // 2 * (i % 4))
        for i in range(count)
    ]
    return step(calls, **changes)


@pytest.mark.parametrize(
    "profile",
    [decoder(6), decoder(6, gradient=3 * UNIT), uneven(5), uneven(5, head=60 * UNIT), uneven(5, optimizer=90 * UNIT)],
    ids=["equal", "large gradients", "uneven", "large head", "large optimizer"],
)
def test_single_blocks_agree_with_brute_force(profile):
    planner = Planner(profile, SINGLES)
    timelines = [simulate(profile, plan) for plan in plans_of_single_blocks(profile)]
    for budget in budgets(profile):
        solution = planner.find(budget)
        assert solution.status == "optimal"
        best = fastest(timelines, budget)
        assert solution.timeline.seconds == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("gradient", [0, UNIT, 3 * UNIT])
@pytest.mark.parametrize("make", [decoder, uneven], ids=["equal", "uneven"])
def test_runs_agree_with_brute_force(make, gradient):
    profile = decoder(5, selective=False, gradient=gradient) if make is decoder else uneven(4, head=gradient)
    plans = [Plan(nodes=nodes) for nodes in members(profile, 0, len(profile.calls), 2)]
    timelines = [simulate(profile, plan) for plan in plans]
    low = min(timeline.peak_bytes for timeline in timelines)
    assert smallest_peak(profile, allow=TWO_LEVELS).peak_bytes == low
    high = simulate(profile, Plan(nodes=())).peak_bytes
    planner = Planner(profile, TWO_LEVELS)
    for budget in [low + (high - low) * i // 7 for i in range(8)]:
        best = fastest(timelines, budget)
        assert planner.find(budget).timeline.seconds == pytest.approx(best, rel=1e-4)


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 14),
    kinds=st.integers(1, 3),
    gradient=st.integers(0, 3 * UNIT),
    head=st.integers(1, 60),
    share=st.floats(0, 1.1),
)
def test_simulated_peak_is_the_predicted_one_and_within_the_budget(count, kinds, gradient, head, share):
    calls = [block(i, plain=10 + 6 * (i * kinds // count), selective={4: 0.6}, gradient=gradient) for i in range(count)]
    profile = step(calls, head=head * UNIT)
    low, high = smallest_peak(profile).peak_bytes, simulate(profile, Plan(nodes=())).peak_bytes
    plan = solve(profile, low + int(share * (high - low)))
    timeline = simulate(profile, plan)
    assert timeline.peak_bytes == plan.predicted_peak_bytes
    assert timeline.peak_bytes <= (plan.budget_bytes or 0)
    assert timeline.seconds == plan.predicted_seconds


def test_plain_step_is_left_alone_when_it_fits():
    profile = decoder(8)
    plan = solve(profile, "100%")
    assert plan.nodes == ()
    assert plan.predicted_seconds == plan.predicted_plain_seconds


def test_tight_budgets_nest_below_every_block():
    profile = decoder(64, selective=False, plain=34, gradient=0, head=UNIT)
    paths = [cost.path for cost in profile.calls]
    every = simulate(profile, Plan(nodes=tuple(Region(path=path, policy=Recompute()) for path in paths)))
    activations = every.peak_bytes - profile.static_bytes
    solution = find(profile, profile.static_bytes + int(0.55 * activations))
    runs = [node for node in solution.plan.nodes if isinstance(node, Run)]
    assert any(not (isinstance(m, Region) and m.policy == Save()) for node in runs for m in node.members)
    assert solution.timeline.seconds <= 1.18 * every.seconds
    assert Run in {type(m) for p in (solve(profile, smallest_peak(profile).peak_bytes),) for n in p.nodes
                   if isinstance(n, Run) for m in n.members}  # fmt: skip


def test_hundred_equal_blocks_are_proven_optimal():
    planner = Planner(decoder(100))
    for share in (0.8, 0.4, 0.15, 0.1):
        solution = planner.find(int(share * planner.plain.peak_bytes))
        assert solution.status == "optimal"
        assert solution.gap <= 1e-6


def test_equal_intervals_are_searched_once(monkeypatch):
    searched = []
    whole = options.run_forward
    monkeypatch.setattr(options, "run_forward", lambda costs: searched.append(len(costs)) or whole(costs))
    Planner(decoder(60))
    assert len(searched) <= Allow().depth * len(set(searched))


def test_running_out_of_time_leaves_a_plan_and_what_is_proven():
    planner = Planner(uneven(60))
    low = simulate(planner.profile, Plan(nodes=())).peak_bytes // 6
    solution = planner.find(low, limit_seconds=0.0)
    assert solution.timeline.peak_bytes <= low
    assert solution.status in ("time limit", "optimal")


def test_frontier_trades_time_for_memory():
    profile = decoder(10)
    points = frontier(profile, points=9)
    seconds = [point.solution.timeline.seconds for point in points]
    assert seconds == sorted(seconds, reverse=True)
    assert all(point.solution.timeline.peak_bytes <= point.budget_bytes for point in points)
    assert points[0].budget_bytes == smallest_peak(profile).peak_bytes
    assert points[-1].solution.timeline.seconds == points[-1].solution.plain.seconds
    assert seconds[0] > seconds[-1]


def test_one_module_called_twice_gets_one_policy():
    profile = step([block(i, path="layer", chain=0) for i in range(5)])
    low = smallest_peak(profile).peak_bytes
    plan = solve(profile, low)
    assert [node.path for node in plan.regions()] == ["layer"]
    assert simulate(profile, plan).peak_bytes == low


def test_two_towers_share_the_budget():
    towers = [block(i, plain=20, chain=0, path=f"vision.{i}") for i in range(7)]
    towers += [block(i, plain=12, chain=1, path=f"text.{i}", selective={4: 0.5}) for i in range(3)]
    profile = step(towers)
    planner, timelines = Planner(profile, SINGLES), timelines_by_counts(profile)
    for budget in budgets(profile, 4):
        best = fastest(timelines, budget)
        assert planner.find(budget).timeline.seconds == pytest.approx(best, rel=1e-4)


def timelines_by_counts(profile: Profile) -> list[Timeline]:
    """Brute force over how many blocks of the first tower recompute, from its begin, and all ways in the second."""
    vision, text = profile.calls[:7], profile.calls[7:]
    plans = [
        Plan(nodes=tuple(
            [Region(path=cost.path, policy=Recompute()) for cost in vision[:count]]
            + [Region(path=cost.path, policy=p) for cost, p in zip(text, policies, strict=True)]
        ))
        for count in range(8)
        for policies in itertools.product(*([o.policy for o in cost.options] for cost in text))
    ]  # fmt: skip
    return [simulate(profile, plan) for plan in plans]


@pytest.mark.parametrize("count", [4, 7], ids=["placed", "counted"])
def test_accumulated_passes_agree_with_brute_force(count):
    calls = [block(i % count, chain=i // count, gradient=0 if i >= count else 2 * UNIT) for i in range(3 * count)]
    one = step(calls[:count]).events
    events = [e if e.kind == "gap" else replace(e, call=e.call + shift) for shift in (0, count, 2 * count) for e in one]
    profile = replace(step(calls), events=tuple(events))
    first = replace(profile, calls=profile.calls[:count])
    timelines = [simulate(profile, plan) for plan in plans_of_single_blocks(first)]
    planner = Planner(profile, SINGLES)
    for budget in budgets(profile):
        assert planner.find(budget).timeline.seconds == pytest.approx(fastest(timelines, budget), rel=1e-4)


def test_two_forwards_before_one_backward():
    calls = [block(i % 2, chain=i // 2) for i in range(4)]
    gap = Event(kind="gap", name="backward", peak_bytes=UNIT)
    events = [*(Event(kind="forward", call=i) for i in range(4)), gap]
    events += [Event(kind="backward", call=i) for i in (3, 2, 1, 0)]
    profile = replace(step(calls), events=tuple(events))
    plan = solve(profile, smallest_peak(profile).peak_bytes)
    assert {leaf.path for leaf in plan.regions()} <= {"layers.0", "layers.1"}
    assert simulate(profile, plan).peak_bytes == plan.predicted_peak_bytes


def test_a_profile_without_seconds_is_planned_by_operations():
    calls = [block(i, seconds=0.0) for i in range(6)]
    counted = [
        replace(call, options=tuple(replace(o, replay_flops=0 if o.policy == Save() else 10) for o in call.options))
        for call in calls
    ]
    profile = step(counted)
    profile = replace(profile, events=tuple(replace(event, seconds=0.0) for event in profile.events))
    budget = budgets(profile)[3]
    timelines = [simulate(profile, plan) for plan in plans_of_single_blocks(profile)]
    fewest = min(t.replay_flops for t in timelines if t.peak_bytes <= budget)
    assert find(profile, budget, allow=SINGLES).timeline.replay_flops == fewest


@pytest.mark.parametrize("budget", [float("nan"), 0, -5, "0%", "60%device", "much", float("inf")])
def test_refuses_budgets_that_are_no_sizes(budget):
    with pytest.raises(errors.InputError):
        solve(decoder(2), budget)


def test_refusal_names_the_smallest_peak_and_its_parts():
    profile = decoder(12, head=300 * UNIT)
    low = smallest_peak(profile)
    with pytest.raises(errors.BudgetError, match="outside the blocks in backward") as caught:
        solve(profile, low.peak_bytes - 1)
    assert caught.value.smallest_bytes == low.peak_bytes
    assert "loss head in chunks" in str(caught.value)
    assert low.static_bytes + low.gradient_bytes + low.kept_bytes + low.event_bytes == low.peak_bytes
    assert simulate(profile, solve(profile, low.peak_bytes)).peak_bytes == low.peak_bytes


def test_planner_runs_without_torch():
    code = "import sys, reforward._solve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_planner_prints_nothing():
    code = "from profiles import decoder; from reforward._solve import solve; solve(decoder(4), '70%')"
    ran = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, check=True)
    assert ran.stdout + ran.stderr == b""


def test_long_chains_of_different_blocks_are_planned_near_the_bound() -> None:
    """More candidates than a search gets through: the cheapest mix of options, rounded."""
    calls = [
        block(i, plain=16 + 8 * (i % 3), seconds=1 + 0.5 * (i % 2), selective={4: 0.6, 8: 0.2}) for i in range(300)
    ]
    planner = Planner(step(calls))
    low = explain_peak(planner.profile, planner.smallest.timeline).peak_bytes
    for share in (0.7, 0.3):
        budget = low + int(share * (planner.plain.peak_bytes - low))
        solution = planner.find(budget, limit_seconds=0.1)
        assert solution.timeline.peak_bytes <= budget
        above = planner.above_bound(solution, budget)
        assert above is not None
        assert above < 0.02
