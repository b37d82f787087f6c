"""Megatron-LM's launch lines: what they plan, which models they spell, and what is refused - never a flag in silence."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pentamesh.errors import InputError
from pentamesh.model.read import read_model
from pentamesh.plan.plan import Plan
from pentamesh.plan.search import plan
from pentamesh.translate.megatron import Pretraining, read_flags
from pentamesh.translate.megatron_words import REFUSED

RECIPE = Path(__file__).parents[2] / "recipes" / "pretrain_gpt.py"


@pytest.fixture(autouse=True)
def beside_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script finds what lies beside it; `runpy` leaves that to its caller."""
    monkeypatch.syspath_prepend(str(RECIPE.parent))


LINE_D = (
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --sequence-parallel --context-parallel-size 1 --num-layers 126 "
    "--hidden-size 16384 --num-attention-heads 128 --seq-length 8192 --micro-batch-size 1 --global-batch-size 2048 --bf16 --use-flash-attn "
    "--transformer-impl transformer_engine"
)
TOY = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights"
LLAMA_8B = (
    f"{LLAMA} --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --ffn-hidden-size 14336 "
    "--vocab-size 128256 --max-position-embeddings 131072 --rotary-base 500000 --seq-length 8192 --bf16 --hidden-dropout 0 --attention-dropout 0"
)


def read(line: str, on: str = "8x8xH100@8x400gbps") -> Pretraining:
    return read_flags([*line.split(), "--hardware", on], "")


def planned(line: str, on: str) -> Plan:
    found = read(line, on)
    return plan(found.job, found.model, found.hardware)


def refused(line: str, on: str = "8xH100") -> dict[str, tuple[str, str]]:
    """What and hint of every problem, by the flag that it is at."""
    with pytest.raises(InputError) as caught:
        read(line, on)
    return {problem.where: (problem.what, problem.hint) for problem in caught.value.problems}


