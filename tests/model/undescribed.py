"""Toy configs of architectures that no family describes."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.05,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = SMALL | {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
TOYS: dict[str, dict[str, Any]] = {
    "vaultgemma": SMALL | {"model_type": "vaultgemma", "query_pre_attn_scalar": 16, "sliding_window": 8, "layer_types": TYPES},
    "olmo3": SMALL | {"model_type": "olmo3", "sliding_window": 8, "layer_types": TYPES},
    "glm": SMALL | {"model_type": "glm"},
    "granite": SMALL | {"model_type": "granite"},
    "phi": SMALL | {"model_type": "phi", "head_dim": 12, "num_key_value_heads": 4},
    "minimax_m2": EXPERTS | {"model_type": "minimax_m2", "num_local_experts": 4},
    "qwen2_moe": EXPERTS | {"model_type": "qwen2_moe", "num_experts": 4, "shared_expert_intermediate_size": 20},
    "bloom": {"model_type": "bloom", "vocab_size": 61, "hidden_size": 48, "n_layer": 3, "n_head": 4},
    "gpt_bigcode": {"model_type": "gpt_bigcode", "vocab_size": 61, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64},
}
