"""Lean norms and gated products: what transformers' own give, forward bit for bit, backward to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pentamesh.run.lean import keep_less
from tests.proof.toys import TOYS


def outcome(name: str, dtype: torch.dtype, lean: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    built: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TOYS[name])).to(dtype)
    for module in built.modules():
        if type(module).__name__.endswith("RMSNorm"):
            torch.nn.init.normal_(module.weight, 1.0, 0.3)
    if lean:
        keep_less(built)
    ids = torch.arange(18).reshape(2, 9) * 7
    logits = built(input_ids=ids).logits
    logits.float().square().mean().backward()
    return logits.detach(), {name: p.grad for name, p in built.named_parameters()}


@pytest.mark.parametrize("name", ["llama-untied", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "glm4"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_equals_transformers(name: str, dtype: torch.dtype, tolerance: float) -> None:
    (logits, grads), (own_logits, own_grads) = outcome(name, dtype, lean=True), outcome(name, dtype, lean=False)
    assert torch.equal(logits, own_logits)
    for tensor, found in grads.items():
        own = own_grads[tensor]
        # Of a bias of keys the gradient vanishes: what is left is rounding, of numbers as large as those of queries.
        scale = max(float(own.norm()), float(own_grads[tensor.replace("k_proj", "q_proj")].norm()))
        assert float((found - own).norm()) <= tolerance * scale, tensor


def test_double_precision_is_not_narrowed() -> None:
    """transformers takes the root in float32 whatever comes in."""
    torch.manual_seed(0)
    built: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TOYS["llama"])).double()
    keep_less(built)
    stream = torch.randn(2, 3, 48, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(built.model.norm, (stream,))
    assert torch.autograd.gradcheck(built.model.layers[0].mlp, (stream,))
