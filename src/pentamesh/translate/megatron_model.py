"""Megatron-LM's flags of a model, as a config.json: GPT-2's architecture or Llama's, whichever of the two they spell."""

from __future__ import annotations

import argparse
from typing import Any

from pentamesh.errors import InputError, Problem
from pentamesh.translate import megatron_experts
from pentamesh.translate.flags import given_value
from pentamesh.translate.reader import Reader

__all__ = ["COUNTS", "NUMBERS", "SWITCHES", "WORDS", "architecture"]

COUNTS = megatron_experts.COUNTS | {
    "--num-layers": "blocks",
    "--hidden-size": "width of the residual stream",
    "--num-attention-heads": "query heads",
    "--ffn-hidden-size": "width of the MLP; 4 x hidden size, two thirds of it with --swiglu",
    "--kv-channels": "width of a head; hidden size / heads",
    "--num-query-groups": "key heads, with --group-query-attention; 1",
    "--max-position-embeddings": "longest sequence that the model has positions for",
    "--vocab-size": "tokens before padding; GPT-2's 50,257",
    "--make-vocab-size-divisible-by": "the padded vocabulary is a multiple of this times the tensor degree; 128",
}
NUMBERS = megatron_experts.NUMBERS | {
    "--hidden-dropout": "share of what sublayers leave that is dropped",
    "--attention-dropout": "share of attention weights that is dropped",
    "--init-method-std": "spread of initial weights; 0.02",
    "--norm-epsilon": "added to the variance in norms; 1e-5",
    "--rotary-base": "base of rotary positions; 10000",
}
SWITCHES = megatron_experts.SWITCHES | {
    "--swiglu": "an MLP with a gate",
    "--disable-bias-linear": "projections without biases",
    "--add-qkv-bias": "biases of queries, keys and values even so",
    "--qk-layernorm": "norms of each query and key head",
    "--group-query-attention": "fewer key heads than query heads",
    "--untie-embeddings-and-output-weights": "a head of its own",
}
WORDS = megatron_experts.WORDS | {"--normalization": ("LayerNorm", "RMSNorm"), "--position-embedding-type": ("learned_absolute", "rope")}

GPT2_VOCABULARY = 50257
# What Megatron-LM drops where nothing is said.
DROPOUT = 0.1


