"""Scores with a window or a cap, a run of queries at a time, in torch's own operations.

torch's fused kernels take a sliding window as a mask of all pairs and a soft cap not at all. Here each run of queries meets the keys that the window
leaves it: what waits for backward is what the fused kernels keep, and no more than a piece of the scores is ever there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pentamesh.layout.policy import scores_at_once

__all__ = ["Scoring", "seen", "seen_backward", "wide"]


@dataclass(frozen=True)
class Scoring:
    """How scores come about: what products are scaled by, how far back a query sees, and at what its scores saturate."""

    scale: float
    window: int | None
    cap: float | None

    def __call__(self, query: torch.Tensor, key: torch.Tensor, piece: _Piece) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The scores of a piece, -inf where a query does not see a key, in float32 (float64); and what the cap's slope follows from.

        Shapes: query [rows, kv_heads, groups * queries, head_dim], key [rows, kv_heads, keys, head_dim].
        """
        scores = _product(query, key.mT).mul_(self.scale)
        shares = None
        if self.cap:
            shares = scores.div_(self.cap).tanh_()
            scores = shares * self.cap
        unseen = ~self._sees(piece, query.device)
        return scores.masked_fill_(unseen.repeat(query.shape[2] // unseen.shape[0], 1), -torch.inf), shares

    def _sees(self, piece: _Piece, device: torch.device) -> torch.Tensor:
        """Which keys of the piece each of its queries sees: [queries, keys]."""
        queries = torch.arange(piece.queries.start, piece.queries.stop, device=device).unsqueeze(1)
        keys = torch.arange(piece.keys.start, piece.keys.stop, device=device)
        return (keys <= queries) & (keys > queries - self.window) if self.window else keys <= queries


class _Piece(NamedTuple):
    """Positions of some queries and of the keys that any of these sees, and where they lie in the tensors at hand."""

    queries: range
    keys: range
    asking: slice
    asked: slice


def _pieces(query: torch.Tensor, queries: range, keys: range, window: int | None) -> Iterator[_Piece]:
    step, _ = scores_at_once(query.shape[0] * query.shape[1], len(keys), window, query.device.type)
    for start in queries[::step]:
        stop = min(start + step, queries.stop)
        low, high = max(keys.start, start - window + 1) if window else keys.start, min(keys.stop, stop)
        asking, asked = slice(start - queries.start, stop - queries.start), slice(low - keys.start, high - keys.start)
        yield _Piece(range(start, stop), range(low, high), asking, asked)


def seen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, queries: range, keys: range, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """What queries at some positions see of keys at others, and the log-sum-exp of each query's scores. Each query sees a key at least.

    Shapes: query [rows, heads, queries, head_dim], key and value [rows, kv_heads, keys, head_dim]; returned as queries, with the heads of one token
    beside each other, and [rows, heads, queries].
    """
    out = query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3])).transpose(1, 2)
    sums = query.new_empty(query.shape[:3], dtype=wide(query))
    for piece in _pieces(query, queries, keys, scoring.window):
        weights, _ = scoring(_grouped(query[:, :, piece.asking], key), key[:, :, piece.asked], piece)
        total = weights.logsumexp(-1, keepdim=True)
        weights = weights.sub_(total).exp_().to(value.dtype)
        out[:, :, piece.asking] = _ungrouped(weights @ value[:, :, piece.asked], query)
        sums[:, :, piece.asking] = _ungrouped(total.squeeze(-1), query)
    return out, sums


def seen_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    queries: range,
    keys: range,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values: scores are computed again, piece by piece. `out` and `sums` may be of more keys than these.

    Source: FlashAttention (arXiv 2205.14135), algorithm 4.
    """
    of_query = torch.empty_like(query)
    of_key, of_value = (torch.zeros_like(t, dtype=wide(t)) for t in (key, value))
    for piece in _pieces(query, queries, keys, scoring.window):
        mine, came = _grouped(query[:, :, piece.asking], key), _grouped(gradient[:, :, piece.asking], key)
        weights, shares = scoring(mine, key[:, :, piece.asked], piece)
        weights = weights.sub_(_grouped(sums[:, :, piece.asking], key).unsqueeze(-1)).exp_()
        of_value[:, :, piece.asked] += weights.to(value.dtype).mT @ came
        paid = (came.to(sums.dtype) * _grouped(out[:, :, piece.asking], key)).sum(-1, keepdim=True)
        of_scores = _product(came, value[:, :, piece.asked].mT).sub_(paid).mul_(weights).mul_(scoring.scale)
        if shares is not None:
            of_scores.addcmul_(of_scores, shares.square_(), value=-1)
        of_scores = of_scores.to(query.dtype)
        of_query[:, :, piece.asking] = _ungrouped(of_scores @ key[:, :, piece.asked], query)
        of_key[:, :, piece.asked] += of_scores.mT @ mine
    return of_query, of_key, of_value


def wide(tensor: torch.Tensor) -> torch.dtype:
    """What sums over the elements of `tensor` are kept in: float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right, rounded to no less than float32, as fused kernels keep it."""
    dtype = wide(left)
    if left.is_cuda and left.dtype != dtype:
        return torch.bmm(left.flatten(0, 1), right.flatten(0, 1), out_dtype=dtype).unflatten(0, left.shape[:2])
    return left.to(dtype) @ right.to(dtype)


def _grouped(tensor: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Queries, or what belongs to them, beside the key head that they share: [rows, kv_heads, groups * queries, ...]."""
    return tensor.reshape(tensor.shape[0], key.shape[1], -1, *tensor.shape[3:])


def _ungrouped(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(tensor.shape[0], query.shape[1], -1, *tensor.shape[3:])
