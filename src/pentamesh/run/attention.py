"""Attention as every described family computes it: causal, without a mask in memory, whatever stands between queries and keys.

torch's fused kernels know causal attention and no more. Sliding windows, soft caps, sinks, documents packed into one row, and keys that lie on other
ranks make one operator here (pentamesh.run.blocks says how it is computed, pentamesh.run.context whence keys come). What waits for backward is what
the fused kernels keep. Documents on a GPU that flash attention knows go to its kernel for sequences of uneven length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pentamesh.run.blocks import Attending, documents_of, flash_computes
from pentamesh.run.context import Context, Runs, Way, exchanged, given_back, way
from pentamesh.run.scores import Scoring, wide

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
    s_aux: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
    context: Context | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface. Under a name of our own it makes no masks: sequence parallel would have them as long as the cut stream.

    `documents` says where each begins, and the last ends, among all tokens of all rows, on the host, where most are asked for; none sees
    another. None where rows are one document each.
    `context` says with whom this rank shares rows. `s_aux` is a score of each head that counts as that of a key of which nothing is seen.

    Shapes: query [batch, heads, seq, head_dim], key and value [batch, kv_heads, seq, head_dim], s_aux [heads], documents [their number + 1], int32;
    returned [batch, seq, heads, head_dim].
    """
    assert attention_mask is None, "what a mask would say is said by lengths and windows"
    assert not sliding_window or sliding_window > 0
    if context is not None and context.how == "ulysses":
        asking, asked, given = exchanged(context, query, key, value)
        sinks = s_aux if s_aux is None else s_aux.chunk(context.degree)[context.rank]
        out = attend(module, asking, asked, given, None, scaling, dropout, sliding_window, softcap, sinks, documents=documents)[0]
        return given_back(context, out), None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if query.stride(1) > query.stride(2):
        # Kernels lay out what they return as queries are. With heads of one token beside each other the next matmul reads it as it stands.
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
    if context is not None:
        assert not dropout, "ranks would drop others than one process"
        out, _ = _attention(query, key, value, documents, s_aux, scale, sliding_window, softcap, context.how, context.group)
        return out.transpose(1, 2).contiguous(), None
    window = sliding_window if sliding_window and sliding_window < query.shape[2] else None
    # torch's kernels, but for some of a GPU's, ask for values as wide as queries, or keep all scores (multi-head latent attention).
    is_even = query.shape[-1] == value.shape[-1]
    if documents is not None and not softcap and s_aux is None and is_even and flash_computes(query, value):
        return _flash(query, key, value, documents, scale, window), None
    if window or softcap or s_aux is not None or documents is not None or not (is_even or query.is_cuda):
        assert not dropout, "models that drop attention weights are not trained"
        out, _ = _attention(query, key, value, documents, s_aux, scale, window, softcap, "", "")
    else:
        grouped: dict[str, Any] = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
        out = scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scale, is_causal=True, **grouped)
    return out.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """Causal attention within documents by torch's kernel for sequences of uneven length."""
    asking, asked, given = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    length, back = query.shape[2], window - 1 if window else -1
    documents = documents.to(query.device, non_blocking=True)
    grouped = query.shape[1] != key.shape[1]
    out = varlen_attn(asking, asked, given, documents, documents, length, length, scale=scale, window_size=(back, 0), enable_gqa=grouped)
    assert isinstance(out, torch.Tensor)
    return out.unflatten(0, (query.shape[0], length))


def _attending(
    query: torch.Tensor, documents: torch.Tensor | None, scoring: Scoring, keys: Way, out: torch.Tensor, sums: torch.Tensor
) -> Iterator[tuple[slice, Attending]]:
    """The queries of each run of this rank's tokens, and where they lie among these."""
    length, at = query.shape[2], 0
    places = documents_of(documents, query.shape[0], length * keys.degree)
    for run in keys.runs(length):
        here = slice(at, at + len(run))
        yield here, Attending(query[:, :, here], run, places, scoring, out[:, :, here], sums[:, :, here])
        at = here.stop


