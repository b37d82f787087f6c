"""Stochastic rounding to bfloat16: a value goes to one of its two neighbours, to the nearer one more often, so that it stays where it is on average.

The noise of an element is a function of a key and of its place in the whole tensor, and of nothing else. With a key of the seed, the step and
the tensor's name a resumed run repeats it, replicas round alike, and so does every layout on every device.
Source: Ozkara et al., Stochastic Rounding for LLM Training (arXiv 2502.20566), which shares the noise among ranks; torchao.optim adds it as here.
"""

from __future__ import annotations

import hashlib
import struct

import torch

from pentamesh.layout.split import Box

__all__ = ["Key", "key", "noise", "places", "round_to_bfloat16_"]

Key = tuple[int, int]
# Multipliers and shifts of a mixing function whose output bits each flip with probability one half when any input bit does; as signed numbers.
# Source: Wellons, Prospecting for hash functions (lowbias32).
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32


def key(seed: int, step: int, name: str) -> Key:
    """Two 32-bit numbers for the noise of one tensor in one step."""
    return struct.unpack("<ii", hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()[:8])


def places(shape: tuple[int, ...], box: Box, device: torch.device) -> torch.Tensor:
    """Where each element of `box` lies in the whole tensor, counted row by row, modulo 2^32.

    Shapes: `box.size`, int32.
    """
    *outer, last = zip(shape, box.offset, box.size, strict=True)
    rows = torch.zeros((), dtype=torch.int64, device=device)
    for length, offset, size in outer:
        rows = rows.unsqueeze(-1) * length + torch.arange(offset, offset + size, device=device)
    length, offset, size = last
    return (rows * length).to(torch.int32).unsqueeze(-1) + torch.arange(offset, offset + size, dtype=torch.int32, device=device)


def noise(words: torch.Tensor, by: Key) -> torch.Tensor:
    """32 random bits for each of `words`, int32 numbers that are overwritten."""
    words ^= by[0]
    words ^= (words >> 16) & 0xFFFF
    words *= _FIRST
    words ^= by[1]
    words ^= (words >> 15) & 0x1FFFF
    words *= _SECOND
    words ^= (words >> 16) & 0xFFFF
    return words


def round_to_bfloat16_(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round float32 `values` in place to numbers that bfloat16 holds exactly, by the low 16 of `bits`.

    A float32 is a bfloat16 and 16 bits more: adding 16 random ones carries into it as often as those bits say. What is not finite stays as it is:
    the carry would make a number of it.
    """
    words, finite = values.view(torch.int32), values.isfinite()
    carried = (bits & 0xFFFF).mul_(finite)
    words += carried
    words &= carried.copy_(finite).mul_(0xFFFF).bitwise_not_()
    return values
