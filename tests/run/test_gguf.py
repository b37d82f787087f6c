"""A job whose model is a GGUF file: planned as its folder would be, unpacked once, trained, resumed and exported as a Hugging Face folder."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pentamesh.plan.plan import Plan
from pentamesh.run.options import Options
from pentamesh.run.unpack import unpacked
from tests.ggufs import write_gguf
from tests.run import toy
from tests.run.test_loop import metrics, trained


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = toy.model_folder(tmp_path / "hf", intermediate_size=64)
    write_gguf(folder, tmp_path / "toy.gguf", "Q8_0")
    (tmp_path / "model").mkdir()  # else the toy makes one
    return toy.job(tmp_path, model="toy.gguf", training__steps=4, training__evaluate_every=2)


def test_a_gguf_file_trains_as_the_folder_that_it_unpacks_to(job: Path, tmp_path: Path) -> None:
    trained(job, Options(stop_at=2))
    from_file = trained(job, Options(resume=True))
    unpacked(tmp_path / "toy.gguf", tmp_path / "base")
    toy.job(tmp_path, model="base", training__steps=4, training__evaluate_every=2, logging__folder="other")
    from_folder = trained(job)
    assert [row["loss"] for row in metrics(from_file)] == [row["loss"] for row in metrics(from_folder)]
    ours, theirs = (load_file(run.export / "model.safetensors") for run in (from_file, from_folder))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert {str(tensor.dtype) for tensor in ours.values()} == {"torch.bfloat16"}
    plans = [Plan.read(run.plan) for run in (from_file, from_folder)]
    assert replace(plans[0], job=plans[1].job).memory == plans[1].memory


def test_the_export_of_a_gguf_file_loads_with_its_tokenizer(job: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = trained(job)
    loaded: Any = AutoModelForCausalLM.from_pretrained(run.export, output_loading_info=True)
    assert not loaded[1]["missing_keys"]
    tokenizer = AutoTokenizer.from_pretrained(run.export)
    talk = [{"role": "user", "content": "the cat"}]
    assert (
        tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        == "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    )


def test_planning_from_a_gguf_file_needs_neither_torch_nor_numpy(job: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pentamesh.cli import app\ntry:\n    app(['plan', 'toy.gguf', '--on', '2xCPU', '--json'])\nexcept SystemExit as end:\n"
        "    assert not end.code, end.code\nassert not {'torch', 'numpy', 'transformers', 'gguf'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "de-quantised from toy.gguf to bfloat16" in done.stdout
    assert json.loads(done.stdout)["model"]["family"] == "llama"
