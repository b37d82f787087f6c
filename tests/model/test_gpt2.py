"""GPT-2: what it trains on, what it refuses before anything starts, and the parts of a gradient that tensor ranks sum."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pentamesh.errors import InputError
from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.layout.rules import partial_axes
from pentamesh.layout.split import split
from pentamesh.model.families import describe
from pentamesh.model.read import read_model
from pentamesh.model.roles import Role
from tests.proof.toys import GPT2


def job(folder: Path, config: dict[str, Any], *more: str) -> Path:
    (folder / "rows.jsonl").write_text("{}\n")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    text = "model: model\nmethod: pretrain\ndata: {train: rows.jsonl}\nbatch: {seq_len: 32, global_batch: 8}\nprecision: fp32\ntraining: {steps: 2}\n"
    (folder / "job.yaml").write_text("\n".join([text, *more]) + "\n")
    return folder / "job.yaml"


def test_the_data_axes_pretrain_it(tmp_path: Path) -> None:
    from pentamesh.run.asked import planned, read_asked

    found = planned(read_asked(job(tmp_path, GPT2, "hardware: 2xCPU")))
    assert (found.model["family"], found.model["num_parameters"]) == ("gpt2", describe(GPT2, "toy").num_parameters)  # type: ignore[union-attr]


def test_sequence_parallel_is_planned_and_refused_by_train(tmp_path: Path) -> None:
    from pentamesh.job.hardware import read_hardware
    from pentamesh.job.read import read_job
    from pentamesh.plan.search import plan
    from pentamesh.run.asked import planned, read_asked

    path = job(tmp_path, GPT2, "hardware: 2xCPU", "layout: {tensor: 2, shard: none, sequence_parallel: true}")
    asked, _ = read_job(path)
    made = plan(asked, read_model(str(tmp_path / "model")), read_hardware("2xCPU"))
    assert made.layout.sequence_parallel
    made.write(tmp_path / "plan.json")
    for target in (path, tmp_path / "plan.json"):
        with pytest.raises(InputError, match="its positions are added to a whole stream"):
            planned(read_asked(target))


def test_dropout_is_refused_by_train(tmp_path: Path) -> None:
    from pentamesh.run.asked import planned, read_asked

    with pytest.raises(InputError, match=r"it drops activations at random \(attn_pdrop\)"):
        planned(read_asked(job(tmp_path, GPT2 | {"attn_pdrop": 0.1}, "hardware: 2xCPU")))


def test_fused_heads_are_cut_within_queries_keys_and_values() -> None:
    fused = next(t for t in read_model("gpt2").parameters if t.name.endswith("0.attn.c_attn.weight"))
    held = split(fused, Role.USE, Layout(Mesh(tp=2)))
    assert held.intervals(1, 1) == ((384, 384), (1152, 384), (1920, 384))


@pytest.mark.parametrize(
    ("tensor", "without", "along"),
    [
        ("wpe.weight", (), ("tp",)),
        ("wte.weight", (), ()),
        ("h.0.ln_1.bias", (), ("tp",)),
        ("h.0.attn.c_attn.bias", (), ()),
        ("h.0.attn.c_proj.weight", (), ()),
        ("h.0.attn.c_proj.bias", (), ("tp",)),
        ("h.0.mlp.c_fc.bias", (), ()),
        ("h.0.mlp.c_proj.bias", (), ("tp",)),
        ("ln_f.weight", (), ("tp",)),
    ],
)
def test_gradients_that_tensor_ranks_have_parts_of(tensor: str, without: tuple[str, ...], along: tuple[str, ...]) -> None:
    """Of what acts on the stream, once sequence parallel cuts it."""
    found = next(t for t in read_model("gpt2").parameters if t.name == f"transformer.{tensor}")
    assert partial_axes(found, Layout(Mesh(tp=2))) == without
    assert partial_axes(found, Layout(Mesh(tp=2), sequence_parallel=True)) == along
