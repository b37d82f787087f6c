"""Board: the numbers of metrics.jsonl as TensorBoard event files, under the names that they have there."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentamesh.errors import InputError
from pentamesh.job.job import Logging

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["Board", "check_board"]


def check_board(logging: Logging, where: str) -> None:
    """Raises InputError where event files are asked for and the package that writes them is not installed."""
    if logging.tensorboard and find_spec("tensorboard") is None:
        what = "event files are asked for, and the package tensorboard is not installed"
        raise InputError(
            what, where=f"{where} logging.tensorboard", hint="pip install tensorboard, or leave it out: metrics.jsonl has the same numbers"
        )


class Board:
    """Event files in a folder, or nothing at all where there is none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def start(self, step: int) -> None:
        """Go on after `step`: what an earlier start wrote beyond it is not shown any more."""
        if self._folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)

    def add(self, row: dict[str, Any]) -> None:
        """One row of metrics, which is on disk when this returns."""
        if self._writer is not None:
            for name, value in _scalars(row):
                self._writer.add_scalar(name, value, row["step"])
            self._writer.flush()

    def close(self) -> None:
        """Finish the files."""
        if self._writer is not None:
            self._writer.close()


def _scalars(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a row by name; those of an inner object have its name before theirs."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            yield prefix + name, value
