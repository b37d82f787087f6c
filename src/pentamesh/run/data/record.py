"""Record: the chunks of a stream that a run has read, one line each, so that it finds its place again without tokenising what lies before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = ["Chunk", "Position", "Record", "place_of"]


@dataclass(frozen=True)
class Chunk:
    """Chunk `number` of a run: chunk `index` of pass `epoch` over the data. It gives `rows` rows of the run; `digest` is of what it is made of."""

    number: int
    epoch: int
    index: int
    rows: int
    digest: str


class Position(NamedTuple):
    """The chunk in which a row of the run lies, and the first row of that chunk."""

    number: int
    first_row: int


@dataclass(frozen=True)
class Record:
    """The file with the chunks of a run, which counts for a run of these settings alone."""

    path: Path
    settings: str

    def read(self) -> list[Chunk]:
        """The chunks that were read, up to a line that a crash cut short."""
        found: list[Chunk] = []
        try:
            head, *lines = self.path.read_text().splitlines()
            if json.loads(head) != self._head():
                return found
            found.extend(Chunk(**json.loads(line)) for line in lines)
        except (OSError, ValueError, TypeError):
            pass  # what is missing is read again
        return found

    def write(self, chunks: Sequence[Chunk]) -> None:
        """Put these in place of all."""
        lines = [self._head(), *map(asdict, chunks)]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def add(self, chunk: Chunk) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(chunk)) + "\n")

    def _head(self) -> dict[str, object]:
        return {"schema": "pentamesh.stream", "version": 1, "settings": self.settings}


def place_of(row: int, chunks: Sequence[Chunk]) -> Position:
    """Where a row of the run lies; behind all chunks where it is in none of them."""
    first = 0
    for chunk in chunks:
        if row < first + chunk.rows:
            return Position(chunk.number, first)
        first += chunk.rows
    return Position(len(chunks), first)
