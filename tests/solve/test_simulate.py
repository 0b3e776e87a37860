"""The simulator: hand-counted cases, and the balance of bytes over random profiles and plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import UNIT, block, decoder, step

from reforward import _errors as errors
from reforward._plan import Plan, Region, Run
from reforward._policy import Ops, Recompute, Save
from reforward._solve import simulate


def region(index: int, policy=None) -> Region:
    return Region(path=f"layers.{index}", policy=policy or Recompute())


def run(start: int, stop: int, policy=None) -> Run:
    return Run(members=tuple(region(i, policy or Save()) for i in range(start, stop)))


@st.composite
def profiles(draw):
    count = draw(st.integers(1, 7))
    calls = [
        block(
            index,
            plain=draw(st.integers(3, 40)),
            full=draw(st.integers(1, 2)),
            selective={draw(st.integers(2, 3)): 0.5},
            gradient=draw(st.integers(0, 3 * UNIT)),
            seconds=draw(st.integers(1, 4)),
        )
        for index in range(count)
    ]
    return step(calls, head=draw(st.integers(1, 50)) * UNIT)


@st.composite
def nodes(draw, start: int, stop: int, depth: int = 0):
    found = []
    while start < stop:
        length = draw(st.integers(1, stop - start))
        if length > 1 and depth < 3 and draw(st.booleans()):
            found.append(Run(members=tuple(draw(nodes(start, start + length, depth + 1)))))
        else:
            policies = [Save(), Recompute(), Recompute(save=(Ops(family="attention"),))]
            found += [region(i, draw(st.sampled_from(policies))) for i in range(start, start + length)]
        start += length
    return found


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_bytes_balance_and_nothing_is_faster_than_plain(data):
    profile = data.draw(profiles())
    plan = Plan(nodes=tuple(data.draw(nodes(0, len(profile.calls)))))
    planned, plain = simulate(profile, plan), simulate(profile, Plan(nodes=()))
    assert planned.moments[-1].live_after_bytes == plain.moments[-1].live_after_bytes
    assert planned.seconds >= plain.seconds - 1e-9
    assert planned.peak_bytes == max(m.peak_bytes for m in planned.moments)
    for moment, after in zip(planned.moments, planned.moments[1:], strict=False):
        assert moment.live_after_bytes == after.live_before_bytes
        assert moment.peak_bytes >= max(moment.live_before_bytes, moment.live_after_bytes)


def test_plain_step_counted_by_hand():
    timeline = simulate(decoder(4, selective=False), Plan(nodes=()))
    # static 20, embedding 1, four blocks of 16, then the head of 8
    assert timeline.peak_bytes == (20 + 1 + 4 * 16 + 8) * UNIT
    assert timeline.moments[timeline.peak_event].event.name == "backward"
    assert timeline.seconds == pytest.approx(0.1 + 4 + 1 + 8 + 0.2)
    assert timeline.replay_flops == 0


def test_run_keeps_one_boundary_and_replays_each_member_once():
    profile = decoder(4, selective=False, head=UNIT)
    timeline = simulate(profile, Plan(nodes=(run(0, 4),)))
    head = next(m for m in timeline.moments if m.event.name == "backward")
    assert head.live_before_bytes == (20 + 1 + 1) * UNIT + 4 * 512
    assert timeline.replay_flops == 4 * 10**9
    # The replay makes all four blocks' values, and half a unit of temporaries at its end.
    assert timeline.peak_bytes == head.live_after_bytes + 4 * 16 * UNIT + UNIT // 2
    # Its last output isn't kept: after the first backward three blocks are live, and one gradient.
    first = next(m for m in timeline.moments if m.event.kind == "backward")
    assert first.live_after_bytes == head.live_after_bytes + (3 * 16 - 1 + 1) * UNIT - 512


def test_run_of_recomputed_blocks_replays_all_but_the_saved_one_twice():
    members = (*(region(i) for i in range(3)), region(3, Save()))
    timeline = simulate(decoder(4, selective=False), Plan(nodes=(Run(members=members),)))
    assert timeline.replay_flops == 7 * 10**9


def test_nested_runs_hold_only_the_inner_inputs_and_one_inner_run():
    profile = decoder(6, selective=False, head=UNIT)
    nested = Run(members=(run(0, 2), run(2, 4), region(4, Save()), region(5, Save())))
    timeline = simulate(profile, Plan(nodes=(nested,)))
    assert timeline.replay_flops == (6 + 4) * 10**9
    assert timeline.peak_bytes < simulate(profile, Plan(nodes=(run(0, 6),))).peak_bytes


def test_accumulated_passes_run_in_each_pass():
    calls = [block(i % 3, chain=i // 3) for i in range(6)]
    single = step(calls[:3]).events
    second = [e if e.kind == "gap" else replace(e, call=e.call + 3) for e in single]
    profile = step(calls)
    profile = replace(profile, events=(*single, *second))
    assert simulate(profile, Plan(nodes=(run(0, 3),))).replay_flops == 6 * 10**9


def test_frozen_first_blocks_of_a_run_run_as_without_a_plan():
    profile = decoder(4, selective=False)
    events = tuple(e for e in profile.events if not (e.kind == "backward" and e.call < 2))
    profile = replace(profile, events=events)
    nested = Plan(nodes=(Run(members=(run(0, 3), region(3, Save()))),))
    assert simulate(profile, nested).replay_flops == 3 * 10**9
    assert simulate(profile, Plan(nodes=(run(0, 2),))) == simulate(profile, Plan(nodes=()))


def test_refuses_what_it_cannot_run():
    profile = decoder(4)
    broken = step([block(i, chain=i // 2) for i in range(4)])
    with pytest.raises(errors.PlanError, match="one chain"):
        simulate(broken, Plan(nodes=(run(1, 3),)))
    with pytest.raises(errors.PlanError, match="one chain"):
        simulate(profile, Plan(nodes=(Run(members=(region(0), region(2))),)))
    with pytest.raises(errors.PlanError, match="order"):
        simulate(profile, Plan(nodes=(Run(members=(region(2), region(1))),)))
    with pytest.raises(errors.PlanError, match=r"layers\.9"):
        simulate(profile, Plan(nodes=(region(9),)))
    with pytest.raises(errors.PlanError, match="wasn't profiled"):
        simulate(profile, Plan(nodes=(region(1, Recompute(save=(Ops(family="conv"),))),)))


def test_replay_in_a_run_takes_as_long_as_a_measured_replay():
    calls = [block(i) for i in range(4)]
    slow = [
        replace(call, options=tuple(replace(o, replay_seconds=3 * o.replay_seconds) for o in call.options))
        for call in calls
    ]
    profile = step(slow)
    every = Plan(nodes=tuple(region(i) for i in range(4)))
    assert simulate(profile, Plan(nodes=(run(0, 4),))).seconds == pytest.approx(simulate(profile, every).seconds)
