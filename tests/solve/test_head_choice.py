"""The planner's choice of the loss head: plain, or in chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from profiles import UNIT, decoder

import reforward as rf
from reforward._profile_type import HeadCost, Profile
from reforward._solve import Planner, find, frontier, simulate

ALLOWED = rf.Allow(chunked_head=True)


def with_heads(profile: Profile, extra: dict[int, float]) -> Profile:
    """The profile with heads that need less than the plain one, at so many seconds more by number of chunks."""
    heads = []
    for chunks, seconds in extra.items():
        events = [
            replace(e, peak_bytes=e.peak_bytes // chunks, seconds=e.seconds + seconds) if e.name == "backward" else e
            for e in profile.events
        ]
        head = rf.Head(path="head", chunks=chunks, module_type="Linear")
        heads.append(HeadCost(head=head, events=tuple(events), extra_seconds=seconds))
    return replace(profile, heads=tuple(heads))


def with_two_heads(head: int = 256) -> Profile:
    return with_heads(decoder(4, head=head * UNIT), {4: 0.5, 16: 2.0})


def test_the_planner_keeps_the_head_plain_unless_it_may_not() -> None:
    profile = with_two_heads(head=64)
    for budget in ("100%", "90%", "80%"):
        assert rf.solve(profile, budget).head is None
    assert rf.solve(profile, "100%", allow=ALLOWED).head is None
    assert rf.solve(profile, "100%", allow=ALLOWED).exactness == "bitwise"


def test_the_planner_takes_the_fastest_that_fits() -> None:
    """Whatever is chosen costs no more than what is best for each number of chunks by itself."""
    profile = with_two_heads()
    chosen = set()
    for percent in range(5, 101, 5):
        try:
            solution = find(profile, f"{percent}%", allow=ALLOWED)
        except rf.BudgetError:
            continue
        budget = Planner(profile).plain.peak_bytes * percent // 100
        assert solution.timeline.peak_bytes <= budget
        assert simulate(profile, solution.plan).peak_bytes == solution.timeline.peak_bytes
        best = []
        for variant in (profile, *map(profile.under, profile.heads)):
            try:
                best.append(Planner(variant).find(budget).timeline.seconds)
            except rf.BudgetError:
                continue
        assert solution.timeline.seconds <= min(best) * 1.001
        chosen.add(solution.plan.head and solution.plan.head.chunks)
    assert chosen == {None, 4, 16}


def test_more_memory_never_takes_longer() -> None:
    points = frontier(with_two_heads(), 10, allow=ALLOWED)
    seconds = [point.solution.timeline.seconds for point in points]
    assert seconds == sorted(seconds, reverse=True)
    assert points[0].solution.plan.head is not None
    assert points[-1].solution.plan.head is None


def test_what_was_not_profiled_is_refused() -> None:
    profile = with_two_heads()
    with pytest.raises(rf.InputError, match=r"profile\(model, step, allow='chunked_head'\)"):
        rf.solve(replace(profile, heads=()), "60%", allow=ALLOWED)
    with pytest.raises(rf.PlanError, match="the head 'head' wasn't profiled in 5 chunks"):
        simulate(profile, rf.Plan(nodes=(), head=rf.Head(path="head", chunks=5)))
    with pytest.raises(rf.InputError, match="chunked_head must be True or False"):
        rf.Allow(chunked_head="yes")  # pyright: ignore[reportArgumentType]
