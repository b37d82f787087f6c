"""Rotary: the rotation of DeepSeek-V2's queries and keys as its code computes it, but in no narrower a width than they have.

Its complex numbers are of float32 whatever the model is of. Layouts that add up gradients before that narrowing and behind it would differ in a model
of float64, in which they are proved to be the same; of narrower models all is as it was.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

__all__ = ["rotate_as_wide"]


def rotate_as_wide(built: nn.Module) -> None:
    """Let the attention of DeepSeek-V2 rotate in float64 where the model is of that. Of all models of the process: its code has one function."""
    code: Any = sys.modules[type(built).__module__]
    if hasattr(code, "apply_rotary_emb"):
        code.apply_rotary_emb = _rotated


def _rotated(query: torch.Tensor, key: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of neighbouring elements as complex numbers, times `turns`. Shapes: query and key [batch, heads, seq, rotated], turns [1 or batch, seq,
    rotated / 2], complex64."""
    found = []
    for tensor in (query, key):
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        pairs = torch.view_as_complex(wide.reshape(*wide.shape[:-1], -1, 2))
        found.append(torch.view_as_real(pairs * turns.unsqueeze(1).to(pairs)).flatten(3).type_as(tensor))
    return found[0], found[1]
