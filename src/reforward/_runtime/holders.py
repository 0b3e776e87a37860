"""What autograd keeps in the place of a tensor that backward needs."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

import torch

from reforward import _torch
from reforward._errors import MutationError, ReplayMismatchError
from reforward._runtime.current import current
from reforward._runtime.fingerprint import Print

#: A replay exchanges what modules hold and sets the global streams: two threads can't do that at once.
one_at_a_time = threading.RLock()


class _Replays(Protocol):
    """A live region."""

    def replay(self) -> None:
        """Fills the holders of what it saved."""
        ...


class Holder:
    """What autograd keeps in a tensor's place.

    Attributes:
        value: the tensor, once it is there.
        inner: the holder of a nested recording that stands behind this one.
        overwritten: the forward overwrote the tensor after it was saved.
    """

    __slots__ = ("__weakref__", "_name", "_recording", "_version", "inner", "overwritten", "value")

    def __init__(self, name: str, recording: _Replays | None, value: torch.Tensor | None = None):
        self._name = name
        self._recording = recording
        self.inner: Holder | None = None
        self.overwritten = False
        self.value: torch.Tensor | None = None
        self._version = 0
        if value is not None:
            self.fill(value)

    def fill(self, value: torch.Tensor) -> None:
        """Takes the tensor, which must be cut off from any graph."""
        self.value = value
        self._version = _torch.version_of_saved(value)

    def get(self) -> torch.Tensor:
        """The tensor; computed again now if it isn't there.

        Raises:
            MutationError: it was changed in place since it was saved; autograd would refuse it as well.
            ReplayMismatchError: the replay took another way than the forward did.
        """
        value = self.value
        if value is None:
            with one_at_a_time:  # the end of another thread's backward could take it away again
                if self.value is None:
                    self._compute()
                    if self.inner is not None:
                        return self.inner.get()
                value = self.value
        elif self._recording is None:
            _note_use()
        if value is None:
            raise ReplayMismatchError(
                f"block {self._name!r}: the replay saved fewer tensors for backward than the forward did. Its forward"
                " must do the same when it runs again: look for state that it changes, or leave this block out of the"
                " plan"
            )
        if self.overwritten or _torch.version_of_saved(value) != self._version:
            raise MutationError(
                f"block {self._name!r}: a tensor of shape {tuple(value.shape)} ({value.dtype}) needed for backward was"
                " changed by an in-place operation after it was saved; write the operation out of place, or move it"
                " behind the backward"
            )
        return value

    def _compute(self) -> None:
        """Replays, unless a nested recording will have the tensor."""
        if self.inner is None and self._recording is not None:
            _note_use()
            self._recording.replay()


class Slot(weakref.ref[Holder]):
    """A holder, held weakly, and what is known of the tensor that it stands for.

    Attributes:
        print: its fingerprint, if its values are compared.
    """

    __slots__ = ("dtype", "print", "shape")

    shape: torch.Size
    dtype: torch.dtype
    print: Print | None


def unpack(held: Holder | torch.Tensor) -> torch.Tensor:
    """The tensor of what autograd kept."""
    return held.get() if isinstance(held, Holder) else held


def _note_use() -> None:
    if current.frame is not None:
        current.frame.note_use()
