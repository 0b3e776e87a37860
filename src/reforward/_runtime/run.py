"""Several block calls as one region: which call continues which run.

A run is followed by the identity of the tensor that flows through it: a call continues an open run if it is given a
tensor that the run's last call returned and it is the run's next member. Nothing is stored in the modules, so
interleaved calls, two forwards before one backward and micro-batches in flight don't disturb each other, and the loop
over the blocks may be written in any way.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from reforward import _torch
from reforward._plan import Node, leaves
from reforward._runtime.replay import Recording


class OpenRun:
    """A run that may go on: the output of its last call, held weakly. If it is overwritten, the run can't go on from
    it.

    Attributes:
        recording: the live region.
        next_leaf: the member that comes next.
    """

    __slots__ = ("_outputs", "_versions", "next_leaf", "recording")

    def __init__(self, recording: Recording, next_leaf: int, outputs: list[Any]):
        self.recording = recording
        self.next_leaf = next_leaf
        self._outputs = [weakref.ref(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in outputs]
        self._versions = [_torch.version(leaf) if isinstance(leaf, torch.Tensor) else 0 for leaf in outputs]

    def outputs(self) -> list[torch.Tensor | None]:
        """The leaves of the last output, as far as they live and are as the call returned them; None for the others."""
        alive = [reference() if reference is not None else None for reference in self._outputs]
        return [
            leaf if leaf is not None and _torch.version(leaf) == version else None
            for leaf, version in zip(alive, self._versions, strict=True)
        ]

    def is_intact(self, output: torch.Tensor) -> bool:
        """Whether a leaf of the output is as the call returned it."""
        return any(output is leaf for leaf in self.outputs())


class Chains:
    """The open runs of one attachment, by the tensors that would continue them."""

    def __init__(self):
        self._open: dict[int, tuple[weakref.ref[torch.Tensor], OpenRun]] = {}

    def continued_by(self, node: Node, path: str, arguments: list[Any]) -> OpenRun | None:
        """The open run of this node that a call of the block at `path` with these argument leaves continues."""
        for leaf in arguments:
            if not isinstance(leaf, torch.Tensor):
                continue
            found = self._open.get(id(leaf))
            if found is None or found[0]() is not leaf:
                continue
            run = found[1]
            if run.is_intact(leaf) and run.recording.node is node and _leaf_path(node, run.next_leaf) == path:
                return run
        return None

    def add(self, run: OpenRun) -> None:
        """Remembers a run until its outputs are gone."""
        for tensor in run.outputs():
            if tensor is not None:
                key = id(tensor)
                reference = weakref.ref(tensor, lambda dead, key=key: self._forget(key, dead))
                self._open[key] = (reference, run)

    def close(self, run: OpenRun) -> None:
        """Forgets a run whose last output has been taken: a second taker starts a region of its own."""
        for tensor in run.outputs():
            if tensor is not None and (found := self._open.get(id(tensor))) is not None and found[1] is run:
                del self._open[id(tensor)]

    def _forget(self, key: int, dead: weakref.ref[torch.Tensor]) -> None:
        found = self._open.get(key)
        if found is not None and found[0] is dead:
            del self._open[key]


def _leaf_path(node: Node, index: int) -> str | None:
    for i, leaf in enumerate(leaves(node)):
        if i == index:
            return leaf.path
    return None
