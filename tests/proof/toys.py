"""Toy models and layouts that the proofs share: small, odd in every size that may go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from pentamesh.job.division import ContextWay
from pentamesh.layout.mesh import AXES, DATA_AXES, Layout, Mesh, Shard
from pentamesh.layout.policy import Policy
from pentamesh.model.config import canonical
from pentamesh.run.ledger import differences
from pentamesh.run.verify import Outcome, Trial, errors, outcome, predicted_ledger
from pentamesh.run.worlds import run_world

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 301,  # prime to 2 and 4: every cut of the embedding is uneven
    "hidden_size": 48,
    "intermediate_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
}
UNTIED = LLAMA | {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}
CAPS = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.2}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 7, "tie_word_embeddings": False}
QWEN2 = LLAMA | {"model_type": "qwen2", "hidden_act": "silu"}
QWEN3 = UNTIED | {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False}
# Windows that sequences outgrow, caps that bite, norms on both sides; a cut of a fused tensor takes a part of each of its parts.
GEMMA2 = LLAMA | {"model_type": "gemma2", "query_pre_attn_scalar": 12, "sliding_window": 7, "pad_token_id": None} | CAPS
GEMMA3 = GEMMA2 | {"model_type": "gemma3_text", "sliding_window_pattern": 2} | dict.fromkeys(CAPS)
PHI3 = {key: value for key, value in UNTIED.items() if key != "head_dim"} | {
    "model_type": "phi3",
    "hidden_size": 64,
    "sliding_window": 9,
    "partial_rotary_factor": 0.5,
    "pad_token_id": None,
}
GLM4 = UNTIED | {"model_type": "glm4", "pad_token_id": None}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 301,
    "n_embd": 52,
    "n_inner": 90,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 63,
    "initializer_range": 0.05,
    "activation_function": "gelu_pytorch_tanh",
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
# Experts that not every token meets, on windows, beside a dense layer, with sinks and biases, or under latents. Dim 1 of what experts hold (twice
# their width, or the hidden size) divides by 2 and 4, their number by 8.
SPARSE: dict[str, Any] = {key: value for key, value in LLAMA.items() if key not in ("attention_bias", "mlp_bias")} | {
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MIXTRAL = SPARSE | {"model_type": "mixtral", "intermediate_size": 20, "num_local_experts": 8, "sliding_window": 9}
QWEN3_MOE = SPARSE | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 20,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "tie_word_embeddings": True,
}
GPT_OSS = SPARSE | {
    "model_type": "gpt_oss",
    "intermediate_size": 20,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 7,
    "max_position_embeddings": 131072,
}
DEEPSEEK_V2 = {key: value for key, value in SPARSE.items() if key not in ("head_dim", "num_key_value_heads")} | {
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
    "q_lora_rank": None,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
DEEPSEEK_V3 = DEEPSEEK_V2 | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "q_lora_rank": 24,
    "num_nextn_predict_layers": 0,
}
del DEEPSEEK_V3["topk_method"]
# Seven rows in `k_proj`-like tensors over four ranks leave the last one empty.
TINY_ROWS = LLAMA | {"hidden_size": 5, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 7, "vocab_size": 13}

# More than one 25 MiB bucket of gradients, in float64.
WIDE = LLAMA | {"vocab_size": 8000, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 6}

TOYS = {
    "wide": WIDE,
    "llama": LLAMA,
    "llama-untied": UNTIED,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gpt2": GPT2,
    "tiny-rows": TINY_ROWS,
}
TOYS["one key head"] = QWEN3 | {"num_key_value_heads": 1}
TOYS |= {"gemma2": canonical(GEMMA2), "gemma3": canonical(GEMMA3), "phi3": canonical(PHI3), "glm4": canonical(GLM4)}
TOYS |= {"mixtral": canonical(MIXTRAL), "qwen3-moe": canonical(QWEN3_MOE), "gpt-oss": canonical(GPT_OSS)}
TOYS |= {"deepseek-v2": canonical(DEEPSEEK_V2), "deepseek-v3": canonical(DEEPSEEK_V3)}


# ZeRO-1 and ZeRO-2 keep whole weights over a step; they differ in when gradients leave.
ZERO: dict[str, dict[str, Any]] = {
    "zero1": {"reshard": False, "keep_gathered": True, "reduce": "once"},
    "zero2": {"reshard": False, "keep_gathered": True, "reduce": "each"},
}


def reduced(cases: Iterable[Any], kept: Callable[[Any], bool]) -> list[Any]:
    """All cases, of which those that are not `kept` are run by `pytest --whole` alone."""
    return [case if kept(case) else pytest.param(case, marks=pytest.mark.whole) for case in cases]


def layout(strategy: str, num_ranks: int) -> Layout:
    """A data strategy over `num_ranks` ranks; `hybrid_shard` as two copies."""
    meshes = {
        "zero1": Layout(Mesh(dp_shard=num_ranks), "optimizer"),
        "zero2": Layout(Mesh(dp_shard=num_ranks), "gradients"),
        "ddp": Layout(Mesh(dp_replicate=num_ranks), "none"),
        "full_shard": Layout(Mesh(dp_shard=num_ranks), "parameters"),
        "hybrid_shard": Layout(Mesh(dp_replicate=2, dp_shard=max(1, num_ranks // 2)), "parameters"),
    }
    return meshes[strategy]


# Sizes that a tensor degree up to 8 divides where it must, and nowhere else.
MANY_HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}


def trial(toy: str, strategy: str, num_ranks: int, grad_accum: int, **policy: Any) -> Trial:
    """A trial of `toy`: two sequences a micro-batch on every rank."""
    micro_batch = 2
    chosen = replace(Policy(micro_batch, grad_accum), **(ZERO.get(strategy, {}) | policy))
    return Trial(TOYS[toy], layout(strategy, num_ranks), chosen, global_batch=micro_batch * grad_accum * num_ranks)


def compared(trial: Trial) -> dict[str, float]:
    """Worst relative errors of a trial on its own number of processes against one."""
    outcomes = run_world(outcome, trial.layout.mesh.num_ranks, trial)
    agree(outcomes)
    return errors(outcomes[0], alone(trial))


def trial_on(config: dict[str, Any], mesh: Mesh, shard: Shard, sequence_parallel: bool, how: ContextWay = "ring", **policy: Any) -> Trial:
    """Two rows a micro-batch, two micro-batches, on every data rank."""
    layout = Layout(mesh, shard, sequence_parallel=sequence_parallel, context=how)
    return Trial(config, layout, replace(Policy(2, 2), **policy), global_batch=4 * mesh.degree(*DATA_AXES))


def check_ledgers(wanted: Trial, ranks: Iterable[int], outcomes: Iterable[Outcome]) -> int:
    """The number of collectives compared, on each of `ranks`; every axis of the mesh is among those that speak."""
    compared, mesh = 0, wanted.layout.mesh
    for rank, found in zip(ranks, outcomes, strict=True):
        predicted = predicted_ledger(wanted, found, rank)
        assert not found.split_errors
        assert not differences(predicted, found.ledger)
        assert {axis.partition("/")[0] for row in predicted for axis in row.axes} >= {axis for axis in (*AXES, "ep") if mesh.degree(axis) > 1}
        compared += sum(row.count for row in predicted)
    return compared


def agree(outcomes: list[Outcome]) -> None:
    """Every rank has the same losses and gradient norms, to the last bit: they clip alike, and say the same."""
    first = outcomes[0]
    for rank, found in enumerate(outcomes):
        assert (found.losses, found.norms) == (first.losses, first.norms), f"rank {rank} has other losses or norms than rank 0"


def check_rounding(wanted: Trial) -> None:
    """Sums in another order than one process makes them: rounding of the compute dtype, and no more."""
    worst = errors(run_world(outcome, wanted.layout.mesh.num_ranks, wanted)[0], alone(wanted))
    assert worst["first_gradient"] < {"fp32": 1e-6, "bf16": 2e-2}[wanted.precision], worst
    assert worst["loss"] < {"fp32": 1e-5, "bf16": 2e-3}[wanted.precision], worst


def alone(trial: Trial) -> Outcome:
    """What one process makes of a trial's samples, in the plainest way: trials that differ in what they keep, gather and reduce share it."""
    wanted = trial.alone()
    even = {"balance": wanted.policy.balance, "balance_by": wanted.policy.balance_by}
    plain = replace(wanted, policy=Policy(wanted.policy.micro_batch, wanted.policy.grad_accum, **even))
    if (key := repr(plain)) not in _ALONE:
        _ALONE[key] = run_world(outcome, 1, plain)[0]
    return _ALONE[key]


_ALONE: dict[str, Outcome] = {}
