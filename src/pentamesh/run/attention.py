"""Attention as every described family computes it: causal, without a mask in memory, whatever stands between queries and keys.

torch's fused kernels know causal attention and no more. A sliding window, or documents packed into one row, they take as a mask of all pairs, a soft
cap not at all. Here these are computed a run of queries at a time, against the keys that document and window leave them, in torch's own operations:
what waits for backward is what the fused kernels keep, and no more than a piece of the scores is ever there. Documents on a GPU that flash
attention knows go to its kernel for sequences of uneven length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pentamesh.layout.policy import flash_knows, scores_at_once

__all__ = ["ATTENTION"]

ATTENTION = "pentamesh"


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    documents: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface. Under a name of our own it makes no masks: sequence parallel would have them as long as the cut stream.

    `documents` says where each begins, and the last ends, among all tokens of all rows; none sees another. None where rows are one document each.

    Shapes: query [batch, heads, seq, head_dim], key and value [batch, kv_heads, seq, head_dim], documents [their number + 1], int32; returned
    [batch, seq, heads, head_dim].
    """
    assert attention_mask is None, "what a mask would say is said by lengths and windows"
    assert not sliding_window or sliding_window > 0
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if query.stride(1) > query.stride(2):
        # Kernels lay out what they return as queries are. With heads of one token beside each other the next matmul reads it as it stands.
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
    window = sliding_window if sliding_window and sliding_window < query.shape[2] else None
    if documents is not None and not softcap and _flash_knows(query):
        return _flash(query, key, value, documents, scale, window), None
    if window or softcap or documents is not None:
        assert not dropout, "models that drop attention weights are not trained"
        out, _ = _attention(query, key, value, documents, scale, window, softcap)
    else:
        grouped: dict[str, Any] = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
        out = scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scale, is_causal=True, **grouped)
    return out.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)


def _flash_knows(query: torch.Tensor) -> bool:
    """On Ampere or newer."""
    known = flash_knows(str(query.dtype).removeprefix("torch."), query.shape[-1])
    return query.is_cuda and known and torch.cuda.get_device_capability() >= (8, 0)


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """Causal attention within documents by torch's kernel for sequences of uneven length."""
    asking, asked, given = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    length, back = query.shape[2], window - 1 if window else -1
    grouped = query.shape[1] != key.shape[1]
    out = varlen_attn(asking, asked, given, documents, documents, length, length, scale=scale, window_size=(back, 0), enable_gqa=grouped)
    assert isinstance(out, torch.Tensor)
    return out.unflatten(0, (query.shape[0], length))


