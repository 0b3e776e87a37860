"""What must not happen twice or differently: random streams, buffers, attributes, autocast.

A `Fence` is taken before a call's forward and sealed after it. `rewind()` puts the world back to where that forward
began and returns a function that undoes it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from reforward._runtime.module_state import ModuleState, Writes
from reforward._runtime.streams import OwnStream, RngState


@dataclass(frozen=True, kw_only=True)
class Ambient:
    """Settings around a call that change what it computes: autocast per device type, backends allowed for attention."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    attention: tuple[bool, bool, bool, bool]

    @classmethod
    def capture(cls, device_types: tuple[str, ...]) -> Ambient:
        return cls(
            autocast=tuple([(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in device_types]),
            cache=torch.is_autocast_cache_enabled(),
            attention=_attention_backends(),
        )

    def enter(self) -> ExitStack | None:
        """Puts these settings in force until the stack that is returned is closed; None if they are in force."""
        if self == self.capture(tuple([device for device, *_ in self.autocast])):
            return None
        stack = ExitStack()
        for device, enabled, dtype in self.autocast:
            stack.enter_context(torch.autocast(device, dtype, enabled, self.cache))
        allowed = [backend for backend, on in zip(_BACKENDS, self.attention, strict=True) if on]
        stack.enter_context(sdpa_kernel(allowed))
        return stack


_BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
)


def _attention_backends() -> tuple[bool, bool, bool, bool]:
    """Which of `_BACKENDS` are allowed; the switches live under `cuda` and hold for every device."""
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


class Fence:
    """The world before one call's forward. See the module's docstring.

    Args:
        state: of the call's modules.
        devices: accelerators that the call may draw random numbers on.
        given: leaves of the call's arguments; generators among them are rewound as well.
    """

    __slots__ = ("_ambient", "_rng", "_state", "_streams")

    def __init__(self, state: ModuleState, devices: tuple[torch.device, ...], given: list[Any]):
        self._rng = RngState.capture(devices)
        self._ambient = Ambient.capture(("cpu", *dict.fromkeys(d.type for d in devices)))
        self._streams = OwnStream.among([leaf for leaf in given if not isinstance(leaf, torch.Tensor)])
        self._state = state

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The parameters and buffers of the modules, as they are in place now."""
        return self._state.tensors

    def seal(self, writes: Writes) -> None:
        """To be called when the forward has ended."""
        self._state.seal(writes)

    def rewind(self) -> Callable[[], None]:
        """Puts random streams, modules and settings as the forward found them.

        Returns:
            A function that puts modules, generator objects and settings as they are now. The global streams are left
            where the replay takes them: whoever replays restores them once, when all calls are done.
        """
        undo_modules = self._state.rewind()
        streams = [stream.now() for stream in self._streams]
        settings = self._ambient.enter()
        self._rng.apply()
        for stream in self._streams:
            stream.apply()

        def undo() -> None:
            if settings is not None:
                settings.close()
            for stream in streams:
                stream.apply()
            undo_modules()

        return undo
