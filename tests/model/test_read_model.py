"""A model is found where its name says, and what is wrong with its config.json is said whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pentamesh.errors import InputError
from pentamesh.model.catalogue import entries, find
from pentamesh.model.families import FAMILIES, describe
from pentamesh.model.read import cached_config, read_model

GOOD: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty Hugging Face cache, wherever the one of this machine is."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def folder(at: Path, config: Any = None) -> Path:
    at.mkdir(parents=True, exist_ok=True)
    (at / "config.json").write_text(config if isinstance(config, str) else json.dumps(config or GOOD))
    return at


def in_cache(tmp_path: Path, hub_id: str, commit: str, config: dict[str, Any], ref: str = "main") -> Path:
    """A snapshot as huggingface_hub lays it out: a link into blobs, and a ref."""
    repository = tmp_path / "hf" / "hub" / f"models--{hub_id.replace('/', '--')}"
    for part in ("blobs", "refs", f"snapshots/{commit}"):
        (repository / part).mkdir(parents=True, exist_ok=True)
    (repository / "blobs" / f"blob{commit}").write_text(json.dumps(config))
    (repository / "snapshots" / commit / "config.json").symlink_to(f"../../blobs/blob{commit}")
    if ref:
        (repository / "refs" / ref).write_text(commit)
    return repository / "snapshots" / commit


def refused(name: str, base: Path | None = None, **kwargs: Any) -> list[tuple[str, str, str]]:
    with pytest.raises(InputError) as caught:
        read_model(name, base, **kwargs)
    return [(p.what, p.where, p.hint) for p in caught.value.problems]


def test_a_folder_and_its_config(tmp_path: Path) -> None:
    folder(tmp_path / "toy")
    by_folder, by_file, by_name = read_model(str(tmp_path / "toy")), read_model(str(tmp_path / "toy" / "config.json")), read_model("toy", tmp_path)
    assert by_folder.tensors == by_file.tensors == by_name.tensors
    assert by_name.name == "toy"
    assert by_folder.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_a_folder_comes_before_the_catalogue(tmp_path: Path) -> None:
    folder(tmp_path / "meta-llama" / "Llama-3.1-8B")
    assert read_model("meta-llama/Llama-3.1-8B", tmp_path).hidden == 24


@pytest.mark.parametrize(
    ("name", "resolved", "num_parameters"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("META-LLAMA/LLAMA-3.1-70B", "meta-llama/Llama-3.1-70B", 70_553_706_496),
        ("llama-3.1-405b", "meta-llama/Llama-3.1-405B", 405_853_388_800),
        ("llama-3-8b", "meta-llama/Meta-Llama-3-8B", 8_030_261_248),
        ("llama-2-7b", "meta-llama/Llama-2-7b-hf", 6_738_415_616),
        ("smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008),
        ("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
        ("gemma-2-9b", "google/gemma-2-9b", 9_241_705_984),
        ("gpt-oss-20b", "openai/gpt-oss-20b", 20_914_757_184),
        ("phi-4", "microsoft/phi-4", 14_659_507_200),
        ("glm-4.5", "zai-org/GLM-4.5", 352_797_814_784),
        ("deepseek-ai/deepseek-v3", "deepseek-ai/DeepSeek-V3", 671_026_404_352),
        ("kimi-k2", "moonshotai/Kimi-K2-Instruct", 1_026_408_209_408),
        ("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B", 1_543_714_304),
    ],
)
def test_catalogue_names(name: str, resolved: str, num_parameters: int) -> None:
    spec = read_model(name)
    assert (spec.name, spec.num_parameters) == (resolved, num_parameters)


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.3-70B", "llama-3.3-70b"])
def test_a_name_that_nobody_published_is_resolved_aloud(name: str) -> None:
    spec = read_model(name)
    assert spec.name == "meta-llama/Llama-3.3-70B-Instruct"
    assert spec.notes == ("meta-llama/Llama-3.3-70B is not published: meta-llama/Llama-3.3-70B-Instruct is meant",)
    assert read_model("meta-llama/Llama-3.3-70B-Instruct").notes == ()


def test_every_catalogue_name_is_its_own() -> None:
    for entry in entries():
        for name in (entry.id, *entry.variants, *entry.unpublished):
            found, short = find(name), find(name.rpartition("/")[2])
            assert found is not None
            assert found.entry is entry
            assert short == found
        assert entry.source
        assert entry.licence


def test_catalogue_is_the_table_of_facts(shared: Path) -> None:
    import csv

    with (shared / "data" / "model_facts.csv").open() as file:
        facts = {row["model_id"]: row for row in csv.DictReader(file)}
    assert len(facts) == 69
    assert {entry.id: entry.num_parameters for entry in entries()} == {name: int(row["params_total"]) for name, row in facts.items()}
    assert {entry.id: read_model(entry.id).num_parameters for entry in entries()} == {name: int(row["params_total"]) for name, row in facts.items()}
    active = {name: int(row["params_active"]) for name, row in facts.items()}
    assert {entry.id: read_model(entry.id).active_parameters for entry in entries()} == active
    assert {entry.id: entry.licence for entry in entries()} == {name: row["licence"] for name, row in facts.items()}


def test_the_hubs_cache_is_read_as_files(tmp_path: Path) -> None:
    in_cache(tmp_path, "someone/toy", "aaa", GOOD)
    in_cache(tmp_path, "someone/toy", "bbb", GOOD | {"num_hidden_layers": 3}, ref="branch")
    assert read_model("someone/toy").num_layers == 2
    assert read_model("someone/toy", revision="branch").num_layers == 3
    assert read_model("someone/toy", revision="bbb").num_layers == 3
    assert "HF_HUB_OFFLINE" in refused("someone/toy", revision="ccc")[0][0]


def test_a_snapshot_given_as_a_folder_may_link_to_its_blobs(tmp_path: Path) -> None:
    assert read_model(str(in_cache(tmp_path, "someone/toy", "aaa", GOOD))).hidden == 24


def test_without_a_main_the_newest_snapshot_counts(tmp_path: Path) -> None:
    old = in_cache(tmp_path, "someone/toy", "bbb", GOOD, ref="")
    new = in_cache(tmp_path, "someone/toy", "aaa", GOOD | {"num_hidden_layers": 3}, ref="")
    os.utime(old, (1, 1))
    os.utime(new, (2, 2))
    assert read_model("someone/toy").num_layers == 3


def test_a_cached_copy_comes_before_the_catalogue(tmp_path: Path) -> None:
    in_cache(tmp_path, "meta-llama/Llama-3.1-8B", "aaa", GOOD | {"bos_token_id": 7})
    spec = read_model("llama-3.1-8b")
    assert (spec.name, spec.config["bos_token_id"]) == ("meta-llama/Llama-3.1-8B", 7)


def test_the_catalogue_says_that_it_has_one_revision() -> None:
    assert "revision abc was not looked at" in read_model("llama-3.1-8b", revision="abc").notes[0]


@pytest.mark.parametrize("name", ["../../etc", "..", "models--x/../.."])
def test_names_do_not_leave_the_cache(name: str) -> None:
    assert cached_config(name) is None
    assert cached_config("someone/toy", "../../..") is None


@pytest.mark.parametrize(
    ("name", "said", "hint"),
    [
        ("lama-3.1-8b", "the model lama-3.1-8b is not on this machine", "did you mean meta-llama/Llama-3.1-8B"),
        ("someone/unknown", "the model someone/unknown is not on this machine, and HF_HUB_OFFLINE is set", "give a folder with a config.json"),
        ("./toy", "there is no model folder ./toy", "give a folder with a config.json"),
        ("toys/config.json", "there is no model folder toys/config.json", "give a folder"),
        ("a model?", "there is no model folder a model?", "give a folder"),
    ],
)
def test_a_name_that_means_nothing(name: str, said: str, hint: str, tmp_path: Path) -> None:
    found = refused(name, tmp_path)
    assert len(found) == 1
    assert found[0][0] == said
    assert "looked for in" in found[0][1]
    assert hint in found[0][2]


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "weights.bin").touch()
    what, _, hint = refused("toy", tmp_path)[0]
    assert what == f"there is no config.json in {tmp_path / 'toy'}"
    assert "weights.bin" in hint
    (tmp_path / "weights.bin").touch()
    assert "is neither a folder, a config.json nor a .gguf file" in refused("weights.bin", tmp_path)[0][0]


def test_a_link_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text(json.dumps(GOOD))
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "config.json").symlink_to("../secret.json")
    assert "config.json is a link out of its folder" in refused("toy", tmp_path)[0][0]


BROKEN = {
    "cut short": ('{"model_type": "llama",\n "hidden_size": 2', "this is not JSON", "config.json:2"),
    "a list": ("[1]", "this holds list, not keys with values", "config.json"),
    "not UTF-8": ("\udcff{}", "this is no config: 'utf-8' codec", "config.json"),
    "a key twice": ('{"model_type": "llama", "vocab_size": 1, "vocab_size": 2}', "`vocab_size` is written twice, as 1 and 2", "config.json"),
    "nested without end": ("[" * 100_000, "this is no config", "config.json"),
    "too large": (" " * (5 * 2**20), "this has more than 4,194,304 bytes", "config.json"),
}


@pytest.mark.parametrize("case", BROKEN, ids=[name.replace(" ", "-") for name in BROKEN])
def test_a_config_that_is_none(case: str, tmp_path: Path) -> None:
    text, said, place = BROKEN[case]
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    found = refused(str(tmp_path))
    assert len(found) == 1
    assert said in found[0][0]
    assert found[0][1].endswith(place)
    assert found[0][2]


@pytest.mark.parametrize(
    ("change", "key", "said"),
    [
        ({"vocab_size": None}, "vocab_size", "vocab_size is missing"),
        ({"hidden_size": -24}, "hidden_size", "hidden_size = -24 is not a whole number from 1"),
        ({"hidden_size": 24.0}, "hidden_size", "hidden_size = 24.0 is not a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers", "num_hidden_layers = True is not a whole number"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers", "num_hidden_layers = '2' is not a whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers", "is more than 10,000"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "num_key_value_heads = 3 does not divide num_attention_heads = 4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads", "num_key_value_heads = 0 is not a whole number from 1"),
        ({"hidden_size": 26}, "hidden_size", "hidden_size = 26 is not a multiple of num_attention_heads = 4, and no head_dim is given"),
        ({"head_dim": 5}, "head_dim", "head_dim = 5 is odd"),
        ({"torch_dtype": "float32", "dtype": "bfloat16"}, "torch_dtype", "torch_dtype = 'float32' and dtype = 'bfloat16'"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta", "rope_theta = 10000.0 and rope_parameters.rope_theta = 500000.0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings", "tie_word_embeddings = 'false' is neither true nor false"),
        ({"rope_scaling": "linear"}, "rope_scaling", "rope_scaling = 'linear' is not a mapping"),
        ({"model_type": "some_other", "num_hidden_layers": 10**9}, "num_hidden_layers", "is more than 10,000"),
        ({"hidden_size": 10**40}, "hidden_size", "is not a whole number from 1 to 1,000,000,000"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps", "rms_norm_eps = nan is not a number above 0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps", "rms_norm_eps = '1e-5' is not a number above 0"),
        ({"initializer_range": -0.02}, "initializer_range", "initializer_range = -0.02 is not a number above 0"),
        ({"rope_theta": "x"}, "rope_theta", "rope_theta = 'x' is not a number above 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope factor", "rope factor = '2' is not a number above 0"),
        ({"rope_scaling": {"type": "magic", "factor": 2}}, "rope_type", "rope_type = 'magic' is not one that is known"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling",
            "rope_scaling is of type 'linear' and rope_parameters of type 'default'",
        ),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window", "sliding_window = -1 is not a whole number from 1"),
        ({"model_type": "gemma2", "sliding_window": 8.5}, "sliding_window", "sliding_window = 8.5 is not a whole number from 1"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern", "sliding_window_pattern = 0 is not a whole number"),
        ({"model_type": "qwen2", "max_window_layers": "x"}, "max_window_layers", "max_window_layers = 'x' is not a whole number from 0"),
        ({"model_type": "gemma2", "layer_types": 5}, "layer_types", "layer_types = 5 is not a list of full_attention and sliding_attention"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"] * 9}, "layer_types", "layer_types names 9 layers of 2"),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"full_attention": 5}},
            "rope_parameters.full_attention",
            "rope_parameters.full_attention = 5 is not",
        ),
        ({"model_type": "gemma2", "tie_word_embeddings": None}, "tie_word_embeddings", "tie_word_embeddings is null"),
        ({"model_type": "phi3", "rope_scaling": {"type": "su", "factor": 2}}, "rope_scaling", "without lists short_factor and long_factor"),
        ({"hidden_act": "magic"}, "hidden_act", "hidden_act = 'magic' is not one that is known"),
        ({"model_type": None}, "model_type", "there is no model_type"),
        ({"model_type": ["llama"]}, "model_type", "model_type = ['llama'] is not a name"),
    ],
)
def test_one_thing_wrong_with_the_sizes(change: dict[str, Any], key: str, said: str, tmp_path: Path) -> None:
    found = refused(str(folder(tmp_path / "toy", GOOD | change)))
    assert len(found) == 1, found
    assert said in found[0][0]
    assert found[0][1] == f"{tmp_path / 'toy' / 'config.json'} {key}"
    assert found[0][2]


@pytest.mark.parametrize(
    ("change", "key", "said"),
    [
        ({"n_embd": None}, "n_embd", "n_embd is missing"),
        ({"n_inner": "96"}, "n_inner", "n_inner = '96' is not a whole number"),
        ({"n_positions": 0}, "n_positions", "n_positions = 0 is not a whole number from 1"),
        ({"n_embd": 26}, "n_embd", "n_embd = 26 is not a multiple of n_head = 4"),
        ({"n_layer": 10**9}, "n_layer", "n_layer = 1000000000 is more than 10,000"),
        ({"resid_pdrop": 1.5}, "resid_pdrop", "resid_pdrop = 1.5 is no share of activations"),
        ({"activation_function": "magic"}, "activation_function", "activation_function = 'magic' is not one that is known"),
        ({"add_cross_attention": True}, "add_cross_attention", "attends to an encoder's output"),
    ],
)
def test_gpt2_is_judged_in_its_own_spelling(change: dict[str, Any], key: str, said: str, tmp_path: Path) -> None:
    good = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64}
    assert read_model(str(folder(tmp_path / "good", good))).ffn == 96
    found = refused(str(folder(tmp_path / "toy", good | change)))
    assert len(found) == 1, found
    assert said in found[0][0]
    assert found[0][1] == f"{tmp_path / 'toy' / 'config.json'} {key}"


SPARSE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 20, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v2": {"n_routed_experts": 8, "moe_intermediate_size": 20, "num_experts_per_tok": 2, "q_lora_rank": None, "num_key_value_heads": 4}
    | {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5},
}
SPARSE["deepseek_v3"] = SPARSE["deepseek_v2"] | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}


@pytest.mark.parametrize(
    ("model_type", "change", "key", "said"),
    [
        ("qwen3_moe", {"moe_intermediate_size": None}, "moe_intermediate_size", "moe_intermediate_size is missing"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts", "num_experts = 0 is not a whole number from 1"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok", "num_experts_per_tok = 9 is more than num_experts = 8"),
        ("qwen3_moe", {"num_local_experts": 4}, "num_experts", "num_experts = 8 and num_local_experts = 4"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step", "decoder_sparse_step = 0 is not a whole number from 1"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers", "mlp_only_layers = 1 is not a list of numbers of layers"),
        ("qwen3_moe", {"mlp_only_layers": {}}, "mlp_only_layers", "mlp_only_layers = {} is not a list of numbers of layers"),
        ("qwen3_moe", {"head_dim": None}, "head_dim", "head_dim is null"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob", "norm_topk_prob = 'yes' is neither true nor false"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts", "num_local_experts is missing"),
        ("mixtral", {"num_key_value_heads": None}, "num_key_value_heads", "num_key_value_heads is null"),
        ("qwen3_moe", {"router_aux_loss_coef": float("nan")}, "router_aux_loss_coef", "router_aux_loss_coef = nan is not a number from 0"),
        ("mixtral", {"router_aux_loss_coef": "a"}, "router_aux_loss_coef", "router_aux_loss_coef = 'a' is not a number from 0"),
        ("gpt_oss", {"router_aux_loss_coef": -1}, "router_aux_loss_coef", "router_aux_loss_coef = -1 is not a number from 0"),
        ("mixtral", {"output_router_logits": "yes"}, "output_router_logits", "output_router_logits = 'yes' is neither true nor false"),
        ("mixtral", {"router_jitter_noise": "x"}, "router_jitter_noise", "router_jitter_noise = 'x' is no share of what a router sees"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window", "sliding_window is null"),
        ("deepseek_v2", {"kv_lora_rank": None}, "kv_lora_rank", "kv_lora_rank is missing"),
        ("deepseek_v2", {"q_lora_rank": 0}, "q_lora_rank", "q_lora_rank = 0 is not a whole number from 1"),
        ("deepseek_v2", {"n_shared_experts": 0}, "n_shared_experts", "n_shared_experts = 0 is not a whole number from 1"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method", "topk_method = 'noaux_tc' is not one that is known"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "topk_group": 1}, "n_group", "n_group = None is not a whole number from 1"),
        ("deepseek_v2", {"hidden_size": 26}, "hidden_size", "hidden_size = 26 is not a multiple of num_attention_heads = 4"),
        ("deepseek_v3", {"n_group": 3}, "n_group", "n_group = 3 does not divide n_routed_experts = 8 into groups of at least 2"),
        ("deepseek_v3", {"n_group": 8}, "n_group", "n_group = 8 does not divide n_routed_experts = 8 into groups of at least 2"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group", "topk_group = 5 is more than n_group = 4"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "num_experts_per_tok", "is more than the 4 experts of topk_group = 2 groups"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads", "num_key_value_heads = 2 is not num_attention_heads = 4"),
        ("deepseek_v3", {"qk_rope_head_dim": 5}, "qk_rope_head_dim", "qk_rope_head_dim = 5 is odd"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace", "first_k_dense_replace = -1 is not a whole number from 0"),
        ("deepseek_v3", {"num_nextn_predict_layers": 10**12}, "num_nextn_predict_layers", "is more than num_hidden_layers = 2"),
        ("deepseek_v3", {"num_hidden_layers": 10**9}, "num_hidden_layers", "is more than 10,000"),
        ("deepseek_v3", {"routed_scaling_factor": "x"}, "routed_scaling_factor", "routed_scaling_factor = 'x' is not a number above 0"),
    ],
)
def test_one_thing_wrong_with_the_experts(model_type: str, change: dict[str, Any], key: str, said: str, tmp_path: Path) -> None:
    good = GOOD | {"model_type": model_type} | SPARSE[model_type]
    assert read_model(str(folder(tmp_path / "good", good))).experts
    found = refused(str(folder(tmp_path / "toy", good | change)))
    assert len(found) == 1, found
    assert said in found[0][0]
    assert found[0][1] == f"{tmp_path / 'toy' / 'config.json'} {key}"
    assert found[0][2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "its files hold quantised weights"),
        ({"hidden_act": "relu6"}, "its experts compute with relu6"),
        ({"router_jitter_noise": 0.1}, "its routers see the stream with noise (router_jitter_noise)"),
        ({"attention_dropout": 0.1}, "it drops activations at random (attention_dropout)"),
    ],
)
def test_what_keeps_the_trainer_from_experts(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    good = GOOD | {"model_type": "mixtral"} | SPARSE["mixtral"]
    whole, spec = read_model(str(folder(tmp_path / "whole", good))), read_model(str(folder(tmp_path / "toy", good | change)))
    assert not whole.untrainable
    assert said in spec.untrainable
    assert spec.tensors == whole.tensors


def test_files_of_quantised_weights_are_planned_as_if_they_were_not(tmp_path: Path) -> None:
    spec = read_model(str(folder(tmp_path / "toy", GOOD | {"quantization_config": {"quant_method": "gptq"}})))
    assert "quantization_config" not in spec.config
    assert spec.notes == ("its files hold quantised weights: it is planned as if they were not",)
    assert spec.untrainable == "its files hold quantised weights"


def test_kimi_is_built_as_deepseek(tmp_path: Path) -> None:
    published = GOOD | SPARSE["deepseek_v3"] | {"model_type": "kimi_k2", "num_nextn_predict_layers": 2, "first_k_dense_replace": 1}
    spec = read_model(str(folder(tmp_path / "toy", published)))
    assert (spec.family, spec.config["model_type"]) == ("deepseek_v3", "deepseek_v3")
    assert spec.unbuilt == ("model.layers.2.", "model.layers.3.")
    assert spec.notes == (
        "layers for multi-token prediction in its files (model.layers.2., model.layers.3.) are not built",
        "kimi_k2 is built as deepseek_v3",
    )


def test_all_that_is_wrong_with_the_sizes(tmp_path: Path) -> None:
    bad = {k: v for k, v in GOOD.items() if k != "vocab_size"} | {"hidden_size": 0, "num_key_value_heads": -1, "intermediate_size": "40"}
    keys = {where.rpartition(" ")[2] for _, where, _ in refused(str(folder(tmp_path / "toy", bad)))}
    assert keys == {"vocab_size", "hidden_size", "num_key_value_heads", "intermediate_size"}


def test_no_model_type_names_the_described_families(tmp_path: Path) -> None:
    hint = refused(str(folder(tmp_path / "toy", GOOD | {"model_type": None})))[0][2]
    assert hint == f"it names the architecture: {', '.join(FAMILIES)}, or any that transformers knows"


def test_code_that_comes_with_a_model_is_left_out_aloud(tmp_path: Path) -> None:
    spec = read_model(str(folder(tmp_path / "toy", GOOD | {"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}})))
    assert "auto_map" not in spec.config
    assert spec.notes == ("auto_map is left out: code that comes with a model is never run",)


def test_reading_is_light() -> None:
    code = """
import sys
from pentamesh.job.hardware import read_hardware
from pentamesh.job.read import read_job_text
from pentamesh.model.read import read_model
read_job_text("model: llama-3.1-8b\\nhardware: 8xH100"), read_hardware("2xCPU"), read_model("llama-3.1-405b")
print(sorted({"torch", "transformers", "numpy", "huggingface_hub", "httpx", "requests"} & {name.partition(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_window_that_is_not_written_is_the_one_that_transformers_takes() -> None:
    config = read_model("mistralai/Mistral-7B-v0.1").config
    without = {key: value for key, value in config.items() if key != "sliding_window"}
    for written, windows in ((config, (4096,) * 32), (without, (4096,) * 32), (config | {"sliding_window": None}, ())):
        spec = describe(written, "mistral")
        assert spec is not None
        assert spec.windows == windows
