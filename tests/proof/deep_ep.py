"""A stand-in for DeepEP's package: the part of its interface that is used, by gloo, for any dtype, as its documentation has it.

A token goes once to each rank that has some of its experts; there its choices are counted from that rank's first expert, and those of others are -1.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

topk_idx_t = torch.int64


class Config:
    def get_nvl_buffer_size_hint(self, row_bytes: int, num_ranks: int) -> int:
        return row_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, row_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.size = group, group.size()
        assert num_nvl_bytes > 0
        assert num_rdma_bytes == 0

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == topk_idx_t
        owner = topk_idx // (num_experts // self.size)
        in_rank = torch.stack([(owner == rank).any(1) for rank in range(self.size)], dim=1)
        by_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts).int()
        return in_rank.sum(0).int(), None, by_expert, in_rank, None

    def dispatch(self, x: torch.Tensor, handle: tuple[torch.Tensor, ...] | None = None, **how: Any) -> tuple[Any, ...]:
        assert x.is_contiguous()
        if handle is not None:
            assert not how
            return self._sent(x, *handle), None, None, None, None, None
        assert how["num_tokens_per_rdma_rank"] is None
        in_rank, chosen, weights = how["is_token_in_rank"], how["topk_idx"], how["topk_weights"]
        num_experts = len(how["num_tokens_per_expert"])
        came = torch.empty_like(how["num_tokens_per_rank"])
        with _disable_current_modes():
            dist.all_to_all_single(came, how["num_tokens_per_rank"], group=self.group)
        handle = (in_rank, came)
        here = self._sent(chosen, *handle) - self.group.rank() * (num_experts // self.size)
        here = here.masked_fill((here < 0) | (here >= num_experts // self.size), -1)
        counts = torch.bincount(here[here >= 0], minlength=num_experts // self.size).tolist()
        return self._sent(x, *handle), here, self._sent(weights, *handle), counts, handle, None

    def combine(self, x: torch.Tensor, handle: tuple[torch.Tensor, ...], topk_weights: torch.Tensor | None = None) -> tuple[Any, ...]:
        assert x.is_contiguous()
        return self._back(x, *handle), None if topk_weights is None else self._back(topk_weights, *handle), None

    def _sent(self, x: torch.Tensor, in_rank: torch.Tensor, came: torch.Tensor) -> torch.Tensor:
        sent = torch.cat([x[there] for there in in_rank.T])
        return self._moved(sent, came, in_rank.sum(0))

    def _back(self, x: torch.Tensor, in_rank: torch.Tensor, came: torch.Tensor) -> torch.Tensor:
        home = self._moved(x, in_rank.sum(0), came)
        places = torch.cat([there.nonzero().flatten() for there in in_rank.T])
        return x.new_zeros(len(in_rank), x.shape[1]).index_add_(0, places, home)

    def _moved(self, rows: torch.Tensor, coming: torch.Tensor, going: torch.Tensor) -> torch.Tensor:
        found = rows.new_empty(int(coming.sum()), *rows.shape[1:])
        with _disable_current_modes():
            dist.all_to_all_single(found, rows.contiguous(), coming.tolist(), going.tolist(), group=self.group)
        return found


def install() -> None:
    """In this process, which ends with its trial."""
    made: Any = ModuleType("deep_ep")
    made.Buffer, made.topk_idx_t = Buffer, topk_idx_t
    sys.modules["deep_ep"] = made
