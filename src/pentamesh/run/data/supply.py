"""Supply: the chunks of a stream on disk, of which another process makes one ahead of those in use. Only one rank has it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pentamesh.errors import RunFailed
from pentamesh.job.job import Job
from pentamesh.run.data.child import Child
from pentamesh.run.data.chunks import chunk_folder
from pentamesh.run.data.record import Chunk, Position, Record, place_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Supply"]


@dataclass
class Supply:
    """Chunks of a job below `folder`, one after the other from the place of a row on.

    At most one chunk lies there that was not taken, beside those that were taken and not released.
    """

    job: Job
    tokenizer: Callable[[], PreTrainedTokenizerBase]
    folder: Path
    settings: str
    _ends: ExitStack = field(default_factory=ExitStack)
    _taken: list[int] = field(default_factory=list)
    _num_known: int = 0

    @property
    def _record(self) -> Record:
        return Record(self.folder / "chunks.jsonl", self.settings)

    def start(self, row: int) -> Position:
        """Begin to make the chunk in which a row of the run lies, and return its place. What was known of a run that starts again is dropped."""
        self.folder.mkdir(parents=True, exist_ok=True)
        known = self._record.read() if row else []
        for left in self.folder.glob("[0-9]" * 8):
            shutil.rmtree(left)
        self._record.write(known)
        self._num_known = len(known)
        place = place_of(row, known)
        hint = "if memory ran out, set data.shuffle_rows to fewer"
        self._child = Child("pentamesh.run.data.streamer", "the process that prepares the stream", self._ends, hint)
        self._child.send((self.job, self.tokenizer(), self.folder, known, place.number), "its start")
        return place

    def take(self) -> Chunk:
        """The next chunk, as soon as it is made. Raises what keeps it from being made."""
        chunk: Chunk = self._child.receive("preparing the next chunk of the stream")
        if chunk.number >= self._num_known:
            self._record.add(chunk)
        self._taken.append(chunk.number)
        return chunk

    def release(self, number: int) -> None:
        """Remove the chunks before this one, which no rank uses any more, and let the one after the last that was taken be made."""
        for used in [taken for taken in self._taken if taken < number]:
            shutil.rmtree(chunk_folder(self.folder, used), ignore_errors=True)
            self._taken.remove(used)
        with suppress(RunFailed):  # it died: the next chunk that is taken says so to all ranks
            self._child.send(None, "making the next chunk of the stream")

    def close(self) -> None:
        """End the process that makes chunks, and remove what it has made."""
        self._ends.close()
        for left in self.folder.glob("[0-9]" * 8):
            shutil.rmtree(left, ignore_errors=True)
