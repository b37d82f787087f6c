"""Finite: how many values of a tensor are none that can be trained, counted in little memory."""

from __future__ import annotations

from pathlib import Path

import torch

from pentamesh.errors import RunFailed

__all__ = ["check_finite", "num_not_finite"]

# torch's isfinite makes a whole copy on the way, and two tensors of bools: of so many elements at a time that is little.
_LOOKED_AT_ONCE = 2**22


def num_not_finite(values: torch.Tensor) -> int:
    """The number of values that are NaN or infinite."""
    return sum(some.numel() - int(torch.isfinite(some).sum()) for some in values.flatten().split(_LOOKED_AT_ONCE))


def check_finite(whole: torch.Tensor, name: str, checkpoint: Path) -> None:
    """Raise RunFailed where values of a saved weight are not finite."""
    if bad := num_not_finite(whole):
        raise RunFailed(f"{name} has {bad:,} values that are NaN or infinite as {whole.dtype}", where=str(checkpoint))
