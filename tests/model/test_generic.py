"""The generic path: facts are what transformers builds, they are asked for once, and what follows from them is honest."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from pentamesh.cost.activations import block
from pentamesh.cost.holding import Holding
from pentamesh.cost.saved import local_bytes
from pentamesh.errors import InputError
from pentamesh.job.job import Batch
from pentamesh.layout.legal import problems
from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.model import traced
from pentamesh.model.catalogue import entries
from pentamesh.model.facts import fingerprint, read_facts
from pentamesh.model.families import generic
from pentamesh.model.read import read_model
from pentamesh.model.spec import ModelSpec
from tests.model.undescribed import SMALL, TOYS

# Sizes at which widths, not masks and tables, decide what is kept.
WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 768, "moe_intermediate_size": 192}
GENERIC = [entry for entry in entries() if read_model(entry.id).family == "generic"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache of our own, and an empty Hugging Face cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "cache" / "pentamesh" / "facts"


def folder(at: Path, config: dict[str, Any]) -> str:
    at.mkdir(parents=True, exist_ok=True)
    (at / "config.json").write_text(json.dumps(config))
    return str(at)


def toy(name: str) -> ModelSpec:
    return described(TOYS[name], name)


def described(config: dict[str, Any], name: str) -> ModelSpec:
    from pentamesh.run.trace import traced as trace

    return generic.describe(read_facts(json.dumps(trace(config)), name), config, name)


# Facts of the catalogue


def test_each_undescribed_model_has_one_file_of_facts() -> None:
    found = {path.name for path in (files("pentamesh.model") / "facts").iterdir()}
    assert found == {f"{entry.id.replace('/', '--')}.json" for entry in GENERIC}
    assert len(GENERIC) == 15


def test_facts_name_the_release_that_they_belong_to() -> None:
    for entry in GENERIC:
        assert any("tensors are those of transformers 5." in note for note in read_model(entry.id).notes), entry.id


def test_kept_facts_of_the_catalogue_are_what_transformers_says() -> None:
    import transformers

    from pentamesh.run.trace import traced as trace

    facts = files("pentamesh.model") / "facts"
    for entry in GENERIC:
        kept = json.loads((facts / f"{entry.id.replace('/', '--')}.json").read_text())
        if kept["transformers"] != transformers.__version__:
            pytest.skip(f"facts belong to transformers {kept['transformers']}")
        assert trace(entry.config) == kept, entry.id


def test_a_published_folder_of_the_catalogue_needs_no_helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("nothing has to be asked"))
    entry = next(e for e in GENERIC if e.id == "zai-org/GLM-4.5-Air")
    published = entry.config | {"torch_dtype": "float16", "eos_token_id": 5, "quantization_config": {"quant_method": "fp8"}}
    spec = read_model(folder(tmp_path / "copy", published))
    assert spec.tensors == read_model(entry.id).tensors
    assert spec.untrainable == "its files hold quantised weights"


# What follows from them


def test_experts_count_by_the_token() -> None:
    spec = read_model("mixtral-8x7b")
    assert spec.is_described
    assert (spec.num_parameters, spec.active_parameters) == (46_702_792_704, 12_879_925_248)
    attention = 12 * 32 * 4096 * 32 * 128
    assert spec.flop_per_token(4096) == 6 * (12_879_925_248 - 32_000 * 4096 - 65 * 4096) + attention


def test_towers_for_what_is_not_text_are_held_and_not_computed() -> None:
    spec = read_model("qwen3.5-27b")
    assert (spec.num_parameters, spec.active_parameters) == (27_356_728_560, 26_895_998_464)


def test_attention_counts_the_window_and_no_linear_layer() -> None:
    gemma, hybrid = read_model("gemma-2-9b"), read_model("qwen3.5-27b")
    assert gemma.attention_flop_per_token(8192) == 12 * 21 * (8192 + 4096) * 16 * 256
    assert hybrid.attention_flop_per_token(8192) == 12 * 16 * 8192 * 24 * 256


def test_the_estimate_of_activations_is_exact_where_a_family_lists_them() -> None:
    for entry in entries():
        spec = read_model(entry.id)
        if spec.family == "generic" or spec.experts:  # of experts a family lists what the estimate does not know: how tokens are arranged
            continue
        sizes = {key: getattr(spec, key) for key in ("hidden", "num_layers", "num_heads", "num_kv_heads", "head_dim")}
        estimated = replace(spec, kept=generic.kept(spec.tensors, sizes))
        listed, guessed = (local_bytes(block(m, Layout(), 1, 4096, "bfloat16"), Layout()) for m in (spec, estimated))
        # The modules of a described family keep neither the activated gate nor what norms have normalised, and what these read is no wider;
        # what norms leave to be added is not kept at all.
        heads = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        lean = 4096 * (2 * spec.ffn + (20 if spec.norms_what_it_adds else 8) * spec.hidden) if spec.family != "gpt2" else 0
        lean += 4096 * {"qwen3": 4, "gemma3_text": 4, "phi3": -2}.get(spec.family, 0) * heads
        lean -= 4096 * 4 * spec.rotary[0] if spec.family == "glm4" else 0  # cosines and sines of every block
        # Queries and keys that are normed are so in place of being kept twice; GPT-2 has no gate, and an activation function in five operations.
        low, high = {"qwen3": (1, 1.1), "gemma3_text": (1, 1.1), "gpt2": (0.75, 1)}.get(spec.family, (0.999, 1.001))
        assert low <= guessed / (listed + lean) <= high, entry.id


@pytest.mark.parametrize("name", ["vaultgemma", "olmo3", "glm", "granite", "minimax_m2", "qwen2_moe", "phi"])
def test_the_estimate_of_activations_is_near_what_autograd_keeps(name: str) -> None:
    wide = TOYS[name] | WIDE
    spec, recorded = described(wide, name), recorded_bytes(wide, 2) - recorded_bytes(wide, 1)
    estimated = local_bytes(block(spec, Layout(), 2, 64, "bfloat16"), Layout())
    assert 1 / 1.45 < estimated / recorded < 1.25, (estimated, recorded)


def recorded_bytes(config: dict[str, Any], layers: int) -> int:
    """Bytes of distinct storages that a forward of the first layers saves, parameters aside."""
    import torch
    import transformers

    cut: dict[str, Any] = (
        config | {"num_hidden_layers": layers} | ({"layer_types": config["layer_types"][:layers]} if "layer_types" in config else {})
    )
    built = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**dict(cut))).to(torch.bfloat16)
    parameters = {p.untyped_storage().data_ptr() for p in built.parameters()}
    alive = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: alive.append(tensor) or tensor, lambda tensor: tensor):
        built.base_model(torch.randint(0, 61, (2, 64)), use_cache=False)
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive if t.untyped_storage().data_ptr() not in parameters}.values()
    )


@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "ep"])
def test_other_axes_say_how_to_describe_a_family(axis: str) -> None:
    mesh = Mesh(dp_shard=2, ep=2) if axis == "ep" else Mesh(**{axis: 2})
    wrong = problems(read_model("glm-4.5-air"), Layout(mesh, "parameters"), Batch(seq_len=4096, global_batch=16))
    assert "is not described: its dimensions have no names to cut along" in wrong[0].what
    assert "describe the family in pentamesh/model/families" in wrong[0].hint


def test_states_are_cut_along_dim_0_of_everything() -> None:
    spec = toy("minimax_m2")
    held = Holding(spec, Layout(Mesh(dp_shard=4), "parameters"))
    from pentamesh.model.roles import Role

    rows = sum(-(-t.shape[0] // 4) * t.numel // t.shape[0] for t in spec.parameters)
    assert held.stage_numel(Role.WEIGHT, 0) == rows


# What cannot be trained


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vaultgemma", "caps logits"),
        ("minimax_m2", "map of names"),
        ("bloom", "not one that torch's fused kernel computes"),
        ("gpt_bigcode", "drops activations at random"),
        ("olmo3", ""),
        ("granite", ""),
    ],
)
def test_what_the_trainer_cannot_do_is_said_by_name(name: str, said: str) -> None:
    spec = toy(name)
    assert said in spec.untrainable
    assert bool(said) is bool(spec.untrainable)
    if said:
        with pytest.raises(InputError, match=f"{name} is planned but not trained yet"):
            generic.check_trainable(spec, "full", "job.yaml")
    else:
        generic.check_trainable(spec, "full", "job.yaml")
        with pytest.raises(InputError, match="what its weights start from"):
            generic.check_trainable(spec, "pretrain", "job.yaml")


def test_train_refuses_before_it_starts(tmp_path: Path) -> None:
    from pentamesh.run.asked import planned, read_asked

    (tmp_path / "rows.jsonl").write_text("{}\n")
    for name in ("vaultgemma", "granite"):
        folder(tmp_path / name, TOYS[name])
        text = f"model: {name}\ndata: {{train: rows.jsonl}}\nbatch: {{seq_len: 32, global_batch: 8}}\n"
        text += "hardware: 2xCPU\nprecision: fp32\ntraining: {steps: 2}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    assert planned(read_asked(tmp_path / "granite.yaml", [])).model["family"] == "generic"
    with pytest.raises(InputError, match="vaultgemma is planned but not trained yet: its attention caps logits"):
        planned(read_asked(tmp_path / "vaultgemma.yaml", []))


# Asking transformers, once


def test_an_architecture_without_facts_is_asked_for_once(tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    name = folder(tmp_path / "toy", TOYS["glm"] | {"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}})
    first = read_model(name)
    assert "reading the tensors of glm from transformers, once" in capfd.readouterr().err
    assert len(list(cache.iterdir())) == 1
    assert first.tensors == toy("glm").tensors
    folder(tmp_path / "toy", TOYS["glm"] | {"torch_dtype": "bfloat16"})
    assert read_model(name).tensors == first.tensors
    assert capfd.readouterr().err == ""
    assert fingerprint(TOYS["glm"]) != fingerprint(TOYS["glm"] | {"hidden_size": 64})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (SMALL | {"model_type": "no_such_architecture"}, "no_such_architecture"),
        (TOYS["glm"] | {"hidden_size": "wide"}, "hidden_size"),
        ({"model_type": "bert", "vocab_size": -1}, ""),
    ],
)
def test_what_transformers_cannot_build(config: dict[str, Any], said: str, tmp_path: Path, cache: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_model(folder(tmp_path / "toy", config))
    (problem,) = caught.value.problems
    assert problem.what.startswith("transformers cannot build a model of this config: ")
    assert said in problem.what
    assert problem.where.endswith("config.json")
    assert not cache.exists()


def test_without_transformers_the_hint_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(traced, "version", absent)
    with pytest.raises(InputError, match="transformers is not installed") as caught:
        read_model(folder(tmp_path / "toy", TOYS["glm"]))
    assert caught.value.problems[0].hint == "pip install pentamesh[train]"


def test_broken_facts_are_named(tmp_path: Path, cache: Path) -> None:
    name = folder(tmp_path / "toy", TOYS["glm"])
    read_model(name)
    (kept,) = cache.iterdir()
    kept.write_text(kept.read_text()[:200])
    with pytest.raises(InputError, match="no facts of an architecture") as caught:
        read_model(name)
    assert caught.value.problems[0].where == str(kept)


def test_planning_by_facts_is_light() -> None:
    code = """
import sys
from pentamesh.model.read import read_model
read_model("deepseek-v3")
print(sorted({"torch", "transformers", "numpy"} & {name.partition(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
