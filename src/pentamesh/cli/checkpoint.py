"""`pentamesh checkpoint`: looking at what runs have saved, and taking it elsewhere."""

# Annotations are objects here, not text: typer reads those of every command, whichever is asked for, and would compile each.
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from pentamesh.cli.options import HELP, AsJson
from pentamesh.errors import InputError

__all__ = ["checkpoint_app", "export_command"]

checkpoint_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings=HELP,
    help="""Look at what runs have saved, and take it elsewhere.

Start with what there is, and whether it is whole:

    pentamesh checkpoint list runs/job

    pentamesh checkpoint verify runs/job""",
)

Meant = Annotated[str, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run folder, its checkpoints folder, or one checkpoint.")]


@checkpoint_app.command("list")
def list_command(where: Meant, as_json: AsJson = False) -> None:
    """Every checkpoint: its step, when it was saved, how large it is, which layout wrote it, its held-out loss, and which is the latest and the best.

    What a run has left unfinished is named too. Manifests are read; whether the files are whole, `pentamesh checkpoint verify` says.

    Examples:

        pentamesh checkpoint list runs/job

        pentamesh checkpoint list runs/job/checkpoints/step-00000500 --json
    """
    from pentamesh.checkpoint.listing import listing
    from pentamesh.run.kept import kept

    meant = kept(where)
    found = listing(meant.folder, meant.checkpoints)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from pentamesh.report.checkpoints import listed

    typer.echo(listed(found))


@checkpoint_app.command("verify")
def verify_command(where: Meant, as_json: AsJson = False) -> None:
    """Compare every file with the checksum that was written with it, and say from which checkpoint a run would go on.

    Examples:

        pentamesh checkpoint verify runs/job

        pentamesh checkpoint verify runs/job/checkpoints/step-00000500

    Exit code 2 when any checkpoint is not whole.
    """
    from pentamesh.checkpoint.listing import num_bytes, verification
    from pentamesh.run.kept import kept

    meant = kept(where)
    with _progress("reading", sum(map(num_bytes, meant.checkpoints))) as advance:
        found = verification(meant.folder, meant.checkpoints, advance)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        from pentamesh.report.checkpoints import verified

        typer.echo(verified(found))
    if not all(row["is_whole"] for row in found["checkpoints"]):
        raise SystemExit(InputError.exit_code)


@checkpoint_app.command("convert")
def convert_command(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="One checkpoint.")],
    to: Annotated[str, typer.Argument(metavar="TO", help="The folder to write, which does not exist yet.")],
    file_size: Annotated[str, typer.Option(metavar="SIZE", help="Most that a file holds, where no tensor is larger.")] = "5GB",
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Leave out the state of optimizer and random numbers.")] = False,
    dtype: Annotated[str | None, typer.Option(help="float32 | bfloat16 | float16, of the weights; with --weights-only.")] = None,
) -> None:
    """Write a checkpoint anew in whole tensors, as if one process had saved it: fewer files, nothing of the ranks that wrote it, the same bits.

    The copy is a checkpoint like any other: a run that finds it under its step in `checkpoints/` resumes from it, and it can be exported. Without
    the optimizer's state it can be exported only.

    Examples:

        pentamesh checkpoint convert runs/job/checkpoints/step-00000500 archive/step-00000500

        pentamesh checkpoint convert runs/job/checkpoints/step-00000500 weights --weights-only --dtype bfloat16 --file-size 2GB
    """
    from pentamesh.run.kept import kept, location
    from pentamesh.units import parse_bytes

    meant = kept(checkpoint)
    if meant.folder is not None:
        there = ", ".join(path.name for path in meant.checkpoints)
        raise InputError(f"{checkpoint} holds several checkpoints", where="CHECKPOINT", hint=f"name one of {there}")
    try:
        file_bytes = parse_bytes(file_size)
    except ValueError as error:
        raise InputError(str(error), where="--file-size") from None
    if file_bytes < 1:
        raise InputError(f"{file_size} is no size of a file", where="--file-size", hint="write it like `5 GB`, or leave it out")
    from pentamesh.checkpoint.convert import convert
    from pentamesh.checkpoint.listing import num_bytes

    with _progress("writing", num_bytes(meant.checkpoints[0])) as advance:
        written = convert(meant.checkpoints[0], location(to), file_bytes=file_bytes, weights_only=weights_only, dtype=dtype, written=advance)
    typer.echo(str(written))


@checkpoint_app.command("export")
def export_command(
    run: Meant,
    to: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where to write; RUN/export when not given.")] = None,
    step: Annotated[int | None, typer.Option(min=1, help="Step of the checkpoint; the newest good one when not given.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The checkpoint with the lowest held-out loss.")] = False,
    dtype: Annotated[str | None, typer.Option(help="float32 | bfloat16 | float16; the base model's when not given.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Model folder that the run started from, for a checkpoint apart from it.")
    ] = None,
    push: Annotated[str | None, typer.Option(metavar="ORG/NAME", help="Push what was written to this repository on the hub, with a card.")] = None,
) -> None:
    """Write a checkpoint of a run as a Hugging Face folder: weights, config, tokenizer and chat template.

    Examples:

        pentamesh export runs/job --step 500 --to my-model --dtype bfloat16

        pentamesh export runs/job --best

        pentamesh export archive/step-00000500 --model ./SmolLM2-135M-Instruct --to my-model
    """
    from pentamesh.run.kept import kept

    meant = kept(run)
    if push is not None and meant.run is None:
        what = "the card of a repository says how its model was trained, and the run that would say it is not here"
        raise InputError(what, where="--push", hint="give the run folder, or push what was exported by `hf upload`")
    from pentamesh.run.after import export_kept, push_export
    from pentamesh.run.push import check_push

    check_push(push, "--push")
    written = export_kept(meant, to, step, dtype, model, best=best)
    typer.echo(str(written))
    if push is not None and meant.run is not None:
        typer.echo(f"pushed to {push_export(meant.run.path, written, push)}", err=True)


@contextmanager
def _progress(doing: str, num_bytes: int) -> Iterator[Callable[[int], object]]:
    """A bar over so many bytes on stderr where that is a terminal; else nothing is shown."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(doing, total=num_bytes)
        yield lambda count: bar.advance(task, count)
