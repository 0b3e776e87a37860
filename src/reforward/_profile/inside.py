"""The policies worth trying on a block: from the calls that its forward makes, what to keep inside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from reforward._policy import Ops, Recompute
from reforward._runtime import SeenCall, is_meant
from reforward._solve import Value, nested_choices

# More options make plans finer and dry runs more.
_MOST = 6
# Of the block's work; what spares less isn't worth the time that looking out for it takes.
_LEAST_SHARE = 0.02


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Calls that one selector means."""

    selector: Ops
    calls: tuple[int, ...]


def policies_inside(path: str, calls: Sequence[SeenCall]) -> tuple[Recompute, ...]:
    """Policies that keep more and more of what a block computes.

    Args:
        path: the block's.
        calls: what its forward makes, in order.
    """
    work = _work(calls)
    groups = [g for g in _groups(path, calls) if sum(work[i] for i in g.calls) >= _LEAST_SHARE]
    values = [
        Value(nbytes=sum(calls[i].kept_bytes for i in group.calls), work=sum(work[i] for i in group.calls))
        for group in groups
    ]
    chosen = [[groups[i] for i in choice] for choice in nested_choices(values, _MOST)]
    return tuple(dict.fromkeys(Recompute(save=_selectors(calls, some)) for some in chosen))


def _work(calls: Sequence[SeenCall]) -> list[float]:
    """The share of each call in what all take; half of it goes by seconds, half by operations."""
    seconds, flops = sum(call.seconds for call in calls), sum(call.flops for call in calls)
    shares = [(call.seconds / seconds if seconds else 0.0, call.flops / flops if flops else None) for call in calls]
    return [by_time if by_flops is None else (by_time + by_flops) / 2 for by_time, by_flops in shares]


def _groups(path: str, calls: Sequence[SeenCall]) -> list[_Group]:
    """The calls that can be kept, each in one group, by selectors that serve all blocks of the kind."""
    taken: set[int] = set()
    groups: list[_Group] = []
    for index, call in enumerate(calls):
        if index in taken or not call.kept_bytes:
            continue
        selector = _selector(path, calls, call)
        meant = _meant(selector, calls)
        if taken.isdisjoint(meant):
            taken.update(meant)
            groups.append(_Group(selector=selector, calls=meant))
    return groups


def _selector(path: str, calls: Sequence[SeenCall], call: SeenCall) -> Ops:
    """Names a call by the submodule that makes it; by number as well if that one makes others of the family."""
    place, number = call.places[-1]
    if not place:
        return Ops(family=call.family, nth=number)
    inside = place.removeprefix(f"{path}.")
    pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", f"*.{inside}")  # the experts of a mixture are alike
    every = Ops(family=call.family, within=pattern)
    if all(calls[i].places[-1][1] == 0 and calls[i].places[-1][0] for i in _meant(every, calls)):
        return every
    return Ops(family=call.family, within=pattern, nth=number)


def _meant(selector: Ops, calls: Sequence[SeenCall]) -> tuple[int, ...]:
    return tuple(
        index
        for index, call in enumerate(calls)
        if call.family == selector.family and is_meant(selector, call.places) and call.kept_bytes
    )


def _selectors(calls: Sequence[SeenCall], groups: Sequence[_Group]) -> tuple[Ops, ...]:
    """The groups' selectors; where they are all of a family, the family's."""
    chosen = {index for group in groups for index in group.calls}
    whole = {
        family
        for family in {group.selector.family for group in groups}
        if chosen.issuperset(_meant(Ops(family=family), calls))
    }
    single = [group.selector for group in groups if group.selector.family not in whole]
    return (*[Ops(family=family) for family in sorted(whole)], *single)
