"""The command line. Thin: it reads what is asked, calls one function and shows what comes back. Heavy imports happen inside commands.

stdout is data, stderr is talk. Exit codes are those of `pentamesh.errors`.
"""

# Annotations are objects here, not text: typer reads those of every command, whichever is asked for, and would compile each.
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from pentamesh import __version__
from pentamesh.errors import DoesNotFit, InputError, PentameshError, Problem, unexpected

if TYPE_CHECKING:
    from pentamesh.job.job import Job
    from pentamesh.model.spec import ModelSpec
    from pentamesh.plan.plan import Plan

__all__ = ["app", "main"]

app = typer.Typer(
    name="pentamesh",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="""Describe a training job once; know whether it fits, how fast it will run and why, then run exactly that plan.

Start with a question:

    pentamesh plan llama-3.1-8b --on 8xRTX-5090

and go on from there with a job file: `pentamesh explain keys` lists what it can say.""",
)
explain_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown", help="Show the tables behind a plan.", context_settings={"help_option_names": ["-h", "--help"]}
)
app.add_typer(explain_app, name="explain")
data_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Look at training data before training.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data_app, name="data")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]
# Flags of `plan` that set one key of the job, and the key.
PLAN_FLAGS = {
    "--on": "hardware",
    "--method": "method",
    "--precision": "precision",
    "--seq-len": "batch.seq_len",
    "--micro-batch": "batch.micro_batch",
    "--global-batch": "batch.global_batch",
    "--shard": "layout.shard",
}


def main() -> None:
    """Run the command line; user errors become messages on stderr and an exit code, never a traceback."""
    # pydantic would look through every installed package for plugins to load, and no other package has a say in what a job is.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
    try:
        app()
    except PentameshError as error:
        _fail(error)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # `| head` has what it wanted
        sys.stderr.close()
        raise SystemExit(0) from None
    except Exception as error:
        if os.environ.get("PENTAMESH_TRACEBACK") and not isinstance(error, OSError):
            raise
        _fail(unexpected(error))


def _fail(error: PentameshError) -> NoReturn:
    """Say what is wrong and leave with its exit code."""
    red, plain = ("\x1b[31m", "\x1b[0m") if _in_colour() else ("", "")
    typer.echo(f"{red}{error}{plain}", err=True)
    raise SystemExit(error.exit_code) from None


def _in_colour() -> bool:
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"pentamesh {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False) -> None: ...


@app.command("plan")
def plan_command(
    target: Annotated[str, typer.Argument(metavar="JOB_OR_MODEL", help="A job file (.yaml), or the name or folder of a model.")],
    on: Annotated[str | None, typer.Option(help="Hardware: `8xRTX-5090`, `2x8xH100@8x400gbps` (8 NICs a node), `2xCPU`, `auto`.")] = None,
    method: Annotated[str | None, typer.Option(help="full | lora | qlora | pretrain")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 | bf16 (fp32 masters) | bf16-pure")] = None,
    seq_len: Annotated[str | None, typer.Option(help="Longest sequence, in tokens.")] = None,
    micro_batch: Annotated[str | None, typer.Option(help="Sequences a rank computes at once.")] = None,
    global_batch: Annotated[str | None, typer.Option(help="Sequences a step.")] = None,
    shard: Annotated[str | None, typer.Option(help="none (DDP) | optimizer (ZeRO-1) | gradients (ZeRO-2) | parameters (full shard)")] = None,
    layout: Annotated[str | None, typer.Option(metavar="KEY=N,...", help="Degrees to judge: `tensor=8,pipeline=2`.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Set any key of the job; repeatable.")] = None,
    as_json: AsJson = False,
) -> None:
    """Whether a job fits, how fast it runs, which layout carries it and why.

    Examples:

        pentamesh plan llama-3.1-8b --on 8xRTX-5090 --seq-len 4096 --global-batch 128

        pentamesh plan llama-3.3-70b --on 2x8xRTX-Pro-6000@200gbps --method lora

        pentamesh plan job.yaml --set batch.micro_batch=2 --json

    Exit code 3 when nothing fits; the best attempt and what would fit are shown all the same.
    """
    values = (on, method, precision, seq_len, micro_batch, global_batch, shard)
    flags = [(flag, key, value) for (flag, key), value in zip(PLAN_FLAGS.items(), values, strict=True) if value is not None]
    if empty := [Problem(f"{flag} is empty", flag, "give it a value, or leave it out") for flag, _, value in flags if not value.strip()]:
        raise InputError(*empty)
    found = _plan(target, [*flags, *_degrees(layout)], set_ or [])
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        from pentamesh.report.terminal import show_plan

        show_plan(found)
    if found.verdict == "does_not_fit":
        raise SystemExit(DoesNotFit.exit_code)


@app.command("init")
def init_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The name or folder of a model.")],
    data: Annotated[str, typer.Argument(metavar="DATA", help="A file, folder or glob of rows, or a data set of the hub.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The job file to write.")] = Path("job.yaml"),
    on: Annotated[str, typer.Option(help="Hardware: `8xRTX-5090`, `2xCPU`, `auto`.")] = "auto",
    force: Annotated[bool, typer.Option("--force", help="Replace the file where it is there already.")] = False,
) -> None:
    """Write a job file with comments for a model and rows: how they are read, how long they are, how many at once.

    Example: `pentamesh init ./SmolLM2-135M-Instruct talks.jsonl --on 8xRTX-5090`
    """
    from pentamesh.run.first_job import write_first_job

    found = write_first_job(model, data, out, on, force=force)
    typer.echo(str(out))
    for note in found.notes:
        typer.echo(f"note: {note}", err=True)
    for command, does in (("data preview", "what the model reads"), ("plan", "whether it fits, and why"), ("train", "runs it")):
        typer.echo(f"next: pentamesh {command} {out}   # {does}", err=True)


