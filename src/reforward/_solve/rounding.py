"""A plan of single blocks for long chains: the cheapest mix of options, rounded to one option per block.

As a linear program the choice has an optimum in which only a few blocks mix options, as many as events are at the
budget; each of those takes the leanest option that it mixes. What rounding wins and loses is taken off the budget, and
the program is solved again. (Two-phase rounding as in Jain et al., Checkmate, 2020, per block instead of per
operation.)

Regime: hundreds of blocks that differ, budgets that can be met without runs. There a mixed-integer solver ends without
a plan, and the loss by rounding is that of a few blocks among all. Shortfalls: no runs, so nothing is found below
"every block recomputed".
"""

from __future__ import annotations

from reforward._solve.bound import Relaxation
from reforward._solve.milp import placements
from reforward._solve.pool import Candidate, Pools
from reforward._solve.simulate import run_placements

_ROUNDS = 6
_NOTHING = 1e-6  # of a block: a share that is a rounding error


def rounded(pools: Pools, budget_bytes: int) -> list[Candidate] | None:
    """One option for every block of every chain, within the budget; None if none was found."""
    relaxation = Relaxation(pools, budget_bytes, runs=False)
    target = budget_bytes
    for _ in range(_ROUNDS):
        mixes = relaxation.cheapest_mix(target)
        if mixes is None:
            return None
        found = [
            Candidate(chain=chain, start=block, shape=_leanest(pools, chain, block, shares))
            for (chain, block), shares in mixes.items()
        ]
        placed = [placement for one in found for placement in placements(pools, one)]
        excess = run_placements(pools.trace, placed).peak_bytes - budget_bytes
        if excess <= 0:
            return found
        target -= excess
    return None


def _leanest(pools: Pools, chain: int, block: int, shares: list[float]) -> int:
    options = pools.chains[chain].costs[block].options
    mixed = [option for option, share in enumerate(shares) if share > _NOTHING]
    return min(mixed, key=lambda option: options[option].forward_delta_bytes)
