"""config.json: read as plain JSON, and brought to one spelling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pentamesh.errors import InputError

__all__ = ["ALIASES", "BUILT_AS", "DEFAULTS", "ROPE_BY_KIND", "as_built", "canonical", "named", "parse_config", "read_config", "rope_of"]

# A config.json is a few kB; what is larger is something else under that name.
MAX_CONFIG_BYTES = 4 * 2**20
# What a missing key means to transformers 5 where that is not "none" or "as many as the query heads". Source: configuration_*.py of each.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "gemma2": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True},
    "glm4": {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    "mixtral": {"num_key_value_heads": 8},
    "qwen3_moe": {"num_key_value_heads": 4},
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "attention_bias": True},
    "deepseek_v2": {"q_lora_rank": 1536, "n_shared_experts": 2, "first_k_dense_replace": 0, "topk_method": "greedy"},
    "deepseek_v3": {
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}
# Other names that transformers takes for a key. Source: attribute_map of each config.
ALIASES = {
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "gpt_oss": {"num_experts": "num_local_experts"},
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
}
# Older names of one kind of rotation. Source: transformers, configuration_phi3.py.
LONGROPE = {"phi3": ("su", "yarn")}
# Of a head, the share that positions rotate where `partial_rotary_factor` does not say, in families whose code asks.
ROTATED = {"glm4": 0.5, "phi3": 1.0}
# Where layers of each kind have rotary frequencies of their own: the key that once named their base, and what its absence means.
ROPE_BY_KIND = {"gemma3_text": {"full_attention": ("rope_theta", 1_000_000.0), "sliding_attention": ("rope_local_base_freq", 10_000.0)}}
# What positions are rotated by where a config says nothing of kinds. Source: transformers, configuration_gpt_oss.py.
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096}
ROPE_UNSAID = {"gpt_oss": YARN | {"rope_theta": 150_000.0}}
_OF_ROPE = ("rope_theta", "rope_local_base_freq", "rope_scaling", "rope_parameters", "partial_rotary_factor")

# Names of architectures that are another's under a name of their own, for which transformers has no class.
BUILT_AS = {"kimi_k2": "deepseek_v3"}
# Keys of what comes with a model's files: code, which is never run, and how its weights are quantised, which are planned as if they were not.
_OF_FILES = ("auto_map", "quantization_config")


def read_config(path: Path, within: Path | None = None) -> dict[str, Any]:
    """The mapping in a config.json, which has to lie in the folder `within` after links are followed. Raises InputError."""
    target = path.resolve()
    if within is not None and not target.is_relative_to(within.resolve()):
        raise InputError(f"{path.name} is a link out of its folder, to {target}", where=str(path), hint="put the file itself into the folder")
    try:
        with target.open("rb") as file:
            return parse_config(file.read(MAX_CONFIG_BYTES + 1), str(path))
    except OSError as error:
        raise InputError(f"{path.name} cannot be read: {error.strerror}", where=str(path), hint="give a readable config.json") from None


def parse_config(raw: bytes, where: str) -> dict[str, Any]:
    """The mapping in the bytes of a config.json. Raises InputError."""
    if len(raw) > MAX_CONFIG_BYTES:
        raise InputError(f"this has more than {MAX_CONFIG_BYTES:,} bytes, as no config has", where=where, hint="give the model's config.json")
    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_key_twice)
    except json.JSONDecodeError as error:
        raise InputError(
            f"this is not JSON: {error.msg}", where=f"{where}:{error.lineno}", hint="fetch the file again: it may be cut short"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"this is no config: {error}", where=where, hint="give the model's config.json") from None
    if not isinstance(found, dict):
        raise InputError(f"this holds {type(found).__name__}, not keys with values", where=where, hint="give the model's config.json")
    return found


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(f"`{key}` is written twice, as {found[key]!r} and {value!r}")
        found[key] = value
    return found


def canonical(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config in transformers 5's spelling: `dtype` for `torch_dtype`, one `rope_parameters` for all that is said of rotary positions; what a
    missing key means is filled in, without code and as if its files were not quantised."""
    config = named(config)
    found = {key: value for key, value in config.items() if key not in ("torch_dtype", *_OF_FILES, *_OF_ROPE)}
    if "dtype" not in found and config.get("torch_dtype") is not None:
        found["dtype"] = config["torch_dtype"]
    if rope := rope_of(config):
        found["rope_parameters"] = rope
    for key, value in DEFAULTS.get(str(config.get("model_type")), {}).items():
        found.setdefault(key, value)
    return found


def as_built(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of modules whose family is not described, in its own spelling: without code, and as if its files were not quantised."""
    return {key: value for key, value in config.items() if key not in _OF_FILES}


def named(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with one name for its architecture and for each key."""
    model_type = config.get("model_type")
    built_as = BUILT_AS.get(model_type, model_type) if isinstance(model_type, str) else model_type
    names = ALIASES.get(str(built_as), {})
    renamed = {names[key]: value for key, value in config.items() if key in names}
    kept = {key: value for key, value in config.items() if key not in names}
    return renamed | kept | ({"model_type": built_as} if "model_type" in config else {})


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config says of rotary positions, however it spells it; by kinds of layers where these differ."""
    if kinds := ROPE_BY_KIND.get(str(config.get("model_type"))):
        return _rope_by_kind(config, kinds)
    parts = [part for key in ("rope_scaling", "rope_parameters") if isinstance(part := config.get(key), dict)]
    if not any(parts) and str(config.get("model_type")) in ROPE_UNSAID:
        parts = [{key: value for key, value in ROPE_UNSAID[config["model_type"]].items() if key not in config}]
    rope = {("rope_type" if key == "type" else key): value for part in parts for key, value in part.items()}
    if config.get("rope_theta") is not None:
        rope.setdefault("rope_theta", config["rope_theta"])
    if rope.get("rope_type") in LONGROPE.get(str(config.get("model_type")), ()):
        rope["rope_type"] = "longrope"
    share = config.get("partial_rotary_factor", ROTATED.get(str(config.get("model_type"))))
    if share is not None:
        rope.setdefault("partial_rotary_factor", share)
    return {"rope_type": "default", **rope} if rope else {}


def _rope_by_kind(config: Mapping[str, Any], kinds: Mapping[str, tuple[str, float]]) -> dict[str, Any]:
    """As `_rope`; what an older spelling scales is the positions of layers that see all."""
    given = config.get("rope_parameters")
    given = given if isinstance(given, dict) else {}
    scaling = config.get("rope_scaling")
    rope = {}
    for kind, (key, base) in kinds.items():
        scaled = scaling if kind == "full_attention" and isinstance(scaling, dict) else {}
        own = given.get(kind)
        said = {**(own if isinstance(own, dict) else {}), **{("rope_type" if k == "type" else k): v for k, v in scaled.items()}}
        rope[kind] = {"rope_type": "default", "rope_theta": config.get(key, base), **said}
    return rope
