"""Which candidates a budget calls for: few enough for a program that is solved to proven optimality in seconds.

Every block gets all its useful options. Runs are taken from the plans that `Contents.whole` finds on both sides of
the budget, chain by chain; each run so found, and its neighbours in length, is offered wherever the same kinds of
blocks follow each other. That makes the choice heuristic in which runs are offered, and exact in how they are put
together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from reforward._profile_type import Profile
from reforward._solve.options import Allow, Contents, Way, Weights, chains
from reforward._solve.simulate import FULL, Effect, Placement, Shape, Trace, gap_effect, placement_effects, width

_NEAR = 3  # plans taken on each side of a budget
# Blocks; in longer chains a run is offered only where it lies a whole number of its lengths from where it was found:
# everywhere, it would be tens of thousands of candidates, more than the solver gets through in its time.
_LONG = 200
_SPREAD = 6  # plans taken over the range of budgets, where several chains share one


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A shape offered to the blocks of a chain from `start` on, in every pass through it."""

    chain: int
    start: int
    shape: Shape

    @property
    def stop(self) -> int:
        return self.start + width(self.shape)


class Pools:
    """The candidates of one profile, searched once and picked per budget.

    Args:
        weights: None: those of the profile.
    """

    def __init__(self, profile: Profile, allow: Allow, weights: Weights | None = None):
        self.trace = Trace(profile)
        self.weights = weights or Weights.of(profile)
        self.chains = chains(self.trace)
        self._contents = [Contents(chain, self.weights, allow) for chain in self.chains]
        self._ways = [self._whole(contents) for contents in self._contents]

    @property
    def long(self) -> bool:
        """Whether a chain is so long that not every candidate is offered everywhere."""
        return any(len(chain) > _LONG for chain in self.chains)

    def pick(self, budget_bytes: int) -> list[Candidate]:
        """Candidates for a budget, without repetition, in a fixed order."""
        found: dict[Candidate, None] = {}
        for index, contents in enumerate(self._contents):
            for start in range(len(contents.chain)):
                for option in contents.singles(start):
                    found[Candidate(chain=index, start=start, shape=option)] = None
            for way in self._near(index, budget_bytes):
                for start, shape in _starts(way):
                    if not isinstance(shape, int):
                        for offered in _offers(contents, index, start, shape):
                            found[offered] = None
        return list(found)

    def guess(self, budget_bytes: int) -> list[Candidate]:
        """The plan that `Contents.whole` expects to fit, or its leanest; the other chains recompute everything."""
        found = []
        for index, ways in enumerate(self._ways):
            way = next((way for way in ways if way.peak_bytes <= budget_bytes), ways[-1])
            found += [Candidate(chain=index, start=start, shape=shape) for start, shape in _starts(way)]
        return found

    def _near(self, index: int, budget_bytes: int) -> list[Way]:
        ways = self._ways[index]
        fits = next((i for i, way in enumerate(ways) if way.peak_bytes <= budget_bytes), len(ways) - 1)
        near = ways[max(0, fits - _NEAR) : fits + _NEAR]
        if len(self.chains) == 1:
            return near
        return near + [ways[round(i * (len(ways) - 1) / (_SPREAD - 1))] for i in range(_SPREAD)]

    def _whole(self, contents: Contents) -> list[Way]:
        """Ways through the last pass of a chain, with absolute peaks, while all other calls recompute everything."""
        mine, trace = [calls[-1] for calls in contents.chain.calls], self.trace
        before = self._others(mine, range(trace.forward[mine[0]]))
        between = self._others(mine, range(trace.forward[mine[-1]] + 1, trace.backward[mine[-1]]))
        ways = contents.whole(Way(peak_bytes=between.peak_bytes, cost=0.0), between.delta_bytes)
        live = trace.profile.static_bytes + before.delta_bytes
        return [replace(way, peak_bytes=live + way.peak_bytes) for way in ways]

    def _others(self, mine: Sequence[int], events: Iterable[int]) -> Effect:
        total = Effect()
        for index in events:
            event = self.trace.profile.events[index]
            if event.kind == "gap":
                total = total.then(gap_effect(event))
            elif event.call not in mine:
                full = min(FULL, len(self.trace.profile.calls[event.call].options) - 1)
                total = total.then(placement_effects(self.trace, Placement(calls=(event.call,), shape=full))[index])
        return total


def _starts(way: Way) -> list[tuple[int, Shape]]:
    starts, start = [], 0
    for shape in way.shapes:
        starts.append((start, shape))
        start += width(shape)
    return starts


def _offers(contents: Contents, index: int, start: int, shape: tuple[Shape, ...]) -> list[Candidate]:
    """The run, and those one block shorter and longer with the nearest peak, wherever kinds of blocks agree."""
    length = width(shape)
    offers = _everywhere(contents, index, start, shape)
    own = next((way.peak_bytes for way in contents.runs(start, length) if way.shapes == shape), None)
    for near in (length - 1, length + 1):
        if own is not None and near in contents.lengths and start + near <= len(contents.chain):
            way = min(contents.runs(start, near), key=lambda way: abs(way.peak_bytes - own))
            offers += _everywhere(contents, index, start, way.shapes)
    return offers


def _everywhere(contents: Contents, index: int, start: int, shape: Shape) -> list[Candidate]:
    length = width(shape)
    starts = contents.alike(start, length)
    if len(contents.chain) > _LONG:
        starts = [at for at in starts if (at - start) % length == 0]
    return [Candidate(chain=index, start=at, shape=shape) for at in starts]