@app.command("train")
def train_command(
    target: Annotated[Path, typer.Argument(metavar="JOB_OR_PLAN", help="A job file (.yaml), or a plan.json, which is run as it stands.")],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Set any key of the job; repeatable, recorded.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest good checkpoint of the run folder.")] = False,
    stop_at: Annotated[int | None, typer.Option(min=1, metavar="STEP", help="Save and stop after this step; --resume goes on.")] = None,
    even_so: Annotated[bool, typer.Option("--even-so", help="Run although the plan says that it does not fit.")] = False,
) -> None:
    """Plan a job, run exactly that plan, and keep the measurement beside the promise.

    Starts one process a device on this machine; under torchrun it is one of the processes that torchrun started:

        pentamesh train job.yaml

        torchrun --nproc-per-node=8 -m pentamesh train job.yaml

        pentamesh train job.yaml --resume

    The run folder (`logging.folder`, or runs/JOB) gets plan.json, metrics.jsonl, checkpoints, receipt.json, outcome.json and the export.
    """
    from pentamesh.run.asked import read_asked
    from pentamesh.run.launch import train
    from pentamesh.run.options import Options

    raise SystemExit(train(lambda: read_asked(target, set_ or []), Options(resume, stop_at), even_so=even_so))


@app.command("evaluate")
def evaluate_command(
    job_file: Annotated[Path, typer.Argument(metavar="JOB", help="The job whose held-out rows are used.")],
    model: Annotated[Path | None, typer.Option(help="Folder of the model to evaluate; the job's own when not given.")] = None,
    precision: Annotated[str, typer.Option(help="fp32 | bf16 (computes in bf16 from fp32 weights) | bf16-pure")] = "fp32",
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Set any key of the job; repeatable.")] = None,
    as_json: AsJson = False,
) -> None:
    """The held-out loss of a model folder, in one process: mean per trained token over the job's held-out rows.

    Example: `pentamesh evaluate job.yaml --model runs/job/export`
    """
    from tempfile import TemporaryDirectory

    from pentamesh.job.precision import PRECISIONS
    from pentamesh.job.read import read_job
    from pentamesh.model.read import resolved
    from pentamesh.run.asked import located
    from pentamesh.run.evaluate import evaluate
    from pentamesh.run.source import model_folder, model_source

    job = located(read_job(job_file, set_ or [])[0], job_file.parent, job_file.stem)
    # A folder is evaluated with the tokens that it has.
    asked = job.model.model_copy(update={"name": resolved(str(model)), "new_tokens": ()}) if model else job.model
    with TemporaryDirectory(prefix="pentamesh-") as scratch:
        found = evaluate(job, model_folder(asked, Path(scratch) / "base"), PRECISIONS[_precision(precision)])
    if as_json:
        facts = {"model": str(model_source(asked)), "precision": precision, "held_out_loss": found.loss, "num_tokens": found.num_tokens}
        typer.echo(json.dumps({"schema": "pentamesh.evaluation", "version": 1} | facts, indent=2))
    else:
        typer.echo(f"held-out loss {found.loss:.6f} over {found.num_tokens:,} trained tokens, {precision}")


