"""HiGHS, silent, and rows for it."""

from __future__ import annotations

import highspy
import numpy as np


class _QuietHighs(highspy.Highs):
    """HiGHS without its banner: the constructor enables callbacks, which prints it before any option can be set."""

    def enableCallbacks(self) -> None:
        self.silent()
        super().enableCallbacks()


def solver(gap: float) -> highspy.Highs:
    """A silent HiGHS that proves optimality up to an absolute gap."""
    made = _QuietHighs()
    made.setOptionValue("mip_rel_gap", 0.0)
    made.setOptionValue("mip_abs_gap", gap)
    made.setOptionValue("mip_feasibility_tolerance", 1e-9)
    made.setOptionValue("primal_feasibility_tolerance", 1e-9)
    return made


class Rows:
    """Sparse rows, gathered and passed to HiGHS at once."""

    def __init__(self) -> None:
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._starts: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []

    def add(self, lower: float, upper: float, terms: dict[int, float]) -> None:
        """One row: lower ≤ Σ value · column ≤ upper."""
        self._lower.append(lower)
        self._upper.append(upper)
        self._starts.append(len(self._columns))
        self._columns.extend(terms)
        self._values.extend(terms.values())

    def pass_to(self, highs: highspy.Highs) -> None:
        """Adds them to a program that has the columns."""
        highs.addRows(
            len(self._starts),
            np.array(self._lower),
            np.array(self._upper),
            len(self._columns),
            np.array(self._starts, dtype=np.int32),
            np.array(self._columns, dtype=np.int32),
            np.array(self._values),
        )
