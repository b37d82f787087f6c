"""The command line. Thin: it reads what is asked, calls one function and shows what comes back. Heavy imports happen inside commands.

stdout is data, stderr is talk. Exit codes are those of `pentamesh.errors`.
"""

# Annotations are objects here, not text: typer reads those of every command, whichever is asked for, and would compile each.
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from pentamesh import __version__
from pentamesh.cli.checkpoint import checkpoint_app, export_command
from pentamesh.cli.data import data_app
from pentamesh.cli.explain import explain_app
from pentamesh.cli.options import HELP, AsJson, Overrides, known_precision
from pentamesh.errors import DoesNotFit, InputError, PentameshError, Problem, unexpected
from pentamesh.units import visible

if TYPE_CHECKING:
    from pentamesh.job.job import Job
    from pentamesh.plan.plan import Plan

__all__ = ["app", "main"]

app = typer.Typer(
    name="pentamesh",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings=HELP,
    pretty_exceptions_enable=False,
    help="""Describe a training job once; know whether it fits, how fast it will run and why, then run exactly that plan.

Start with a question:

    pentamesh plan llama-3.1-8b --on 8xRTX-5090

and go on from there with a job file: `pentamesh explain keys` lists what it can say.""",
)
app.add_typer(explain_app, name="explain")
app.add_typer(data_app, name="data")
app.add_typer(checkpoint_app, name="checkpoint")

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
    typer.echo(f"{red}{visible(str(error))}{plain}", err=True)
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
    set_: Overrides = None,
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
    set_: Overrides = None,
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
        found = evaluate(job, model_folder(asked, Path(scratch) / "base"), PRECISIONS[known_precision(precision)])
    if as_json:
        facts = {"model": str(model_source(asked)), "precision": precision, "held_out_loss": found.loss, "num_tokens": found.num_tokens}
        typer.echo(json.dumps({"schema": "pentamesh.evaluation", "version": 1} | facts, indent=2))
    else:
        typer.echo(f"held-out loss {found.loss:.6f} over {found.num_tokens:,} trained tokens, {precision}")


app.command("export")(export_command)


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
