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
from operator import is_
from typing import Any, Literal

import torch
from torch import nn

from reforward import _torch
from reforward._errors import ReplayError

# Buffers up to this size are copied before every forward; of larger ones, only those that a forward was seen to write.
_SMALL_BUFFER_BYTES = 64 * 1024
_MISSING = object()


Part = Literal["cpu", "devices", "python", "numpy"]
ALL_PARTS: frozenset[Part] = frozenset(("cpu", "devices", "python", "numpy"))
TORCH_PARTS: frozenset[Part] = frozenset(("cpu", "devices"))


@dataclass(frozen=True, kw_only=True)
class RngState:
    """States of the random streams: torch's CPU and device generators, Python's `random`, numpy's legacy generator.

    A part that wasn't captured is None.
    """

    cpu: bytes | None = None
    devices: tuple[tuple[torch.device, bytes], ...] | None = None
    python: Any = None
    numpy: Any = None

    @classmethod
    def capture(cls, devices: tuple[torch.device, ...] = (), parts: frozenset[Part] = ALL_PARTS) -> RngState:
        """The states now. In a dry run nothing is computed, so torch draws nothing and isn't asked."""
        torch_too = not _torch.in_fake_mode()
        return cls(
            cpu=_to_bytes(torch.get_rng_state()) if torch_too and "cpu" in parts else None,
            devices=_device_states(devices) if torch_too and "devices" in parts else None,
            python=random.getstate() if "python" in parts else None,
            numpy=_numpy_state() if "numpy" in parts else None,
        )

    def apply(self) -> None:
        """Sets the streams of the captured parts to this state."""
        if self.cpu is not None:
            torch.set_rng_state(_from_bytes(self.cpu))
        for device, state in self.devices or ():
            torch.get_device_module(device).set_rng_state(_from_bytes(state), device)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            kind, keys, position, has_gauss, gauss = self.numpy
            sys.modules["numpy"].random.set_state((kind, _numpy_keys(keys), position, has_gauss, gauss))

    def shared_with(self, earlier: RngState) -> RngState:
        """This state, with each part that is as it was earlier taken from there: an unchanged part is stored once."""
        return RngState(**{part: _same(getattr(earlier, part), getattr(self, part)) for part in ALL_PARTS})

    def differing(self, other: RngState) -> frozenset[Part]:
        """The parts in which two states that share what is equal differ."""
        return frozenset(part for part in ALL_PARTS if getattr(self, part) is not getattr(other, part))

    def moved_since(self, earlier: RngState) -> RngState:
        """This state, reduced to the parts that moved since: applying it does what was drawn meanwhile, and no more."""
        return self.only(self.shared_with(earlier).differing(earlier))

    def only(self, parts: frozenset[Part]) -> RngState:
        """This state, reduced to some parts."""
        return RngState(**{part: getattr(self, part) for part in parts})


def _same(earlier: Any, now: Any) -> Any:
    return earlier if earlier == now else now


def _device_states(devices: tuple[torch.device, ...]) -> tuple[tuple[torch.device, bytes], ...]:
    return tuple((d, _to_bytes(torch.get_device_module(d).get_rng_state(d))) for d in devices)


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
            if getattr(module, name, None) is buffer and not _written(buffer, version, copy):
                continue
            writes.add(key)
            if not _written(buffer, version, copy):
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


def _written(buffer: torch.Tensor, version: int, copy: torch.Tensor | None) -> bool:
    """Whether a buffer was written. Batch norm's kernel writes its running statistics without counting it as a write."""
    if _torch.version(buffer) != version:
        return True
    return copy is not None and not _torch.in_fake_mode() and not torch.equal(buffer, copy)


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    if len(before) == len(now) and all(map(is_, before.values(), now.values())):  # the common case, at C's speed
        return []
    changed = [key for key, value in now.items() if before.get(key, _MISSING) is not value]
    return changed + [key for key in before if key not in now]


def _set(module: nn.Module, attributes: dict[str, Any]) -> None:
    for key, value in attributes.items():
        if value is _MISSING:
            module.__dict__.pop(key, None)
        else:
            module.__dict__[key] = value


class Fence:
    """The world before one call's forward. See the module's docstring.

    Args:
        state: of the call's modules; None if there are none.
        devices: accelerators that the call may draw random numbers on.
        before: the fence of the call before, whose random state is shared as far as nothing was drawn since.

    Attributes:
        rng: the random streams when the call began.
    """

    __slots__ = ("__weakref__", "_autocast", "_next", "_state", "rng")

    def __init__(self, state: ModuleState | None, devices: tuple[torch.device, ...], before: Fence | None):
        self.rng = RngState.capture(devices)
        self._next: RngState | None = None
        if before is not None:
            self.rng = before._next = self.rng.shared_with(before.rng)
        self._autocast = Autocast.capture(tuple({"cpu", *(d.type for d in devices)}))
        self._state = state

    def seal(self, writes: set[tuple[int, str]]) -> None:
        """To be called when the forward has ended."""
        if self._state is not None:
            self._state.seal(writes)
            if not self._state:
                self._state = None

    @property
    def drawn(self) -> frozenset[Part]:
        """The streams that may have moved between the begin of this call and of the next one."""
        return ALL_PARTS if self._next is None else self.rng.differing(self._next)

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """The random streams, modules and autocast as the forward found them.

        The modules are put back on exit; the streams are left where the replay takes them: whoever replays restores them
        once, when all calls are done.
        """
        self.rng.only(self.drawn).apply()
        with self._autocast.applied():
            if self._state is None:
                yield
            else:
                with self._state.rewound():
                    yield
