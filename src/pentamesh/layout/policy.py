"""Policy: the choices about *when* things move in a step, beside the layout's *where*."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["DDP_BUCKET_BYTES", "Policy", "flash_knows", "head_piece", "scores_at_once", "tokens_at_once"]

# The limit of every bucket of torch's DistributedDataParallel, as it is asked for in `run.place`; given one, torch has no smaller first bucket.
# Source: torch.nn.parallel.DistributedDataParallel, bucket_cap_mb.
DDP_BUCKET_BYTES = 25 * 2**20
# Logits that the head computes at a time, by kind of device: half a gigabyte in float32 on a GPU; and the fewest tokens, since every piece reads and
# writes the whole gradient of the head.
LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**27}
LEAST_TOKENS_AT_ONCE = {"cpu": 256, "cuda": 1024}
# Scores that attention with a window or a cap computes at a time, and the fewest queries.
SCORES_AT_ONCE = {"cpu": 2**22, "cuda": 2**25}
LEAST_QUERIES_AT_ONCE = 64
FLASH_HEAD_DIM = 256


@dataclass(frozen=True)
class Policy:
    """How often each crossing happens.

    micro_batch     sequences a rank computes at once
    packed          sequences hold several samples, which attention keeps apart
    grad_accum      micro-batches per step and data rank
    recompute       `none` keeps every block's activations; `selective` its input and what matmuls and attention gave, and computes the cheap rest
                    again in backward; `full` only its input, and computes the whole block again
    offload         the inputs of blocks that are computed again wait for backward in host memory; nothing on a CPU, which has no other
    compile         blocks run as torch.compile fuses them; what is planned is what eager kernels take, an upper bound
    async_tensor    compiled blocks send the stream in parts beside the matmuls that use it; planned as if they waited, an upper bound
    reshard         full shard: free a block's gathered parameters between its forward and its backward
    keep_gathered   full shard: keep gathered parameters over all micro-batches of a step (implies no reshard)
    balance         what keeps the loads of experts even: nothing, an auxiliary `loss`, or a `bias` of each that moves after every step
    balance_by      what that loss weighs, or how far a bias moves
    dispatch        what brings tokens to experts on other ranks: all-to-alls, or DeepEP's kernels, planned as if they were those, an upper bound
    reduce          `once` sums gradients over ranks after the last micro-batch, `each` after every one; `node` cuts and sums them among the
                    ranks that shard after every one, and among copies after the last
    """

    micro_batch: int = 1
    grad_accum: int = 1
    recompute: Literal["none", "selective", "full"] = "none"
    reshard: bool = True
    keep_gathered: bool = False
    reduce: Literal["once", "node", "each"] = "once"
    offload: bool = False
    compile: bool = False
    async_tensor: bool = False
    packed: bool = False
    balance: Literal["none", "loss", "bias"] = "none"
    balance_by: float = 0.0
    dispatch: Literal["all_to_all", "deepep"] = "all_to_all"

    def __post_init__(self) -> None:
        if self.keep_gathered and self.reshard:
            raise ValueError("parameters that stay gathered are not resharded after forward")
        if self.offload and self.recompute != "full":
            raise ValueError("only the inputs of blocks that are wholly computed again are offloaded")


def tokens_at_once(vocab: int, kind: str) -> int:
    """Tokens whose logits, of `vocab` each, the head computes at a time."""
    return max(LEAST_TOKENS_AT_ONCE[kind], LOGITS_AT_ONCE[kind] // vocab)


def head_piece(tokens: int, vocab: int, tp: int, kind: str) -> int:
    """Of a rank's `tokens`, those of a piece of the head's work: all where tensor ranks have to meet over each."""
    return tokens if tp > 1 else min(tokens, tokens_at_once(vocab, kind))


def flash_knows(dtype: str, head_dim: int) -> bool:
    """Whether a GPU's kernel for documents of uneven length computes such heads. Source: torch.nn.attention.varlen, FlashAttention-2."""
    return dtype in ("bfloat16", "float16") and head_dim <= FLASH_HEAD_DIM


def scores_at_once(heads: int, length: int, window: int | None, kind: str) -> tuple[int, int]:
    """Of a sequence of `length`, the queries that attention with a window or a cap computes at a time, and the keys that these see; `heads` counts
    those of all sequences. A window's worth of queries see two windows of keys."""
    keys = min(length, 2 * window) if window else length
    return min(max(LEAST_QUERIES_AT_ONCE, SCORES_AT_ONCE[kind] // (heads * keys)), window or length), keys
