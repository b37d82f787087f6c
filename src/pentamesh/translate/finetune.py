"""The flags of the field's fine-tuning scripts, as a Job.

    torchrun --standalone --nproc-per-node=8 finetune.py --model meta-llama/Llama-3.1-8B --batch-size 1 --grad-accum 16 --fsdp full_shard

Every flag sets one key of the job, or is refused with the reason. What is not said stays at the job's own default.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pentamesh.errors import InputError, Problem
from pentamesh.job.hardware import read_hardware
from pentamesh.job.job import Job
from pentamesh.job.read import job_from_flags
from pentamesh.job.started import started
from pentamesh.job.written import read_value
from pentamesh.translate.flags import Flag, Setting, declare, given_value, settings
from pentamesh.units import parse_count

__all__ = ["Defaults", "Start", "read_flags"]


FLAGS = (
    Flag("--model", "model.name", "local folder, hub id or catalogue name", metavar="NAME"),
    Flag("--revision", "model.revision", "branch, tag or commit of a hub id", metavar="REV"),
    Flag("--data", "data.train", "training rows: a file, a glob or a hub data set", metavar="FILE"),
    Flag("--held-out", "data.held_out", "held-out rows: a file, or a share of the training rows (0.05)", metavar="FILE|SHARE"),
    Flag("--batch-size", "batch.micro_batch", "sequences that a device computes at once", metavar="N"),
    Flag("--seq-len", "batch.seq_len", "longest sequence, in tokens", metavar="N"),
    Flag("--packing", "batch.packing", "put several samples into one sequence", sets=True),
    Flag("--group-by-length", "batch.group_by_length", "steps of samples of like length", sets=True),
    Flag("--steps", "training.steps", "optimizer steps", metavar="N"),
    Flag("--epochs", "training.epochs", "passes over the rows", metavar="X"),
    Flag("--seed", "training.seed", "seed of order and initial weights", metavar="N"),
    Flag("--lr", "optimizer.lr", "peak learning rate", metavar="X"),
    Flag("--warmup-steps", "optimizer.warmup_steps", "steps of linear warm-up", metavar="N"),
    Flag("--weight-decay", "optimizer.weight_decay", "decoupled decay of matrices", metavar="X"),
    Flag("--lr-schedule", "optimizer.schedule", "cosine | linear | constant", metavar="NAME"),
    Flag("--max-grad-norm", "optimizer.max_grad_norm", "gradient norm to clip to", metavar="X"),
    Flag("--fp32", "precision", "compute and keep everything in fp32", sets="fp32"),
    Flag("--bf16", "precision", "compute in bf16; weights and optimizer state in fp32", sets="bf16"),
    Flag("--bf16-pure", "precision", "everything in bf16, rounded stochastically", sets="bf16-pure"),
    Flag("--gradient-checkpointing", "layout.activation_checkpointing", "compute blocks again in backward", sets="full"),
    Flag("--activation-cpu-offload", "layout.activation_offload", "keep activations in host memory until backward", sets=True),
    Flag("--torch-compile", "training.compile", "compile every block", sets=True),
    Flag("--output-dir", "logging.folder", "run folder", metavar="FOLDER"),
    Flag("--save-steps", "checkpoint.every", "steps between checkpoints", metavar="N"),
    Flag("--save-total-limit", "checkpoint.keep", "newest checkpoints that are kept", metavar="N"),
    Flag("--eval-steps", "training.evaluate_every", "steps between evaluations", metavar="N"),
    Flag("--tensorboard", "logging.tensorboard", "write TensorBoard event files too", sets=True),
    Flag("--hardware", "hardware", "machine to plan for; found from this one when not given", metavar="WHAT"),
)
# What each word of --fsdp cuts over the data axis; hybrid_shard copies between nodes besides.
FSDP = {"full_shard": "parameters", "hybrid_shard": "parameters", "shard_grad_op": "gradients", "no_shard": "none"}


@dataclass(frozen=True)
class Defaults:
    """What a script trains where its flags do not say.

    keys            dotted keys of the job and their values
    without_model   more of them, when no --model is given; where there are none it has to be
    fsdp            the strategy without --fsdp
    """

    keys: Mapping[str, Any]
    without_model: Mapping[str, Any] = field(default_factory=dict)
    fsdp: str | None = None


@dataclass(frozen=True)
class Start:
    """A job, and how this start of it differs from a plain one."""

    job: Job
    resume: bool
    stop_at: int | None
    even_so: bool
    plan_only: bool


def read_flags(argv: Sequence[str], defaults: Defaults, description: str) -> Start:
    """The job that a command line describes, for as many processes as were started, or as its hardware has devices. Raises InputError with every
    problem.

    `--grad-accum` counts micro-batches a device, so that the global batch is batch-size x grad-accum x devices, once for those that share
    sequences.
    """
    given = _parser(description).parse_args(argv)
    nodes, each = started() or _devices(given_value(given, "--hardware"))
    own = defaults.keys if given_value(given, "--model") else {**defaults.keys, **defaults.without_model}
    if problems := list(_clashes(given, nodes, own)):
        raise InputError(*problems)
    said = [*_set_by(given), *_strategy(given, defaults, nodes)]
    said += _batch(given, nodes * each // _ranks_of_one_batch(said))
    keys = {key for _, key, _ in said}
    assumed = [("default", key, value) for key, value in own.items() if key not in keys]
    if not keys & {"training.steps", "training.epochs"}:
        assumed.append(("default", "training.epochs", 1.0))
    return Start(job_from_flags([*assumed, *said]), given.resume, given.stop_at, given.even_so, given.plan)


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    declare(parser, FLAGS)
    parser.add_argument("--grad-accum", type=int, default=1, metavar="N", help="micro-batches a device and step (batch.global_batch)")
    parser.add_argument("--fsdp", choices=FSDP, help="strategy on the data axis (layout.shard); DDP without it")
    parser.add_argument("--fsdp-reshard-after-forward", action="store_true", help="free gathered parameters between forward and backward")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="set any key of the job; repeatable")
    parser.add_argument("--resume", action="store_true", help="go on from the newest good checkpoint")
    parser.add_argument("--stop-at", type=int, metavar="STEP", help="save and stop after this step")
    parser.add_argument("--even-so", action="store_true", help="run although the plan says that it does not fit")
    parser.add_argument("--plan", action="store_true", help="show the plan and do not run it")
    return parser


def _devices(hardware: str | None) -> tuple[int, int]:
    """Nodes, and devices of each, of the hardware that a flag names, or of this machine."""
    found = read_hardware(hardware or "auto", "--hardware")
    return found.num_nodes, found.devices_per_node


def _clashes(given: argparse.Namespace, nodes: int, own: Mapping[str, Any]) -> Iterator[Problem]:
    """What cannot be meant together, or is missing."""
    if not given_value(given, "--model") and "model.name" not in own:
        yield Problem("there is no model to train", "--model", "give a folder, a hub id or a catalogue name")
    precisions = [flag.name for flag in FLAGS if flag.key == "precision" and given_value(given, flag.name)]
    if len(precisions) > 1:
        yield Problem(f"{' and '.join(precisions)} name two precisions", precisions[1], "keep one")
    if given.fsdp_reshard_after_forward and FSDP.get(given.fsdp) != "parameters":
        hint = "add --fsdp full_shard, or leave it out"
        yield Problem(f"nothing is gathered under {given.fsdp or 'DDP'}", "--fsdp-reshard-after-forward", hint)
    if given.fsdp == "hybrid_shard" and nodes == 1:
        hint = "use --fsdp full_shard, or start it on several nodes (torchrun --nnodes)"
        yield Problem("hybrid_shard copies the model between nodes, and there is one", "--fsdp hybrid_shard", hint)
    if given.grad_accum < 1:
        yield Problem(f"{given.grad_accum} micro-batches are no step", "--grad-accum", "use 1 or more")
    if given.stop_at is not None and given.stop_at < 1:
        yield Problem(f"there is no step {given.stop_at}: the first is 1", "--stop-at", "use 1 or more, or leave it out")
    for flag in FLAGS:
        if isinstance(value := given_value(given, flag.name), str) and not value.strip():
            yield Problem(f"{flag.name} is empty", flag.name, "give it a value, or leave it out")


def _set_by(given: argparse.Namespace) -> Iterator[Setting]:
    """What each flag that was given sets, and each --set."""
    yield from settings(given, FLAGS)
    for override in given.set:
        key, equals, value = override.partition("=")
        if not equals or not key.strip():
            raise InputError(f"{override!r} sets nothing", where="--set", hint="write --set optimizer.eps=1e-6")
        yield f"--set {override}", key.strip(), read_value(value, f"--set {override}")


def _ranks_of_one_batch(said: Sequence[Setting]) -> int:
    """How many devices work on the same sequences, by the degrees that were set."""
    degrees = {key: value for _, key, value in said if key in ("layout.tensor", "layout.pipeline", "layout.context")}
    return math.prod(degree for degree in degrees.values() if isinstance(degree, int) and degree > 0)


def _batch(given: argparse.Namespace, data_ranks: int) -> Iterator[Setting]:
    with suppress(ValueError):  # what is no count is refused as batch.micro_batch
        size = parse_count(given_value(given, "--batch-size") or 1)
        yield "--batch-size x --grad-accum x data ranks", "batch.global_batch", size * given.grad_accum * data_ranks


def _strategy(given: argparse.Namespace, defaults: Defaults, nodes: int) -> Iterator[Setting]:
    chosen = given.fsdp or defaults.fsdp
    if chosen is not None:
        yield f"--fsdp {chosen}", "layout.shard", FSDP[chosen]
    if given.fsdp == "hybrid_shard":
        yield "--fsdp hybrid_shard", "layout.replicate", nodes
    if given.fsdp_reshard_after_forward:
        yield "--fsdp-reshard-after-forward", "layout.reshard_after_forward", True
