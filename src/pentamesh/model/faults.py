"""Faults: all that keeps a config.json from describing a model, at once, before any module is built."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pentamesh.errors import InputError, Problem
from pentamesh.model.config import ALIASES, DEFAULTS, ROPE_BY_KIND, named, rope_of
from pentamesh.model.families import FAMILIES, experts, gpt2, latent
from pentamesh.model.families.experts import SPARSE
from pentamesh.model.families.llama import LATENT

__all__ = ["ACTIVATIONS", "ROPE_TYPES", "check"]

# The deepest published decoder has 126 layers; each costs a dozen tensors here, so that a slip of the keyboard should not exhaust memory.
MAX_LAYERS = 10_000
# No dim of a model comes near; beyond it, arithmetic on shapes only makes numbers that nobody can read.
MAX_SIZE = 10**9
# What the modules are built with, by the names of transformers; those with parameters of their own are of no described family.
ACTIVATIONS = (
    "silu",
    "swish",
    "gelu",
    "gelu_new",
    "gelu_fast",
    "gelu_pytorch_tanh",
    "gelu_python",
    "quick_gelu",
    "relu",
    "relu2",
    "relu6",
    "sigmoid",
    "tanh",
)
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")
# GPT-2 has a table of positions and may leave out the width of its MLP; it has no key heads or head size of their own.
GPT2_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
GPT2_OPTIONAL_SIZES = ("intermediate_size",)
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob", "use_sliding_window", "rope_interleave", "output_router_logits")
REALS = (
    "rms_norm_eps",
    "layer_norm_epsilon",
    "initializer_range",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "routed_scaling_factor",
    "swiglu_alpha",
    "swiglu_limit",
)
# Keys that a null does not stand for the default of.
_GEMMA = {"num_key_value_heads", "head_dim", "tie_word_embeddings"}
_SPARSE = {"num_key_value_heads", "head_dim", "tie_word_embeddings", "hidden_act"}
_DEEPSEEK = {"tie_word_embeddings", "hidden_act", "attention_bias", "first_k_dense_replace", "n_shared_experts", "routed_scaling_factor"}
NEVER_NULL = {
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "glm4": {"num_key_value_heads", "head_dim", "attention_bias"},
    "mixtral": _SPARSE - {"head_dim"},
    "qwen3_moe": _SPARSE | {"attention_bias", "norm_topk_prob", "decoder_sparse_step", "use_sliding_window"},
    "gpt_oss": _SPARSE | {"attention_bias", "sliding_window", "swiglu_alpha", "swiglu_limit"},
    "deepseek_v2": _DEEPSEEK | {"mlp_bias"},
    "deepseek_v3": _DEEPSEEK,
}
LAYER_TYPES = ("full_attention", "sliding_attention")


def check(config: Mapping[str, Any], where: str) -> None:
    """Raises InputError with everything that keeps a config from describing a model: of a known family all of it, of others their depth."""
    if problems := [Problem(what, f"{where} {key}".strip(), hint) for key, what, hint in _faults(config)]:
        raise InputError(*problems)


def _faults(given: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    config = named(given)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        said = "there is no model_type" if model_type is None else f"model_type = {model_type!r} is not a name"
        yield "model_type", said, f"it names the architecture: {', '.join(FAMILIES)}, or any that transformers knows"
        return
    if model_type not in FAMILIES:
        yield from _too_deep(config)
        return
    yield from _spellings(given)
    sizes = _sizes(config)
    bad = {key: value for key, value in sizes.items() if not _is_count(value)}
    for key, value in bad.items():
        said = f"{key} is missing" if value is None else f"{key} = {repr(value)[:40]} is not a whole number from 1 to {MAX_SIZE:,}"
        yield key, said, "fetch the config.json again"
    for key in FLAGS:
        if not isinstance(config.get(key), bool | None):
            yield key, f"{key} = {config[key]!r} is neither true nor false", "fetch the config.json again"
    yield from _numbers(config)
    if model_type != "gpt2":
        yield from _by_layer(config)
    if not bad:
        yield from _inconsistent_of(config, sizes)


def _inconsistent_of(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What is wrong with sizes that are whole numbers."""
    model_type = config["model_type"]
    if model_type == "gpt2":
        yield from _inconsistent_gpt2(sizes)
    elif model_type in LATENT:
        yield from latent.faults(model_type, sizes)
        yield from _deep("num_hidden_layers", sizes)
    else:
        yield from _inconsistent(sizes)
    if model_type in SPARSE:
        yield from experts.faults(DEFAULTS[model_type] | dict(config))


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes in the family's own spelling: those it needs, None where they are missing, and those it has beside them."""
    model_type = config["model_type"]
    needed, optional = SIZES, OPTIONAL_SIZES
    if model_type == "gpt2":
        needed, optional = (tuple(gpt2.SPELLING.get(key, key) for key in keys) for keys in (GPT2_SIZES, GPT2_OPTIONAL_SIZES))
    if model_type in SPARSE:
        config, needed = DEFAULTS[model_type] | dict(config), needed + SPARSE[model_type].sizes
    if model_type in LATENT:
        needed, optional = needed + latent.SIZES, optional + latent.OPTIONAL_SIZES
    return {key: config.get(key) for key in needed} | {key: config[key] for key in optional if config.get(key) is not None}


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What transformers would compute with, or look up, only once the modules are built."""
    rope = rope_of(config)
    ropes = list(rope.values()) if config["model_type"] in ROPE_BY_KIND else [rope]
    reals = [(key, config.get(key)) for key in REALS]
    rotary = {"rope_theta": "rope_theta", "factor": "rope factor", "partial_rotary_factor": "partial_rotary_factor"}
    for key, value in [*reals, *((said, part.get(key)) for part in ropes for key, said in rotary.items())]:
        real = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
        if value is not None and not real:
            yield key, f"{key} = {value!r} is not a number above 0", "fetch the config.json again"
    for key in gpt2.DROPOUT:
        share = config.get(key, 0)
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share < 1:
            yield key, f"{key} = {share!r} is no share of activations", "a share lies between 0 and 1"
    if config.get("add_cross_attention"):
        yield "add_cross_attention", "this is a decoder that attends to an encoder's output too", "give a model of text alone"
    words = [(key, config.get(key), ACTIVATIONS) for key in ("hidden_act", "hidden_activation", "activation_function")]
    for key, value, known in (*words, *(("rope_type", part.get("rope_type"), ROPE_TYPES) for part in ropes)):
        if value is not None and value not in known:
            yield key, f"{key} = {value!r} is not one that is known", f"known are {', '.join(known)}"


def _by_layer(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """How far layers see, and by which frequencies they rotate."""
    mend = "fetch the config.json again"
    for key, least in (("sliding_window", 1), ("sliding_window_pattern", 1), ("max_window_layers", 0)):
        value = config.get(key)
        if value is not None and not (isinstance(value, int) and not isinstance(value, bool) and value >= least):
            yield key, f"{key} = {value!r} is not a whole number from {least}", mend
    kinds = config.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and set(map(str, kinds)) <= set(LAYER_TYPES)):
        yield "layer_types", f"layer_types = {repr(kinds)[:60]} is not a list of {' and '.join(LAYER_TYPES)}", mend
    elif kinds is not None and len(kinds) != config.get("num_hidden_layers"):
        yield "layer_types", f"layer_types names {len(kinds)} layers of {config.get('num_hidden_layers')}", mend
    for key in sorted(NEVER_NULL.get(str(config["model_type"]), set()) & {key for key, value in config.items() if value is None}):
        yield key, f"{key} is null", "give its value, or leave the key out"
    rope = rope_of(config)
    if rope.get("rope_type") == "longrope" and not all(isinstance(rope.get(f"{length}_factor"), list) for length in ("short", "long")):
        yield "rope_scaling", "rope_type = 'longrope' without lists short_factor and long_factor", mend


def _too_deep(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Numbers of layers, by whatever name and in whichever part of a config, that would take a helper's memory before they mean anything."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _too_deep(value)
        elif re.search(r"layers?$|^depth$", key) and isinstance(value, int) and value > MAX_LAYERS:
            yield key, f"{key} = {value} is more than {MAX_LAYERS:,}", "mend the number of layers"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_SIZE


def _inconsistent(size: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    heads, hidden = size["num_attention_heads"], size["hidden_size"]
    kv_heads = size.get("num_key_value_heads", heads)
    if heads % kv_heads:
        what = f"num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}"
        yield "num_key_value_heads", what, "each key head serves the same number of query heads"
    if "head_dim" not in size and hidden % heads:
        what = f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}, and no head_dim is given"
        yield "hidden_size", what, "add head_dim, or mend the sizes"
    elif (head_dim := size.get("head_dim", hidden // heads)) % 2:
        yield "head_dim", f"head_dim = {head_dim} is odd, and rotary positions turn pairs", "use an even head_dim"
    yield from _deep("num_hidden_layers", size)


def _inconsistent_gpt2(size: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    if size["n_embd"] % size["n_head"]:
        yield "n_embd", f"n_embd = {size['n_embd']} is not a multiple of n_head = {size['n_head']}", "mend the sizes"
    yield from _deep("n_layer", size)


def _deep(key: str, size: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    if size[key] > MAX_LAYERS:
        yield key, f"{key} = {size[key]} is more than {MAX_LAYERS:,}", "mend the number of layers"


def _spellings(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Keys that say the same thing twice and differently."""
    old, new = config.get("torch_dtype"), config.get("dtype")
    if old is not None and new is not None and old != new:
        yield "torch_dtype", f"torch_dtype = {old!r} and dtype = {new!r}", "keep one of them"
    for other, key in ALIASES.get(named(config)["model_type"], {}).items():
        if other in config and config.get(key, config[other]) != config[other]:
            yield key, f"{key} = {config[key]!r} and {other} = {config[other]!r}", "keep one of them"
    rope, theta = config.get("rope_parameters"), config.get("rope_theta")
    inner = rope.get("rope_theta") if isinstance(rope, dict) else None
    if theta is not None and inner is not None and theta != inner:
        yield "rope_theta", f"rope_theta = {theta!r} and rope_parameters.rope_theta = {inner!r}", "keep one of them"
    of_kinds = ROPE_BY_KIND.get(str(config.get("model_type")), {})
    kinds = [part.get("rope_type", part.get("type")) for part in (config.get("rope_scaling"), rope) if isinstance(part, dict)]
    if not of_kinds and len(kinds) == 2 and kinds[0] != kinds[1]:
        yield "rope_scaling", f"rope_scaling is of type {kinds[0]!r} and rope_parameters of type {kinds[1]!r}", "keep one of them"
    by_kind = [(f"rope_parameters.{kind}", rope[kind]) for kind in of_kinds if isinstance(rope, dict) and kind in rope]
    for key, value in [("rope_scaling", config.get("rope_scaling")), ("rope_parameters", rope), *by_kind]:
        if value is not None and not isinstance(value, dict):
            yield key, f"{key} = {value!r} is not a mapping", "fetch the config.json again"
