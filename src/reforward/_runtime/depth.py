"""How many replays are running in a thread, one inside the other."""

from __future__ import annotations

import threading


class _Depth(threading.local):
    count: int = 0


#: Of the calling thread.
depth = _Depth()


def is_replaying() -> bool:
    """True while the calling thread computes a block again for backward.

    For code in a model's forward that must act once per step, such as counters or logging.
    """
    return depth.count > 0
