"""Arrivals: how many rows come to the experts of a rank, on which what its messages carry depends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pentamesh.run.experts import dispatches

__all__ = ["arrivals", "by_micro_batch"]


@contextmanager
def arrivals(module: nn.Module) -> Iterator[list[int]]:
    """The rows that come to this rank's experts in the forward passes inside the block, a number for each layer, in order."""
    came: list[int] = []

    def hear(counts: torch.Tensor) -> None:
        came.append(int(counts.sum()))

    found = list(dispatches(module))
    for dispatch in found:
        dispatch.heard.append(hear)
    try:
        yield came
    finally:
        for dispatch in found:
            dispatch.heard.remove(hear)


def by_micro_batch(came: list[int], num_micros: int) -> list[list[int]]:
    """What came in a step, micro-batch by micro-batch."""
    layers = len(came) // num_micros
    return [came[at * layers : (at + 1) * layers] for at in range(num_micros)]
