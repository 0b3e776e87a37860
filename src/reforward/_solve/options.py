"""Candidates for a plan: what could be done with each interval of consecutive blocks.

A run's forward doesn't depend on what happens inside it later, so the candidates for one interval differ only in the
highest bytes of its backward and in seconds. `Contents` finds, interval by interval, the ways to run an interval
again and go backward through it that no other way beats in both. A way is a first member followed by a way for the
rest; a member is one block under an option, or a shorter run. Without the limits below this is the full search over
nested runs, and for equal blocks the recursion of Griewank & Walther's `revolve` (2000), with several options per
block and real costs.

Regime: chains of any kind; equal intervals are searched once, so 1,000 equal blocks take seconds.
Shortfalls: each interval keeps a limited number of ways, spread over the whole range; runs have a limited set of
lengths and depth; all-different blocks get shorter runs. Gaps between the blocks of an interval are left out of the
comparison of its ways (the program in `milp.py` counts them). A plan is therefore optimal over these candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from reforward._errors import InputError
from reforward._profile_type import CallCost, OptionCost, Profile
from reforward._solve.simulate import FULL, Effect, Shape, Trace, run_forward
from reforward._units import check_count

_WAYS_PER_INTERVAL = 12
_WAYS_PER_CHAIN = 160
_INTERVALS = 1200  # distinct intervals searched per chain
_LONGEST = 128  # blocks in a run
_COUNTED = 0.75  # share of a plan's cost that goes by counted operations


@dataclass(frozen=True, kw_only=True)
class Allow:
    """What a plan may be made of.

    Attributes:
        selective: options that keep part of a block.
        runs: several blocks recomputed as one unit.
        depth: how many runs may lie inside each other; 1: no nesting.
        chunked_head: the loss head in chunks, where it was profiled; such a plan is equal to rounding, not bit for bit.

    Raises:
        InputError: a value of another type.
    """

    selective: bool = True
    runs: bool = True
    depth: int = 3
    chunked_head: bool = False

    def __post_init__(self):
        for name in ("selective", "runs", "chunked_head"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"Allow: {name} must be True or False, not {getattr(self, name)!r}")
        check_count("Allow: depth", self.depth, least=0)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Turns seconds and recomputed operations into one number to minimise."""

    second: float
    flop: float

    @classmethod
    def of(cls, profile: Profile) -> Weights:
        """A quarter of what a plan adds is measured, the rest is counted, where a profile has both.

        Seconds of single blocks are noisy to some per cent, counted operations aren't, and what is rerun without
        operations that count (norms, activations) has its price in the seconds. Recomputing everything once adds its
        share of the plain step's seconds, by either measure.
        """
        options = [cost.options[0] for cost in profile.calls]
        seconds = sum(o.forward_seconds + o.backward_seconds for o in options) + sum(e.seconds for e in profile.events)
        full = [cost.options[FULL] for cost in profile.calls if len(cost.options) > FULL]
        again, flops = sum(o.replay_seconds for o in full), sum(o.replay_flops for o in full)
        if seconds <= 0 or flops <= 0 or again <= 0:
            return cls(
                second=1 / seconds if seconds > 0 else 0.0, flop=1 / flops if flops > 0 and seconds <= 0 else 0.0
            )
        return cls(second=(1 - _COUNTED) / seconds, flop=_COUNTED * again / seconds / flops)

    def __call__(self, seconds: float, flops: float = 0) -> float:
        return self.second * seconds + self.flop * flops


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run an interval and go backward through it.

    Attributes:
        peak_bytes: highest live bytes, relative to the begin of the interval's (re)run.
        cost: weighed seconds and operations, without those of the blocks' first forward, which all ways have.
        first: the first member; None if there is none.
        rest: the way for what follows it.
        depth: how many runs lie inside each other in it.
    """

    peak_bytes: int
    cost: float
    first: Shape | None = None
    rest: Way | None = None
    depth: int = 0

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The members, in order."""
        found: list[Shape] = []
        way: Way | None = self
        while way is not None and way.first is not None:
            found.append(way.first)
            way = way.rest
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Blocks that can form runs: each call of one is followed by a call of the next, in one chain, in every pass.

    Attributes:
        costs: block by block, of the last pass; it begins with the gradients that the others made.
        calls: per block, its call in each pass.
        keys: blocks with equal keys have equal costs.
    """

    costs: tuple[CallCost, ...]
    calls: tuple[tuple[int, ...], ...]
    keys: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.costs)


def chains(trace: Trace) -> list[Chain]:
    """All chains of a profile, single blocks included. Blocks that backward never reaches are in none."""
    calls = trace.profile.calls
    by_path: dict[str, list[int]] = {}
    for index, cost in enumerate(calls):
        by_path.setdefault(cost.path, []).append(index)
    free = {
        path: tuple(found)
        for path, found in by_path.items()
        if all(call in trace.backward and len(calls[call].options) > FULL for call in found)
    }
    groups: list[list[tuple[int, ...]]] = []
    for found in free.values():
        if groups and _follows(trace, groups[-1][-1], found):
            groups[-1].append(found)
        else:
            groups.append([found])
    known: dict[object, int] = {}
    return [
        Chain(
            costs=tuple(calls[found[-1]] for found in group),
            calls=tuple(group),
            keys=tuple(known.setdefault(_numbers(calls, found), len(known)) for found in group),
        )
        for group in groups
    ]


def _follows(trace: Trace, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    calls = trace.profile.calls
    return len(before) == len(after) and all(
        b + 1 == a and calls[b].chain == calls[a].chain and trace.backward[a] < trace.backward[b]
        for b, a in zip(before, after, strict=True)
    )


def _numbers(calls: Sequence[CallCost], found: tuple[int, ...]) -> object:
    return tuple((calls[call].output_bytes, calls[call].options) for call in found)


def useful_options(cost: CallCost, allow: Allow) -> list[int]:
    """Options of one call that no other option beats in everything; of equal ones the first."""
    indices = range(len(cost.options)) if allow.selective else (0, FULL)
    useful: list[int] = []
    for index in indices:
        mine = _vector(cost.options[index])
        others = [_vector(cost.options[other]) for other in indices if other != index]
        beaten = any(all(o <= m for o, m in zip(other, mine, strict=True)) and other != mine for other in others)
        if not beaten and not any(_vector(cost.options[other]) == mine for other in useful):
            useful.append(index)
    return useful


def _vector(option: OptionCost) -> tuple[float, ...]:
    seconds = option.forward_seconds + option.backward_seconds + option.replay_seconds
    return (
        option.forward_delta_bytes,
        option.forward_peak_bytes,
        option.forward_delta_bytes + option.backward_peak_bytes,
        option.forward_delta_bytes + option.backward_delta_bytes,
        option.forward_seconds,
        seconds,
        option.replay_flops,
    )


class Contents:
    """The undominated ways through the intervals of one chain, found once per kind of interval.

    Args:
        chain: the blocks.
        weights: what is minimised beside bytes.
        allow: what members may be.
    """

    def __init__(self, chain: Chain, weights: Weights, allow: Allow):
        self.chain = chain
        self._weights = weights
        self._allow = allow
        self._options = [useful_options(cost, allow) for cost in chain.costs]
        self._ways: dict[tuple[int, ...], list[Way]] = {}
        self._starts: dict[tuple[int, ...], list[int]] = {}
        self._found_heads: dict[tuple[tuple[int, ...], int], list[_Head]] = {}
        self.lengths = self._run_lengths()
        for length in range(1, max(self.lengths, default=0) + 1):
            for start in range(len(chain) - length + 1):
                key = chain.keys[start : start + length]
                if key not in self._ways:
                    self._ways[key] = self._search(start, length)

    def runs(self, start: int, length: int) -> list[Way]:
        """The ways through the run of `length` blocks from `start`; fast ones first, then fewer and fewer bytes."""
        return self._ways[self.chain.keys[start : start + length]]

    def singles(self, start: int) -> list[int]:
        """The options of one block that are worth a thought."""
        return self._options[start]

    def alike(self, start: int, length: int) -> list[int]:
        """Where the kinds of these blocks follow each other, too."""
        kinds, keys = self.chain.keys[start : start + length], self.chain.keys
        if kinds not in self._starts:
            self._starts[kinds] = [at for at in range(len(keys) - length + 1) if keys[at : at + length] == kinds]
        return self._starts[kinds]

    def whole(self, between: Way, left_bytes: int) -> list[Way]:
        """The undominated ways through the whole chain.

        Args:
            between: what happens between the chain's last forward and its first backward, relative to its begin.
            left_bytes: what that leaves live.
        """
        tails = {len(self.chain): _Tail.of([between], left_bytes)}
        for start in reversed(range(len(self.chain))):
            lengths = [length for length in (1, *self.lengths) if start + length <= len(self.chain)]
            pairs = [
                (head, tails[start + length])
                for length in lengths
                for head in self._heads(start, length, self._allow.depth)
            ]
            left = tails[start + 1].left_bytes + _net(self.chain.costs[start])
            tails[start] = _Tail.of(_combine(pairs, _WAYS_PER_CHAIN), left)
        return list(tails[0].ways)

    def _run_lengths(self) -> tuple[int, ...]:
        """All the short lengths, then steps of a quarter, up to where there are too many kinds of intervals."""
        if not self._allow.runs or self._allow.depth < 1:
            return ()
        keys, kinds, longest = self.chain.keys, 0, 0
        for length in range(1, min(len(keys), _LONGEST) + 1):
            kinds += len({keys[start : start + length] for start in range(len(keys) - length + 1)})
            if kinds > _INTERVALS:
                break
            longest = length
        found = [2]
        while found[-1] < longest:
            found.append(min(longest, max(found[-1] + 1, found[-1] * 5 // 4)))
        return tuple(length for length in found if length <= longest)

    def _search(self, start: int, length: int) -> list[Way]:
        last = self.chain.costs[start + length - 1]
        if length == 1:
            dropped = Way(peak_bytes=0, cost=0.0)
            pairs = [(head, _Tail.of([dropped], -last.output_bytes)) for head in self._heads(start, 1, 0)]
            return _combine(pairs, _WAYS_PER_INTERVAL)
        pairs: list[tuple[_Head, _Tail]] = []
        left = -last.output_bytes
        tails = {}
        for tail in range(1, length):
            left += _net(self.chain.costs[start + length - tail])
            tails[tail] = _Tail.of(self.runs(start + length - tail, tail), left)
        for first in (1, *self.lengths):
            if first < length:
                heads = self._heads(start, first, self._allow.depth - 1)
                pairs += [(head, tails[length - first]) for head in heads]
        return _combine(pairs, _WAYS_PER_INTERVAL)

    def _heads(self, start: int, length: int, depth: int) -> list[_Head]:
        key = self.chain.keys[start : start + length], depth
        if key not in self._found_heads:
            self._found_heads[key] = self._make_heads(start, length, depth)
        return self._found_heads[key]

    def _make_heads(self, start: int, length: int, depth: int) -> list[_Head]:
        costs = self.chain.costs[start : start + length]
        if length == 1:
            return [self._single(costs[0], index) for index in self._options[start]]
        ways = [way for way in self.runs(start, length) if way.depth < depth]
        return [self._run(costs, ways)] if ways else []

    def _single(self, cost: CallCost, index: int) -> _Head:
        option = cost.options[index]
        seconds = option.forward_seconds - cost.options[FULL].forward_seconds
        seconds += option.backward_seconds + option.replay_seconds
        way = Way(peak_bytes=option.backward_peak_bytes, cost=self._weights(seconds, option.replay_flops))
        return _Head.of(
            ways=[way],
            members=[index],
            forward_peak_bytes=max(option.forward_peak_bytes, option.forward_delta_bytes),
            held_bytes=option.forward_delta_bytes,
        )

    def _run(self, costs: Sequence[CallCost], ways: list[Way]) -> _Head:
        forward = Effect()
        for effect in run_forward(costs):
            forward = forward.then(effect)
        replays = [cost.options[FULL] for cost in costs]
        again = self._weights(sum(o.replay_seconds for o in replays), sum(o.replay_flops for o in replays))
        return _Head.of(
            ways=[replace(way, cost=way.cost + again, depth=way.depth + 1) for way in ways],
            members=[way.shapes for way in ways],
            forward_peak_bytes=forward.peak_bytes,
            held_bytes=forward.delta_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class _Front:
    """Ways as arrays."""

    ways: tuple[Way, ...]
    peaks: np.ndarray
    costs: np.ndarray


@dataclass(frozen=True, kw_only=True)
class _Tail(_Front):
    """Ways for the rest of an interval, and what the rest leaves live at its end."""

    left_bytes: int

    @classmethod
    def of(cls, ways: Sequence[Way], left_bytes: int) -> _Tail:
        return cls(ways=tuple(ways), left_bytes=left_bytes, **_arrays(ways))


@dataclass(frozen=True, kw_only=True)
class _Head(_Front):
    """Alternatives for the first member of an interval; they share its forward. Peaks are those of its backward."""

    members: tuple[Shape, ...]
    forward_peak_bytes: int
    held_bytes: int

    @classmethod
    def of(cls, *, ways: Sequence[Way], members: Sequence[Shape], forward_peak_bytes: int, held_bytes: int) -> _Head:
        return cls(
            ways=tuple(ways),
            members=tuple(members),
            forward_peak_bytes=forward_peak_bytes,
            held_bytes=held_bytes,
            **_arrays(ways),
        )

    def before(self, tail: _Tail) -> tuple[np.ndarray, np.ndarray]:
        """Peaks and costs of every alternative (rows) with every way of the tail (columns), from the begin."""
        ahead = np.maximum(self.forward_peak_bytes, self.held_bytes + tail.peaks)
        back = self.held_bytes + tail.left_bytes + self.peaks
        return np.maximum(ahead[None, :], back[:, None]), self.costs[:, None] + tail.costs[None, :]


def _arrays(ways: Sequence[Way]) -> dict[str, np.ndarray]:
    return {
        "peaks": np.array([way.peak_bytes for way in ways], dtype=np.int64),
        "costs": np.array([way.cost for way in ways], dtype=np.float64),
    }


def _combine(pairs: Sequence[tuple[_Head, _Tail]], most: int) -> list[Way]:
    """Every head before its tail, without those that another beats in both bytes and cost: at most so many, both ends
    included, evenly spread in between."""
    grids = [head.before(tail) for head, tail in pairs]
    peaks = np.concatenate([peak.ravel() for peak, _ in grids])
    costs = np.concatenate([cost.ravel() for _, cost in grids])
    worth = np.flatnonzero(np.concatenate([_falls(peak).ravel() for peak, _ in grids]))
    order = worth[np.lexsort((peaks[worth], costs[worth]))]
    lowest = np.minimum.accumulate(peaks[order])
    kept = order[np.concatenate(([True], lowest[1:] < lowest[:-1]))]
    if len(kept) > most:
        kept = kept[np.rint(np.arange(most) * (len(kept) - 1) / (most - 1)).astype(int)]
    ends = np.cumsum([peak.size for peak, _ in grids])
    ways = []
    for flat, grid in zip(kept.tolist(), np.searchsorted(ends, kept, side="right").tolist(), strict=True):
        head, tail = pairs[grid]
        row, column = divmod(flat - int(ends[grid]) + grids[grid][0].size, len(tail.ways))
        ways.append(
            Way(
                peak_bytes=int(peaks[flat]),
                cost=float(costs[flat]),
                first=head.members[row],
                rest=tail.ways[column],
                depth=max(head.ways[row].depth, tail.ways[column].depth),
            )
        )
    return ways


def _falls(peaks: np.ndarray) -> np.ndarray:
    """Where a grid of peaks, whose costs rise along both axes, is lower than at the place before on either axis."""
    falls = np.ones(peaks.shape, dtype=bool)
    falls[1:] &= peaks[1:] < peaks[:-1]
    falls[:, 1:] &= peaks[:, 1:] < peaks[:, :-1]
    return falls


def _net(cost: CallCost) -> int:
    """What a call's forward and backward together leave live (its parameters' gradients)."""
    return cost.options[FULL].forward_delta_bytes + cost.options[FULL].backward_delta_bytes
