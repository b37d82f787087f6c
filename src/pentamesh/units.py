"""People's units in, SI numbers out, and back again.

Bytes are SI (1 GB = 1e9) unless written GiB; data rates are bytes per second inside and may be given in bits (`200gbps`).
"""

from __future__ import annotations

import re

__all__ = ["format_bytes", "format_count", "format_flop_per_s", "format_seconds", "parse_bytes", "parse_bytes_per_s", "parse_count"]

_DECIMAL = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_NUMBER = r"\s*([0-9]+(?:[_,][0-9]{3})*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*"


def _parse(text: str | float, suffix: str, scales: dict[str, float], what: str, example: str) -> float:
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return float(text)
    match = re.fullmatch(_NUMBER + f"({'|'.join(map(re.escape, scales))}){suffix}", str(text).lower())
    if not match:
        raise ValueError(f"{text!r} is not {what}; write it like {example}")
    return float(re.sub("[_,]", "", match[1])) * scales[match[2]]


def parse_bytes(text: str | float) -> int:
    """Bytes from `80 GB`, `79.2 GiB` or a plain number. Raises ValueError with an example."""
    return round(_parse(text, "b?", _DECIMAL | _BINARY, "an amount of memory", "`80 GB` or `79.2 GiB`"))


def parse_count(text: str | int) -> int:
    """A whole number from `4M tokens`, `128k`, `500 steps` or a plain number. Raises ValueError with an example."""
    value = _parse(text, r"\s*(?:tokens?|samples?|sequences?|steps?|epochs?)?", _DECIMAL | {"b": 1e9}, "a count", "`500`, `128k` or `4M tokens`")
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def parse_bytes_per_s(text: str | float) -> float:
    """Bytes per second from `200gbps` (bits), `50 GB/s` (bytes) or a plain number. Raises ValueError with an example."""
    if isinstance(text, str) and re.search(r"(bps|bit/s|b/s)\s*$", text.strip()) and not re.search(r"B/s\s*$", text.strip()):
        return _parse(re.sub(r"(bps|bit/s|b/s)\s*$", "", text.strip()), "", _DECIMAL, "a data rate", "`200gbps` or `50 GB/s`") / 8
    return _parse(text, "(?:b/s)?", _DECIMAL, "a data rate", "`200gbps` or `50 GB/s`")


def _scaled(value: float, unit: str, step: float = 1e3, digits: int = 3) -> str:
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < step or prefix == "P":
            return f"{value:.{digits}g} {prefix}{unit}" if prefix or value != int(value) else f"{int(value)} {unit}"
        value /= step
    raise AssertionError


def format_bytes(value: float) -> str:
    """`16.1 GB`: SI bytes with three digits."""
    return _scaled(value, "B")


def format_count(value: float) -> str:
    """`134.5M`, `8.03B`: a count of parameters or tokens."""
    for limit, scale, unit in ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / scale:.4g}{unit}"
    return f"{value:,.0f}"


def format_flop_per_s(value: float) -> str:
    """`209 TFLOP/s`."""
    return _scaled(value, "FLOP/s")


def format_seconds(value: float) -> str:
    """`340 us`, `12.5 ms`, `3.2 s`, `4 min 20 s`, `2 h 05 min`, `3 d 4 h`."""
    if value < 1:
        return f"{value * 1e6:.3g} us" if value < 1e-3 else f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    seconds = round(value)
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if seconds < 48 * 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600} h"
