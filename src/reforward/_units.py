"""Bytes and seconds: parse and format. The only place that knows what a GiB is."""

from __future__ import annotations

import math
import re

from reforward._errors import InputError

KIB = 2**10
MIB = 2**20
GIB = 2**30

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 2**40,
}  # fmt: skip
_BYTES = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_SHARE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*%\s*(device)?\s*", re.IGNORECASE)


def parse_bytes(text: str | int | float) -> int:
    """Bytes from `"6GiB"`, `"900MB"`, `"1.5 GB"` or a plain number of bytes.

    Decimal units (kB, MB, GB) are powers of ten and binary ones (KiB, MiB, GiB) powers of two.

    Raises:
        InputError: not a number with a known unit, or not positive, or beyond 64 bits.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise InputError(f"a size in bytes must be a number or text like '6GiB', not {text!r}")
    if isinstance(text, str):
        match = _BYTES.fullmatch(text)
        if match is None or match[2].upper() not in _UNITS:
            raise InputError(f"can't read {text!r} as bytes; write for example '6GiB', '900MB' or 1500000000")
        value = float(match[1]) * _UNITS[match[2].upper()]
    else:
        value = text
    if not 1 <= value < 2**63:
        raise InputError(f"a size in bytes must be at least 1 and fit into 64 bits, not {text!r}")
    return int(value)


def parse_share(text: str) -> tuple[float, bool] | None:
    """`"60%"` → (0.6, False), `"60%device"` → (0.6, True); None if the text isn't a percentage.

    The flag says whether the share is of the device's memory rather than of the plain step's peak.

    Raises:
        InputError: a percentage that isn't finite and above 0.
    """
    match = _SHARE.fullmatch(text)
    if match is None:
        return None
    share = float(match[1]) / 100
    if not 0 < share < math.inf:
        raise InputError(f"a budget of {text!r} is nothing, or endless; give a share above 0%")
    return share, match[2] is not None


def check_count(name: str, value: object, *, least: int = 1, alternative: str = "") -> None:
    """Refuses what isn't a whole number of at least `least`.

    Raises:
        InputError: it isn't.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}{alternative}, not {value!r}")


def format_bytes(count: float) -> str:
    """`1536` → `"1.50 KiB"`; three significant digits, binary units."""
    sign, count = ("-", -count) if count < 0 else ("", count)
    if count < KIB:
        return f"{sign}{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= KIB
        if count < 999.5 or unit == "TiB":
            digits = 2 if count < 9.995 else 1 if count < 99.95 else 0
            return f"{sign}{count:.{digits}f} {unit}"
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """`0.0021` → `"2.10 ms"`; three significant digits."""
    for scale, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= scale or unit == "µs":
            value = seconds / scale
            digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
            return f"{value:.{digits}f} {unit}"
    raise AssertionError("unreachable")
