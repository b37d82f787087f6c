"""People's units in, SI out, and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentamesh.units import format_bytes, format_count, format_flop_per_s, format_path, format_seconds, parse_bytes, parse_bytes_per_s, parse_count


@pytest.mark.parametrize(
    ("text", "value"),
    [("80 GB", 80 * 10**9), ("79.2 GiB", round(79.2 * 2**30)), ("96gb", 96 * 10**9), ("1_000", 1000), ("512 k", 512_000), (1.5e9, 1_500_000_000)],
)
def test_bytes(text: str | float, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4M tokens", 4_000_000),
        ("128k", 128_000),
        ("500 steps", 500),
        ("1 epoch", 1),
        ("8.03B", 8_030_000_000),  # 8029999999.999999 in floating point
        ("2e9", 2 * 10**9),
        (3.0, 3),
        (2**60 + 1, 2**60 + 1),  # more digits than a double has
    ],
)
def test_counts(text: str | float, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("200gbps", 25e9), ("200 Gb/s", 25e9), ("400 Gbit/s", 50e9), ("50 GB/s", 50e9), ("7.5 GB/s", 7.5e9), ("5e9", 5e9), (5e9, 5e9)],
)
def test_rates_know_bits_from_bytes(text: str | float, value: float) -> None:
    assert parse_bytes_per_s(text) == value


@pytest.mark.parametrize("parse", [parse_bytes, parse_count, parse_bytes_per_s])
@pytest.mark.parametrize("wrong", ["", "many", "-3", "3 parsecs", "GB", "1.2.3", True, None, [], math.nan, math.inf])
def test_nonsense_is_refused_with_an_example(parse: Callable[[Any], float], wrong: object) -> None:
    with pytest.raises(ValueError, match="write it like"):
        parse(wrong)


@pytest.mark.parametrize("ambiguous", ["400G", "400 g", "50 GBps"])
def test_a_rate_says_bits_or_bytes(ambiguous: str) -> None:
    with pytest.raises(ValueError, match="bits"):
        parse_bytes_per_s(ambiguous)


def test_a_count_is_whole() -> None:
    with pytest.raises(ValueError, match="not a whole number"):
        parse_count("1.5 steps")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (12, "12 B"), (999.7, "1 kB"), (999_700, "1 MB"), (16.1e9, "16.1 GB"), (1128.9e9, "1.13 TB"), (5e18, "5,000 PB")],
)
def test_bytes_for_people(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (999, "999"), (9_999, "9,999"), (134_515_008, "134.5M"), (8_030_261_248, "8.03B"), (999_999, "1M"), (10_000, "10k")]
)
def test_counts_for_people(value: float, text: str) -> None:
    assert format_count(value) == text


def test_flop_for_people() -> None:
    assert format_flop_per_s(209e12) == "209 TFLOP/s"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (340e-6, "340 us"),
        (999.9e-6, "1 ms"),
        (12.5e-3, "12.5 ms"),
        (0.9999, "1 s"),
        (3.2, "3.2 s"),
        (119.7, "2 min 00 s"),
        (260, "4 min 20 s"),
        (3599.7, "1 h 00 min"),
        (2 * 3600 + 5 * 60, "2 h 05 min"),
        (76 * 3600, "3 d 4 h"),
    ],
)
def test_seconds_for_people(value: float, text: str) -> None:
    assert format_seconds(value) == text


@given(st.integers(0, 10**18))
def test_what_is_printed_can_be_read(value: int) -> None:
    read = parse_bytes(format_bytes(value))
    assert read == pytest.approx(value, rel=0.006)


@given(st.integers(0, 10**15))
def test_counts_that_are_printed_can_be_read(value: int) -> None:
    assert parse_count(format_count(value)) == pytest.approx(value, rel=0.0006)


def test_paths_are_short_inside_the_current_folder_and_whole_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert format_path(tmp_path / "here/a/b.jsonl") == "a/b.jsonl"
    assert format_path(tmp_path / "heretic.jsonl") == str(tmp_path / "heretic.jsonl")
    assert format_path(Path("a.jsonl")) == "a.jsonl"
