"""The Llama family: pre-norm decoders with rotary positions, grouped queries and a gated MLP.

Llama 2 and 3, SmolLM2 and TinyLlama are `llama`; Mistral, Qwen2 and Qwen3 differ in biases and in the norms of queries and keys; Gemma and GLM-4
norm what a sublayer leaves too; Phi-3 (and Phi-4) and GLM-4 fuse projections; Mixtral, Qwen3-MoE, gpt-oss and DeepSeek have experts (`experts`), of
which DeepSeek presses keys into latents (`latent`). Names and shapes are those of transformers' modules, checked against the model on the meta
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pentamesh.model.dims import Acts, Dim, TensorSpec
from pentamesh.model.families.dropped import dropping
from pentamesh.model.families.experts import SPARSE, SparseMlp, experts, keeps_from_training
from pentamesh.model.families.latent import LatentAttention
from pentamesh.model.families.modules import CARRIED, STREAM, gated_mlp, linear
from pentamesh.model.roles import Role
from pentamesh.model.spec import Experts, ModelSpec

__all__ = ["LATENT", "VARIATIONS", "describe"]

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
    sinks       whether each head has a score of its own that takes weight and gives no value
    latent      whether keys and values are pressed into a latent
    halved      whether a table of rotations holds each frequency once
    predicts    whether files may have layers for multi-token prediction, which are not built
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
    sinks: bool = False
    latent: bool = False
    halved: bool = False
    predicts: bool = False


def _in_all(_config: Config, _layer: int) -> bool:
    return True


def _in_all_if_asked(config: Config, _layer: int) -> bool:
    return bool(config.get("use_sliding_window"))


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
    "mixtral": Variation(slides=_in_all, window=None),
    "qwen3_moe": Variation(**_BIAS, qk_norm="as projected", slides=_in_all_if_asked),
    "gpt_oss": Variation(**_BIAS, slides=_in_every_other, window=128, sinks=True, halved=True),
    "deepseek_v2": Variation(**_BIAS, mlp_bias="mlp_bias", latent=True, halved=True),
    "deepseek_v3": Variation(**_BIAS, latent=True, predicts=True),
}
LATENT = tuple(name for name, vary in VARIATIONS.items() if vary.latent)
DROPOUT = {"attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


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
    def latent(self) -> LatentAttention | None:
        return LatentAttention(self.config, self.hidden) if self.vary.latent else None

    @cached_property
    def experts(self) -> Experts | None:
        return experts(self.config)

    @cached_property
    def head_dim(self) -> int:
        if self.latent:
            return self.latent.head_dim
        return self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]

    @property
    def rotated(self) -> int:
        """Elements of a head that positions rotate, or may."""
        return self.latent.widths.rotated if self.latent else self.head_dim

    @cached_property
    def q(self) -> Dim:
        return Dim("heads", self.config["num_attention_heads"] * self.head_dim, self.head_dim)

    @cached_property
    def kv(self) -> Dim:
        heads = self.config.get("num_key_value_heads") or self.q.num_units
        return Dim("kv_heads", heads * self.head_dim, self.head_dim)

    @cached_property
    def ffn(self) -> Dim:
        """Of layers with a dense MLP, empty where none has one."""
        is_dense = not self.experts or len(self.experts.layers) < self.config["num_hidden_layers"]
        return Dim("ffn", self.config["intermediate_size"] if is_dense else 0)

    @cached_property
    def is_tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings", False))

    def all(self) -> tuple[TensorSpec, ...]:
        """In the order of a forward pass."""
        shape, ids = (self.vocab, self.hidden), Acts(Role.USE, ("batch", "seq"))
        embedding = TensorSpec("model.embed_tokens.weight", shape, ids, "lookup")
        head = TensorSpec("lm_head.weight", shape, Acts(Role.USE, STREAM), "matmul", tied_to=embedding.name if self.is_tied else None)
        blocks = (tensor for layer in range(self.config["num_hidden_layers"]) for tensor in self._block(layer))
        return (embedding, *blocks, self._norm("model.norm"), head)

    def buffers(self) -> Iterator[TensorSpec]:
        """What is no parameter and yet in the files."""
        for mlp in filter(None, map(self._sparse, range(self.config["num_hidden_layers"]))):
            yield from mlp.buffers()

    def _block(self, layer: int) -> Iterator[TensorSpec]:
        unit = f"model.layers.{layer}"
        sublayers = (self._attention(unit), self._mlp(unit, self._sparse(layer)))
        for before, sublayer, after in zip(self.vary.before, sublayers, self.vary.after or ("", ""), strict=True):
            yield self._norm(f"{unit}.{before}", unit=unit)
            yield from sublayer
            if after:
                yield self._norm(f"{unit}.{after}", unit=unit)

    def _attention(self, unit: str) -> Iterator[TensorSpec]:
        return self.latent.tensors(unit, self._has(self.vary.qkv_bias)) if self.latent else self._grouped_attention(unit)

    def _grouped_attention(self, unit: str) -> Iterator[TensorSpec]:
        path, bias, q, kv = f"{unit}.self_attn", self._has(self.vary.qkv_bias), self.q, self.kv
        qkv = Dim("heads", q.size + 2 * kv.size, self.head_dim, (q.size, kv.size, kv.size))
        for letter, dim in (("q", q), ("k", kv), ("v", kv)) if "qkv" not in self.vary.fused else (("qkv", qkv),):
            yield from linear(f"{path}.{letter}_proj", dim, self.hidden, bias, unit)
            if self.vary.qk_norm == "as projected" and letter != "v":
                yield self._head_norm(unit, letter, dim)
        if self.vary.qk_norm == "after all":
            yield from (self._head_norm(unit, "q", q), self._head_norm(unit, "k", kv))
        if self.vary.sinks:
            yield TensorSpec(f"{path}.sinks", (Dim("heads", q.num_units),), Acts(Role.USE, ("batch", "seq", "heads")), "sink", unit)
        yield from linear(f"{path}.o_proj", self.hidden, q, self._has(self.vary.out_bias), unit)

    def _mlp(self, unit: str, sparse: SparseMlp | None) -> Iterator[TensorSpec]:
        path, bias = f"{unit}.mlp", self._has(self.vary.mlp_bias)
        if not sparse:
            yield from gated_mlp(path, self.hidden, self.ffn, bias, unit, fused="gate_up" in self.vary.fused)
            return
        yield from sparse.tensors()
        if shared := sparse.found.shared_ffn:
            yield from gated_mlp(f"{path}.shared_experts", self.hidden, Dim("ffn", shared), bias, unit)

    def _sparse(self, layer: int) -> SparseMlp | None:
        """The experts of a layer, where it has some."""
        if not self.experts or layer not in self.experts.layers:
            return None
        return SparseMlp(SPARSE[self.config["model_type"]], self.experts, self.hidden, f"model.layers.{layer}")

    def _head_norm(self, unit: str, letter: str, heads: Dim) -> TensorSpec:
        per_head = Acts(Role.USE, ("batch", "seq", heads.name, "head_dim"))
        return self._norm(f"{unit}.self_attn.{letter}_norm", Dim("head_dim", self.head_dim), per_head, unit)

    def _norm(self, path: str, dim: Dim | None = None, acts: Acts = CARRIED, unit: str = "") -> TensorSpec:
        return TensorSpec(f"{path}.weight", (dim or self.hidden,), acts, "excess" if self.vary.centred else "scale", unit)

    def _has(self, flag: bool | str) -> bool:
        return bool(self.config.get(flag, False)) if isinstance(flag, str) else flag


def describe(config: Config, name: str) -> ModelSpec:
    """The spec of a config of this family. Raises KeyError for a config without one of its sizes."""
    vary, layers = VARIATIONS[config["model_type"]], config["num_hidden_layers"]
    tensors, unbuilt = _Tensors(config, vary), _unbuilt(config) if vary.predicts else ()
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
        notes=(f"layers for multi-token prediction in its files ({', '.join(unbuilt)}) are not built",) if unbuilt else (),
        windows=_windows(config, layers, vary),
        steady=_steady(config),
        rotary=_rotary(config.get("rope_parameters") or {}, tensors.rotated // (2 if vary.halved else 1)),
        logit_cap=config.get("final_logit_softcapping"),
        score_cap=config.get("attn_logit_softcapping"),
        score_drop=config.get("attention_dropout") or DROPOUT["attention_dropout"],
        value_dim=tensors.latent.value_dim if tensors.latent else 0,
        latent=tensors.latent.widths if tensors.latent else None,
        experts=tensors.experts,
        buffers=tuple(tensors.buffers()),
        unbuilt=unbuilt,
        untrainable=_untrainable(config),
    )


def _windows(config: Config, layers: int, vary: Variation) -> tuple[int | None, ...]:
    """The sliding window of each layer; empty where there is none."""
    window = config.get("sliding_window", vary.window)  # a missing key is no null
    asked = vary.slides not in (_in_all, _in_all_if_asked)  # code that slides everywhere asks for no kinds
    given = config.get("layer_types") if asked else None
    kinds = given or ["sliding_attention" if vary.slides(config, i) else "full_attention" for i in range(layers)]
    found = tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])
    return found if any(found) else ()


def _rotary(rope: Config, width: int) -> tuple[int, ...]:
    """The widths of the tables of cosines: one for each kind of layer where these have frequencies of their own."""
    by_kind = [part for part in rope.values() if isinstance(part, dict)]
    return tuple(int(width * part.get("partial_rotary_factor", 1.0)) for part in by_kind or [rope])


def _steady(config: Config) -> int | None:
    """Longer sequences turn some rotations to other frequencies, for the whole of the micro-batch that they are in.

    Source: transformers, modeling_rope_utils, dynamic_rope_update.
    """
    rope = config.get("rope_parameters") or {}
    kind = rope.get("rope_type")
    if kind == "longrope":
        return rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings", 4096)
    return config.get("max_position_embeddings") if kind == "dynamic" else None


def _unbuilt(config: Config) -> tuple[str, ...]:
    """What names of layers for multi-token prediction begin with: they lie behind the others, as many as a config says."""
    layers, beyond = config["num_hidden_layers"], config.get("num_nextn_predict_layers") or 0
    return tuple(f"model.layers.{layers + layer}." for layer in range(beyond))


def _untrainable(config: Config) -> str:
    if config.get("use_bidirectional_attention"):
        return "its tokens attend to those after them"
    return dropping(config, DROPOUT) or keeps_from_training(config)
