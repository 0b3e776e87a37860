"""What is going on in the calling thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reforward._runtime.frames import Filler, Recorder


class _Current(threading.local):
    """Of one thread.

    Attributes:
        replays: how many are running, one inside the other.
        frame: what deals with the tensors saved by the block call that runs now; None outside of regions.
    """

    replays: int = 0
    frame: Recorder | Filler | None = None


#: Of the calling thread.
current = _Current()


def is_replaying() -> bool:
    """True while the calling thread computes a block again for backward.

    For code in a model's forward that must act once per step, such as counters or logging.
    """
    return current.replays > 0
