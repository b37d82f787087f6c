"""Attention whose keys lie on other ranks: what one process with whole rows computes, in values and gradients, however the row is shared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from pentamesh.layout import policy
from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.run import attention
from pentamesh.run.context import context_of, runs_of
from pentamesh.run.world import World, join
from pentamesh.run.worlds import run_world

SEQ, BATCH = 16, 2
# Three documents in the first row, two in the second; runs of four ranks begin and end within them. Or a row each.
DOCUMENTS = torch.tensor([0, 3, 12, 16, 23, 32], dtype=torch.int32)
ROWS = torch.tensor([0, SEQ, BATCH * SEQ], dtype=torch.int32)
WAYS = ("ring", "all_gather", "ulysses")


@dataclass(frozen=True)
class Case:
    """Heads, sizes of heads of queries and of values, and what stands between queries and keys."""

    kv_heads: int = 4
    head_dims: tuple[int, int] = (8, 8)
    window: int | None = None
    cap: float | None = None
    documents: torch.Tensor | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float64
    at_once: int = 2**22

    @property
    def given(self) -> list[torch.Tensor]:
        """Queries, keys and values as projections leave them, the gradient of what is seen, and sinks."""
        draw = torch.Generator().manual_seed(0)
        wide, narrow = self.head_dims
        sizes = [(8, wide), (self.kv_heads, wide), (self.kv_heads, narrow), (8, narrow)]
        found = [torch.randn(BATCH, SEQ, *size, generator=draw).transpose(1, 2) for size in sizes]
        return [t.bfloat16().to(self.dtype) for t in (*found, torch.randn(8, generator=draw))]


def own(world: World, whole: torch.Tensor) -> torch.Tensor:
    """This rank's tokens of a tensor [batch, heads, seq, ...]."""
    cp, rank, length = world.layout.mesh.cp, world.rank, whole.shape[2]
    if world.layout.context == "ulysses" or cp == 1:
        return whole.chunk(cp, dim=2)[rank]
    return torch.cat([whole[:, :, run.start : run.stop] for run in runs_of(length // cp, rank, cp)], dim=2)


def seen(case: Case, layout: Layout) -> list[np.ndarray]:
    """In float64, what this rank's queries see, and the gradients of its queries, keys and values and of sinks."""
    policy.SCORES_AT_ONCE["cpu"], policy.LEAST_QUERIES_AT_ONCE = case.at_once, 2
    world = join(layout, "cpu")
    *tensors, sinks = case.given
    query, key, value, gradient = (own(world, t).transpose(1, 2).contiguous().transpose(1, 2) for t in tensors)
    asked = [t.requires_grad_() for t in (query, key, value, sinks)]
    between: dict[str, Any] = {"sliding_window": case.window, "softcap": case.cap, "documents": case.documents}
    between |= {"s_aux": sinks if case.sinks else None, "context": context_of(world)}
    out, _ = attention.attend(nn.Module(), query, key, value, None, scaling=0.4, **between)
    found = torch.autograd.grad(out, asked if case.sinks else asked[:3], gradient.transpose(1, 2))
    return [t.detach().double().numpy() for t in (out.transpose(1, 2), *found)]


CASES = {
    "plain": Case(),
    "grouped": Case(kv_heads=2),
    "windows that end within a run": Case(window=3),
    "windows over several runs": Case(kv_heads=8, window=7),
    "capped": Case(cap=1.5),
    "windows, capped": Case(window=5, cap=1.5),
    "packed": Case(documents=DOCUMENTS),
    "packed, windows": Case(documents=DOCUMENTS, window=4),
    "packed, capped": Case(documents=DOCUMENTS, cap=1.5),
    "sinks": Case(sinks=True),
    "sinks, windows, packed": Case(sinks=True, window=5, documents=DOCUMENTS),
    "values of smaller heads": Case(kv_heads=8, head_dims=(12, 8)),
    "values of smaller heads, a document a row": Case(kv_heads=8, head_dims=(12, 8), documents=ROWS),
    "values of smaller heads, packed, windows": Case(kv_heads=8, head_dims=(12, 8), documents=DOCUMENTS, window=6),
    "a few queries at a time": Case(window=9, cap=1.5, documents=DOCUMENTS, at_once=64),
}


def all_seen(layout: Layout, dtype: torch.dtype) -> list[list[np.ndarray] | None]:
    """Of all cases, in this order; None of those that are refused when planned: Ulysses with fewer key heads than ranks."""
    refused = layout.mesh.cp if layout.context == "ulysses" else 1
    return [seen(replace(case, dtype=dtype), layout) if case.kv_heads % refused == 0 else None for case in CASES.values()]


@cache
def outcomes(layout: Layout, dtype: torch.dtype = torch.float64) -> dict[str, list[list[torch.Tensor]]]:
    """By case, of each rank."""
    ranks = zip(*run_world(all_seen, layout.mesh.cp, layout, dtype), strict=True)
    return {name: [[torch.from_numpy(t) for t in one] for one in found] for name, found in zip(CASES, ranks, strict=True) if None not in found}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("degree", [2, 4])
def test_equals_one_process(degree: int, how: Any) -> None:
    layout = Layout(Mesh(cp=degree), context=how)
    ranks = outcomes(layout)
    assert len(ranks) >= len(CASES) - (how == "ulysses" and degree > 2)
    for name, found in ranks.items():
        alone = outcomes(Layout())[name][0]
        for rank, ours in enumerate(found):
            for theirs, tensor in zip(alone[:4], ours, strict=False):
                expected = own(World(layout, rank, torch.device("cpu")), theirs)
                torch.testing.assert_close(
                    tensor, expected, rtol=1e-11, atol=1e-12, msg=lambda said, name=name, rank=rank: f"{name}, rank {rank}: {said}"
                )
        if CASES[name].sinks:
            torch.testing.assert_close(sum(ours[4] for ours in found), alone[4], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("how", WAYS)
def test_rounds_hardly_more_in_bfloat16_than_one_process(how: Any) -> None:
    """Errors against float64 beside those of one process: sums are wide on each rank, and round when they are sent on, as often as there are ranks;
    independent errors of four such roundings are twice as large as those of one. Kernels are the same on both sides: for values with smaller heads
    one process takes a fused one where there are documents, and otherwise torch's attention written out in float32, which nothing is held against."""
    layout = Layout(Mesh(cp=4), context=how)
    narrow, wide = outcomes(Layout(), torch.bfloat16), outcomes(Layout())
    places = [World(layout, rank, torch.device("cpu")) for rank in range(4)]
    for name, ranks in outcomes(layout, torch.bfloat16).items():
        if name == "values of smaller heads":
            continue
        for i, (alone, exact) in enumerate(zip(narrow[name][0][:4], wide[name][0], strict=False)):
            errors = torch.stack([(ours[i] - own(place, exact)).norm() for ours, place in zip(ranks, places, strict=True)])
            assert errors.norm() < 2 * (alone - exact).norm(), (name, i)


# Models whose attention has what no described family has: values with smaller heads (MLA), and sinks beside windows.
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 3},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "num_key_value_heads": 2},
}
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4}


