"""GGUF: a file of quantised weights by its own description - metadata and where each tensor lies - and the config that it means.

Torch-free, and no tensor is read but one of a few numbers. Source: ggml, docs/gguf.md; the keys are those that llama.cpp's converter writes.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentamesh.errors import InputError, Problem

__all__ = ["Gguf", "GgufTensor", "gguf_config", "gguf_file", "gguf_name", "read_gguf"]

MAGIC, VERSIONS = b"GGUF", (2, 3)
NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
TEXT, ARRAY = 8, 9
# Arrays that are kept: numbers by layer. Of others, tokens say, only the length is.
MAX_KEPT = 4096
# ggml's numbers of the dtypes that are not quantised.
PLAIN = {0: "float32", 1: "float16", 30: "bfloat16"}
# Architectures of which each tensor has one name here and there, by the class that transformers builds.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ROPE_FACTORS = "rope_freqs.weight"
FETCH = "copy or download the file again"
INSTEAD = "give the Hugging Face folder that the file was made from"


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: its shape outermost first, ggml's number of its quantisation, and where its bytes begin in the file."""

    shape: tuple[int, ...]
    kind: int
    begin: int


@dataclass(frozen=True)
class Gguf:
    """What a file says of itself: metadata by key, long arrays as their length, and its tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def dtype(self) -> str:
        """The dtype of the weights when they are numbers again: the file's own where most of it is not quantised, else bfloat16."""
        sizes: dict[int, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.kind] = sizes.get(tensor.kind, 0) + math.prod(tensor.shape)
        return PLAIN.get(max(sizes, key=lambda kind: sizes[kind]), "bfloat16") if sizes else "bfloat16"


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that `path` is, or that a folder without config.json holds; None where there is none. Raises InputError for several."""
    if not path.is_dir():
        return path if path.suffix == ".gguf" and path.is_file() else None
    found = sorted(path.glob("*.gguf"))
    if (path / "config.json").is_file() or not found:
        return None
    if len(found) > 1:
        raise InputError(f"{path} holds {len(found)} GGUF files", where="model.name", hint=f"name one of them, like {path / found[0].name}")
    return found[0]


def gguf_name(name: str) -> str:
    """The name that a parameter has in a GGUF file."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.{kind}"
    layer, _, inner = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[inner]}.{kind}"


