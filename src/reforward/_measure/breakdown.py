"""Where the peak's bytes are: every allocation that is live at the peak gets one name."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from reforward._measure.account import Account, Allocation
from reforward._measure.measurement import Breakdown
from reforward._measure.static import BATCH, BUFFERS, GRADIENTS, OPTIMIZER, PARAMETERS
from reforward._measure.trace import Span, Trace

_BLOCK, _LOSS_HEAD, _TEMPORARY = "block ", "loss_head", "temporaries"


def break_down(
    account: Account,
    trace: Trace,
    *,
    gradients: Sequence[frozenset[int]],
    optimizer_state: frozenset[int],
) -> Breakdown:
    """Names every allocation that is live at the peak, by what it turned out to be.

    What was there before the step keeps its kind. An allocation that holds a gradient when its backward ends is a
    gradient; one that outlives its forward is an activation, of the innermost block that ran when it was made; the
    rest are temporaries.

    Args:
        account: of the run.
        trace: of the same run, with spans of kind "phase" and "block".
        gradients: where the gradients lie at the end of each backward phase, in order.
        optimizer_state: where the optimizer's state lies at the end of the step.
    """
    naming = _Naming(trace, gradients, optimizer_state)
    total: Counter[str] = Counter()
    for allocation in account.allocations:
        if allocation.lives_at(account.peak):
            total[allocation.kind or naming.name(allocation)] += allocation.bytes
    return Breakdown(
        parameters=total[PARAMETERS],
        buffers=total[BUFFERS],
        gradients=total[GRADIENTS],
        optimizer_state=total[OPTIMIZER],
        batch=total[BATCH],
        blocks={path: total[_BLOCK + path] for path in naming.paths if total[_BLOCK + path]},
        loss_head=total[_LOSS_HEAD],
        temporaries=total[_TEMPORARY],
    )


class _Naming:
    def __init__(self, trace: Trace, gradients: Sequence[frozenset[int]], optimizer_state: frozenset[int]):
        self._trace = trace
        self._phases = [span for span in trace.spans if span.kind == "phase"]
        self._phase_begins = [span.begin for span in self._phases]
        self._blocks = [span for span in trace.spans if span.kind == "block"]
        self._block_begins = [span.begin for span in self._blocks]
        backwards = [span for span in self._phases if span.name == "backward"]
        self._gradients = {id(span): held for span, held in zip(backwards, gradients, strict=True)}
        self._optimizer_state = optimizer_state
        #: Paths of the blocks, in the order of their first call.
        self.paths = tuple(dict.fromkeys(span.name for span in self._blocks))

    def name(self, allocation: Allocation) -> str:
        """The name of an allocation that the run made."""
        time = self._trace.memory[allocation.begin].time
        position = bisect_right(self._phase_begins, time) - 1
        if position < 0:
            return _TEMPORARY
        phase = self._phases[position]
        if phase.name == "optimizer":
            return OPTIMIZER if allocation.address in self._optimizer_state else _TEMPORARY
        if not allocation.lives_at(self._trace.between(phase.begin, phase.end).stop - 1):
            return _TEMPORARY
        if phase.name == "backward":
            return GRADIENTS if allocation.address in self._gradients[id(phase)] else _TEMPORARY
        block = self._innermost_block(time)
        return _LOSS_HEAD if block is None else _BLOCK + block.name

    def _innermost_block(self, time: float) -> Span | None:
        """Of the blocks that run at a time, the one that began last."""
        for block in reversed(self._blocks[: bisect_right(self._block_begins, time)]):
            if block.end >= time:
                return block
        return None
