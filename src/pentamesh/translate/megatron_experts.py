"""Megatron-LM's flags of experts and of latent attention, as keys of a config.json: Mixtral's architecture, Qwen3-MoE's or DeepSeek's.

Source: Megatron-LM, training/arguments.py and core/transformer/transformer_config.py, whose fields are flags.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any

from pentamesh.errors import Problem
from pentamesh.translate.flags import Setting, given_value
from pentamesh.translate.reader import Reader

__all__ = ["COUNTS", "NUMBERS", "SWITCHES", "WORDS", "balancing", "with_experts"]

COUNTS = {
    "--num-experts": "experts of a sparse layer",
    "--moe-ffn-hidden-size": "width of an expert; that of the MLP",
    "--moe-router-topk": "experts that a token meets; 2",
    "--moe-shared-expert-intermediate-size": "width of the experts that every token meets, together",
    "--moe-router-num-groups": "groups of experts",
    "--moe-router-group-topk": "groups that a token chooses among",
    "--expert-tensor-parallel-size": "1: tensor ranks cut no expert",
    "--q-lora-rank": "width of the latent of queries; none",
    "--kv-lora-rank": "width of the latent of keys and values; 32",
    "--qk-head-dim": "width of a query or key head, but for what is rotated; 128",
    "--qk-pos-emb-head-dim": "width of what is rotated; 64",
    "--v-head-dim": "width of a value head; 128",
}
NUMBERS = {
    "--moe-router-topk-scaling-factor": "factor of the weights of a token's experts; 1",
    "--moe-aux-loss-coeff": "weight of an auxiliary loss; 0",
    "--moe-router-bias-update-rate": "how far biases of experts move after a step; 0.001",
}
SWITCHES = {
    "--moe-grouped-gemm": "one kernel for the experts of a rank, as is always done here",
    "--moe-router-pre-softmax": "weights are shares among all experts, not among the chosen",
    "--moe-router-enable-expert-bias": "a bias of each expert enters the choice",
    "--multi-latent-attention": "keys and values come from a latent",
}
WORDS = {
    "--moe-token-dispatcher-type": ("alltoall",),
    "--moe-router-score-function": ("softmax", "sigmoid"),
    "--moe-router-load-balancing-type": ("aux_loss", "seq_aux_loss", "none"),
    "--rope-type": ("rope",),
}


def with_experts(read: Reader, dense: dict[str, Any]) -> dict[str, Any]:
    """The config of a Llama, with the experts and the attention that flags add to it; itself where they add none."""
    count = read.count("--num-experts")
    if not count:
        for flag in (*COUNTS, *NUMBERS, *SWITCHES, "--moe-layer-freq"):
            if given_value(read.given, flag):
                read.problems.append(Problem(f"{flag} without --num-experts", flag, "add it, or leave this out"))
        return dense
    _said(read)
    met, ffn = read.count("--moe-router-topk", 2), read.count("--moe-ffn-hidden-size", dense["intermediate_size"])
    sparse = _sparse_layers(read, dense["num_hidden_layers"])
    if read.has("--multi-latent-attention"):
        found = _deepseek(read, dense, count, ffn, sparse)
    else:
        found = (_qwen if read.has("--qk-layernorm") else _mixtral)(read, dense, count, ffn, sparse)
    return found | {"num_experts_per_tok": met}


def balancing(given: argparse.Namespace) -> Iterator[Setting]:
    """Keys of the job that say what keeps the loads of experts even.

    Megatron-LM adds up the losses of all layers, each 1 where loads are even; here their mean is weighed, which then is as many as a token chooses.
    Source: its core/transformer/moe/moe_utils.py, switch_load_balancing_loss_func.
    """
    read = Reader(given)
    if not read.count("--num-experts"):
        return
    weight, kind = read.number("--moe-aux-loss-coeff", 0.0), given_value(given, "--moe-router-load-balancing-type")
    step = read.number("--moe-router-bias-update-rate", 0.001)
    if read.has("--moe-router-enable-expert-bias") and step:
        yield "--moe-router-enable-expert-bias", "experts.balance", "bias"
        yield "--moe-router-bias-update-rate", "experts.bias_step", step
    elif weight and kind != "none":
        layers = sum(_sparse_layers(read, read.count("--num-layers", 1)))
        yield "--moe-router-load-balancing-type", "experts.balance", "loss"
        yield "--moe-aux-loss-coeff", "experts.loss_weight", weight * layers / read.count("--moe-router-topk", 2)
    else:
        yield "Megatron-LM's default", "experts.balance", "none"


def _said(read: Reader) -> None:
    """What is done in another way than Megatron-LM would, and what cannot be."""
    if read.number("--moe-aux-loss-coeff", 0.0) and read.has("--moe-router-enable-expert-bias"):
        what = "loads of experts are kept even in one way: by an auxiliary loss, or by biases"
        read.problems.append(Problem(what, "--moe-aux-loss-coeff", "use --moe-aux-loss-coeff 0, or leave --moe-router-enable-expert-bias out"))
    for flag, known in WORDS.items():
        read.word(flag, known)
    if given_value(read.given, "--moe-token-dispatcher-type") is None:
        read.notes.append("rows go to experts by all-to-all; without --moe-token-dispatcher-type alltoall Megatron-LM gathers all tokens")
    parted = read.count("--expert-tensor-parallel-size", 1)
    if parted > 1:
        read.problems.append(Problem("tensor ranks cut no expert here", "--expert-tensor-parallel-size", "use 1, and more expert ranks"))
    elif given_value(read.given, "--tensor-model-parallel-size") and given_value(read.given, "--expert-tensor-parallel-size") is None:
        read.notes.append("tensor ranks cut no expert; without --expert-tensor-parallel-size 1 Megatron-LM would")
    if given_value(read.given, "--add-qkv-bias"):
        read.problems.append(Problem("no architecture with experts that is described here has it", "--add-qkv-bias", "leave it out"))


def _mixtral(read: Reader, dense: dict[str, Any], count: int, ffn: int, sparse: list[bool]) -> dict[str, Any]:
    """A softmax over the chosen is the share of each among them, which is Mixtral's."""
    for flag in ("--moe-router-pre-softmax", "--moe-shared-expert-intermediate-size", *_ONLY_DEEPSEEK):
        _refuse(read, flag, "Mixtral's architecture, which has neither --qk-layernorm nor --multi-latent-attention,")
    if not all(sparse):
        read.problems.append(Problem("Mixtral's architecture has experts in every layer", "--moe-layer-freq", "leave it out, or add --qk-layernorm"))
    return dense | {"model_type": "mixtral", "num_local_experts": count, "intermediate_size": ffn}