def read_gguf(path: Path) -> Gguf:
    """The description at the start of a file. Raises InputError where it is none, or cut short."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, _Reader(data))
    except (struct.error, KeyError, TypeError, OverflowError, RecursionError, ValueError) as error:
        raise InputError(f"{path.name} is no whole GGUF file: {error}", where=str(path), hint=FETCH) from None
    except OSError as error:
        raise InputError(f"{path.name} cannot be read: {error.strerror}", where=str(path), hint=FETCH) from None


def _read(path: Path, reader: _Reader) -> Gguf:
    if reader.take(4) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    if (version := reader.number("<I")) not in VERSIONS:
        raise ValueError(f"it is of version {version}, known are {', '.join(map(str, VERSIONS))}")
    num_tensors, num_keys = reader.number("<Q"), reader.number("<Q")
    metadata = {reader.text(): reader.value(reader.number("<I")) for _ in range(num_keys)}
    listed = [reader.tensor() for _ in range(num_tensors)]
    grain = metadata.get("general.alignment", 32)
    if not isinstance(grain, int) or grain < 1:
        raise ValueError(f"its tensors are aligned to {grain}")
    start = -(-reader.at // grain) * grain
    return Gguf(path, metadata, {name: GgufTensor(shape, kind, start + offset) for name, shape, kind, offset in listed})


@dataclass
class _Reader:
    """Values one after the other. Raises struct.error or ValueError where the file ends before they do."""

    data: mmap.mmap
    at: int = 0

    def take(self, num_bytes: int) -> bytes:
        self.skip(num_bytes)
        return self.data[self.at - num_bytes : self.at]

    def skip(self, num_bytes: int) -> None:
        if self.at + num_bytes > len(self.data):
            raise ValueError(f"{num_bytes:,} bytes are expected at byte {self.at:,}, and it has {len(self.data):,}")
        self.at += num_bytes

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def text(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            return self.number(NUMBERS[kind])
        inner, length = self.number("<I"), self.number("<Q")
        if inner in NUMBERS and length <= MAX_KEPT:
            return [self.value(inner) for _ in range(length)]
        if inner in NUMBERS:
            self.skip(struct.calcsize(NUMBERS[inner]) * length)
        else:
            for _ in range(length):
                self.skip(self.number("<Q")) if inner == TEXT else self.value(inner)
        return length

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self.text(), self.number("<I")
        shape = tuple(reversed([self.number("<Q") for _ in range(num_dims)]))
        return name, shape, self.number("<I"), self.number("<Q")


def gguf_config(found: Gguf) -> dict[str, Any]:
    """The config.json that a file means. Raises InputError with everything that it does not say, or says and we would not compute."""
    architecture = found.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        what = f"a GGUF file of the architecture {architecture} is not read"
        raise InputError(what, where=str(found.path), hint=f"read are {', '.join(ARCHITECTURES)}; {INSTEAD}")
    own = {key.removeprefix(f"{architecture}."): value for key, value in found.metadata.items() if key.startswith(f"{architecture}.")}
    if problems := [Problem(what, str(found.path), hint) for what, hint in _unread(found, own)]:
        raise InputError(*problems)
    heads = own["attention.head_count"]
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": found.tensors["token_embd.weight"].shape[0],
        "hidden_size": own["embedding_length"],
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "head_dim": own.get("attention.key_length") or own.get("rope.dimension_count") or own["embedding_length"] // heads,
        "max_position_embeddings": own["context_length"],
        "rms_norm_eps": _short(own["attention.layer_norm_rms_epsilon"]),
        "rope_theta": _short(own.get("rope.freq_base", 10_000.0)),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in found.tensors,
        "dtype": found.dtype,
    }
    if architecture != "qwen2":
        config |= {"attention_bias": "blk.0.attn_q.bias" in found.tensors, "mlp_bias": "blk.0.ffn_up.bias" in found.tensors}
    return config | _rope_scaling(found, own, config) | dict(_token_ids(found))


NEEDED = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
OPTIONAL = ("attention.head_count_kv", "attention.key_length", "rope.dimension_count", "rope.freq_base", "rope.scaling.factor")


def _unread(found: Gguf, own: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What is missing, and what would be computed otherwise than the file means."""
    for key in (*NEEDED, *(key for key in OPTIONAL if key in own)):
        if not isinstance(own.get(key), int | float) or not own[key] > 0:
            yield f"{key} is {own.get(key, 'not given')}", FETCH
    if len(found.tensors.get("token_embd.weight", GgufTensor((), 0, 0)).shape) != 2:
        yield "there is no token_embd.weight", FETCH
    if found.metadata.get("split.count", 1) not in (0, 1):
        yield f"it is one of {found.metadata['split.count']} parts", "merge them: llama-gguf-split --merge"
    if own.get("expert_count"):
        yield f"it has {own['expert_count']} experts a layer, which are not read from GGUF", INSTEAD
    if own.get("attention.sliding_window"):
        yield f"its attention sees {own['attention.sliding_window']} tokens, which is not read from GGUF", INSTEAD
    if (scaling := own.get("rope.scaling.type", "none")) not in ("none", "linear", "yarn"):
        yield f"rotary positions are scaled by {scaling}, which is not read from GGUF", INSTEAD


def _short(value: float) -> float:
    """The number that went through float32: 1e-05 for 9.999999747378752e-06."""
    return float(f"{value:.6g}")


def _token_ids(found: Gguf) -> Iterator[tuple[str, int]]:
    for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if (token := found.metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            yield key, token


def _rope_scaling(found: Gguf, own: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    if ROPE_FACTORS in found.tensors:
        return {"rope_scaling": _llama3(found, config)}
    kind = own.get("rope.scaling.type", "none")
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": _short(own.get("rope.scaling.factor", 1.0))}
    original = own.get("rope.scaling.original_context_length")
    return {"rope_scaling": scaling | ({"original_max_position_embeddings": original} if original else {})}


def _llama3(found: Gguf, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's scaling, of which a file keeps only what each frequency is divided by: believed where it gives exactly those numbers.

    Source: the parameters of Llama 3.1 and 3.2 as published, and transformers' modeling_rope_utils for what they do.
    """
    written, num = found.tensors[ROPE_FACTORS], config["head_dim"] // 2
    with found.path.open("rb") as file:
        file.seek(written.begin)
        content = file.read(4 * num)
    factors = struct.unpack(f"<{num}f", content) if written.kind == 0 and written.shape == (num,) and len(content) == 4 * num else (0.0,)
    scaling = {"rope_type": "llama3", "factor": max(factors), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    if len(factors) != num or any(abs(a - b) > 1e-5 * b for a, b in zip(factors, _divisors(scaling, config), strict=True)):
        raise InputError(f"{ROPE_FACTORS} is not Llama 3's scaling of rotary positions", where=str(found.path), hint=INSTEAD)
    return scaling


def _divisors(scaling: dict[str, Any], config: dict[str, Any]) -> Iterator[float]:
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    for i in range(0, config["head_dim"], 2):
        turns = scaling["original_max_position_embeddings"] / (2 * math.pi * config["rope_theta"] ** (i / config["head_dim"]))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        yield 1 / ((1 - smooth) / factor + smooth)