def learned(name: str, layout: Layout) -> tuple[float, dict[str, np.ndarray]]:
    """The sum over all tokens of a function of the logits, and its gradients, summed over ranks."""
    world = join(layout, "cpu")
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SIZES | MODELS[name])
    built: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention.ATTENTION, experts_implementation="eager").double()
    ids = torch.arange(BATCH * SEQ).reshape(BATCH, 1, SEQ) * 7 % 96
    positions = own(world, torch.arange(SEQ).reshape(1, 1, SEQ))
    given = {"input_ids": own(world, ids)[:, 0], "position_ids": positions[:, 0], "use_cache": False}
    value = (built(**given, context=context_of(world)).logits.tanh() * torch.linspace(-1, 1, 96)).sum()
    value.backward()
    total = [float(value.detach())]
    gradients = {n: p.grad for n, p in built.named_parameters() if p.grad is not None}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return world.sum(total, ("cp",))[0], {n: gradient.numpy() for n, gradient in gradients.items()}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_models_with_sinks_and_smaller_values(name: str, how: Any) -> None:
    """transformers' own modules, not cut otherwise."""
    value, gradients = run_world(learned, 1, name, Layout())[0]
    shared, found = run_world(learned, 2, name, Layout(Mesh(cp=2), context=how))[0]
    assert abs(shared - value) < 1e-10 * abs(value)
    assert found.keys() == gradients.keys()
    for tensor, expected in gradients.items():
        assert np.linalg.norm(found[tensor] - expected) < 1e-10 * max(1.0, np.linalg.norm(expected)), tensor
    assert not any("sinks" in tensor and not expected.any() for tensor, expected in gradients.items())


def test_one_process_computes_sinks_as_transformers_does() -> None:
    config = AutoConfig.for_model("gpt_oss", **SIZES | MODELS["gpt_oss"])
    found = []
    for implementation in ("eager", attention.ATTENTION):
        torch.manual_seed(0)
        built: Any = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, experts_implementation="eager").double()
        built(input_ids=torch.arange(BATCH * SEQ).reshape(BATCH, SEQ) * 7 % 96).logits.square().mean().backward()
        found.append({n: p.grad for n, p in built.named_parameters()})
    for tensor, expected in found[0].items():
        torch.testing.assert_close(found[1][tensor], expected, rtol=1e-6, atol=1e-9, msg=tensor)
