"""`pentamesh data`: looking at rows before training."""

# Annotations are objects here, not text: typer reads those of every command, whichever is asked for, and would compile each.
import json
from pathlib import Path
from typing import Annotated

import typer

from pentamesh.cli.options import HELP, AsJson, Overrides
from pentamesh.errors import InputError

__all__ = ["data_app"]

data_app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="Look at training data before training.", context_settings=HELP)


@data_app.command("preview")
def data_preview_command(
    job_file: Annotated[Path, typer.Argument(metavar="JOB", help="The job whose training rows are shown.")],
    rows: Annotated[int, typer.Option(min=1, help="How many rows to render.")] = 3,
    set_: Overrides = None,
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
    set_: Overrides = None,
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