@dataclass(frozen=True)
class _Piece:
    """Which rows, which of their queries, and the keys that any of these sees."""

    rows: slice
    queries: slice
    keys: slice

    def asking(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of a tensor [batch, heads, seq, ...] what belongs to the queries."""
        return tensor[self.rows, :, self.queries]

    def asked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of a tensor [batch, heads, seq, ...] what belongs to the keys."""
        return tensor[self.rows, :, self.keys]


@dataclass(frozen=True)
class _Scores:
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
        unseen = ~self.seen(piece, query.device)
        return scores.masked_fill_(unseen.repeat(query.shape[2] // unseen.shape[0], 1), -torch.inf), shares

    def seen(self, piece: _Piece, device: torch.device) -> torch.Tensor:
        """Which keys of the piece each of its queries sees: [queries, keys]."""
        queries = torch.arange(piece.queries.start, piece.queries.stop, device=device).unsqueeze(1)
        keys = torch.arange(piece.keys.start, piece.keys.stop, device=device)
        return (keys <= queries) & (keys > queries - self.window) if self.window else keys <= queries

    def pieces(self, query: torch.Tensor, documents: torch.Tensor | None) -> Iterator[_Piece]:
        """Runs of queries of each document, with the keys that any of them sees."""
        for rows, document in _documents(query, documents):
            step, _ = scores_at_once(query.shape[1] * (rows.stop - rows.start), len(document), self.window, query.device.type)
            for start in document[::step]:
                stop = min(start + step, document.stop)
                low = max(document.start, start - self.window + 1) if self.window else document.start
                yield _Piece(rows, slice(start, stop), slice(low, stop))


def _documents(query: torch.Tensor, bounds: torch.Tensor | None) -> Iterator[tuple[slice, range]]:
    """The rows that each document lies in and its positions there: all rows alike, or one document after the other."""
    batch, _, length, _ = query.shape
    if bounds is None:
        yield slice(0, batch), range(length)
        return
    for low, high in pairwise(bounds.tolist()):
        row = low // length
        yield slice(row, row + 1), range(low - row * length, high - row * length)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right, rounded to no less than float32, as fused kernels keep it."""
    wide = _wide(left)
    if left.is_cuda and left.dtype != wide:
        return torch.bmm(left.flatten(0, 1), right.flatten(0, 1), out_dtype=wide).unflatten(0, left.shape[:2])
    return left.to(wide) @ right.to(wide)


def _grouped(tensor: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Queries, or what belongs to them, beside the key head that they share: [rows, kv_heads, groups * queries, ...]."""
    return tensor.reshape(tensor.shape[0], key.shape[1], -1, *tensor.shape[3:])


def _ungrouped(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(tensor.shape[0], query.shape[1], -1, *tensor.shape[3:])


@torch.library.custom_op("pentamesh::attention", mutates_args=())
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: torch.Tensor | None,
    scale: float,
    window: int | None,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention within windows and documents, capped or not, and the log-sum-exp of each query's scores.

    Shapes: as in `attend`; returned [batch, heads, seq, head_dim] and [batch, heads, seq].
    """
    scores = _Scores(scale, window, cap)
    # As torch's own kernels lay it out: heads of one token beside each other.
    out = query.new_empty(query.transpose(1, 2).shape).transpose(1, 2)
    sums = query.new_empty(query.shape[:3], dtype=_wide(query))
    for piece in scores.pieces(query, documents):
        weights, _ = scores(_grouped(piece.asking(query), key), piece.asked(key), piece)
        total = weights.logsumexp(-1, keepdim=True)
        weights = weights.sub_(total).exp_().to(value.dtype)
        piece.asking(out).copy_(_ungrouped(weights @ piece.asked(value), query))
        piece.asking(sums).copy_(_ungrouped(total.squeeze(-1), query))
    return out, sums


@_attention.register_fake
def _(query: torch.Tensor, *_: object) -> Any:
    return query.new_empty(query.transpose(1, 2).shape).transpose(1, 2), query.new_empty(query.shape[:3], dtype=_wide(query))


@torch.library.custom_op("pentamesh::attention_backward", mutates_args=())
def _attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: torch.Tensor | None,
    out: torch.Tensor,
    sums: torch.Tensor,
    scale: float,
    window: int | None,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values: scores are computed again, piece by piece. Source: FlashAttention (arXiv 2205.14135), algorithm 4."""
    scores = _Scores(scale, window, cap)
    of_query = torch.empty_like(query)
    of_key, of_value = (torch.zeros_like(t, dtype=_wide(t)) for t in (key, value))
    for piece in scores.pieces(query, documents):
        mine, came = _grouped(piece.asking(query), key), _grouped(piece.asking(gradient), key)
        weights, shares = scores(mine, piece.asked(key), piece)
        weights = weights.sub_(_grouped(piece.asking(sums), key).unsqueeze(-1)).exp_()
        piece.asked(of_value).add_(weights.to(value.dtype).mT @ came)
        paid = (came.to(sums.dtype) * _grouped(piece.asking(out), key)).sum(-1, keepdim=True)
        of_scores = _product(came, piece.asked(value).mT).sub_(paid).mul_(weights).mul_(scale)
        if shares is not None:
            of_scores.addcmul_(of_scores, shares.square_(), value=-1)
        of_scores = of_scores.to(query.dtype)
        piece.asking(of_query).copy_(_ungrouped(of_scores @ piece.asked(key), query))
        piece.asked(of_key).add_(of_scores.mT @ mine)
    return of_query, of_key.to(key.dtype), of_value.to(value.dtype)


@_attention_backward.register_fake
def _(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.scoring = inputs[4:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor | None) -> tuple[Any, ...]:
    return (*_attention_backward(gradient, *ctx.saved_tensors, *ctx.scoring), None, None, None, None)


_attention.register_autograd(_backward, setup_context=_keep)