def architecture(given: argparse.Namespace, seq_length: int, tensor: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The config.json that flags spell, what they leave out at Megatron-LM's defaults, and what should be said of those.

    Raises InputError with every problem: sizes that are missing, and mixtures that transformers has no architecture for.
    """
    read = Reader(given)
    for flag in ("--num-layers", "--hidden-size", "--num-attention-heads"):
        if given_value(given, flag) is None:
            read.problems.append(Problem(f"{flag} is missing", flag, "Megatron-LM needs it too"))
    config = (_llama if _is_llama(read) else _gpt2)(read, _positions(read, seq_length))
    config |= {"vocab_size": _vocabulary(read, tensor), "initializer_range": read.number("--init-method-std", 0.02)}
    config["tie_word_embeddings"] = not read.has("--untie-embeddings-and-output-weights")
    if read.problems:
        raise InputError(*read.problems)
    return config, tuple(read.notes)


LLAMA_MARKS = ("--swiglu", "--normalization RMSNorm", "--position-embedding-type rope", "--disable-bias-linear")


def _is_llama(read: Reader) -> bool:
    """Whether flags spell Llama's architecture, of which all four marks are needed; with none of them it is GPT-2's."""
    marks = {
        "--swiglu": read.has("--swiglu"),
        "--normalization RMSNorm": read.word("--normalization", WORDS["--normalization"]) == "RMSNorm",
        "--position-embedding-type rope": read.word("--position-embedding-type", WORDS["--position-embedding-type"]) == "rope",
        "--disable-bias-linear": read.has("--disable-bias-linear"),
    }
    here, absent = ([mark for mark, given in marks.items() if given is wanted] for wanted in (True, False))
    if here and absent:
        what = f"transformers has no architecture with {' '.join(here)} and without {' '.join(absent)}"
        read.problems.append(Problem(what, here[0], f"add {' '.join(absent)} for Llama's, or leave out {' '.join(here)} for GPT-2's"))
    return not absent


def _gpt2(read: Reader, positions: int) -> dict[str, Any]:
    hidden, heads = read.count("--hidden-size", 1), read.count("--num-attention-heads", 1)
    for flag in ("--num-experts", "--qk-layernorm", "--multi-latent-attention"):
        if given_value(read.given, flag):
            read.problems.append(Problem(f"GPT-2's architecture knows no {flag}", flag, "spell Llama's architecture: " + " ".join(LLAMA_MARKS)))
    if read.has("--group-query-attention"):
        what = "GPT-2's architecture has as many key heads as query heads"
        read.problems.append(Problem(what, "--group-query-attention", "leave it out, or spell Llama's architecture"))
    if read.count("--kv-channels", hidden // heads) * heads != hidden:
        what = f"GPT-2's heads fill the stream: {heads} of {read.count('--kv-channels', hidden // heads)} are not {hidden}"
        read.problems.append(Problem(what, "--kv-channels", "leave it out, or spell Llama's architecture"))
    if any(given_value(read.given, flag) is None for flag in ("--hidden-dropout", "--attention-dropout")):
        read.notes.append(f"dropout is {DROPOUT:g} where no --hidden-dropout and --attention-dropout say otherwise, as in Megatron-LM")
    dropped, unattended = read.number("--hidden-dropout", DROPOUT), read.number("--attention-dropout", DROPOUT)
    return {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": read.count("--num-layers"),
        "n_head": heads,
        "n_inner": read.count("--ffn-hidden-size", 4 * hidden),
        "n_positions": positions,
        # The fused kernel of Megatron-LM, bias_gelu, is the approximation by tanh.
        "activation_function": "gelu_pytorch_tanh",
        "layer_norm_epsilon": read.number("--norm-epsilon", 1e-5),
        "resid_pdrop": dropped,
        "embd_pdrop": dropped,
        "attn_pdrop": unattended,
    }


def _llama(read: Reader, positions: int) -> dict[str, Any]:
    hidden, heads = read.count("--hidden-size", 1), read.count("--num-attention-heads", 1)
    if read.number("--hidden-dropout", 0.0):
        read.problems.append(Problem("Llama's architecture drops nothing of the stream", "--hidden-dropout", "use --hidden-dropout 0"))
    if any(given_value(read.given, flag) is None for flag in ("--hidden-dropout", "--attention-dropout")):
        read.notes.append(f"nothing is dropped where Megatron-LM would drop {DROPOUT:g} without --hidden-dropout 0 --attention-dropout 0")
    grouped = read.has("--group-query-attention")
    if not grouped and given_value(read.given, "--num-query-groups") is not None:
        read.problems.append(Problem("--num-query-groups without --group-query-attention", "--num-query-groups", "add it"))
    found = {
        "model_type": _of_attention(read),
        "hidden_size": hidden,
        "num_hidden_layers": read.count("--num-layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.count("--num-query-groups", 1) if grouped else heads,
        "head_dim": read.count("--kv-channels", hidden // heads),
        # Two thirds, in whole multiples of 64: a gate makes three matrices of two.
        "intermediate_size": read.count("--ffn-hidden-size", int(4 * hidden * 2 / 3 / 64) * 64),
        "max_position_embeddings": positions,
        "rms_norm_eps": read.number("--norm-epsilon", 1e-5),
        "rope_parameters": {"rope_type": "default", "rope_theta": read.number("--rotary-base", 10000.0)},
        "attention_dropout": read.number("--attention-dropout", 0.0),
    }
    return megatron_experts.with_experts(read, found)


def _of_attention(read: Reader) -> str:
    """Which of Llama's relatives has such queries and keys."""
    biased, normed = read.has("--add-qkv-bias"), read.has("--qk-layernorm")
    if biased and normed:
        what = "no architecture that is described here has both biases and norms of queries and keys"
        read.problems.append(Problem(what, "--qk-layernorm", "leave it or --add-qkv-bias out"))
    return "qwen2" if biased else "qwen3" if normed else "llama"


def _positions(read: Reader, seq_length: int) -> int:
    found = read.count("--max-position-embeddings")
    if not found:
        read.notes.append(f"positions end with the sequence, at {seq_length:,}: Megatron-LM asks for --max-position-embeddings")
    return found or seq_length


def _vocabulary(read: Reader, tensor: int) -> int:
    """The padded vocabulary. Source: Megatron-LM, `_vocab_size_with_padding`."""
    tokens, unit = read.count("--vocab-size", GPT2_VOCABULARY), read.count("--make-vocab-size-divisible-by", 128) * tensor
    padded = -(-tokens // unit) * unit
    whose = "" if given_value(read.given, "--vocab-size") else " of GPT-2's tokenizer"
    read.notes.append(f"the vocabulary is the {tokens:,} tokens{whose}, padded to {padded:,}, a multiple of {unit:,}")
    return padded
