"""Random streams: torch's generators, Python's `random`, numpy's legacy generator, and generator objects.

States are values. They are captured at every call of a region, so capturing is cheap and an unchanged part is stored
once.
"""

from __future__ import annotations

import ctypes
import operator
import random
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch

from reforward import _torch

Part = Literal["cpu", "devices", "python", "numpy"]
ALL_PARTS: frozenset[Part] = frozenset(("cpu", "devices", "python", "numpy"))
TORCH_PARTS: frozenset[Part] = frozenset(("cpu", "devices"))

_MERSENNE_BYTES = 624 * 4 + 4  # key and position


class _Known(threading.local):
    """What is known in this thread: the state captured last, whose parts the next one shares, and where numpy's is."""

    latest: RngState | None = None
    numpy: _NumpyState | None = None
    # Here a state is put to set a generator to it: it is done so often that memory of its own each time would cost.
    buffer: torch.Tensor | None = None


class RngState(NamedTuple):
    """States of the global streams: torch's CPU and device generators, Python's `random`, numpy's legacy generator.

    A part that wasn't captured is None.
    """

    cpu: bytes | None = None
    devices: tuple[tuple[torch.device, bytes], ...] | None = None
    python: Any = None
    numpy: _NumpyState | None = None

    @classmethod
    def capture(cls, devices: tuple[torch.device, ...] = (), parts: frozenset[Part] = ALL_PARTS) -> RngState:
        """The states now; parts that are as they were at the last capture are stored once. In a dry run nothing is
        computed, so torch draws nothing and isn't asked."""
        torch_too = not _torch.in_fake_mode()
        state = cls(
            _to_bytes(torch.default_generator.get_state()) if torch_too and "cpu" in parts else None,
            _device_states(devices) if torch_too and "devices" in parts else None,
            _python_state() if "python" in parts else None,
            _NumpyState.capture() if "numpy" in parts else None,
        )
        if _known.latest is not None:
            state = cls(*map(_same, _known.latest, state))
        if parts is ALL_PARTS:
            _known.latest = state
        return state

    def apply(self) -> None:
        """Sets the streams of the captured parts to this state."""
        if self.cpu is not None:
            torch.default_generator.set_state(_from_bytes(self.cpu))
        _apply(self.devices, self.python, self.numpy)

    def moved_since(self, earlier: RngState) -> RngState:
        """This state, reduced to the parts that moved since: applying it does what was drawn meanwhile, and no more."""
        moved = {p: getattr(self, p) for p in ALL_PARTS if getattr(self, p) != getattr(earlier, p)}
        return RngState(**moved)


def _apply(devices: tuple[tuple[torch.device, bytes], ...] | None, python: Any, numpy: _NumpyState | None) -> None:
    for device, state in devices or ():
        torch.get_device_module(device).set_rng_state(_from_bytes(state), device)
    if python is not None:
        _set_python_state(python)
    if numpy is not None:
        numpy.apply()


class Bookmark:
    """Where the global streams are, to come back to once. It is made at every replay, so it copies less than an
    `RngState`, which is compared and kept. The state isn't held as a tensor: that would be memory of the step, at its
    peak, which no dry run sees."""

    __slots__ = ("_cpu", "_devices", "_numpy", "_python")

    def __init__(self, devices: tuple[torch.device, ...]):
        torch_too = not _torch.in_fake_mode()
        self._cpu = _to_bytes(torch.default_generator.get_state()) if torch_too else None
        self._devices = _device_states(devices) if torch_too else ()
        self._python = _python_state()
        self._numpy = _NumpyState.capture()

    def go_back(self) -> None:
        """Sets the streams to where they were."""
        if self._cpu is not None:
            torch.default_generator.set_state(_from_bytes(self._cpu))
        _apply(self._devices, self._python, self._numpy)


# Python's stream. `random.getstate()` makes 625 integers, which takes longer than a small block's forward. CPython
# keeps position and key, 32 bits each, behind the head of the generator object; where that is found to be so, they are
# copied.
_HIDDEN: Any = random.random.__self__  # the generator behind the functions of `random` # pyright: ignore
_MEMORY = (ctypes.c_char * _MERSENNE_BYTES).from_address(id(_HIDDEN) + object.__basicsize__)


def _in_memory() -> tuple[int, ...]:
    position, *key = struct.unpack("=625I", _MEMORY.raw)
    return (*key, position)


_MEMORY_IS_KNOWN = (
    sys.implementation.name == "cpython"
    and type(_HIDDEN).__basicsize__ >= object.__basicsize__ + _MERSENNE_BYTES
    and _in_memory() == random.getstate()[1]
)


def _python_state() -> Any:
    """The state of `random`, quickly: memory and the normal deviate put aside, or what `getstate` returns."""
    if _MEMORY_IS_KNOWN:
        return _MEMORY.raw, _HIDDEN.gauss_next
    return random.getstate()


def _set_python_state(state: Any) -> None:
    if state == _python_state():
        return
    if _MEMORY_IS_KNOWN:
        memory, deviate = state
        position, *key = struct.unpack("=625I", memory)
        state = _HIDDEN.VERSION, (*key, position), deviate
    random.setstate(state)


_known = _Known()


