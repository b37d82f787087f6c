"""Attention as every described family computes it: causal, without a mask in memory, whatever stands between queries and keys.

torch's fused kernels know causal attention and no more. A sliding window, or documents packed into one row, they take as a mask of all pairs, a soft
cap not at all. Here these are computed a run of queries at a time, against the keys that the window leaves them, in torch's own operations: what
waits for backward is what the fused kernels keep, and no more than a piece of the scores is ever there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pentamesh.layout.policy import scores_at_once

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
    starts: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface. Under a name of our own it makes no masks: sequence parallel would have them as long as the cut stream.

    `starts` says of each token at which position of its row its document begins; a token sees none before. None where rows are one document each.

    Shapes: query [batch, heads, seq, head_dim], key and value [batch, kv_heads, seq, head_dim], starts [batch, seq]; returned
    [batch, seq, heads, head_dim].
    """
    assert attention_mask is None, "what a mask would say is said by lengths and windows"
    assert not sliding_window or sliding_window > 0
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if query.stride(1) > query.stride(2):
        # Kernels lay out what they return as queries are. With heads of one token beside each other the next matmul reads it as it stands.
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
    window = sliding_window if sliding_window and sliding_window < query.shape[2] else None
    if window or softcap or starts is not None:
        assert not dropout, "models that drop attention weights are not trained"
        out, _ = _attention(query, key, value, starts, scale, window, softcap)
    else:
        grouped: dict[str, Any] = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
        out = scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scale, is_causal=True, **grouped)
    return out.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)


@dataclass(frozen=True)
class _Scores:
    """How scores come about: what products are scaled by, how far back a query sees, and at what its scores saturate."""

    scale: float
    window: int | None
    cap: float | None

    def __call__(self, query: torch.Tensor, key: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The scores of a run of queries, -inf where one does not see a key, in float32 (float64); and what the cap's slope follows from.

        Shapes: query [batch, kv_heads, groups * rows, head_dim], key [batch, kv_heads, keys, head_dim], seen [batch or 1, 1, rows, keys].
        """
        scores = _product(query, key.mT).mul_(self.scale)
        shares = None
        if self.cap:
            shares = scores.div_(self.cap).tanh_()
            scores = shares * self.cap
        return scores.masked_fill_(~seen.repeat(1, 1, query.shape[2] // seen.shape[2], 1), -torch.inf), shares

    def seen(self, rows: range, low: int, starts: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """Which of the keys from `low` on each of `rows` sees: [batch or 1, 1, rows, keys]."""
        queries, keys = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1), torch.arange(low, rows.stop, device=device)
        seen = (keys <= queries) & (keys > queries - self.window) if self.window else keys <= queries
        return seen[None, None] if starts is None else (seen & (keys >= starts[:, rows.start : rows.stop, None])).unsqueeze(1)

    def pieces(self, query: torch.Tensor) -> Iterator[tuple[range, int]]:
        """Runs of queries, and the first key that any of them sees."""
        batch, heads, length, _ = query.shape
        step, _ = scores_at_once(batch * heads, length, self.window, query.device.type)
        for start in range(0, length, step):
            yield range(start, min(start + step, length)), max(0, start - self.window + 1) if self.window else 0


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right, rounded to no less than float32, as fused kernels keep it."""
    wide = _wide(left)
    if left.is_cuda and left.dtype != wide:
        return torch.bmm(left.flatten(0, 1), right.flatten(0, 1), out_dtype=wide).unflatten(0, left.shape[:2])
    return left.to(wide) @ right.to(wide)


def _grouped(tensor: torch.Tensor, rows: range, key: torch.Tensor) -> torch.Tensor:
    """Rows of queries, or of what belongs to them, beside the key head that they share: [batch, kv_heads, groups * rows, ...]."""
    piece = tensor[:, :, rows.start : rows.stop]
    return piece.reshape(piece.shape[0], key.shape[1], -1, *piece.shape[3:])


def _ungrouped(tensor: torch.Tensor, rows: range, query: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(tensor.shape[0], query.shape[1], len(rows), *tensor.shape[3:])


@torch.library.custom_op("pentamesh::attention", mutates_args=())
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor | None,
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
    for rows, low in scores.pieces(query):
        keys = slice(low, rows.stop)
        weights, _ = scores(_grouped(query, rows, key), key[:, :, keys], scores.seen(rows, low, starts, query.device))
        total = weights.logsumexp(-1, keepdim=True)
        weights = weights.sub_(total).exp_().to(value.dtype)
        out[:, :, rows.start : rows.stop] = _ungrouped(weights @ value[:, :, keys], rows, query)
        sums[:, :, rows.start : rows.stop] = _ungrouped(total.squeeze(-1), rows, query)
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
    starts: torch.Tensor | None,
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
    for rows, low in scores.pieces(query):
        keys = slice(low, rows.stop)
        mine, came = _grouped(query, rows, key), _grouped(gradient, rows, key)
        weights, shares = scores(mine, key[:, :, keys], scores.seen(rows, low, starts, query.device))
        weights = weights.sub_(_grouped(sums, rows, key).unsqueeze(-1)).exp_()
        of_value[:, :, keys] += weights.to(value.dtype).mT @ came
        paid = (came.to(sums.dtype) * _grouped(out, rows, key)).sum(-1, keepdim=True)
        of_scores = _product(came, value[:, :, keys].mT).sub_(paid).mul_(weights).mul_(scale)
        if shares is not None:
            of_scores.addcmul_(of_scores, shares.square_(), value=-1)
        of_scores = of_scores.to(query.dtype)
        of_query[:, :, rows.start : rows.stop] = _ungrouped(of_scores @ key[:, :, keys], rows, query)
        of_key[:, :, keys] += of_scores.mT @ mine
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
