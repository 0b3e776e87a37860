"""Bytes and seconds, read and written."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reforward._errors import InputError
from reforward._units import GIB, KIB, MIB, format_bytes, format_seconds, parse_bytes, parse_share


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6GiB", 6 * GIB), ("900MB", 900 * 10**6), ("1.5 GB", 1_500_000_000), (" 2 kib ", 2 * KIB), ("512", 512),
        ("7B", 7), ("1e9", 10**9), (".5MiB", MIB // 2), (4096, 4096), (1e6, 10**6), ("3TB", 3 * 10**12),
    ],
)  # fmt: skip
def test_parse_bytes(text: object, expected: int):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "6 GiG", "six", "-1GiB", "0", "0.5", 0, -3, math.nan, math.inf, "nan", True, None, [1], "60%", 10**400],
)
def test_what_is_not_bytes(text: object):
    with pytest.raises(InputError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("60%", (0.6, False)), (" 12.5 % ", (0.125, False)), ("60%device", (0.6, True)), ("50% Device", (0.5, True))],
)
def test_parse_share(text: str, expected: tuple[float, bool]):
    assert parse_share(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["6GiB", "60", "%", "60%gpu", "-5%"])
def test_what_is_no_share(text: str):
    assert parse_share(text) is None


@pytest.mark.parametrize("text", ["0%", "9" * 400 + "%"])
def test_a_share_of_nothing_or_everything(text: str):
    with pytest.raises(InputError, match="give a share above 0%"):
        parse_share(text)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536, "1.50 KiB"), (10 * MIB, "10.0 MiB"),
        (999 * MIB, "999 MiB"), (1000 * MIB, "0.98 GiB"), (-2 * GIB, "-2.00 GiB"), (5000 * 2**40, "5000 TiB"),
    ],
)  # fmt: skip
def test_format_bytes(count: float, expected: str):
    assert format_bytes(count) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0.00 µs"), (2.5e-6, "2.50 µs"), (0.0021, "2.10 ms"), (0.0456, "45.6 ms"), (1, "1.00 s"),
        (123.4, "123 s"), (-0.5, "-500 ms"),
    ],
)  # fmt: skip
def test_format_seconds(seconds: float, expected: str):
    assert format_seconds(seconds) == expected


@given(st.integers(1, 2**49))
def test_formatted_bytes_read_back_to_three_digits(count: int):
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=6e-3)
