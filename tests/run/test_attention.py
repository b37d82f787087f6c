"""Attention with windows and caps, a run of queries at a time: what the whole matrix of scores gives, in values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from pentamesh.layout import policy
from pentamesh.run import attention, scores
from tests.proof.toys import TOYS

SEQ = 19


def drawn(heads: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """As projections leave it: heads of one token beside each other."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, SEQ, heads, 8, dtype=dtype, generator=generator).transpose(1, 2).requires_grad_()


# Three documents in the first row, one in the second.
STARTS = torch.tensor([[0] * 4 + [4] * 9 + [13] * (SEQ - 13), [0] * SEQ])
DOCUMENTS = torch.tensor([0, 4, 13, SEQ, 2 * SEQ], dtype=torch.int32)


def by_matrix(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor | None, scale: float, window: int | None, cap: float | None
) -> torch.Tensor:
    key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
    scores = query @ key.mT * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    behind = torch.arange(SEQ).unsqueeze(1) - torch.arange(SEQ)
    seen = (behind >= 0) & (behind < (window or SEQ))
    if starts is not None:
        seen = seen & (torch.arange(SEQ) >= starts[:, None, :, None])
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("at_once", [2**22, 1])
@pytest.mark.parametrize(("window", "cap"), [(5, None), (None, 2.0), (7, 1.5), (None, None), (SEQ, None), (100, 1.5)])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["alone", "packed"])
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_equals_the_whole_matrix(
    kv_heads: int, documents: torch.Tensor | None, window: int | None, cap: float | None, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(policy.SCORES_AT_ONCE, "cpu", at_once)
    monkeypatch.setattr(policy, "LEAST_QUERIES_AT_ONCE", 3)
    given = drawn(6, 0), drawn(kv_heads, 1), drawn(kv_heads, 2)
    found, _ = attention.attend(nn.Module(), *given, None, scaling=0.7, sliding_window=window, softcap=cap, documents=documents)
    expected = by_matrix(*given, None if documents is None else STARTS, 0.7, window, cap)
    gradient = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    for ours, theirs in zip(*(torch.autograd.grad(out, given, gradient) for out in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_bfloat16_is_rounded_as_fused_kernels_round(scale: float) -> None:
    """Errors against float64 of what a window gives, beside those of torch's kernel with a mask: scores are as wide there."""
    wide = [4 * drawn(4, seed).detach() for seed in (0, 1, 2)]
    narrow = [t.to(torch.bfloat16) for t in wide]
    window, exact = 5, [t.double() for t in narrow]
    expected = by_matrix(exact[0], exact[1], exact[2], None, scale, window, None)
    ours, _ = attention.attend(nn.Module(), narrow[0], narrow[1], narrow[2], None, scaling=scale, sliding_window=window)
    behind = torch.arange(SEQ).unsqueeze(1) - torch.arange(SEQ)
    mask = (behind >= 0) & (behind < window)
    theirs = nn.functional.scaled_dot_product_attention(*narrow, attn_mask=mask, scale=scale).transpose(1, 2)
    errors = [float((found.double() - expected).norm() / expected.norm()) for found in (ours, theirs)]
    assert errors[0] < 1.3 * errors[1] + 1e-4, errors


def test_no_more_than_a_piece_of_the_scores_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "LEAST_QUERIES_AT_ONCE", 3)
    monkeypatch.setitem(policy.SCORES_AT_ONCE, "cpu", 4 * 2 * 6 * 10)
    pieces = [(p.queries.start, p.queries.stop, p.keys.start) for p in scores._pieces(drawn(6, 0), range(SEQ), range(SEQ), 5)]
    assert pieces == [(0, 4, 0), (4, 8, 0), (8, 12, 4), (12, 16, 8), (16, 19, 12)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_an_operator_that_torch_understands(dtype: torch.dtype) -> None:
    given = drawn(4, 0, dtype), drawn(2, 1, dtype), drawn(2, 2, dtype)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(attention._attention, (*given, DOCUMENTS, None, 0.5, 5, 1.5, "", ""), test_utils=checks, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "phi3", "glm4"])
def test_equals_what_transformers_writes_out(name: str) -> None:
    """transformers' own eager attention, with masks, of a whole model in float32."""
    logits, gradients = zip(*(outcome(name, implementation) for implementation in ("eager", attention.ATTENTION)), strict=True)
    torch.testing.assert_close(logits[1], logits[0], rtol=2e-5, atol=2e-6)
    for tensor, theirs in gradients[0].items():
        scale = max(float(theirs.norm()), float(gradients[0][tensor.replace("k_proj", "q_proj")].norm()))
        assert float((gradients[1][tensor] - theirs).norm()) < 1e-5 * scale, tensor


def outcome(name: str, implementation: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    built: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TOYS[name]), attn_implementation=implementation)
    logits = built(input_ids=torch.arange(2 * SEQ).reshape(2, SEQ) * 7 % 301).logits
    logits.square().mean().backward()
    return logits.detach(), {tensor: p.grad for tensor, p in built.named_parameters()}