def _qwen(read: Reader, dense: dict[str, Any], count: int, ffn: int, sparse: list[bool]) -> dict[str, Any]:
    for flag in ("--moe-shared-expert-intermediate-size", *_ONLY_DEEPSEEK):
        _refuse(read, flag, "Qwen3's architecture with experts")
    layers = [layer for layer, is_sparse in enumerate(sparse) if not is_sparse]
    own = {"model_type": "qwen3_moe", "num_experts": count, "moe_intermediate_size": ffn, "mlp_only_layers": layers}
    return dense | own | {"norm_topk_prob": not read.has("--moe-router-pre-softmax"), "decoder_sparse_step": 1}


# What routers of DeepSeek know.
_ONLY_DEEPSEEK = (
    "--moe-router-num-groups",
    "--moe-router-group-topk",
    "--moe-router-topk-scaling-factor",
    "--moe-router-enable-expert-bias",
    "--moe-router-score-function sigmoid",
)


def _deepseek(read: Reader, dense: dict[str, Any], count: int, ffn: int, sparse: list[bool]) -> dict[str, Any]:
    first = sparse.index(True) if any(sparse) else len(sparse)
    if not all(sparse[first:]):
        read.problems.append(Problem("DeepSeek's dense layers all come first", "--moe-layer-freq", "write it like [0]*3+[1]*58"))
    shared = read.count("--moe-shared-expert-intermediate-size")
    if not shared or shared % ffn:
        what = f"DeepSeek's shared experts are as wide as others: {shared or 'none'} is no multiple of {ffn}"
        read.problems.append(Problem(what, "--moe-shared-expert-intermediate-size", f"use {ffn} or a multiple of it"))
    if read.has("--group-query-attention"):
        read.problems.append(Problem("every head has its own keys from the latent", "--group-query-attention", "leave it out"))
    if given_value(read.given, "--rope-type") is None:
        read.notes.append("positions are rotated as they are; without --rope-type rope Megatron-LM scales those of latent attention (YaRN)")
    groups = read.count("--moe-router-num-groups", 1)
    heads = dense["num_attention_heads"]
    own = {
        "n_routed_experts": count,
        "moe_intermediate_size": ffn,
        "n_shared_experts": shared // ffn,
        "first_k_dense_replace": first,
        "routed_scaling_factor": read.number("--moe-router-topk-scaling-factor", 1.0),
        "n_group": groups,
        "topk_group": read.count("--moe-router-group-topk", groups),
        "q_lora_rank": read.count("--q-lora-rank") or None,
        "kv_lora_rank": read.count("--kv-lora-rank", 32),
        "qk_nope_head_dim": read.count("--qk-head-dim", 128),
        "qk_rope_head_dim": read.count("--qk-pos-emb-head-dim", 64),
        "v_head_dim": read.count("--v-head-dim", 128),
        "num_key_value_heads": heads,
    }
    without = {key: value for key, value in dense.items() if key != "head_dim"}
    return without | own | _choosing(read, groups)


