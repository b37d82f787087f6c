"""Names, shapes, ties and order of parameters are those of transformers' modules, model by model."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pentamesh.model.catalogue import Entry, entries
from pentamesh.model.config import DEFAULTS, ROPE_BY_KIND, as_built, canonical
from pentamesh.model.families import FAMILIES, describe
from pentamesh.model.faults import check
from pentamesh.model.read import read_model
from pentamesh.model.spec import ModelSpec
from pentamesh.run import trace


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of our own, where nothing has been kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "pad_token_id": None,
}
# Heads that do not fill the hidden size, one key head for all, sizes without a common divisor, biases, ties.
ODD = SMALL | {"hidden_size": 35, "intermediate_size": 51, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 6, "num_hidden_layers": 3}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 61,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
# What a config of a family needs beside them.
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "bos_token_id": None, "eos_token_id": None}
LATENTS: dict[str, Any] = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "num_key_value_heads": 4}
NEEDED: dict[str, dict[str, Any]] = {
    "mixtral": EXPERTS | {"num_local_experts": 6},
    "qwen3_moe": EXPERTS | {"num_experts": 6, "moe_intermediate_size": 14},
    "gpt_oss": EXPERTS | {"num_local_experts": 6},
    "deepseek_v2": EXPERTS | LATENTS | {"n_routed_experts": 6, "moe_intermediate_size": 14},
    "deepseek_v3": EXPERTS | LATENTS | {"n_routed_experts": 16, "moe_intermediate_size": 14},
}
SPARSE = {model_type: SMALL | {"model_type": model_type} | needed for model_type, needed in NEEDED.items()}
GROUPED = {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2}
TOYS = {
    "llama": SMALL | {"model_type": "llama"},
    "llama tied, biases": ODD | {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama, as many key heads": {k: v for k, v in SMALL.items() if k != "num_key_value_heads"} | {"model_type": "llama"},
    "mistral": SMALL | {"model_type": "mistral", "head_dim": 8, "sliding_window": 16},
    "mistral tied": ODD | {"model_type": "mistral", "tie_word_embeddings": True, "sliding_window": None},
    "mistral, key heads not given": {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
    | {"model_type": "mistral", "num_attention_heads": 8, "hidden_size": 32},
    "qwen2": SMALL | {"model_type": "qwen2"},
    "qwen2 tied, uneven": ODD | {"model_type": "qwen2", "hidden_size": 30, "head_dim": 6, "tie_word_embeddings": True},
    "qwen3": SMALL | {"model_type": "qwen3", "head_dim": 10},
    "qwen3 tied, biases": ODD | {"model_type": "qwen3", "tie_word_embeddings": True, "attention_bias": True},
    "qwen3, head size not given": SMALL | {"model_type": "qwen3"},
    "gemma2": SMALL | {"model_type": "gemma2", "head_dim": 8},
    "gemma2, nothing given": {k: v for k, v in SMALL.items() if k != "num_key_value_heads"} | {"model_type": "gemma2"},
    "gemma3_text": ODD | {"model_type": "gemma3_text", "attention_bias": True, "tie_word_embeddings": False, "rope_local_base_freq": 5000.0},
    "phi3": {k: v for k, v in SMALL.items() if k != "num_key_value_heads"} | {"model_type": "phi3", "hidden_size": 32},
    "phi3 grouped": SMALL | {"model_type": "phi3", "partial_rotary_factor": 0.5, "hidden_size": 32, "tie_word_embeddings": True},
    "glm4": SMALL | {"model_type": "glm4"},
    "glm4, odd": ODD | {"model_type": "glm4", "attention_bias": False, "partial_rotary_factor": 0.34},
    "mixtral": SPARSE["mixtral"],
    "mixtral, other names": SPARSE["mixtral"] | {"num_experts": 4, "num_local_experts": 4, "sliding_window": 5, "tie_word_embeddings": True},
    "qwen3_moe": SPARSE["qwen3_moe"] | {"head_dim": 8, "decoder_sparse_step": 2, "num_hidden_layers": 5, "mlp_only_layers": [3]},
    "qwen3_moe, other names": {key: value for key, value in SPARSE["qwen3_moe"].items() if key != "num_experts"} | {"num_local_experts": 5},
    "gpt_oss": SPARSE["gpt_oss"],
    "gpt_oss, rotated as told": SPARSE["gpt_oss"] | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "head_dim": 6},
    "deepseek_v2": SPARSE["deepseek_v2"],
    "deepseek_v2, no latent of queries": SPARSE["deepseek_v2"] | GROUPED | {"q_lora_rank": None, "mlp_bias": True, "first_k_dense_replace": 1},
    "deepseek_v3": SPARSE["deepseek_v3"],
    "deepseek_v3, biases": SPARSE["deepseek_v3"]
    | {"attention_bias": True, "q_lora_rank": 7, "first_k_dense_replace": 1, "n_shared_experts": 2, "num_mtp_layers": 2, "tie_word_embeddings": True},
    "gpt2": GPT2,
    "gpt2 untied, odd": GPT2 | {"tie_word_embeddings": False, "n_embd": 35, "n_head": 5, "n_inner": 51, "n_positions": 33},
}
LLAMAS = [model_type for model_type in FAMILIES if model_type != "gpt2"]


def on_meta(config: PretrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def shapes(model: torch.nn.Module, *, tied_too: bool) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=not tied_too)}


def agrees(spec: ModelSpec, model: torch.nn.Module) -> int:
    """The number of tensors of `spec`, which are exactly those of `model`, as are its buffers that files hold."""
    saved = model.state_dict()
    assert {t.name: t.shape for t in spec.buffers} == {
        name: tuple(b.shape) for name, b in model.named_buffers() if name in saved
    } or not spec.is_described
    assert {t.name: t.shape for t in spec.tensors} == shapes(model, tied_too=True)
    assert {t.name: t.shape for t in spec.parameters} == shapes(model, tied_too=False)
    assert spec.num_parameters == sum(p.numel() for p in model.parameters())
    return len(spec.tensors)


def hf_config(config: dict[str, Any]) -> PretrainedConfig:
    return AutoConfig.for_model(**config)


@pytest.mark.parametrize("toy", TOYS)
def test_a_toy_is_described_tensor_by_tensor(toy: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TOYS[toy]))
    spec = read_model(str(tmp_path))
    agrees(spec, on_meta(hf_config(TOYS[toy])))
    assert spec.tied is bool(TOYS[toy].get("tie_word_embeddings", spec.family in ("gpt2", "gemma2", "gemma3_text")))


@pytest.mark.parametrize("toy", TOYS)
def test_one_spelling_builds_the_same_model(toy: str) -> None:
    written, ours = (hf_config(deepcopy(config)).to_dict() for config in (TOYS[toy], canonical(TOYS[toy])))
    written.pop("partial_rotary_factor", None)  # Phi-3 leaves it beside rope_parameters, which have it too
    assert written == ours


@pytest.mark.parametrize(
    "toy", ["llama tied, biases", "mistral", "qwen2 tied, uneven", "qwen3", "gemma2", "gemma3_text", "phi3", "glm4", "gpt2", *SPARSE]
)
def test_tensors_are_listed_as_a_forward_pass_meets_them(toy: str) -> None:
    spec = describe(canonical(TOYS[toy]), toy)
    model = AutoModelForCausalLM.from_config(hf_config(TOYS[toy]), experts_implementation="eager")
    met: list[str] = []
    for path, module in model.named_modules():
        own = [f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)]
        if own and not path.endswith("self_attn"):  # whose own are sinks, met between what it calls
            module.register_forward_pre_hook(lambda *_, own=own: met.extend(own))
    model(torch.tensor([[1, 2, 3]]))
    assert spec is not None
    assert [t.name for t in spec.tensors if t.kind != "sink"] == met
    sinks = [place for place, t in enumerate(spec.tensors) if t.kind == "sink"]
    assert [spec.tensors[place + 1].name for place in sinks] == [t.name.replace("sinks", "o_proj.weight") for t in spec.tensors if t.kind == "sink"]


@pytest.mark.parametrize("model_type", LLAMAS)
def test_what_a_missing_key_means(model_type: str) -> None:
    heads = 128 if model_type == "deepseek_v3" else 32
    config = SMALL | NEEDED.get(model_type, {}) | {"model_type": model_type, "num_attention_heads": heads, "hidden_size": 2 * heads}
    config = {k: v for k, v in config.items() if k != "num_key_value_heads"}
    check(config, model_type)
    theirs, ours = hf_config(config), describe(canonical(config), model_type)
    assert ours is not None
    head_dim = theirs.qk_head_dim if ours.latent else getattr(theirs, "head_dim", None) or 2
    assert (ours.num_kv_heads, ours.head_dim) == (theirs.num_key_value_heads, head_dim)
    assert set(DEFAULTS) <= set(FAMILIES)


@pytest.mark.parametrize("model_type", LLAMAS)
def test_both_spellings_as_transformers_writes_and_reads_them(model_type: str, tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    if model_type == "phi3":  # of which transformers allows two kinds
        rope = {"rope_type": "longrope", "short_factor": [1.0, 2.0, 3.0], "long_factor": [4.0, 5.0, 6.0]}
    published = (
        SMALL
        | NEEDED.get(model_type, {})
        | {"model_type": model_type, "head_dim": 6, "rope_theta": 5e5, "rope_scaling": rope, "torch_dtype": "bfloat16"}
    )
    (tmp_path / "published.json").write_text(json.dumps(published))
    hf_config(deepcopy(published)).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in saved, "transformers 5 spells it anew"
    assert "rope_theta" not in saved
    of_family = {"phi3": {"partial_rotary_factor": 1.0}, "glm4": {"partial_rotary_factor": 0.5}}.get(model_type, {})
    expected: dict[str, Any] = {"rope_theta": 5e5, **rope, **of_family}
    if model_type in ROPE_BY_KIND:
        expected = {"full_attention": expected, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    old, new = read_model(str(tmp_path / "published.json")), read_model(str(tmp_path))
    assert old.tensors == new.tensors
    assert old.config["dtype"] == new.config["dtype"]
    for spec in (old, new):
        assert without_filling(spec.config["rope_parameters"]) == expected


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "gemma2", "sliding_window": 8, "sliding_window_pattern": 3}, (8, None, 8, None)),
        ({"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 3}, (8, 8, None, 8)),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention"] * 4}, (8, 8, 8, 8)),
        ({"model_type": "phi3", "sliding_window": 8}, (8, 8, 8, 8)),
        ({"model_type": "phi3"}, ()),
        ({"model_type": "mixtral", "sliding_window": 8, "layer_types": ["full_attention"] * 4}, (8, 8, 8, 8)),
        ({"model_type": "mixtral"}, ()),
        ({"model_type": "qwen3_moe", "sliding_window": 8}, ()),
        ({"model_type": "qwen3_moe", "sliding_window": 8, "use_sliding_window": True}, (8, 8, 8, 8)),
        ({"model_type": "gpt_oss"}, (128, None, 128, None)),
        ({"model_type": "gpt_oss", "layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, (None, None, None, 128)),
        ({"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 8)),
    ],
    ids=str,
)
def test_windows_are_those_that_the_modules_ask_for(config: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    """What each attention is called with, in the order of layers."""
    config = SMALL | {"num_hidden_layers": 4, "hidden_size": 32, "head_dim": 8} | NEEDED.get(config["model_type"], {}) | config
    asked: list[int | None] = []

    def attend(module: Any, query: torch.Tensor, *_: Any, sliding_window: int | None = None, **__: Any) -> tuple[torch.Tensor, None]:
        asked.append(sliding_window)
        return query.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("recorded", attend)
    model = AutoModelForCausalLM.from_config(hf_config(deepcopy(config)), attn_implementation="recorded", experts_implementation="eager")
    model(torch.tensor([[1, 2, 3]]))
    spec = describe(canonical(config), "toy")
    assert spec is not None
    assert tuple(asked) == (windows or (None,) * 4)
    assert spec.windows == windows


def test_how_far_rotations_are_the_same_whatever_a_micro_batch_holds() -> None:
    longrope = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    phi = canonical(SMALL | {"model_type": "phi3", "hidden_size": 32, "rope_scaling": longrope, "original_max_position_embeddings": 48})
    dynamic = canonical(SMALL | {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    steady = [spec.steady for config in (phi, dynamic, SMALL | {"model_type": "llama"}) if (spec := describe(config, "toy"))]
    assert steady == [48, 64, None]


def without_filling(rope: dict[str, Any]) -> dict[str, Any]:
    """What transformers adds to long rotations from other keys is not of the spelling."""
    return {key: value for key, value in rope.items() if key != "original_max_position_embeddings" or rope["rope_type"] != "longrope"}


def ties(model: torch.nn.Module) -> dict[str, str]:
    first = {id(p): name for name, p in model.named_parameters()}
    return {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if first[id(p)] != name}


def test_every_catalogue_model_is_the_one_transformers_builds() -> None:
    compared = 0
    for entry in entries():
        spec, model = read_model(entry.id), trace.on_meta(entry.config)
        assert {t.name: t.tied_to for t in spec.tensors if t.tied_to} == ties(model)
        compared += agrees(spec, model)
        assert spec.num_parameters == entry.num_parameters, entry.id
    print(f"{len(entries())} catalogue models, {compared} tensors: names and shapes equal to transformers' on the meta device")
    assert compared > 10_000


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.id)
def test_catalogue_configs_are_in_one_spelling(entry: Entry) -> None:
    check(entry.config, entry.id)
    described = entry.config["model_type"] in FAMILIES
    assert (canonical(entry.config) if described else as_built(entry.config)) == entry.config


def test_toy_of_the_shared_folder(shared: Path) -> None:
    spec = read_model(str(shared / "data" / "models" / "tiny-llama-0.9m"))
    assert spec.num_parameters == 918_656


def test_published_and_rebuilt_configs(shared: Path) -> None:
    import csv

    facts = {row["model_id"]: row for row in csv.DictReader((shared / "data" / "model_facts.csv").open())}
    compared = 0
    for path in sorted((shared / "data" / "model_configs").glob("*/*.json")):
        row = facts[path.stem.replace("--", "/", 1)]
        assert read_model(str(path)).num_parameters == int(row["params_total"]), path.name
        compared += 1
    assert compared == len(entries())
