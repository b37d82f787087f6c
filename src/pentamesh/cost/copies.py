"""Copies: what saving checkpoints beside the steps takes of host memory - one copy of the state over all ranks together, whatever the layout."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from pentamesh.cost.holding import Holding, adapters
from pentamesh.cost.needs import Memory, Range
from pentamesh.job.precision import ITEMSIZE, Precision

__all__ = ["copied", "copy_bytes"]


def copy_bytes(held: Holding, precision: Precision) -> int:
    """A rank's share of the copy: weights, and the moments of those that are trained; of adapters those alone."""
    tensors = (adapters(held.model) if held.is_adapted else held.model).parameters
    return math.ceil(sum(t.numel * (ITEMSIZE[precision.weight] + precision.moments_bytes * t.trained) for t in tensors) / held.layout.mesh.num_ranks)


def copied(memory: Memory, num_bytes: int, kind: str, asked: Literal["auto"] | bool) -> Memory:
    """`memory` with the copy in it, where checkpoints are saved beside the steps: `auto` does that where it fits into the memory for certain.

    On a CPU the copy lies where everything does; it is a part of the peak then.
    """
    room = memory.usable_bytes - memory.peak_bytes.high if kind == "cpu" else (memory.host_usable_bytes or math.inf) - memory.host_bytes
    if asked is False or (asked == "auto" and num_bytes > room):
        return memory
    if kind != "cpu":
        return replace(memory, copy_bytes=num_bytes)
    stages = tuple(replace(s, peak_bytes=_more(s.peak_bytes, num_bytes), parts_bytes=s.parts_bytes | {"copy": num_bytes}) for s in memory.stages)
    parts = memory.parts_bytes | {"copy": num_bytes}
    return replace(memory, copy_bytes=num_bytes, peak_bytes=_more(memory.peak_bytes, num_bytes), parts_bytes=parts, stages=stages)


def _more(span: Range, num_bytes: int) -> Range:
    return Range(span.low + num_bytes, span.expected + num_bytes, span.high + num_bytes)