@app.command("export")
def export_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    to: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where to write; RUN/export when not given.")] = None,
    step: Annotated[int | None, typer.Option(min=1, help="Step of the checkpoint; the newest good one when not given.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 | bfloat16 | float16; the base model's when not given.")] = None,
    push: Annotated[str | None, typer.Option(metavar="ORG/NAME", help="Push what was written to this repository on the hub, with a card.")] = None,
) -> None:
    """Write a checkpoint of a run as a Hugging Face folder: weights, config, tokenizer and chat template.

    Example: `pentamesh export runs/job --step 500 --to my-model --dtype bfloat16`
    """
    from pentamesh.run.after import export_run, push_export
    from pentamesh.run.push import check_push

    check_push(push, "--push")
    written = export_run(run, to, step, dtype)
    typer.echo(str(written))
    if push is not None:
        typer.echo(f"pushed to {push_export(run, written, push)}", err=True)


@data_app.command("preview")
def data_preview_command(
    job_file: Annotated[Path, typer.Argument(metavar="JOB", help="The job whose training rows are shown.")],
    rows: Annotated[int, typer.Option(min=1, help="How many rows to render.")] = 3,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Set any key of the job; repeatable.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one .html file of it, which needs nothing else.")] = None,
    as_json: AsJson = False,
) -> None:
    """Rows as the model sees them, with the trained tokens marked, and counts and lengths over all rows.

    Examples:

        pentamesh data preview job.yaml --rows 5

        pentamesh data preview job.yaml --rows 50 --html rows.html
    """
    if html is not None and html.suffix != ".html":
        raise InputError(f"{html} does not end in .html", where="--html", hint="name a file for the page, such as rows.html")
    from pentamesh.job.read import read_job
    from pentamesh.run.asked import located
    from pentamesh.run.data.preview import collect
    from pentamesh.run.source import model_source, tokenizer_of

    job = located(read_job(job_file, set_ or [])[0], job_file.parent, job_file.stem)
    tokenizer = tokenizer_of(model_source(job.model), job.data.chat_template, job.model.new_tokens)
    found = collect(job, tokenizer, Path(), rows).to_json()
    if html is not None:
        from pentamesh.report.page import page

        html.write_text(page(found), encoding="utf-8")
        typer.echo(f"written {html}", err=True)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from rich.console import Console

    from pentamesh.report.preview import preview

    Console().print(preview(found))


@data_app.command("doctor")
def data_doctor_command(
    target: Annotated[str, typer.Argument(metavar="JOB_OR_FILE", help="A job file (.yaml), or a file, folder or glob of rows.")],
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write clean.jsonl and rejected.jsonl into this folder.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace these files where they are there already.")] = False,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Set any key of the job; repeatable.")] = None,
    as_json: AsJson = False,
) -> None:
    """What is wrong with rows, how often and where first; repeated rows; and the keys of a job that would read more of them.

    Examples:

        pentamesh data doctor job.yaml

        pentamesh data doctor 'rows/*.jsonl' --out sorted

    Exit code 2 when there are faults. Of a job whose model is at hand the template and the lengths are judged too.
    """
    from pentamesh.run.examine import examine

    found = examine(target, set_ or [], out, force=force)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        from pentamesh.report.doctor import doctor

        typer.echo(doctor(found))
    if not found["is_well"]:
        raise SystemExit(InputError.exit_code)


def _plan(target: str, flags: list[tuple[str, str, str]], overrides: list[str]) -> "Plan":
    from pentamesh.job.hardware import read_hardware
    from pentamesh.plan.model import model_of
    from pentamesh.plan.search import plan

    base = Path(target).parent if _is_job_file(target) else Path()
    job, recorded = _job_of_file(Path(target), flags, overrides) if _is_job_file(target) else (_job_of_flags(target, flags, overrides), {})
    return plan(job, model_of(job, base), read_hardware(job.hardware), overrides=recorded)


def _is_job_file(target: str) -> bool:
    return Path(target).suffix in (".yaml", ".yml")


def _job_of_file(path: Path, flags: list[tuple[str, str, str]], overrides: list[str]) -> "tuple[Job, dict[str, str]]":
    """The job of a file; flags are overrides like any other, and recorded as such."""
    from pentamesh.job.read import read_job

    return read_job(path, [*(f"{key}={value}" for _, key, value in flags), *overrides])


def _job_of_flags(model: str, flags: list[tuple[str, str, str]], overrides: list[str]) -> "Job":
    """The job that a model and flags describe; each problem names its flag."""
    from pentamesh.job.read import job_from_flags
    from pentamesh.job.written import read_value

    pairs = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key.strip():
            raise InputError(f"{override!r} sets nothing", where="--set", hint="write --set batch.micro_batch=2")
        pairs.append((f"--set {override}", key.strip(), value))
    read = [(flag, key, read_value(value, flag)) for flag, key, value in (*flags, *pairs)]
    return job_from_flags([("MODEL", "model.name", model), *read])


