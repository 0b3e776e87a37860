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
        numerics: default type, deterministic algorithms, precision of float32 products, threads, kernels allowed.
        modes: function modes, such as `with torch.device(...)`, from the outermost in; compared by identity.
        parametrizations: the values that `parametrize.cached()` holds; None outside of it.
    """

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    attention: tuple[bool, ...]
    numerics: tuple[Any, ...]
    modes: tuple[Any, ...]
    parametrizations: _torch.CachedParametrizations | None

    @classmethod
    def capture(cls, devices: tuple[torch.device, ...]) -> Ambient:
        """The settings now, for the CPU and these devices."""
        return cls._of_types(("cpu", *dict.fromkeys([device.type for device in devices])) if devices else ("cpu",))

    @classmethod
    def _of_types(cls, device_types: tuple[str, ...]) -> Ambient:
        return cls(
            tuple([(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in device_types]),
            torch.is_autocast_cache_enabled(),
            tuple([read() for read in _torch.attention_switches]),
            tuple([read() for read in _READ_NUMERICS]),
            _torch.function_modes(),
            _torch.CachedParametrizations.now(),
        )

    def enter(self) -> ExitStack | None:
        """Puts these settings in force until the stack that is returned is closed; None if they are in force."""
        now = self._of_types(tuple([device[0] for device in self.autocast]))
        if self == now:
            return None
        with ExitStack() as stack:
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
            return stack.pop_all()


def _set_deterministic(on: bool) -> None:
    torch.use_deterministic_algorithms(on, warn_only=_torch.warns_of_nondeterminism())


def _set_warn_only(on: bool) -> None:
    torch.use_deterministic_algorithms(_torch.is_deterministic(), warn_only=on)


# Settings of the whole process: how each is read and written.
_NUMERICS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_torch.is_deterministic, _set_deterministic),
    (_torch.warns_of_nondeterminism, _set_warn_only),
    (_torch.float32_precision, _torch.set_float32_precision),
    (torch.get_num_threads, torch.set_num_threads),
    *_torch.kernel_switches,
)
_READ_NUMERICS = [read for read, _ in _NUMERICS]
