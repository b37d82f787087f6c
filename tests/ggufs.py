"""Hugging Face folders written as GGUF files, in the way of llama.cpp's converter, with the package that it is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

__all__ = ["write_gguf"]

QUANTISED = gguf.GGMLQuantizationType


def _permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """Source: llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute."""
    shape = weights.shape
    return weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_gguf(folder: Path, path: Path, kind: str = "F32", tokenizer: bool = True, **metadata: Any) -> Path:
    """The model in `folder` as a GGUF file whose matrices are of `kind`; `metadata` overrides keys, dots as `__`, and None leaves one out."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(path), config["model_type"])
    known = _sizes(config) | (_tokens(folder) if tokenizer else {}) | {key.replace("__", "."): value for key, value in metadata.items()}
    for key, value in known.items():
        _add(writer, key.replace("ARCH", config["model_type"]), value)
    _add_tensors(writer, folder, config, QUANTISED[kind])
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    return {
        "ARCH.block_count": config["num_hidden_layers"],
        "ARCH.context_length": config["max_position_embeddings"],
        "ARCH.embedding_length": config["hidden_size"],
        "ARCH.feed_forward_length": config["intermediate_size"],
        "ARCH.attention.head_count": config["num_attention_heads"],
        "ARCH.attention.head_count_kv": config["num_key_value_heads"],
        "ARCH.attention.key_length": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "ARCH.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "ARCH.rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
    }


def _tokens(folder: Path) -> dict[str, Any]:
    """Vocabulary and merges of a byte-level BPE; 3 marks a control token, 1 any other."""
    words = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"] for token in words["added_tokens"]}
    vocab = words["model"]["vocab"] | {token["content"]: token["id"] for token in words["added_tokens"]}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in words["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<|im_start|>"],
        "tokenizer.ggml.eos_token_id": vocab["<|im_end|>"],
        "tokenizer.ggml.padding_token_id": vocab["<|im_end|>"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _add_tensors(writer: Any, folder: Path, config: dict[str, Any], kind: Any) -> None:
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[config["model_type"]]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, ending = name.rpartition(".")
        values = tensor.float().numpy()
        projection = module.rpartition(".")[2]
        if config["model_type"] == "llama" and projection in heads:
            values = _permuted(values, heads[projection])
        if values.ndim > 1 and kind != QUANTISED.F32:
            values = gguf.quants.quantize(np.ascontiguousarray(values), kind)
            writer.add_tensor(f"{names.get_name(module)}.{ending}", values, raw_dtype=kind)
        else:
            writer.add_tensor(f"{names.get_name(module)}.{ending}", np.ascontiguousarray(values))
