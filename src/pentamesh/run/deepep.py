"""DeepEP: tokens go to their experts and home by its kernels, where it is installed, instead of by all-to-alls.

It sends a token once to each rank that has some of its experts, with the weights of these; there its row is repeated for each, and what they make
of it is summed before it goes home, where ranks' sums add up. The kernels take bf16, and weights in float32. What they move is in no ledger.

Source: deep_ep.Buffer of DeepEP 1.2, the high-throughput kernels: `get_dispatch_layout`, `dispatch`, `combine`; each is the other's backward.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName

from pentamesh.errors import InputError
from pentamesh.job.job import ExpertsRequest

__all__ = ["DEEP_OPS", "Came", "check_deepep", "gone", "home"]


def check_deepep(experts: ExpertsRequest, where: str) -> None:
    """Raises InputError where DeepEP is asked for and not installed."""
    if experts.dispatch == "deepep" and find_spec("deep_ep") is None:
        what = "dispatch = deepep, and the package deep_ep is not installed"
        hint = "install it from https://github.com/deepseek-ai/DeepEP, or use experts.dispatch: all_to_all"
        raise InputError(what, where=f"{where} experts.dispatch", hint=hint)


class Came(NamedTuple):
    """What came to this rank's experts, in their order: rows with their weights, how many for each, and whose they are.

    Shapes: rows [rows, hidden], shares [rows, 1], counts [2, 1, experts / ranks] as of `experts._routed`, on the host; tokens [rows], of `num_tokens`
    that came.
    """

    rows: torch.Tensor
    shares: torch.Tensor
    counts: torch.Tensor
    tokens: torch.Tensor
    num_tokens: int
    handle: list[torch.Tensor]


def gone(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, num_experts: int, group: str) -> Came:
    """Send tokens to their experts. Collective over `group`. Shapes: hidden [tokens, hidden], index and weights [tokens, k]."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    came, shares, chosen, counts, handle = _out(hidden, index, weights.to(wide), num_experts, group)
    # A choice of another rank's expert is -1 here, and stands behind all others.
    order = chosen.flatten().masked_fill(chosen.flatten() < 0, num_experts).argsort(stable=True)[: int(counts.sum())]
    tokens = order // chosen.shape[1]
    rows, shares = came.index_select(0, tokens), shares.flatten().index_select(0, order).unsqueeze(1)
    return Came(rows, shares, counts.view(1, 1, -1).expand(2, 1, -1), tokens, len(came), handle)


def home(made: torch.Tensor, came: Came, group: str) -> torch.Tensor:
    """For each token the sum of what experts made of it. Collective over `group`. Shapes: made [rows, hidden]; returned [tokens, hidden]."""
    sums = made.new_zeros(came.num_tokens, made.shape[1], dtype=torch.promote_types(made.dtype, torch.float32))
    return _home(sums.index_add(0, came.tokens, made.to(sums.dtype)).to(made.dtype), came.handle, group)


@cache
def _buffer(group: str, row_bytes: int) -> Any:
    """DeepEP's memory for rows of a size among the ranks of a group. Collective."""
    ranks, kind = dist.distributed_c10d._resolve_process_group(GroupName(group)), import_module("deep_ep").Buffer
    configs = (kind.get_dispatch_config(ranks.size()), kind.get_combine_config(ranks.size()))
    over_nvlink = max(config.get_nvl_buffer_size_hint(row_bytes, ranks.size()) for config in configs)
    over_rdma = max(config.get_rdma_buffer_size_hint(row_bytes, ranks.size()) for config in configs)
    return kind(ranks, over_nvlink, over_rdma)


def _buffer_for(rows: torch.Tensor, group: str) -> Any:
    return _buffer(group, rows.shape[1] * max(rows.element_size(), 2))


# Operators, so that what came is kept where blocks are computed again but for what is dear.


@torch.library.custom_op("pentamesh::deep_out", mutates_args=())
def _out(
    hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, num_experts: int, group: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The tokens that come to this rank, their weights and their choices among this rank's experts (-1: of another's); how many each of these gets,
    on the host; and how they find home."""
    buffer = _buffer_for(hidden, group)
    chosen = index.to(getattr(import_module("deep_ep"), "topk_idx_t", torch.int64))
    by_rank, by_node, by_expert, in_rank, _ = buffer.get_dispatch_layout(chosen, num_experts)
    came, there, shares, counts, handle, _ = buffer.dispatch(
        hidden.contiguous(),
        topk_idx=chosen,
        topk_weights=weights.contiguous(),
        num_tokens_per_rank=by_rank,
        num_tokens_per_rdma_rank=by_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=by_expert,
    )
    return came, shares, there.long(), torch.tensor(counts), list(handle)


@torch.library.custom_op("pentamesh::deep_home", mutates_args=())
def _home(sums: torch.Tensor, handle: list[torch.Tensor], group: str) -> torch.Tensor:
    """For each token the sum of what comes home from all ranks."""
    return _buffer_for(sums, group).combine(sums.contiguous(), tuple(handle))[0]


@torch.library.custom_op("pentamesh::deep_out_backward", mutates_args=())
def _home_weighed(rows: torch.Tensor, weights: torch.Tensor, handle: list[torch.Tensor], group: str) -> tuple[torch.Tensor, torch.Tensor]:
    of_tokens, of_weights, _ = _buffer_for(rows, group).combine(rows.contiguous(), tuple(handle), topk_weights=weights.contiguous())
    return of_tokens, of_weights


@torch.library.custom_op("pentamesh::deep_home_backward", mutates_args=())
def _out_again(tokens: torch.Tensor, handle: list[torch.Tensor], group: str) -> torch.Tensor:
    return _buffer_for(tokens, group).dispatch(tokens.contiguous(), handle=tuple(handle))[0]


def _keep_handle(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.handle, ctx.group = output[4], inputs[4]


def _out_backward(ctx: Any, of_rows: torch.Tensor, of_weights: torch.Tensor, *_: object) -> tuple[Any, ...]:
    of_hidden, of_shares = _home_weighed(of_rows, of_weights, ctx.handle, ctx.group)
    return of_hidden, None, of_shares, None, None


def _keep_way(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.handle, ctx.group = inputs


def _home_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return _out_again(gradient, ctx.handle, ctx.group), [None] * len(ctx.handle), None


_out.register_autograd(_out_backward, setup_context=_keep_handle)
_home.register_autograd(_home_backward, setup_context=_keep_way)

DEEP_OPS = [torch.ops.pentamesh.deep_out.default, torch.ops.pentamesh.deep_home.default]
