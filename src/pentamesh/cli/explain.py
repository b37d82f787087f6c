"""`pentamesh explain`: the tables behind a plan."""

# Annotations are objects here, not text: typer reads those of every command, whichever is asked for, and would compile each.
import json
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pentamesh.cli.options import HELP, AsJson, known_precision
from pentamesh.errors import InputError

if TYPE_CHECKING:
    from pentamesh.model.spec import ModelSpec

__all__ = ["explain_app"]

explain_app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="Show the tables behind a plan.", context_settings=HELP)


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

    _show(strategies(_model(model), _counts(gpus, "--gpus"), known_precision(precision)), as_json)


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

    _show(communication(_model(model), _counts(gbps, "--gbps")), as_json)


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

    _show(wire(_model(model), _counts(gpus, "--gpus"), known_precision(precision)), as_json)


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


def _counts(text: str, flag: str) -> list[int]:
    counts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[1-9][0-9]{0,8}", count) for count in counts):
        raise InputError(f"{text!r} is not a list of numbers", where=flag, hint=f"write it like {flag} 8,16,64")
    return [int(count) for count in counts]
