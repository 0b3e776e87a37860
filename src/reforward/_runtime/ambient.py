"""Settings around a call that change what it computes, put in force again for its replay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from reforward import _torch

_BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
)


class Ambient(NamedTuple):
    """Settings around a call.

    Attributes:
        autocast: on or off, and its type, per device type.
        cache: whether autocast keeps casts of weights.
        attention: which of `_BACKENDS` are allowed.
        numerics: default type, deterministic algorithms, precision of float32 products, threads.
        modes: function modes, such as `with torch.device(...)`, from the outermost in; compared by identity.
        parametrizations: the values that `parametrize.cached()` holds; None outside of it.
    """

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    attention: tuple[bool, bool, bool, bool]
    numerics: tuple[Any, ...]
    modes: tuple[Any, ...]
    parametrizations: _torch.CachedParametrizations | None

    @classmethod
    def capture(cls, devices: tuple[torch.device, ...]) -> Ambient:
        """The settings now, for the CPU and these devices."""
        return cls._of_types(("cpu", *dict.fromkeys(device.type for device in devices)))

    @classmethod
    def _of_types(cls, device_types: tuple[str, ...]) -> Ambient:
        return cls(
            tuple([(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in device_types]),
            torch.is_autocast_cache_enabled(),
            _attention_backends(),
            tuple([read() for read, _ in _NUMERICS]),
            _torch.function_modes(),
            _torch.CachedParametrizations.now(),
        )

    def enter(self) -> ExitStack | None:
        """Puts these settings in force until the stack that is returned is closed; None if they are in force."""
        now = self._of_types(tuple([device for device, *_ in self.autocast]))
        if self == now:
            return None
        stack = ExitStack()
        for device, enabled, dtype in self.autocast:
            stack.enter_context(torch.autocast(device, dtype, enabled, self.cache))
        if self.attention != now.attention:
            stack.enter_context(sdpa_kernel([b for b, on in zip(_BACKENDS, self.attention, strict=True) if on]))
        for (_, write), wanted, current in zip(_NUMERICS, self.numerics, now.numerics, strict=True):
            if wanted != current:
                write(wanted)
                stack.callback(write, current)
        if self.modes != now.modes:
            stack.enter_context(_torch.under_function_modes(self.modes))
        if self.parametrizations != now.parametrizations:
            stack.enter_context(_torch.CachedParametrizations.shown(self.parametrizations))
        return stack


def _attention_backends() -> tuple[bool, bool, bool, bool]:
    """Which of `_BACKENDS` are allowed; the switches live under `cuda` and hold for every device."""
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_determinism(state: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])


# Settings of the whole process: how each is read and written.
_NUMERICS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_determinism, _set_determinism),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_num_threads, torch.set_num_threads),
)
