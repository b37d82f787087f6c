"""Blocks: some queries of one document and some of its keys that stand all before them, or are the same tokens.

Causal attention over whatever runs of a row falls apart into such blocks. Fused kernels know both kinds; where a window's edge runs through a block,
or scores are capped, it is computed piece by piece. What the same queries saw in several blocks is put together by the log-sum-exps of their scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import pad

from pentamesh.layout.policy import flash_knows
from pentamesh.run.scores import Scoring, seen, seen_backward

__all__ = ["Attending", "Block", "documents_of", "flash_computes"]

_aten = torch.ops.aten
# Of the fused kernels on a GPU.
HEAD_DIM_MULTIPLE = 8


@dataclass(frozen=True)
class Block:
    """The rows of a batch and the positions in a row of queries and of keys."""

    rows: slice
    queries: range
    keys: range

    @property
    def is_diagonal(self) -> bool:
        return self.queries == self.keys


def documents_of(bounds: torch.Tensor | None, batch: int, length: int) -> list[tuple[slice, range]]:
    """The rows that each document lies in and its positions there: all rows alike, or one document after the other."""
    if bounds is None:
        return [(slice(0, batch), range(length))]
    places = pairwise(bounds.tolist())
    return [(slice(low // length, low // length + 1), range(low % length, low % length + high - low)) for low, high in places]


def _blocks(documents: Iterable[tuple[slice, range]], asking: range, asked: range, window: int | None) -> Iterator[Block]:
    """What queries of a run see of the keys of another: of each document the keys before all of its queries, and those beside them."""
    for rows, document in documents:
        queries, keys = _common(document, asking), _common(document, asked)
        low = max(keys.start, queries.start - window + 1) if window else keys.start
        before, beside = range(low, min(keys.stop, queries.start)), _common(queries, keys)
        if queries and before:
            last = min(queries.stop, before.stop - 1 + window) if window else queries.stop
            yield Block(rows, range(queries.start, last), before)
        if beside:
            assert beside == queries, "runs are the same or have no token in common"
            yield Block(rows, queries, beside)


def _common(one: range, two: range) -> range:
    return range(max(one.start, two.start), min(one.stop, two.stop))


@dataclass
class Attending:
    """Queries of one run, and what they have seen so far: `out` and the log-sum-exp of their scores.

    Shapes: query [batch, heads, queries, head_dim], out as value, sums [batch, heads, queries].
    """

    query: torch.Tensor
    run: range
    documents: list[tuple[slice, range]]
    scoring: Scoring
    out: torch.Tensor
    sums: torch.Tensor

    def see(self, key: torch.Tensor, value: torch.Tensor, keys: range, *, at_once: bool) -> None:
        """Let the queries see the keys of a run; `at_once` where each query has all its keys in one block."""
        for block in self._blocks(keys):
            query, (key_, value_) = self._own(self.query, block), (_keys(t, block, keys) for t in (key, value))
            out, sums = _forward(query, key_, value_, block, self.scoring)
            if at_once:
                self._own(self.out, block).copy_(out)
                self._own(self.sums, block).copy_(sums)
            else:
                _join(self._own(self.out, block), self._own(self.sums, block), out, sums)

    def see_back(
        self, gradient: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: range, of_query: torch.Tensor, of_keys: Iterable[torch.Tensor]
    ) -> None:
        """Add the gradients that come of what `see` has seen. `out` and `sums` are those of all keys."""
        for block in self._blocks(keys):
            asking = [self._own(t, block) for t in (gradient, self.query, self.out, self.sums)]
            own, *of_asked = _backward(asking, [_keys(t, block, keys) for t in (key, value)], block, self.scoring)
            self._own(of_query, block).add_(own)
            for whole, part in zip(of_keys, of_asked, strict=True):
                _keys(whole, block, keys).add_(part)

    def _blocks(self, keys: range) -> Iterator[Block]:
        return _blocks(self.documents, self.run, keys, self.scoring.window)

    def _own(self, tensor: torch.Tensor, block: Block) -> torch.Tensor:
        return tensor[block.rows, :, block.queries.start - self.run.start : block.queries.stop - self.run.start]


def _keys(tensor: torch.Tensor, block: Block, run: range) -> torch.Tensor:
    return tensor[block.rows, :, block.keys.start - run.start : block.keys.stop - run.start]


def _join(out: torch.Tensor, sums: torch.Tensor, seen: torch.Tensor, seen_sums: torch.Tensor) -> None:
    """Add to what queries have seen what they see of other keys. Source: FlashAttention (arXiv 2205.14135), section 3.1."""
    total = torch.logaddexp(sums, seen_sums)
    out.mul_((sums - total).exp_().unsqueeze(-1)).add_(seen * (seen_sums - total).exp_().unsqueeze(-1))
    sums.copy_(total)


# One block


def _is_plain(block: Block, query: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> bool:
    """Whether a fused kernel computes it: all keys are seen, or all up to a query's own."""
    inside = scoring.window is None or block.queries.stop - block.keys.start <= scoring.window
    return inside and not scoring.cap and (query.device.type == "cpu" or flash_computes(query, value))