@torch.library.custom_op("pentamesh::attention", mutates_args=())
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    window: int | None,
    cap: float | None,
    how: str,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention within windows and documents, and the log-sum-exp of each query's scores. Collective over `group`, where one is named.

    Shapes: as in `attend`; returned [batch, heads, seq, head_dim] and [batch, heads, seq].
    """
    keys = way(how, group)
    at_once = not how and sinks is None
    out, sums = _nothing_seen(query, value, sinks, query.dtype if at_once else wide(query))
    attending = list(_attending(query, documents, Scoring(scale, window, cap), keys, out, sums))
    for runs, asked, given in keys.turns(key, value):
        for run, parts in _by_runs(runs, asked, given):
            for _, one in attending:
                one.see(parts[0], parts[1], run, at_once=at_once)
    return out.to(query.dtype), sums


def _nothing_seen(query: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What queries have seen before any key, laid out as torch's own kernels do it, heads of one token beside each other; and of their scores the
    log-sum-exp: those of sinks, or next to nothing."""
    batch, heads, length, _ = query.shape
    out = query.new_zeros((batch, length, heads, value.shape[3]), dtype=dtype).transpose(1, 2)
    sums = query.new_full((batch, heads, length), torch.finfo(wide(query)).min, dtype=wide(query))
    return out, sums if sinks is None else sums.copy_(sinks.unsqueeze(-1))


def _by_runs(runs: Runs, *tensors: torch.Tensor) -> Iterator[tuple[range, list[torch.Tensor]]]:
    """Each run and what of each tensor [batch, heads, seq, ...] lies in it."""
    parts = zip(*(t.split([len(run) for run in runs], dim=2) for t in tensors), strict=True)
    return ((run, list(part)) for run, part in zip(runs, parts, strict=True))


@_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_how: object) -> Any:
    batch, heads, length, _ = query.shape
    out = query.new_empty((batch, length, heads, value.shape[3])).transpose(1, 2)
    return out, query.new_empty(query.shape[:3], dtype=wide(query))


@torch.library.custom_op("pentamesh::attention_backward", mutates_args=())
def _attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    sums: torch.Tensor,
    scale: float,
    window: int | None,
    cap: float | None,
    how: str,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values, and of sinks (empty where there are none). Collective over `group`, where one is named."""
    keys = way(how, group)
    sums_up = torch.zeros_like(query, dtype=wide(query) if how else query.dtype)
    attending = list(_attending(query, documents, Scoring(scale, window, cap), keys, out, sums))

    def of_keys(runs: Runs, asked: torch.Tensor, given: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.zeros_like(t, dtype=wide(t)) for t in (asked, given)]
        for run, (key, value, *of) in _by_runs(runs, asked, given, *found):
            for here, one in attending:
                one.see_back(gradient[:, :, here], key, value, run, sums_up[:, :, here], of)
        return found

    found = sums_up, *keys.home(key, value, of_keys)
    of_query, of_key, of_value = (torch.empty_like(t).copy_(of) for t, of in zip((query, key, value), found, strict=True))
    return of_query, of_key, of_value, _of_sinks(gradient, out, sums, sinks)


def _of_sinks(gradient: torch.Tensor, out: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The gradient of each head's sink: it draws weight from what its queries see, and shows nothing itself."""
    if sinks is None:
        return sums.new_empty(0)
    paid = (gradient.to(sums.dtype) * out).sum(-1)
    return -(paid * (sinks.unsqueeze(-1) - sums).exp()).sum((0, 2)).to(sinks.dtype)


@_attention_backward.register_fake
def _(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: object, sinks: torch.Tensor | None, *_how: object
) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), query.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.how = inputs[5:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor | None) -> tuple[Any, ...]:
    query, key, value, documents, sinks, out, sums = ctx.saved_tensors
    *found, of_sinks = _attention_backward(gradient, query, key, value, documents, sinks, out, sums, *ctx.how)
    return (*found, None, None if sinks is None else of_sinks, *[None] * len(ctx.how))


_attention.register_autograd(_backward, setup_context=_keep)
