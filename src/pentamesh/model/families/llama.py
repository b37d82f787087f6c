"""The Llama family: pre-norm decoders with rotary positions, grouped queries and a gated MLP.

Llama 2 and 3, SmolLM2 and TinyLlama are `llama`; Mistral, Qwen2 and Qwen3 differ in biases and in the norms of queries and keys.
Names and shapes are those of transformers' modules, checked against the model on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pentamesh.model.dims import Acts, Dim, TensorSpec
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec

__all__ = ["VARIATIONS", "describe"]


@dataclass(frozen=True)
class Variation:
    """Where a family departs from Llama. A bias is fixed by the code (True, False) or named by the config (a key)."""

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False


VARIATIONS = {
    "llama": Variation(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Variation(),
    "qwen2": Variation(qkv_bias=True),
    "qwen3": Variation(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True),
}

_STREAM = ("batch", "seq", "hidden")


def describe(config: dict[str, Any], name: str) -> ModelSpec:
    """The spec of a config of this family. Raises KeyError for a config without one of its sizes."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    vary = VARIATIONS[config["model_type"]]

    def has(flag: bool | str) -> bool:
        return bool(config.get(flag, False)) if isinstance(flag, str) else flag

    hidden = Dim("hidden", config["hidden_size"])
    vocab = Dim("vocab", config["vocab_size"])
    q, kv = Dim("heads", heads * head_dim, head_dim), Dim("kv_heads", kv_heads * head_dim, head_dim)
    ffn = Dim("ffn", config["intermediate_size"])

    def linear(path: str, out: Dim, into: Dim, bias: bool, unit: str) -> list[TensorSpec]:
        reads = Acts(Role.USE, ("batch", "seq", into.name))
        # A bias is added to the output; after a contraction over tp that output is on the residual stream.
        adds = Acts(Role.CARRY if out is hidden else Role.USE, ("batch", "seq", out.name))
        found = [TensorSpec(f"{path}.weight", (out, into), reads, "matmul", unit)]
        return found + ([TensorSpec(f"{path}.bias", (out,), adds, "bias", unit)] if bias else [])

    def norm(path: str, dim: Dim, acts: Acts, unit: str) -> list[TensorSpec]:
        return [TensorSpec(f"{path}.weight", (dim,), acts, "scale", unit)]

    def attention(unit: str) -> list[TensorSpec]:
        path, found = f"{unit}.self_attn", []
        for letter, dim in (("q", q), ("k", kv), ("v", kv)):
            found += linear(f"{path}.{letter}_proj", dim, hidden, has(vary.qkv_bias), unit)
            if vary.qk_norm and letter != "v":
                per_head = Acts(Role.USE, ("batch", "seq", dim.name, "head_dim"))
                found += norm(f"{path}.{letter}_norm", Dim("head_dim", head_dim), per_head, unit)
        return found + linear(f"{path}.o_proj", hidden, q, has(vary.out_bias), unit)

    def block(layer: int) -> list[TensorSpec]:
        unit, bias = f"model.layers.{layer}", has(vary.mlp_bias)
        return [
            *norm(f"{unit}.input_layernorm", hidden, Acts(Role.CARRY, _STREAM), unit),
            *attention(unit),
            *norm(f"{unit}.post_attention_layernorm", hidden, Acts(Role.CARRY, _STREAM), unit),
            *linear(f"{unit}.mlp.gate_proj", ffn, hidden, bias, unit),
            *linear(f"{unit}.mlp.up_proj", ffn, hidden, bias, unit),
            *linear(f"{unit}.mlp.down_proj", hidden, ffn, bias, unit),
        ]

    tied = bool(config.get("tie_word_embeddings", False))
    embedding = TensorSpec("model.embed_tokens.weight", (vocab, hidden), Acts(Role.USE, ("batch", "seq")), "lookup")
    head = TensorSpec("lm_head.weight", (vocab, hidden), Acts(Role.USE, _STREAM), "matmul", tied_to=embedding.name if tied else None)
    layers = config["num_hidden_layers"]
    return ModelSpec(
        name=name,
        family=config["model_type"],
        hidden=hidden.size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn.size,
        vocab=vocab.size,
        tied=tied,
        max_positions=config.get("max_position_embeddings", 0),
        tensors=(embedding, *(t for i in range(layers) for t in block(i)), *norm("model.norm", hidden, Acts(Role.CARRY, _STREAM), ""), head),
        config=config,
        windows=_windows(config, layers),
    )


# What transformers takes where a config that slides does not say how far. Source: configuration_{mistral,qwen2,qwen3}.py.
WINDOW = 4096


def _windows(config: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer; empty where there is none.

    Source: transformers, Mistral slides in every layer; Qwen2 and Qwen3, where `use_sliding_window` says so, from `max_window_layers` on.
    """
    slides = config["model_type"] == "mistral" or config.get("use_sliding_window")
    window = config.get("sliding_window", WINDOW) if slides else None  # a missing key is no null
    if not window:
        return ()
    first = 0 if config["model_type"] == "mistral" else config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])