@dataclass(frozen=True, kw_only=True)
class _NumpyState:
    """numpy's legacy generator.

    Reading it through numpy takes longer than a small block's forward, so its memory is looked at first, by the address
    that numpy publishes for that. What memory doesn't show is a normal deviate put aside for the next draw. Where none
    was put aside and memory is the same, nothing was drawn. (Whoever puts back by hand a state with a deviate, after
    drawing just that one, isn't seen.)

    Attributes:
        memory: key and position as they lie in memory; None if it isn't a Mersenne twister.
        state: what `numpy.random.get_state()` returned.
    """

    memory: bytes | None
    state: Any

    @classmethod
    def capture(cls) -> _NumpyState | None:
        """The state now; None if numpy's random module was never imported."""
        module = sys.modules.get("numpy.random")
        if module is None:
            return None
        memory = _numpy_memory(module)
        known = _known.numpy
        if known is None or memory is None or memory != known.memory or known.state[3]:
            known = _known.numpy = cls(memory=memory, state=module.get_state(legacy=memory is not None))
        return known

    def apply(self) -> None:
        if self.capture() != self:
            sys.modules["numpy.random"].set_state(self.state)
            _known.numpy = self

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, _NumpyState) and _comparable(self.state) == _comparable(other.state)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _numpy_memory(module: Any) -> bytes | None:
    generator = module.get_bit_generator()
    if type(generator) is not module.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, _MERSENNE_BYTES)


def _comparable(state: Any) -> Any:
    if isinstance(state, dict):  # another kind of generator
        return repr(state)
    kind, keys, *rest = state
    return kind, keys.tobytes(), rest


def _same(earlier: Any, now: Any) -> Any:
    return earlier if earlier is not None and earlier == now else now


_is_cpu = operator.attrgetter("is_cpu")


def accelerators(tensors: list[torch.Tensor]) -> tuple[torch.device, ...]:
    """The devices of some tensors that have random streams of their own."""
    if all(map(_is_cpu, tensors)):
        return ()
    return tuple(
        [device for device in dict.fromkeys([t.device for t in tensors]) if device.type not in ("cpu", "meta")]
    )


def _device_states(devices: tuple[torch.device, ...]) -> tuple[tuple[torch.device, bytes], ...]:
    return tuple([(d, _to_bytes(torch.get_device_module(d).get_rng_state(d))) for d in devices])


def _to_bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())  # quicker than through numpy


def _from_bytes(state: bytes) -> torch.Tensor:
    """The state as generators take it; good until the next call in this thread."""
    if _known.buffer is None or _known.buffer.numel() != len(state):
        _known.buffer = torch.frombuffer(bytearray(len(state)), dtype=torch.uint8)
    ctypes.memmove(_known.buffer.data_ptr(), state, len(state))
    return _known.buffer


class OwnStream(NamedTuple):
    """A generator object that isn't a global one, and its state."""

    generator: Any
    state: Any

    @classmethod
    def among(cls, values: Iterable[Any]) -> list[OwnStream]:
        """The generators among some values, each with its state now."""
        return [
            cls(value, ways.read(value))
            for value in values
            if (ways := _ways_of(type(value))) is not None and not _is_global(value)
        ]

    def apply(self) -> None:
        """Sets the generator to this state."""
        _known_ways(self.generator).write(self.generator, self.state)

    def now(self) -> OwnStream:
        """The same generator with its present state."""
        return OwnStream(self.generator, _known_ways(self.generator).read(self.generator))


def _is_global(generator: Any) -> bool:
    """Whether a generator is one of the global ones, which are looked after as such."""
    if generator is _HIDDEN or generator is torch.default_generator:
        return True
    module = sys.modules.get("numpy.random")
    return module is not None and (generator is module.rand.__self__ or generator is module.get_bit_generator())


class _Ways(NamedTuple):
    """How the state of generators of one class is read and set."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]


def _known_ways(generator: Any) -> _Ways:
    ways = _ways_of(type(generator))
    assert ways is not None
    return ways


@cache
def _ways_of(cls: type) -> _Ways | None:
    """How generators of a class are dealt with; None if its objects aren't generators with a state."""
    if issubclass(cls, torch.Generator):
        return _Ways(lambda generator: generator.get_state(), lambda generator, state: generator.set_state(state))
    if issubclass(cls, random.Random):
        if issubclass(cls, random.SystemRandom):  # the machine's entropy
            return None
        return _Ways(lambda generator: generator.getstate(), lambda generator, state: generator.setstate(state))
    if issubclass(cls, torch.quasirandom.SobolEngine):
        return _Ways(_read_sobol, _write_sobol)
    module = sys.modules.get("numpy.random")
    if module is None:
        return None
    if issubclass(cls, module.BitGenerator):
        return _Ways(_read_bits, _write_bits)
    if issubclass(cls, module.Generator):
        return _Ways(
            lambda generator: _read_bits(generator.bit_generator),
            lambda generator, state: _write_bits(generator.bit_generator, state),
        )
    if issubclass(cls, module.RandomState):
        return _Ways(lambda generator: generator.get_state(), lambda generator, state: generator.set_state(state))
    return None


def _read_sobol(engine: Any) -> Any:
    return engine.num_generated, engine.quasi.clone()


def _write_sobol(engine: Any, state: Any) -> None:
    engine.num_generated, engine.quasi = state[0], state[1].clone()


def _read_bits(generator: Any) -> Any:
    """Also how many generators it has spawned, which decides what the next one draws."""
    seeds = generator.seed_seq
    return generator.state, seeds, getattr(seeds, "n_children_spawned", None)


def _write_bits(generator: Any, state: Any) -> None:
    drawn, seeds, spawned = state
    if spawned != getattr(seeds, "n_children_spawned", None):  # can't be set: another one spawns in its place
        seeds = type(seeds)(
            entropy=seeds.entropy, spawn_key=seeds.spawn_key, pool_size=seeds.pool_size, n_children_spawned=spawned
        )
    if seeds is generator.seed_seq:
        generator.state = drawn
    else:
        generator.__setstate__((drawn, seeds))
