"""Rows that hold several samples give the losses and gradients of the same samples in rows of their own, on any layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from pentamesh.job.job import Job
from pentamesh.layout.mesh import Layout, Mesh, Shard
from pentamesh.layout.policy import Policy
from pentamesh.run.data.batches import Batches
from pentamesh.run.data.prepare import prepare
from pentamesh.run.data.samples import open_prepared
from pentamesh.run.ledger import differences
from pentamesh.run.step import accumulate
from pentamesh.run.verify import Trial, _trainee, errors, outcome, predicted_ledger
from pentamesh.run.world import join
from pentamesh.run.worlds import run_world
from tests.proof.toys import TOYS, alone

IN_A_ROW = 3
LAYOUTS: dict[str, tuple[Mesh, Shard, bool, dict[str, Any]]] = {
    "ddp 2": (Mesh(dp_replicate=2), "none", False, {}),
    "full shard 2, recomputed": (Mesh(dp_shard=2), "parameters", False, {"recompute": "selective"}),
    "hybrid 2 x 2": (Mesh(dp_replicate=2, dp_shard=2), "parameters", False, {}),
    "tp2, sequence": (Mesh(tp=2), "none", True, {"recompute": "full"}),
    "full shard 2 x tp2, sequence": (Mesh(dp_shard=2, tp=2), "parameters", True, {}),
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "glm4", "gpt2")


def packed(toy: str, layout: Layout, **policy: Any) -> Trial:
    """Two rows of three samples a micro-batch, two micro-batches, on every data rank; documents outgrow windows and none is as long as another."""
    chosen = replace(Policy(2, 2), **policy)
    return Trial(TOYS[toy], layout, chosen, global_batch=4 * layout.mesh.dp_replicate * layout.mesh.dp_shard, longest=16, in_a_row=IN_A_ROW)


@pytest.mark.parametrize("toy", FAMILIES)
def test_on_one_process(toy: str, record_proof) -> None:
    check(packed(toy, Layout()), record_proof)


ON_SEVERAL = [(toy, name) for toy in ("llama", "gemma3") for name in LAYOUTS]
ON_SEVERAL += [(toy, "full shard 2 x tp2, sequence") for toy in FAMILIES if toy not in ("llama", "gemma3", "gpt2")]


@pytest.mark.parametrize(("toy", "name"), ON_SEVERAL)
def test_on_several(toy: str, name: str, record_proof) -> None:
    mesh, shard, sequence, policy = LAYOUTS[name]
    check(packed(toy, Layout(mesh, shard, sequence_parallel=sequence), **policy), record_proof)


def check(wanted: Trial, record_proof: Any) -> None:
    found = run_world(outcome, wanted.layout.mesh.num_ranks, wanted)
    worst = errors(found[0], alone(wanted))
    assert max(worst.values()) < 1e-10, worst
    for rank, one in enumerate(found):
        assert not one.split_errors
        assert not differences(predicted_ledger(wanted, one, rank), one.ledger)
    record_proof("packed rows equal to rows of their own, float64", runs=1, worst_relative_error=max(worst.values()))


@dataclass(frozen=True)
class Epoch:
    """Every sample of a prepared folder in one step of a float32 model, rows as they were packed or not."""

    config: dict[str, Any]
    folder: Path

    def outcome(self) -> tuple[float, dict[str, np.ndarray], int]:
        """The mean loss, the gradients, and how many rows and positions were computed."""
        trial = Trial(self.config, policy=Policy(1, 1), precision="fp32")
        samples = open_prepared(self.folder).train
        trainee = _trainee(trial, join(trial.layout, "cpu"))
        micros = Batches(samples, 0, samples.num_rows, 1).step(0)
        loss = accumulate(trainee, micros, samples.num_trained) / samples.num_trained
        gradients = {name: p.grad.numpy() for name, p in trainee.parameters.items() if p.grad is not None}
        return loss, gradients, sum(micro.input_ids.numel() for micro in micros)


@pytest.mark.parametrize("toy", ["llama", "qwen3", "gemma3"])
def test_real_conversations(toy: str, shared: Path, tmp_path: Path, record_proof) -> None:
    """Rows of people's own chats, truncated to a thousand tokens, in float32: loss and gradients of packed rows to 1e-6."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "data/tokenizers/smollm2")
    data = {"train": str(shared / "data/chat/messages_300.jsonl"), "max_rows": 12, "too_long": "truncate"}
    found = []
    for packing in (False, True):
        job = Job.model_validate({"model": {"name": "m"}, "data": data, "batch": {"seq_len": 1000, "packing": packing}})
        folder = tmp_path / f"packed-{packing}"
        assert prepare(job, tokenizer, tmp_path, folder).train.num_rows == (8 if packing else 12)
        found.append(run_world(Epoch(TOYS[toy] | {"vocab_size": len(tokenizer)}, folder).outcome, 1)[0])
    (loss, gradients, alone), (packed_loss, packed_gradients, packed) = found
    assert alone == packed == 7_153, "one row at a time nothing is padded"
    assert abs(packed_loss - loss) < 1e-6 * loss
    worst = max(float(np.linalg.norm(packed_gradients[name] - own) / np.linalg.norm(own)) for name, own in gradients.items())
    assert worst < 1e-6
    record_proof("packed real conversations equal to rows of their own, float32", runs=1, worst_relative_error=worst)
