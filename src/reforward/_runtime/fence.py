"""What must not happen twice or differently: random streams, buffers, attributes, autocast.

A `Fence` is taken before a call's forward and sealed after it. `rewound()` puts the world back to where that forward began
and, when left, to where it was on entry. What didn't change isn't stored: a call that draws nothing shares its predecessor's
random state, a call that writes no buffer keeps none.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from reforward import _torch
from reforward._errors import ReplayError

# Buffers up to this size are copied before every forward; of larger ones, only those that a forward was seen to write.
_SMALL_BUFFER_BYTES = 64 * 1024
_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class RngState:
    """States of the random streams: torch's CPU and device generators, Python's `random`, numpy's legacy generator."""

    cpu: bytes
    devices: tuple[tuple[torch.device, bytes], ...]
    python: Any
    numpy: Any

    @classmethod
    def capture(cls, devices: tuple[torch.device, ...] = (), like: RngState | None = None) -> RngState:
        """The states now; `like` itself if they are the same, so that an unchanged state is stored once."""
        fake = _torch.in_fake_mode()
        state = cls(
            cpu=b"" if fake else _to_bytes(torch.get_rng_state()),
            devices=() if fake else tuple((d, _to_bytes(torch.get_device_module(d).get_rng_state(d))) for d in devices),
            python=random.getstate(),
            numpy=_numpy_state(),
        )
        return like if like is not None and state == like else state

    def apply(self, now: RngState | None = None) -> None:
        """Sets the streams to this state; parts that `now` shows to be there already are left alone."""
        if self.cpu and (now is None or now.cpu != self.cpu):
            torch.set_rng_state(_from_bytes(self.cpu))
        for device, state in self.devices:
            torch.get_device_module(device).set_rng_state(_from_bytes(state), device)
        if now is None or now.python != self.python:
            random.setstate(self.python)
        if self.numpy is not None and (now is None or now.numpy != self.numpy):
            kind, keys, position, has_gauss, gauss = self.numpy
            sys.modules["numpy"].random.set_state((kind, _numpy_keys(keys), position, has_gauss, gauss))


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    kind, keys, position, has_gauss, gauss = numpy.random.get_state()
    return kind, keys.tobytes(), position, has_gauss, gauss


def _numpy_keys(keys: bytes) -> Any:
    numpy = sys.modules["numpy"]
    return numpy.frombuffer(keys, dtype=numpy.uint32)


def _to_bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _from_bytes(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Autocast:
    """Autocast settings per device type."""

    settings: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool

    @classmethod
    def capture(cls, device_types: tuple[str, ...]) -> Autocast:
        return cls(
            settings=tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in device_types),
            cache=torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Autocast as captured; nothing is entered where it is so already."""
        with ExitStack() as stack:
            for device, enabled, dtype in self.settings:
                if (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) != (enabled, dtype):
                    stack.enter_context(torch.autocast(device, dtype, enabled, self.cache))
            yield


class ModuleState:
    """What a forward writes to its modules: buffers, in place or by assignment, and Python attributes.

    Taken before the forward; `seal` then drops all that the forward left alone.

    Args:
        name: the block, for messages.
        modules: the block's modules, each once.
        writes: names of large buffers that a forward was seen to write, shared by the calls of one block; None at the
            first call, when every buffer is copied because nothing is known yet.
    """

    def __init__(self, name: str, modules: list[nn.Module], writes: set[tuple[int, str]] | None):
        self._name = name
        self._attributes = [(m, dict(m.__dict__)) for m in modules]
        self._buffers = [
            (
                m,
                key,
                b,
                _torch.version(b),
                b.detach().clone() if self._is_copied(b, (i, key), writes) else None,
                (i, key),
            )
            for i, m in enumerate(modules)
            for key, b in _torch.own_buffers(m).items()
        ]

    @staticmethod
    def _is_copied(buffer: torch.Tensor, key: tuple[int, str], writes: set[tuple[int, str]] | None) -> bool:
        return writes is None or key in writes or buffer.nbytes <= _SMALL_BUFFER_BYTES

    def seal(self, writes: set[tuple[int, str]]) -> None:
        """Keeps what the forward changed, and adds the buffers it wrote to `writes`.

        Raises:
            ReplayError: a large buffer was written that no earlier forward wrote, so its value before is lost.
        """
        attributes = [
            (module, {k: before.get(k, _MISSING) for k in _changed(before, module.__dict__)})
            for module, before in self._attributes
        ]
        self._attributes = [(module, before) for module, before in attributes if before]
        kept = []
        for module, name, buffer, version, copy, key in self._buffers:
            if getattr(module, name, None) is buffer and _torch.version(buffer) == version:
                continue
            writes.add(key)
            if _torch.version(buffer) == version:
                copy = buffer  # replaced, not written: the old tensor still holds the old value
            elif copy is None:
                raise ReplayError(
                    f"block {self._name!r} wrote its buffer {name!r} ({buffer.nbytes} bytes) in place in this forward but"
                    " in none before, so its value can't be brought back for the replay; run one forward of the whole"
                    " step before training, or leave this block out of the plan"
                )
            kept.append((module, name, buffer, version, copy, key))
        self._buffers = kept

    def __bool__(self) -> bool:
        return bool(self._attributes or self._buffers)

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """The modules as the forward found them; on exit as they are now.

        Buffers are exchanged, not overwritten: their versions stay, so autograd's own checks go on working.
        """
        buffers = [(module, name, getattr(module, name, None)) for module, name, *_ in self._buffers]
        attributes = [
            (module, {k: module.__dict__.get(k, _MISSING) for k in before}) for module, before in self._attributes
        ]
        try:
            for module, name, _, _, copy, _ in self._buffers:
                assert copy is not None
                setattr(module, name, copy.clone())
            for module, before in self._attributes:
                _set(module, before)
            yield
        finally:
            for module, name, buffer in buffers:
                setattr(module, name, buffer)
            for module, now in attributes:
                _set(module, now)


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    changed = [key for key, value in now.items() if before.get(key, _MISSING) is not value]
    return changed + [key for key in before if key not in now]


def _set(module: nn.Module, attributes: dict[str, Any]) -> None:
    for key, value in attributes.items():
        if value is _MISSING:
            module.__dict__.pop(key, None)
        else:
            module.__dict__[key] = value


class Fence:
    """The world before one call's forward. See the module's docstring."""

    __slots__ = ("_autocast", "_state", "rng")

    def __init__(self, state: ModuleState | None, devices: tuple[torch.device, ...], like: RngState | None):
        self.rng = RngState.capture(devices, like)
        self._autocast = Autocast.capture(tuple({"cpu", *(d.type for d in devices)}))
        self._state = state

    def seal(self, writes: set[tuple[int, str]]) -> None:
        """To be called when the forward has ended."""
        if self._state is not None:
            self._state.seal(writes)
            if not self._state:
                self._state = None

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """The random streams, modules and autocast as the forward found them.

        The modules are put back on exit; the streams are left where the replay takes them: whoever replays restores them
        once, when all calls are done.
        """
        self.rng.apply()
        with ExitStack() as stack:
            stack.enter_context(self._autocast.applied())
            if self._state is not None:
                stack.enter_context(self._state.rewound())
            yield