def said(line: str, on: str, exit_code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What the recipe prints, on one line."""
    monkeypatch.setattr(sys, "argv", [str(RECIPE), *line.split(), "--hardware", on])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(RECIPE), run_name="__main__")
    out, err = capsys.readouterr()
    assert ended.value.code == exit_code, err
    return re.sub(r"\s+", " ", out + err)


# Line (d)


def test_405b_fits_no_80_gb_card(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = said(LINE_D, "8x8xH100@8x400gbps", 3, capsys, monkeypatch)
    assert text.startswith("DOES NOT FIT gpt-126x16384 (406.9B parameters), pretrain, bf16")
    assert "126 layers do not divide by pipeline = 8: 6 stages of 16 and 2 stages of 15" in text
    assert "2,048 micro-batches make the bubble of 8 stages 7/2048 = 0.34% of the computing" in text
    (numel, megatron) = re.findall(r"holds ([\d.]+)B parameters at 16 bytes; Megatron-LM keeps bf16 weights beside, 18 bytes: (\d+) GB", text)[0]
    # Sixteen blocks over eight ranks are 6.44e9; the first stage has 0.1e9 of the vocabulary and 0.13e9 of positions beside.
    blocks = 16 * 12 * 16384**2 / 8
    assert blocks == pytest.approx(6.44e9, rel=1e-3)
    assert float(numel) * 1e9 == pytest.approx(blocks + 51200 * 16384 / 8 + 8192 * 16384, rel=1e-3)
    assert int(megatron) == pytest.approx(116, rel=0.04)
    (step_s,) = re.findall(r"at 40% a step would take ([\d,]+) s", text)
    assert int(step_s.replace(",", "")) == pytest.approx(1700, rel=0.04)
    for assumed in (
        "50,257 tokens of GPT-2's tokenizer, padded to 51,200",
        "kernels are torch's",
        "FlashAttention",
        "positions end with the sequence",
    ):
        assert assumed in text, assumed


def test_405b_fits_a_141_gb_card_with_blocks_recomputed_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = said(f"{LINE_D} --plan", "8x8xH200@8x400gbps", 0, capsys, monkeypatch)
    assert text.startswith("FITS")
    assert "blocks recomputed in backward" in text
    assert re.search(r"with their activations kept a GPU needs 2\d\d GB, with them recomputed 1\d\d GB", text)
    kept = said(f"{LINE_D} --recompute-granularity selective", "8x8xH200@8x400gbps", 3, capsys, monkeypatch)
    assert kept.startswith("DOES NOT FIT")
    assert "selective: all but matmuls and attention is computed again" in kept


def test_405b_in_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(RECIPE), *LINE_D.split(), "--hardware", "8x8xH100@8x400gbps", "--json"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(RECIPE), run_name="__main__")
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["layout"]["pp"], found["layout"]["tp"], found["layout"]["sequence_parallel"]) == ("does_not_fit", 8, 8, True)
    assert found["time"]["step_s"]["low"] < 1700 < found["time"]["step_s"]["high"]
    assert found["job"]["optimizer"]["betas"] == [0.9, 0.999]


def test_what_is_planned_only_is_no_success(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = said(TOY, "2xCPU", 2, capsys, monkeypatch)
    assert text.startswith("FITS")
    assert "is planned and not trained yet" in text


@pytest.mark.parametrize(("rank", "speaks"), [(0, True), (3, False)])
def test_the_first_process_speaks_for_all(rank: int, speaks: bool) -> None:
    started = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""}
    for line, code in ((f"{TOY} --plan", 0), (f"{TOY} --use-flash-attn", 2)):
        command = [sys.executable, str(RECIPE), *line.split()]
        done = subprocess.run(command, env=os.environ | started, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr
        assert bool(done.stdout + done.stderr) is speaks
        assert not speaks or "2 nodes of 4 x CPU" in done.stdout + done.stderr


# Models


def test_without_a_word_it_is_gpt2() -> None:
    found = read(TOY).model
    assert (found.family, found.ffn, found.num_kv_heads, found.tied, found.max_positions) == ("gpt2", 256, 4, True, 32)
    assert {key: found.config[key] for key in ("resid_pdrop", "attn_pdrop")} == {"resid_pdrop": 0.1, "attn_pdrop": 0.1}


def test_four_marks_make_it_llama() -> None:
    found, published = read(LLAMA_8B).model, read_model("llama-3.1-8b")
    assert found.tensors == published.tensors
    assert found.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}
    assert read(f"{LLAMA_8B} --add-qkv-bias").model.family == "qwen2"


@pytest.mark.parametrize(
    ("line", "sizes"),
    [
        (f"{TOY} {LLAMA}", {"ffn": 128, "num_kv_heads": 4, "tied": False, "head_dim": 16}),  # two thirds of 256, in whole multiples of 64
        (f"{TOY} {LLAMA} --group-query-attention", {"num_kv_heads": 1}),
        (f"{TOY} {LLAMA} --kv-channels 32", {"head_dim": 32}),
        (f"{TOY} --ffn-hidden-size 100 --vocab-size 500 --make-vocab-size-divisible-by 64", {"ffn": 100, "vocab": 512}),
        (f"{TOY} --vocab-size 500 --tensor-model-parallel-size 4", {"vocab": 512}),
        (f"{TOY} --vocab-size 513 --tensor-model-parallel-size 4", {"vocab": 1024}),
    ],
)
def test_sizes(line: str, sizes: dict[str, Any]) -> None:
    found = read(line).model
    assert {key: getattr(found, key) for key in sizes} == sizes


# The job


def test_flags_set_keys_of_the_job() -> None:
    line = (
        f"{TOY} --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 5 --weight-decay 0.1 --clip-grad 0.5 --adam-beta2 0.95 "
        "--adam-eps 1e-6 --train-iters 100 --seed 7 --data-path rows.jsonl --use-distributed-optimizer --micro-batch-size 2 "
        "--save runs/a --save-interval 10 --save-retain-interval 40 --tensorboard-dir runs/a/tensorboard --load runs/a --exit-interval 50 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    )
    found = read(line, "8xH100")
    job, optimizer = found.job, found.job.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay) == (3e-4, (0.9, 0.95), 1e-6, 0.1)
    assert (optimizer.schedule, optimizer.warmup_steps, optimizer.max_grad_norm) == ("cosine", 5, 0.5)
    assert optimizer.min_lr_ratio == pytest.approx(0.1)
    assert (job.training.steps, job.training.seed, job.data.train, job.method) == (100, 7, "rows.jsonl", "pretrain")
    assert (job.layout.shard, job.layout.activation_checkpointing) == ("optimizer", "full")
    assert (job.logging.folder, job.logging.tensorboard, job.checkpoint.every, job.checkpoint.keep_every) == ("runs/a", True, 10, 40)
    assert (job.batch.micro_batch, job.batch.global_batch) == (2, 16)
    assert (found.resume, found.stop_at, job.precision) == (True, 50, "fp32")
    assert not any("chosen" in note for note in found.model.notes)


def test_what_is_not_said_is_as_in_megatron() -> None:
    job = read(TOY, "8xH100").job
    assert (job.layout.shard, job.layout.tensor, job.layout.pipeline, job.layout.activation_checkpointing) == ("none", 1, 1, "auto")
    assert (job.optimizer.weight_decay, job.optimizer.schedule, job.training.seed, job.precision) == (0.01, "linear", 1234, "fp32")
    assert job.batch.global_batch == 8


@pytest.mark.parametrize(("word", "way"), [("p2p", "ring"), ("allgather", "all_gather"), ("all_gather", "all_gather"), ("a2a", "ulysses")])
def test_how_context_ranks_meet(word: str, way: str) -> None:
    found = planned(f"{LLAMA_8B} --context-parallel-size 4 --cp-comm-type {word}", "8xH200")
    assert (found.layout.mesh.cp, found.layout.context) == (4, way)


# Refused


@pytest.mark.parametrize("flag", REFUSED)
def test_refused_flags_give_the_reason(flag: str) -> None:
    for written in (flag, f"{flag} 2"):
        assert refused(f"{TOY} {written}")[flag] == REFUSED[flag]


@pytest.mark.parametrize(
    ("flags", "where", "what"),
    [
        ("--swiglu", "--swiglu", "no architecture with --swiglu and without --normalization RMSNorm"),
        ("--normalization RMSNorm", "--normalization RMSNorm", "and without --swiglu --position-embedding-type rope --disable-bias-linear"),
        ("--group-query-attention", "--group-query-attention", "as many key heads as query heads"),
        ("--kv-channels 32", "--kv-channels", "4 of 32 are not 64"),
        (f"{LLAMA} --num-query-groups 2", "--num-query-groups", "without --group-query-attention"),
        (f"{LLAMA} --hidden-dropout 0.1", "--hidden-dropout", "drops nothing of the stream"),
        ("--normalization LayerNorm1P", "--normalization", "no architecture that is described here"),
        ("--transformer-impl inference", "--transformer-impl", "--transformer-impl inference is unknown"),
        ("--expert-model-parallel-size 3", "layout.expert", "expert = 3 does not divide"),
        ("--load other --save here", "--load other", "a run goes on in its own folder, which is here"),
        ("--save here --tensorboard-dir there", "--tensorboard-dir there", "beside the metrics of a run"),
        ("--min-lr 0.1", "--min-lr", "without --lr"),
        ("--lr-decay-style inverse-square-root", "--lr-decay-style", "is not one of"),
        ("--recompute-granularity none", "--recompute-granularity", "is unknown"),
        ("--recompute-method block", "--recompute-method", "computed again all"),
        ("--recompute-num-layers 1", "--recompute-num-layers", "says how blocks are wholly computed again"),
        ("--recompute-activations --recompute-granularity full", "--recompute-activations", "both say what is computed again"),
        ("--pipeline-model-parallel-size 3", "--pipeline-model-parallel-size", "pipeline = 3 does not divide the 8 devices"),
        ("--sequence-parallel", "--sequence-parallel", "tensor = 1"),
        ("--hidden-size 1.5", "--hidden-size", "--hidden-size 1.5 is not a whole number"),
        ("--hidden-dropout much", "--hidden-dropout", "is not a number of at least 0"),
        ("--adam-beta1 nan", "--adam-beta1", "is not a number of at least 0"),
        ("--num-atention-heads 4", "--num-atention-heads", "is not a flag that is understood here"),
        ("--context-parallel-size 2 --cp-comm-type a2a+p2p", "--cp-comm-type", "a2a+p2p is no way in which context ranks meet"),
        ("--context-parallel-size 2 --cp-comm-type p2p a2a", "the command line", "'a2a' belongs to no flag"),
        ("--cp-comm-type p2p", "--cp-comm-type", "context = 1"),
        ("--context-parallel-size 2", "layout.context", "drops 10% of attention's weights at random"),
        ("rows.jsonl", "the command line", "'rows.jsonl' belongs to no flag"),
        ("--seq-length", "--seq-length", "expected one argument"),
    ],
)
def test_what_cannot_be_meant(flags: str, where: str, what: str) -> None:
    with pytest.raises(InputError) as caught:
        planned(f"{TOY} {flags}", "8xH100")
    assert [problem for problem in caught.value.problems if problem.where.startswith(where) and what in problem.what], str(caught.value)
    assert all(problem.hint for problem in caught.value.problems), str(caught.value)


def test_a_slip_of_the_keyboard_names_the_flag_that_is_near() -> None:
    assert refused(f"{TOY} --num-atention-heads=4")["--num-atention-heads=4"][1] == "did you mean --num-attention-heads?"


def test_all_at_once() -> None:
    found = refused("--num-layers x --fp16 --bogus 3 --swiglu --lr fast", "8xH100")
    assert {"--num-layers", "--fp16", "--bogus", "--swiglu", "--lr", "--hidden-size", "--num-attention-heads", "--seq-length"} <= set(found)


@pytest.mark.parametrize("flag", ["--use-flash-attn", "--transformer-impl transformer_engine"])
def test_what_only_a_gpu_has_is_refused_on_a_cpu(flag: str) -> None:
    assert "asks for kernels of a GPU" in refused(f"{TOY} {flag}", "2xCPU")[flag][0]
    assert any(note.startswith(flag) for note in read(f"{TOY} {flag}", "8xH100").model.notes)


def test_local_kernels_are_torchs_anywhere() -> None:
    assert not any("transformer" in note for note in read(f"{TOY} --transformer-impl local", "2xCPU").model.notes)


def test_reading_and_planning_is_light() -> None:
    code = f"import sys; sys.argv = ['', *{LINE_D!r}.split(), '--hardware', '8x8xH100@8x400gbps', '--json']\n"
    code += f"import runpy; sys.path.insert(0, {str(RECIPE.parent)!r})\n"
    code += f"try: runpy.run_path({str(RECIPE)!r}, run_name='__main__')\nexcept SystemExit: pass\n"
    code += "print(sorted({'torch', 'transformers', 'numpy'} & {n.partition('.')[0] for n in sys.modules}), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"
