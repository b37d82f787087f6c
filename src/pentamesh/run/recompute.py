"""Recompute: what blocks keep for backward and what they compute again, by torch's checkpointing on transformers' blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from pentamesh.layout.policy import Policy
from pentamesh.run import attention, experts  # noqa: F401 - register the operators that are named below
from pentamesh.run.deepep import DEEP_OPS
from pentamesh.run.router import Choices, routers

__all__ = ["recompute"]

_aten = torch.ops.aten
# What `selective` keeps: the products of matmuls and attention by every fused kernel, which cost more to compute than to hold. Norms, rotations,
# activation functions and sums are computed again.
DEAR = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.pentamesh.attention.default,
    torch.ops.pentamesh.routed.default,
    torch.ops.pentamesh.sent_out.default,
    torch.ops.pentamesh.experts.default,
    torch.ops.pentamesh.sent_home.default,
    *DEEP_OPS,
]


def recompute(built: PreTrainedModel, policy: Policy, device: torch.device) -> None:
    """Let every block of `built` keep what `policy.recompute` says, on its device or under `policy.offload` on the host, which a CPU is already; and
    with them what its routers chose."""
    if policy.recompute == "none":
        return
    selective, offload = policy.recompute == "selective", policy.offload and device.type != "cpu"
    around = {"context_fn": partial(create_selective_checkpoint_contexts, DEAR)} if selective else {}
    around = {"context_fn": partial(_contexts, selective)} if routers(built) else around
    built.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False, **around}, offload=offload)
    # transformers lets the embedding's output ask for a gradient, trained or not, and all blocks would go back.
    built.disable_input_require_grads()


Context = AbstractContextManager[Any]


def _contexts(selective: bool) -> tuple[Context, Context]:
    """Around the forward pass of a block, and around its repetition: what is kept, and what routers chose, which is never computed again."""
    choices = Choices()
    forward, again = create_selective_checkpoint_contexts(DEAR) if selective else (nullcontext(), nullcontext())
    return _both(choices.kept(), forward), _both(choices.repeated(), again)


@contextmanager
def _both(first: Context, second: Context) -> Iterator[None]:
    with first, second:
        yield