def _degrees(layout: str | None) -> list[tuple[str, str, str]]:
    """`tensor=8,pipeline=2` as flags."""
    found = []
    for pair in layout.split(",") if layout is not None else []:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key or not value:
            raise InputError(f"{pair!r} gives no degree", where="--layout", hint="write it like --layout tensor=8,pipeline=2")
        found.append((f"--layout {pair.strip()}", f"layout.{key}", value))
    return found


@explain_app.command("table")
def explain_table(as_json: AsJson = False) -> None:
    """Which mesh axes cut which dim of a tensor, in each role."""
    from pentamesh.plan.explain import table

    _show(table(), as_json)


@explain_app.command("strategies")
def explain_strategies(
    model: Annotated[str, typer.Argument(help="The name or folder of a model.")],
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs, with commas.")] = "1,2,4,8,16,64",
    precision: Annotated[str, typer.Option(help="fp32 | bf16 | bf16-pure")] = "bf16",
    as_json: AsJson = False,
) -> None:
    """What weights, gradients and optimizer state take on each GPU, by strategy and number of GPUs.

    Example: `pentamesh explain strategies llama-3.1-70b --gpus 8,16,64`
    """
    from pentamesh.plan.explain import strategies

    _show(strategies(_model(model), _counts(gpus), _precision(precision)), as_json)


@explain_app.command("communication")
def explain_communication(
    model: Annotated[str, typer.Argument(help="The name or folder of a model.")] = "llama-3.1-70b",
    gbps: Annotated[str, typer.Option(help="Rates of a NIC in Gb/s, with commas.")] = "100,200,400",
    as_json: AsJson = False,
) -> None:
    """What data parallelism sends by strategy: per rank, per node and per NIC, beside the payload that people count.

    Example: `pentamesh explain communication llama-3.1-405b --gbps 400,800`
    """
    from pentamesh.plan.budget import communication

    _show(communication(_model(model), _counts(gbps)), as_json)


@explain_app.command("tensor")
def explain_tensor(
    model: Annotated[str, typer.Argument(help="The name or folder of a model.")] = "llama-3.1-70b",
    degree: Annotated[int, typer.Option(min=2, help="Tensor-parallel degree.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch.")] = 4096,
    as_json: AsJson = False,
) -> None:
    """What tensor parallelism sends for one micro-batch, and what that takes over NVLink and PCIe.

    Example: `pentamesh explain tensor llama-3.1-70b --degree 8`
    """
    from pentamesh.plan.budget import tensor

    _show(tensor(_model(model), degree, tokens), as_json)


@explain_app.command("axes")
def explain_axes(
    model: Annotated[str, typer.Argument(help="The name or folder of a model.")] = "llama-3.1-8b",
    degree: Annotated[int, typer.Option(min=2, help="Degree of each axis in turn.")] = 8,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 4096,
    as_json: AsJson = False,
) -> None:
    """What each axis cuts, how often it speaks and how much it says in one micro-batch, each axis alone.

    Example: `pentamesh explain axes llama-3.1-70b --degree 8`
    """
    from pentamesh.plan.budget import axes

    _show(axes(_model(model), degree, seq_len), as_json)


@explain_app.command("wire")
def explain_wire(
    model: Annotated[str, typer.Argument(help="The name or folder of a model.")],
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs, with commas.")] = "8,16,64",
    precision: Annotated[str, typer.Option(help="fp32 | bf16 | bf16-pure")] = "bf16",
    as_json: AsJson = False,
) -> None:
    """What each data strategy sends in a step: bytes per rank and through a node's NIC, beside the states of `explain strategies`.

    Example: `pentamesh explain wire llama-3.1-70b --gpus 8,16,64`
    """
    from pentamesh.plan.budget import wire

    _show(wire(_model(model), _counts(gpus), _precision(precision)), as_json)


@explain_app.command("keys")
def explain_keys(as_json: AsJson = False) -> None:
    """Every key of a job file, with its default and meaning."""
    from pentamesh.plan.explain import keys

    _show(keys(), as_json)


def _show(explained: Any, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(explained.to_json(), indent=2))
        return
    from pentamesh.report.terminal import show_table

    show_table(explained)


def _model(name: str) -> "ModelSpec":
    from pentamesh.model.read import read_model

    return read_model(name)


def _counts(text: str) -> list[int]:
    counts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[1-9][0-9]{0,8}", count) for count in counts):
        raise InputError(f"{text!r} is not a list of numbers of GPUs", where="--gpus", hint="write it like --gpus 8,16,64")
    return [int(count) for count in counts]


def _precision(name: str) -> str:
    from pentamesh.job.precision import PRECISIONS

    known = [known for known in PRECISIONS if known != "fp64"]
    if name not in known:
        raise InputError(f"precision {name!r} is not known", where="--precision", hint=f"use {', '.join(known[:-1])} or {known[-1]}")
    return name
