"""Grouped: one matmul for every expert, over the rows that came to it - by one kernel where torch has it, else one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import grouped_mm

__all__ = ["grouped", "grouped_outer"]

# Bytes that rows of both factors have to be a multiple of. Source: torch, aten/src/ATen/native/GroupedMMUtils.h.
ALIGNED = 16


def grouped(rows: torch.Tensor, weights: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Each expert's rows times its own matrix.

    Shapes: rows [R, a], the first `counts[0]` of the first expert; weights [experts, a, b]; returned [R, b].
    """
    if _is_fused(rows, weights):
        return grouped_mm(rows, weights, offs=_ends(counts, rows.device))
    out = rows.new_empty(rows.shape[0], weights.shape[2])
    for expert, here in _groups(counts):
        torch.mm(rows[here], weights[expert], out=out[here])
    return out


def grouped_outer(left: torch.Tensor, right: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Of each expert's rows the sum of their outer products, zero where it has none.

    Shapes: left [R, a], right [R, b]; returned [experts, a, b].
    """
    if _is_fused(left, right):
        out = grouped_mm(left.T, right, offs=_ends(counts, left.device))
        if 0 in counts:
            out[[expert for expert, count in enumerate(counts) if not count]] = 0  # which a kernel may leave as they were
        return out
    out = left.new_zeros(len(counts), left.shape[1], right.shape[1])
    for expert, here in _groups(counts):
        torch.mm(left[here].T, right[here], out=out[expert])
    return out


def _groups(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, and which."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


def _is_fused(rows: torch.Tensor, other: torch.Tensor) -> bool:
    narrow = rows.device.type == "cuda" and rows.dtype == other.dtype == torch.bfloat16 and len(rows) > 0
    sizes = (rows.shape[1], *other.shape[1:])
    return narrow and torch.cuda.get_device_capability(rows.device) >= (8, 0) and all(size * rows.itemsize % ALIGNED == 0 for size in sizes)


def _ends(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device, non_blocking=True)