def flash_computes(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch's flash kernels do, on a GPU of Ampere or newer."""
    known = flash_knows(str(query.dtype).removeprefix("torch."), max(query.shape[-1], value.shape[-1]))
    return query.is_cuda and known and torch.cuda.get_device_capability() >= (8, 0)


def _forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block, scoring: Scoring) -> tuple[torch.Tensor, torch.Tensor]:
    if not _is_plain(block, query, value, scoring):
        return seen(query, key, value, block.queries, block.keys, scoring)
    asking, asked, given = _alike(query, key, value)
    if query.device.type == "cpu":
        out, sums = _aten._scaled_dot_product_flash_attention_for_cpu(asking, asked, given, 0.0, block.is_diagonal, scale=scoring.scale)
    else:
        flat, lengths = [t.transpose(1, 2) for t in (asking, asked, given)], (len(block.queries), len(block.keys))
        out, sums, *_ = _aten._flash_attention_forward(*flat, None, None, *lengths, 0.0, block.is_diagonal, False, scale=scoring.scale)
        out = out.transpose(1, 2)
    return out[..., : value.shape[-1]], sums


def _backward(asking: list[torch.Tensor], asked: list[torch.Tensor], block: Block, scoring: Scoring) -> tuple[torch.Tensor, ...]:
    """Gradients of queries, keys and values of a block. `asking` is of its queries: the gradient of what they have seen, themselves, what they have
    seen of these keys and others, and the log-sum-exp of all scores; `asked` keys and values."""
    (gradient, query, out, sums), (key, value) = asking, asked
    if not _is_plain(block, query, value, scoring):
        return seen_backward(gradient, query, key, value, out, sums, block.queries, block.keys, scoring)
    given = [*_alike(gradient, query, key, value, out.to(query.dtype)), sums.contiguous()]
    if query.device.type == "cpu":
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, block.is_diagonal, scale=scoring.scale)
    else:
        flat, lengths = [t.transpose(1, 2) for t in given[:-1]], (len(block.queries), len(block.keys))
        state = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0)  # of the random generator, which nothing is drawn from
        backward = _aten._flash_attention_backward
        found = backward(*flat, given[-1], None, None, *lengths, 0.0, block.is_diagonal, *state, scale=scoring.scale)
        found = [t.transpose(1, 2) for t in found]
    return tuple(of[..., : t.shape[-1]] for of, t in zip(found, (query, key, value), strict=True))


def _alike(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """With heads of one size, as fused kernels want them: zeros add nothing to scores, and what is seen of them is dropped."""
    size = max(t.shape[-1] for t in tensors)
    size = -(-size // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE if tensors[0].is_cuda else size
    return [pad(t, (0, size - t.shape[-1])) if t.shape[-1] < size else t for t in tensors]
