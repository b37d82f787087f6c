"""What is written becomes the job that was meant, and overrides are recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from pentamesh.errors import InputError
from pentamesh.job.job import Job, Machine, Model
from pentamesh.job.read import check_trainable, job_from_flags, read_job, read_job_text, resolve

FULL = """\
model: llama-3.1-8b            # a name alone is enough
data: {train: rows.jsonl, held_out: 5e-2}
batch:
  seq_len: 128k
  micro_batch: 1
  global_batch: 4k sequences
optimizer:
  lr: 1e-4
  betas: [0.9, 0.999]
  max_grad_norm: null
training: {steps: 2_000}
checkpoint:
hardware: 8xRTX-5090
layout: {shard: parameters, reshard_after_forward: false}
"""


def test_units_shorthands_and_empty_sections() -> None:
    job, overrides = read_job_text(FULL)
    assert overrides == {}
    assert job.model == Model(name="llama-3.1-8b")
    assert (job.batch.seq_len, job.batch.global_batch) == (128_000, 4_000)
    assert (job.optimizer.lr, job.optimizer.betas, job.optimizer.max_grad_norm) == (1e-4, (0.9, 0.999), None)
    assert (job.training.steps, job.data.held_out) == (2000, 0.05)
    assert job.checkpoint == Job(model=Model(name="m")).checkpoint
    assert job.layout.reshard_after_forward is False


def test_a_model_alone_is_a_job() -> None:
    assert read_job_text("model: m")[0] == Job(model=Model(name="m"))


def test_a_job_survives_json() -> None:
    text = "model: m\nhardware: {gpus: 8, gpu: RTX-PRO-6000, host_ram: 512 GB, power_cap_w: 300}\n"
    job = read_job_text(text)[0]
    assert isinstance(job.hardware, Machine)
    assert job.hardware.host_ram == 512 * 10**9
    assert Job.model_validate(job.model_dump(mode="json")) == job


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbfmodel: m\n")
    assert read_job(path)[0].model.name == "m"


def test_overrides_change_the_job_and_are_recorded() -> None:
    job, overrides = read_job_text(FULL, overrides=["optimizer.lr=3e-5", "model=qwen3-8b", "data.held_out=null", "checkpoint.keep=1"])
    assert (job.optimizer.lr, job.model.name, job.data.held_out, job.checkpoint.keep) == (3e-5, "qwen3-8b", None, 1)
    assert overrides == {"optimizer.lr": "3e-5", "model": "qwen3-8b", "data.held_out": "null", "checkpoint.keep": "1"}


def test_an_override_mends_what_the_file_has_wrong() -> None:
    assert read_job_text("model: m\noptimizer: {lr: fast}", overrides=["optimizer.lr=1e-4"])[0].optimizer.lr == 1e-4


def test_a_revision_can_be_set_beside_the_short_form_of_a_model() -> None:
    assert read_job_text("model: m", overrides=["model.revision=main"])[0].model == Model(name="m", revision="main")


def test_flags_are_where_their_problems_are() -> None:
    job = job_from_flags([("MODEL", "model.name", "m"), ("--seq-len", "batch.seq_len", "4k"), ("--set", "optimizer.max_grad_norm", None)])
    assert (job.batch.seq_len, job.optimizer.max_grad_norm) == (4000, None)
    with pytest.raises(InputError) as caught:
        job_from_flags([("MODEL", "model.name", "m"), ("--seq-len", "batch.seq_len", "long"), ("--on", "hardware", "8xH200s")])
    assert [p.where for p in caught.value.problems] == ["--seq-len", "--on"]


def test_everything_that_keeps_a_job_from_training_is_said() -> None:
    text = "model: m\nmethod: qlora\nprecision: bf16-pure\nlayout: {tensor: 2, pipeline: 2, context: 2, expert: 2}\n"
    with pytest.raises(InputError) as caught:
        check_trainable(read_job_text(text)[0], "job.yaml")
    said = {p.where.removeprefix("job.yaml "): p.what for p in caught.value.problems}
    assert set(said) == {"data.train", "training", "method", "layout.pipeline"}
    assert said["method"] == "method = qlora is planned but not trained yet"
    assert all(p.hint for p in caught.value.problems)


@pytest.mark.parametrize(
    "layout",
    ["{}", "{shard: none}", "{shard: optimizer}", "{shard: gradients}", "{shard: parameters, data: 4, replicate: 2}", "{tensor: 2, context: 2}"],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
def test_what_is_trained_passes(layout: str, precision: str, tmp_path: Path) -> None:
    (tmp_path / "rows-1.jsonl").write_text("{}\n")
    job = read_job_text(f"model: m\ndata: {{train: 'rows-*.jsonl'}}\ntraining: {{epochs: 1}}\nprecision: {precision}\nlayout: {layout}")[0]
    check_trainable(job, "job.yaml", tmp_path)


def test_absent_rows_are_missed_in_the_folder_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    job = read_job_text("model: m\ndata: {train: trian.jsonl, held_out: sub/rows.jsonl}\ntraining: {steps: 1}")[0]
    with pytest.raises(InputError) as caught:
        check_trainable(job, "job.yaml", tmp_path)
    first, second = caught.value.problems
    assert (first.what, first.where, first.hint) == (f"no file trian.jsonl in {tmp_path}", "job.yaml data.train", "that folder has train.jsonl")
    assert (second.what, second.hint) == (f"no file sub/rows.jsonl in {tmp_path / 'sub'}", "that folder does not exist")


def test_paths_are_of_the_job_files_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert resolve("rows.jsonl", Path("jobs")) == Path("jobs/rows.jsonl")
    assert resolve("/data/rows.jsonl", Path("jobs")) == Path("/data/rows.jsonl")
    assert resolve("~/rows.jsonl", Path("jobs")) == Path("/home/someone/rows.jsonl")
