"""Recompute: what blocks keep for backward and what they compute again, by torch's checkpointing on transformers' blocks."""

from __future__ import annotations

from functools import partial

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from pentamesh.layout.policy import Policy
from pentamesh.run import attention  # noqa: F401 - registers the operator that is named below

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
]


def recompute(built: PreTrainedModel, policy: Policy, device: torch.device) -> None:
    """Let every block of `built` keep what `policy.recompute` says, on its device or under `policy.offload` on the host, which a CPU is already."""
    if policy.recompute == "none":
        return
    dear = {"context_fn": partial(create_selective_checkpoint_contexts, DEAR)} if policy.recompute == "selective" else {}
    offload = policy.offload and device.type != "cpu"
    built.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False, **dear}, offload=offload)
    # transformers lets the embedding's output ask for a gradient, trained or not, and all blocks would go back.
    built.disable_input_require_grads()
