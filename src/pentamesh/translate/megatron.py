"""Megatron-LM's flags for pre-training, as a Job and the model that it trains.

    torchrun --nnodes=8 --nproc-per-node=8 pretrain_gpt.py --tensor-model-parallel-size 8 --num-layers 126 --hidden-size 16384 ...

Every flag does what it says or is refused with the reason. What is not said is as in Megatron-LM where it decides what is computed; only what
blocks compute again in backward is then the plan's choice.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pentamesh.errors import InputError, Problem
from pentamesh.job.hardware import Hardware, read_hardware, started_hardware
from pentamesh.job.job import Job
from pentamesh.job.read import job_from_flags
from pentamesh.job.started import started
from pentamesh.model.config import canonical
from pentamesh.model.families import describe
from pentamesh.model.faults import check
from pentamesh.model.spec import ModelSpec
from pentamesh.translate.flags import Setting, given_value, settings
from pentamesh.translate.megatron_experts import balancing
from pentamesh.translate.megatron_model import architecture
from pentamesh.translate.megatron_words import ADAM, CONTEXT, DEFAULTS, FLAGS, ON_GPU, REFUSED, parser_of
from pentamesh.translate.reader import count, number

__all__ = ["Pretraining", "read_flags"]

T = TypeVar("T")


@dataclass(frozen=True)
class Pretraining:
    """A job and its model, and how this start differs from a plain one."""

    job: Job
    model: ModelSpec
    hardware: Hardware
    resume: bool
    stop_at: int | None
    plan_only: bool
    as_json: bool


def read_flags(argv: Sequence[str], description: str) -> Pretraining:
    """What a command line describes, on the machine that it names or is given on. Raises InputError with every problem."""
    given, problems = _given(argv, description)

    def attempt(work: Callable[[], T]) -> T | None:
        try:
            return work()
        except InputError as error:
            problems.extend(error.problems)
            return None

    hardware = attempt(lambda: _hardware(given))
    job = attempt(lambda: job_from_flags(_settings(given, hardware)))
    tensor, seq_length = (count(given, flag, []) or 1 for flag in ("--tensor-model-parallel-size", "--seq-length"))
    model = attempt(lambda: _model(given, seq_length, tensor))
    problems += _wrong(given, hardware)
    if problems or job is None or model is None or hardware is None:
        raise InputError(*dict.fromkeys(problems))
    said = (*model.notes, *_on_gpu(given, hardware), *_chosen(given), *_cut(given))
    stop_at = count(given, "--exit-interval", [])
    resume = given_value(given, "--load") is not None
    return Pretraining(job, replace(model, notes=said), hardware, resume, stop_at, given.plan, given.json)


# Parsing


def _given(argv: Sequence[str], description: str) -> tuple[argparse.Namespace, list[Problem]]:
    """The flags as written, and what is wrong with their spelling."""
    parser = parser_of(description)
    try:
        given, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise InputError(f"{error.message}", where=error.argument_name or "the command line", hint="--help lists the flags") from None
    known = [option for action in parser._actions for option in action.option_strings]
    # A word behind an unknown flag is its value.
    return given, [_unknown(word, known) for before, word in zip(["", *unknown], unknown) if word.startswith("--") or not before.startswith("--")]  # noqa: B905


def _unknown(word: str, known: Sequence[str]) -> Problem:
    if not word.startswith("--"):
        return Problem(f"{word!r} belongs to no flag", "the command line", "--help lists the flags")
    return Problem(f"{word} is not a flag that is understood here", word, _meant(word, known))


def _meant(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word.partition("=")[0], known, n=2, cutoff=0.7)
    return f"did you mean {' or '.join(near)}?" if near else "leave it out; --help lists the flags that are understood"


# The job


def _hardware(given: argparse.Namespace) -> Hardware:
    """The machine that is named, or what the processes of this start find themselves on. Raises InputError."""
    if (named := given_value(given, "--hardware")) is not None:
        return read_hardware(named, "--hardware")
    ours = started()
    return started_hardware(*ours) if ours else read_hardware("auto")


def _settings(given: argparse.Namespace, hardware: Hardware | None) -> list[Setting]:
    """What flags set, and what Megatron-LM would without them."""
    said = [*settings(given, FLAGS), *_context(given), *_optimizer(given), *_board(given), *balancing(given)]
    keys = {key for _, key, _ in said}
    defaults = DEFAULTS | ({"layout.shard": "optimizer"} if _parts_experts(given) else {})
    assumed = [("Megatron-LM's default", key, value) for key, value in defaults.items() if key not in keys]
    if "batch.global_batch" not in keys and hardware:
        assumed.append(("--micro-batch-size x data ranks", "batch.global_batch", _one_micro_batch(given, hardware)))
    return [("--num-layers", "model.name", _name(given)), ("pretrain_gpt.py", "method", "pretrain"), *assumed, *said]


def _parts_experts(given: argparse.Namespace) -> bool:
    return (count(given, "--expert-model-parallel-size", []) or 1) > 1


def _name(given: argparse.Namespace) -> str:
    return f"gpt-{given_value(given, '--num-layers')}x{given_value(given, '--hidden-size')}"


def _one_micro_batch(given: argparse.Namespace, hardware: Hardware) -> int:
    """One micro-batch on every data rank."""
    ranks = hardware.num_devices
    for flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"):
        ranks = max(1, ranks // (count(given, flag, []) or 1))
    return ranks * (count(given, "--micro-batch-size", []) or 1)


def _optimizer(given: argparse.Namespace) -> Iterator[Setting]:
    betas = [number(given, flag, []) for flag in ADAM]
    yield " and ".join(ADAM), "optimizer.betas", [default if beta is None else beta for beta, default in zip(betas, ADAM.values(), strict=True)]
    lowest, peak = (number(given, flag, []) for flag in ("--min-lr", "--lr"))
    if lowest is not None and peak:
        yield "--min-lr", "optimizer.min_lr_ratio", lowest / peak


def _context(given: argparse.Namespace) -> Iterator[Setting]:
    if (way := CONTEXT.get(given_value(given, "--cp-comm-type"))) is not None:
        yield "--cp-comm-type", "layout.context_attention", way


def _board(given: argparse.Namespace) -> Iterator[Setting]:
    if given_value(given, "--tensorboard-dir") is not None:
        yield "--tensorboard-dir", "logging.tensorboard", True


def _model(given: argparse.Namespace, seq_length: int, tensor: int) -> ModelSpec:
    config, notes = architecture(given, seq_length, tensor)
    config = canonical(config)
    check(config, "the model of these flags:")
    found = describe(config, _name(given))
    assert found is not None, config["model_type"]
    return replace(found, notes=notes)


# What cannot be done


def _wrong(given: argparse.Namespace, hardware: Hardware | None) -> Iterator[Problem]:
    """What cannot be meant, alone or together, and what is not here."""
    for flag, (reason, hint) in REFUSED.items():
        if given_value(given, flag) is not None:
            yield Problem(reason, flag, hint)
    if given_value(given, "--seq-length") is None:
        yield Problem("--seq-length is missing", "--seq-length", "Megatron-LM needs it too")
    if (way := given_value(given, "--cp-comm-type")) not in (None, *CONTEXT):
        hint = f"use one of {', '.join(CONTEXT)}, for all layers"
        yield Problem(f"--cp-comm-type {way} is no way in which context ranks meet here", "--cp-comm-type", hint)
    yield from _numbers(given)
    yield from _recompute(given)
    yield from _kernels(given, hardware)
    yield from _folders(given)


def _numbers(given: argparse.Namespace) -> Iterator[Problem]:
    problems: list[Problem] = []
    count(given, "--exit-interval", problems)
    for flag in (*ADAM, "--min-lr"):
        number(given, flag, problems)
    yield from problems
    if given_value(given, "--min-lr") is not None and given_value(given, "--lr") is None:
        yield Problem("--min-lr without --lr, of which it is a share", "--min-lr", "add --lr")


def _recompute(given: argparse.Namespace) -> Iterator[Problem]:
    granularity = given_value(given, "--recompute-granularity")
    if granularity not in (None, "full", "selective"):
        yield Problem(f"--recompute-granularity {granularity} is unknown", "--recompute-granularity", "use full or selective")
    if granularity and given_value(given, "--recompute-activations"):
        yield Problem("this and --recompute-granularity both say what is computed again", "--recompute-activations", "keep one")
    for flag, only in (("--recompute-method", "uniform"), ("--recompute-num-layers", "1")):
        said = given_value(given, flag)
        if said not in (None, only):
            yield Problem(f"{flag} {said}: blocks are computed again all, and one by one", flag, f"use {flag} {only}")
        elif said and granularity != "full":
            yield Problem(f"{flag} says how blocks are wholly computed again", flag, "add --recompute-granularity full, or leave it out")


def _kernels(given: argparse.Namespace, hardware: Hardware | None) -> Iterator[Problem]:
    if (said := given_value(given, "--transformer-impl")) not in (None, "local", "transformer_engine"):
        yield Problem(f"--transformer-impl {said} is unknown", "--transformer-impl", "use local or transformer_engine")
    if hardware is not None and hardware.device.kind == "cpu":
        hint = "leave it out, or name the machine that is meant: --hardware 8xH100"
        for flag in _asked_of_gpu(given):
            yield Problem(f"{flag} asks for kernels of a GPU, and {hardware} has none", flag, hint)


def _folders(given: argparse.Namespace) -> Iterator[Problem]:
    save, load, board = (given_value(given, flag) for flag in ("--save", "--load", "--tensorboard-dir"))
    if load is not None and load != save:
        yield Problem(f"a run goes on in its own folder, which is {save or 'not given'}", f"--load {load}", f"use --save {load} --load {load}")
    if board is not None and (save is None or os.path.normpath(board) != os.path.normpath(f"{save}/tensorboard")):
        hint = "use the folder tensorboard in that of --save"
        yield Problem("event files are written beside the metrics of a run", f"--tensorboard-dir {board}", hint)


# What should be said


def _asked_of_gpu(given: argparse.Namespace) -> list[str]:
    asked = {flag: given_value(given, flag.partition(" ")[0]) for flag in ON_GPU}
    return [flag for flag, value in asked.items() if value is True or value == flag.partition(" ")[2]]


def _on_gpu(given: argparse.Namespace, hardware: Hardware) -> list[str]:
    return [f"{flag}: {ON_GPU[flag]}" for flag in _asked_of_gpu(given)] if hardware.device.kind == "cuda" else []


def _cut(given: argparse.Namespace) -> list[str]:
    """What goes with parted experts here and not there."""
    if not _parts_experts(given) or given_value(given, "--use-distributed-optimizer"):
        return []
    return ["the optimizer is cut over the data axis, as experts are parted; Megatron-LM does that by --use-distributed-optimizer"]


def _chosen(given: argparse.Namespace) -> list[str]:
    """What blocks compute again in backward, where that is not what Megatron-LM would."""
    granularity = given_value(given, "--recompute-granularity")
    if granularity == "selective" or given_value(given, "--recompute-activations"):
        return ["selective: all but matmuls and attention is computed again; Megatron-LM's is attention, of which a fused kernel keeps nothing"]
    if granularity == "full":
        return []
    return ["what blocks compute again in backward is chosen: without --recompute-granularity Megatron-LM keeps all activations"]
