"""What to keep inside a block: from single values, each with its bytes and what keeping it spares, sets worth offering.

Keeping a value costs its bytes until the block's backward and spares the work that makes it; both add up. For one block
and one number of bytes that is a knapsack; over many blocks, of which each may take another set, a plan mixes the sets
that lie on the lower hull of bytes and work, and those are the values taken in the order of what they spare per byte
(Dantzig 1957, *Discrete-Variable Extremum Problems*).

Regime: blocks that occur often, or values that are small beside the budget. Shortfalls: sets off the hull aren't
offered, so a lone block may be left with up to one value's bytes unused; two values that share memory count twice; work
that only a kept value needs isn't spared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Value:
    """One value of a block that can be kept.

    Attributes:
        nbytes: what is held if it is kept; positive.
        work: what isn't recomputed then, in any unit.
    """

    nbytes: int
    work: float


def nested_choices(values: Sequence[Value], most: int) -> list[tuple[int, ...]]:
    """Sets of values to keep, each holding the one before it; the last holds all values.

    Args:
        values: what can be kept.
        most: how many sets to give. Where there are more on the hull, those are left out that the line between their
            neighbours comes nearest to.

    Returns:
        Indices of the values, by set.
    """
    order = sorted(range(len(values)), key=lambda i: (-values[i].work / values[i].nbytes, values[i].nbytes, i))
    corners = [(0, 0.0)]
    for i in order:
        held, spared = corners[-1]
        corners.append((held + values[i].nbytes, spared + values[i].work))
    counts = list(range(len(corners)))
    while len(counts) > most + 1:
        inner = range(1, len(counts) - 1)
        counts.pop(min(inner, key=lambda at: _area(*[corners[counts[at + step]] for step in (-1, 0, 1)])))
    return [tuple(sorted(order[:count])) for count in counts[1:]]


def _area(before: tuple[int, float], corner: tuple[int, float], after: tuple[int, float]) -> float:
    """Twice the area of the triangle of three corners."""
    (a, b), (c, d), (e, f) = before, corner, after
    return abs((c - a) * (f - b) - (e - a) * (d - b))
