"""The launches that people write down, each as one command: what its text says of memory, of layout and of speed."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from pentamesh.cli import app

PRETRAIN_405B = "llama-3.1-405b --method pretrain --seq-len 8192 --global-batch 2048 --layout tensor=8,pipeline=8,sequence_parallel=true"
HYBRID_70B = "meta-llama/Llama-3.3-70B --on 2x8xRTX-Pro-6000@200gbps --global-batch 512 --shard parameters"


def said(command: str, exit_code: int = 0) -> str:
    """The text of `pentamesh plan`, on one line."""
    result = CliRunner().invoke(app, ["plan", *command.split()])
    assert getattr(result.exception, "code", result.exit_code) == exit_code, result.output
    return re.sub(r"\s+", " ", result.stdout)


def test_8b_full_shard_on_one_node() -> None:
    text = said("meta-llama/Llama-3.1-8B --on 8xRTX-5090 --seq-len 4096 --micro-batch 1 --global-batch 128 --shard parameters")
    assert text.startswith("FITS meta-llama/Llama-3.1-8B")
    assert "weights, gradients and optimizer are 16.1 GB a GPU under full shard" in text
    (tokens_per_s,) = re.findall(r"tokens/s ([\d.]+)k \(", text)
    assert 8 < float(tokens_per_s) < 16


def test_70b_over_two_nodes_is_cut_over_both() -> None:
    text = said("meta-llama/Llama-3.3-70B --on 2x8xRTX-Pro-6000@200gbps --seq-len 4096 --global-batch 512")
    assert "full shard: dp_shard 16" in text
    assert "cut over 16 it is 70.6 GB" in text
    assert "hybrid shard, with a copy in every node, is 141 GB a GPU: it fits none" in text
    assert "meta-llama/Llama-3.3-70B is not published: meta-llama/Llama-3.3-70B-Instruct is meant" in text


def test_70b_in_two_copies() -> None:
    text = said(f"{HYBRID_70B} --layout replicate=2", exit_code=3)
    assert "weights, gradients and optimizer are 141 GB a GPU under hybrid shard" in text
    assert "one copy cut over all ranks (layout.replicate left out)" in text
    assert "precision: bf16-pure" in text
    pure = said(f"{HYBRID_70B} --layout replicate=2 --precision bf16-pure")
    assert "weights, gradients and optimizer are 70.6 GB a GPU under hybrid shard" in pure
    (share,) = re.findall(r"expected peak [\d.]+ GB #+\.* +(\d+)%", pure)
    assert 85 < int(share) <= 100  # at the edge


def test_405b_fits_no_80_gb_card() -> None:
    text = said(f"{PRETRAIN_405B} --on 8x8xH100@8x400gbps", exit_code=3)
    assert "126 layers do not divide by pipeline = 8: 6 stages of 16 and 2 stages of 15" in text
    assert "2,048 micro-batches make the bubble of 8 stages 7/2048 = 0.34% of the computing" in text
    (numel, megatron) = re.findall(r"holds ([\d.]+)B parameters at 16 bytes; Megatron-LM keeps bf16 weights beside, 18 bytes: (\d+) GB", text)[0]
    assert float(numel) == pytest.approx(6.44, rel=0.04)
    assert int(megatron) == pytest.approx(116, rel=0.04)
    (step_s,) = re.findall(r"at 40% a step would take ([\d,]+) s", text)
    assert int(step_s.replace(",", "")) == pytest.approx(1700, rel=0.03)


def test_405b_fits_a_141_gb_card_with_blocks_recomputed_only() -> None:
    text = said(f"{PRETRAIN_405B} --on 8x8xH200@8x400gbps")
    assert text.startswith("FITS")
    assert re.search(r"with their activations kept a GPU needs \d{3} GB, with them recomputed 1\d\d GB", text)
    assert re.search(r"pp 8 x tp 8 does not fit", text)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-32b", "llama-3.1-70b"])
def test_pretraining_on_64_gpus_says_what_wins_and_by_how_much(model: str) -> None:
    text = said(f"{model} --on 8x8xH100@8x400gbps --method pretrain --seq-len 8192 --global-batch 1024")
    assert re.search(r"(of the data axes alone|with more axes), .* takes .*, \d+% (more|less)", text)