def _choosing(read: Reader, groups: int) -> dict[str, Any]:
    """DeepSeek-V3 scores by sigmoids, of which those of the chosen are made to add up to one; V2 by a softmax over all."""
    if read.word("--moe-router-score-function", WORDS["--moe-router-score-function"]) == "sigmoid":
        return {"model_type": "deepseek_v3", "norm_topk_prob": True}
    _refuse(read, "--moe-router-enable-expert-bias", "DeepSeek-V2's architecture, which scores by a softmax,")
    if not read.has("--moe-router-pre-softmax"):
        what = "DeepSeek-V2 weighs experts by their shares among all, V3 by sigmoids"
        read.problems.append(Problem(what, "--multi-latent-attention", "add --moe-router-pre-softmax, or --moe-router-score-function sigmoid"))
    return {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy" if groups > 1 else "greedy"}


def _refuse(read: Reader, flag: str, what: str) -> None:
    name, _, word = flag.partition(" ")
    given = given_value(read.given, name)
    if given and (not word or given == word):
        read.problems.append(Problem(f"{what} knows no {flag}", name, "leave it out"))


def _sparse_layers(read: Reader, layers: int) -> list[bool]:
    """Which layers have experts: every N-th from the first, or those that a list of zeros and ones says."""
    text = given_value(read.given, "--moe-layer-freq") or "1"
    plain = re.sub(r"['\" ]", "", text)
    if plain.isdecimal() and int(plain):
        return [layer % int(plain) == 0 for layer in range(layers)]
    found = _listed(plain)
    if found is None or len(found) != layers:
        what = f"--moe-layer-freq {text} is no number and no list of {layers} zeros and ones"
        read.problems.append(Problem(what, "--moe-layer-freq", f"write it like [0]*1+[1]*{max(1, layers - 1)}"))
        return [True] * layers
    return found


_LIST = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d{1,4}))?")


def _listed(text: str) -> list[bool] | None:
    """Lists of zeros and ones, times numbers, one after the other: `[0]*3+[1]*58`, or all of it in brackets, times a number. None for all else."""
    whole = re.fullmatch(r"\((.*)\)(?:\*(\d{1,4}))?", text)
    inner, times = (whole[1], int(whole[2] or 1)) if whole else (text, 1)
    parts = [_LIST.fullmatch(part) for part in inner.split("+")]
    if not all(parts):
        return None
    return [bit == "1" for part in parts if part for bit in part[1].split(",") * int(part[2] or 1)] * times
