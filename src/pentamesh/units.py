"""People's units in, SI numbers out, and back again.

Bytes are SI (1 GB = 1e9) unless written GiB; data rates are bytes per second inside and may be given in bits (`200gbps`). Numbers are read
as decimals, since in floating point 8.03 x 1e9 is not a whole number of parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path

__all__ = [
    "format_bytes",
    "format_count",
    "format_flop_per_s",
    "format_path",
    "format_seconds",
    "parse_bytes",
    "parse_bytes_per_s",
    "parse_count",
    "visible",
]

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_NUMBER = r"\s*([0-9]+(?:[_,][0-9]{3})*(?:\.[0-9]+)?(?:e[+-]?[0-9]{1,3})?)\s*"
# 1 EB/s: no link carries a millionth of it.
MAX_BYTES_PER_S = 1e18
_BITS = re.compile(r"\s*(?:bps|bit/s|b/s)\s*")  # a lower-case b is a bit, in data rates only


def _parse(text: str | float, suffix: str, scales: Mapping[str, int], what: str, example: str) -> Decimal:
    refusal = f"{text!r} is not {what}; write it like {example}"
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        number = Decimal(str(text))
        if not number.is_finite():
            raise ValueError(refusal)
        return number
    match = re.fullmatch(_NUMBER + f"({'|'.join(map(re.escape, scales))}){suffix}\\s*", str(text).lower())
    if not match:
        raise ValueError(refusal)
    return Decimal(re.sub("[_,]", "", match[1])) * scales[match[2]]


def parse_bytes(text: str | float) -> int:
    """Bytes from `80 GB`, `79.2 GiB` or a plain number. Raises ValueError with an example."""
    return round(_parse(text, "b?", _DECIMAL | _BINARY, "an amount of memory", "`80 GB` or `79.2 GiB`"))


def parse_count(text: str | float) -> int:
    """A whole number from `4M tokens`, `128k`, `500 steps` or a plain number. Raises ValueError with an example."""
    value = _parse(text, r"\s*(?:tokens?|samples?|sequences?|steps?|epochs?)?", _DECIMAL | {"b": 10**9}, "a count", "`500`, `128k` or `4M tokens`")
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def parse_bytes_per_s(text: str | float) -> float:
    """Bytes per second from `200gbps` (bits), `50 GB/s` (bytes) or a plain number. Raises ValueError with an example.

    A prefix without a unit (`400G`) is refused: networks are sold in bits and links in bytes, eight times apart.
    """
    what, example = "a data rate", "`200gbps` (bits) or `50 GB/s` (bytes)"
    bits = isinstance(text, str) and re.fullmatch(f"(.*?){_BITS.pattern}", text)
    unit = "b/s" if isinstance(text, str) and re.search("[a-zA-Z]/s", text) else ""
    found = _parse(bits[1], "", _DECIMAL, what, example) / 8 if bits else _parse(text, unit, _DECIMAL if unit else {"": 1}, what, example)
    if found and not 1 <= found <= MAX_BYTES_PER_S:
        raise ValueError(f"{text!r} is no rate of a link: between 1 B/s and {MAX_BYTES_PER_S:.0e} B/s; write it like {example}")
    return float(found)


def _scaled(value: float, unit: str) -> str:
    """Three digits and an SI prefix; 999.6 thousand is 1 million, not 1e+03 thousand."""
    if float(value).is_integer() and abs(value) < 1000:
        return f"{int(value)} {unit}"
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} P{unit}" if abs(value) < 999.5 else f"{value:,.0f} P{unit}"


def format_bytes(value: float) -> str:
    """`16.1 GB`: SI bytes with three digits."""
    return _scaled(value, "B")


def format_count(value: float) -> str:
    """`134.5M`, `8.03B`: a count of parameters or tokens, in four digits from ten thousand on."""
    if abs(value) < 1e4:
        return f"{value:,.0f}"
    rounded = float(f"{value:.4g}")
    scale, unit = next((scale, unit) for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")) if abs(rounded) >= scale)
    return f"{rounded / scale:.4g}{unit}" if abs(rounded) < 1e16 else f"{rounded / scale:,.0f}{unit}"


def format_flop_per_s(value: float) -> str:
    """`209 TFLOP/s`."""
    return _scaled(value, "FLOP/s")


def format_seconds(value: float) -> str:
    """`340 us`, `12.5 ms`, `3.2 s`, `4 min 20 s`, `2 h 05 min`, `3 d 4 h`."""
    if value == 0 or 0.9995 <= value < 119.5:
        return f"{value:.3g} s"
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms" if value >= 0.9995e-3 else f"{value * 1e6:.3g} us"
    seconds = round(value)
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if seconds < 48 * 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600} h"


def format_path(path: Path) -> str:
    """A path as people see it: from the current folder where it lies inside, else as it is."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def visible(text: str) -> str:
    """The text with its control characters made visible, but for line ends and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
