"""The GPT-2 family: pre-norm decoders with learned positions, LayerNorm, biases everywhere and an MLP without a gate.

Its projections are `Conv1D`, whose weights are [in, out]; queries, keys and values are fused in one. Names and shapes are those of transformers'
modules, checked against the model on the meta device.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

from pentamesh.model.dims import Acts, Dim, TensorSpec
from pentamesh.model.families.dropped import dropping
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec

__all__ = ["DROPOUT", "SPELLING", "describe"]

# What its config.json calls the sizes that others name alike. Source: transformers, GPT2Config.attribute_map.
SPELLING = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
# What drops activations at random, and by how much where a config does not say. Source: transformers, GPT2Config.
DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}

_STREAM = Acts(Role.CARRY, ("batch", "seq", "hidden"))


def describe(config: dict[str, Any], name: str) -> ModelSpec:
    """The spec of a config of this family. Raises KeyError for a config without one of its sizes."""
    heads, layers = config["n_head"], config["n_layer"]
    head_dim = config["n_embd"] // heads
    hidden, vocab = Dim("hidden", config["n_embd"]), Dim("vocab", config["vocab_size"])
    q, ffn = Dim("heads", hidden.size, head_dim), Dim("ffn", config.get("n_inner") or 4 * hidden.size)
    qkv = Dim("heads", 3 * hidden.size, head_dim, (hidden.size,) * 3)
    # Every block adds to the stream twice: what is added starts smaller, so that the stream starts as wide however deep the model is.
    onto_stream = 1 / sqrt(2 * layers)

    def linear(path: str, into: Dim, out: Dim, unit: str) -> list[TensorSpec]:
        reads = Acts(Role.USE, ("batch", "seq", into.name))
        adds = _STREAM if out is hidden else Acts(Role.USE, ("batch", "seq", out.name))
        spread = onto_stream if out is hidden else 1.0
        weight = TensorSpec(f"{path}.weight", (into, out), reads, "matmul", unit, spread=spread)
        return [weight, TensorSpec(f"{path}.bias", (out,), adds, "bias", unit)]

    def norm(path: str, unit: str) -> list[TensorSpec]:
        return [TensorSpec(f"{path}.{own}", (hidden,), _STREAM, kind, unit) for own, kind in (("weight", "scale"), ("bias", "bias"))]

    def block(layer: int) -> list[TensorSpec]:
        unit = f"transformer.h.{layer}"
        return [
            *norm(f"{unit}.ln_1", unit),
            *linear(f"{unit}.attn.c_attn", hidden, qkv, unit),
            *linear(f"{unit}.attn.c_proj", q, hidden, unit),
            *norm(f"{unit}.ln_2", unit),
            *linear(f"{unit}.mlp.c_fc", hidden, ffn, unit),
            *linear(f"{unit}.mlp.c_proj", ffn, hidden, unit),
        ]

    tied = bool(config.get("tie_word_embeddings", True))
    embedding = TensorSpec("transformer.wte.weight", (vocab, hidden), Acts(Role.USE, ("batch", "seq")), "lookup")
    # A position is looked up once for all sequences, and added to what the stream carries.
    positions = TensorSpec("transformer.wpe.weight", (Dim("positions", config["n_positions"]), hidden), _STREAM, "lookup")
    reads = Acts(Role.USE, ("batch", "seq", "hidden"))
    head = TensorSpec("lm_head.weight", (vocab, hidden), reads, "matmul", tied_to=embedding.name if tied else None)
    return ModelSpec(
        name=name,
        family="gpt2",
        hidden=hidden.size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        ffn=ffn.size,
        vocab=vocab.size,
        tied=tied,
        max_positions=config["n_positions"],
        tensors=(embedding, positions, *(t for i in range(layers) for t in block(i)), *norm("transformer.ln_f", ""), head),
        config=config,
        score_drop=config.get("attn_pdrop", DROPOUT["attn_pdrop"]),
        untrainable=dropping(config, DROPOUT),
    )
