"""The Llama family: pre-norm decoders with rotary positions, grouped queries and a gated MLP.

Llama 2 and 3, SmolLM2 and TinyLlama are `llama`; Mistral, Qwen2 and Qwen3 differ in biases and in the norms of queries and keys; Gemma and GLM-4
norm what a sublayer leaves too; Phi-3 (and Phi-4) and GLM-4 fuse projections. Names and shapes are those of transformers' modules, checked against
the model on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pentamesh.model.dims import Acts, Dim, TensorSpec
from pentamesh.model.families.dropped import dropping
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec

__all__ = ["VARIATIONS", "describe"]

Config = dict[str, Any]


@dataclass(frozen=True)
class Variation:
    """Where a family departs from Llama. A bias is fixed by the code (True, False) or named by the config (a key).

    qk_norm     whether queries and keys are normed: each as it is projected, or once values are projected too
    before      the norms of the stream before attention and before the MLP
    after       the norms of what they leave, or none
    centred     norms multiply by one more than their weight, which starts at zero
    fused       the projections that are one tensor: queries, keys and values, or gate and up
    slides      whether a layer, by its number, attends within `sliding_window` where `layer_types` does not say
    window      what a missing `sliding_window` means
    """

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: Literal["", "as projected", "after all"] = ""
    before: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str, str] | None = None
    centred: bool = False
    fused: tuple[str, ...] = ()
    slides: Callable[[Config, int], bool] = lambda _config, _layer: False
    window: int | None = 4096


def _in_all(_config: Config, _layer: int) -> bool:
    return True


def _in_upper(config: Config, layer: int) -> bool:
    return bool(config.get("use_sliding_window")) and layer >= config.get("max_window_layers", 28)


def _in_every_other(_config: Config, layer: int) -> bool:
    return layer % 2 == 0


def _but_the_last_of_each(config: Config, layer: int) -> bool:
    return bool((layer + 1) % config.get("sliding_window_pattern", 6))


_BIAS: dict[str, Any] = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
_GEMMA: dict[str, Any] = _BIAS | {
    "before": ("input_layernorm", "pre_feedforward_layernorm"),
    "after": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "centred": True,
}
# Source: transformers, configuration_*.py and modeling_*.py of each.
VARIATIONS = {
    "llama": Variation(**_BIAS, mlp_bias="mlp_bias"),
    "mistral": Variation(slides=_in_all),
    "qwen2": Variation(qkv_bias=True, slides=_in_upper),
    "qwen3": Variation(**_BIAS, qk_norm="as projected", slides=_in_upper),
    "gemma2": Variation(**_GEMMA, slides=_in_every_other),
    "gemma3_text": Variation(**_GEMMA, qk_norm="after all", slides=_but_the_last_of_each),
    "phi3": Variation(fused=("qkv", "gate_up"), slides=_in_all, window=None),
    "glm4": Variation(qkv_bias="attention_bias", after=("post_self_attn_layernorm", "post_mlp_layernorm"), fused=("gate_up",)),
}
DROPOUT = {"attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}

_STREAM = ("batch", "seq", "hidden")
_CARRIED = Acts(Role.CARRY, _STREAM)


@dataclass(frozen=True)
class _Tensors:
    """The parameters of a config, named and sized as its variation has them. Raises KeyError for a config without one of its sizes."""

    config: Config
    vary: Variation

    @cached_property
    def hidden(self) -> Dim:
        return Dim("hidden", self.config["hidden_size"])

    @cached_property
    def vocab(self) -> Dim:
        return Dim("vocab", self.config["vocab_size"])

    @cached_property
    def head_dim(self) -> int:
        return self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]

    @cached_property
    def q(self) -> Dim:
        return Dim("heads", self.config["num_attention_heads"] * self.head_dim, self.head_dim)

    @cached_property
    def kv(self) -> Dim:
        heads = self.config.get("num_key_value_heads") or self.q.num_units
        return Dim("kv_heads", heads * self.head_dim, self.head_dim)

    @cached_property
    def ffn(self) -> Dim:
        return Dim("ffn", self.config["intermediate_size"])

    @cached_property
    def is_tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings", False))

    def all(self) -> tuple[TensorSpec, ...]:
        """In the order of a forward pass."""
        shape, ids = (self.vocab, self.hidden), Acts(Role.USE, ("batch", "seq"))
        embedding = TensorSpec("model.embed_tokens.weight", shape, ids, "lookup")
        head = TensorSpec("lm_head.weight", shape, Acts(Role.USE, _STREAM), "matmul", tied_to=embedding.name if self.is_tied else None)
        blocks = (tensor for layer in range(self.config["num_hidden_layers"]) for tensor in self._block(f"model.layers.{layer}"))
        return (embedding, *blocks, self._norm("model.norm"), head)

    def _block(self, unit: str) -> Iterator[TensorSpec]:
        for before, sublayer, after in zip(self.vary.before, (self._attention, self._mlp), self.vary.after or ("", ""), strict=True):
            yield self._norm(f"{unit}.{before}", unit=unit)
            yield from sublayer(unit)
            if after:
                yield self._norm(f"{unit}.{after}", unit=unit)

    def _attention(self, unit: str) -> Iterator[TensorSpec]:
        path, bias, q, kv = f"{unit}.self_attn", self._has(self.vary.qkv_bias), self.q, self.kv
        qkv = Dim("heads", q.size + 2 * kv.size, self.head_dim, (q.size, kv.size, kv.size))
        for letter, dim in (("q", q), ("k", kv), ("v", kv)) if "qkv" not in self.vary.fused else (("qkv", qkv),):
            yield from self._linear(f"{path}.{letter}_proj", dim, self.hidden, bias, unit)
            if self.vary.qk_norm == "as projected" and letter != "v":
                yield self._head_norm(unit, letter, dim)
        if self.vary.qk_norm == "after all":
            yield from (self._head_norm(unit, "q", q), self._head_norm(unit, "k", kv))
        yield from self._linear(f"{path}.o_proj", self.hidden, q, self._has(self.vary.out_bias), unit)

    def _mlp(self, unit: str) -> Iterator[TensorSpec]:
        path, bias, ffn = f"{unit}.mlp", self._has(self.vary.mlp_bias), self.ffn
        gate_up = Dim("ffn", 2 * ffn.size, 1, (ffn.size, ffn.size))
        for side, dim in (("gate", ffn), ("up", ffn)) if "gate_up" not in self.vary.fused else (("gate_up", gate_up),):
            yield from self._linear(f"{path}.{side}_proj", dim, self.hidden, bias, unit)
        yield from self._linear(f"{path}.down_proj", self.hidden, ffn, bias, unit)

    def _linear(self, path: str, out: Dim, into: Dim, bias: bool, unit: str) -> Iterator[TensorSpec]:
        yield TensorSpec(f"{path}.weight", (out, into), Acts(Role.USE, ("batch", "seq", into.name)), "matmul", unit)
        if bias:
            # It is added to the output; after a contraction over tp that output is on the residual stream.
            adds = Acts(Role.CARRY if out is self.hidden else Role.USE, ("batch", "seq", out.name))
            yield TensorSpec(f"{path}.bias", (out,), adds, "bias", unit)

    def _head_norm(self, unit: str, letter: str, heads: Dim) -> TensorSpec:
        per_head = Acts(Role.USE, ("batch", "seq", heads.name, "head_dim"))
        return self._norm(f"{unit}.self_attn.{letter}_norm", Dim("head_dim", self.head_dim), per_head, unit)

    def _norm(self, path: str, dim: Dim | None = None, acts: Acts = _CARRIED, unit: str = "") -> TensorSpec:
        return TensorSpec(f"{path}.weight", (dim or self.hidden,), acts, "excess" if self.vary.centred else "scale", unit)

    def _has(self, flag: bool | str) -> bool:
        return bool(self.config.get(flag, False)) if isinstance(flag, str) else flag


def describe(config: Config, name: str) -> ModelSpec:
    """The spec of a config of this family. Raises KeyError for a config without one of its sizes."""
    vary, layers = VARIATIONS[config["model_type"]], config["num_hidden_layers"]
    tensors = _Tensors(config, vary)
    return ModelSpec(
        name=name,
        family=config["model_type"],
        hidden=tensors.hidden.size,
        num_layers=layers,
        num_heads=tensors.q.num_units,
        num_kv_heads=tensors.kv.num_units,
        head_dim=tensors.head_dim,
        ffn=tensors.ffn.size,
        vocab=tensors.vocab.size,
        tied=tensors.is_tied,
        max_positions=config.get("max_position_embeddings", 0),
        tensors=tensors.all(),
        config=config,
        windows=_windows(config, layers, vary),
        steady=_steady(config),
        rotary=_rotary(config.get("rope_parameters") or {}, tensors.head_dim),
        logit_cap=config.get("final_logit_softcapping"),
        score_cap=config.get("attn_logit_softcapping"),
        score_drop=config.get("attention_dropout") or DROPOUT["attention_dropout"],
        untrainable=_untrainable(config),
    )


def _windows(config: Config, layers: int, vary: Variation) -> tuple[int | None, ...]:
    """The sliding window of each layer; empty where there is none."""
    window = config.get("sliding_window", vary.window)  # a missing key is no null
    given = config.get("layer_types") if vary.slides is not _in_all else None  # not asked by code that slides everywhere
    kinds = given or ["sliding_attention" if vary.slides(config, i) else "full_attention" for i in range(layers)]
    found = tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])
    return found if any(found) else ()


def _rotary(rope: Config, head_dim: int) -> tuple[int, ...]:
    """The widths of the tables of cosines: one for each kind of layer where these have frequencies of their own."""
    by_kind = [part for part in rope.values() if isinstance(part, dict)]
    return tuple(int(head_dim * part.get("partial_rotary_factor", 1.0)) for part in by_kind or [rope])


def _steady(config: Config) -> int | None:
    """Longer sequences turn some rotations to other frequencies, for the whole of the micro-batch that they are in.

    Source: transformers, modeling_rope_utils, dynamic_rope_update.
    """
    rope = config.get("rope_parameters") or {}
    kind = rope.get("rope_type")
    if kind == "longrope":
        return rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings", 4096)
    return config.get("max_position_embeddings") if kind == "dynamic" else None


def _untrainable(config: Config) -> str:
    if config.get("use_bidirectional_attention"):
        return "its tokens attend to those after them"
    return dropping(config, DROPOUT)
