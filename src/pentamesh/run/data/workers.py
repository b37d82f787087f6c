"""Workers: processes that tokenise chunks of rows, whose results come back in the order of the rows, whatever their number.

A worker is a new interpreter without torch, ready in about a second: nothing is forked, so no lock of another thread is copied. It reads rows from a
pipe and ends with it, so that none outlives its parent. At most two chunks a worker are under way.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Pipe
from typing import TYPE_CHECKING, Any

from pentamesh.errors import PentameshError, RunFailed
from pentamesh.run.data.encode import Encode
from pentamesh.run.data.forms import Form
from pentamesh.run.data.split import Placed, num_chars
from pentamesh.run.data.tokens import Encoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["encoded_by", "encoded_here", "num_workers"]

Result = Encoded | list[Any]
# One process tokenises some 1.5 million characters of conversations a second: below this a worker costs more than it saves.
WORTH_CHARS = 4_000_000
# More than the process that reads and judges rows can feed, at 100 us a row of which a worker takes 1 ms.
MOST_WORKERS = 8
CHUNK_ROWS, CHUNK_CHARS = 256, 2**20
UNDER_WAY = 2
END_S = 5.0


def num_workers(asked: int | None, chars: int) -> int:
    """Processes that tokenise so many characters; 1 is this process. When not asked for, as many as it may use cores, since other ranks wait."""
    if chars < WORTH_CHARS:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return asked or min(cores, MOST_WORKERS)


def encoded_here(rows: Iterable[Placed], encoders: Mapping[Form, Encode]) -> Generator[tuple[Placed, Result | None]]:
    """Every row with its tokens, or what keeps it from having them; nothing for one that is not to be used."""
    return ((row, None if row.unused else encoders[row.form](row.row)) for row in rows)


def encoded_by(num: int, rows: Iterable[Placed], tokenizer: PreTrainedTokenizerBase) -> Generator[tuple[Placed, Result | None]]:
    """The same, tokenised by `num` processes that end with the last row or with the first failure.

    Raises: RunFailed, where a process died or could not do its work.
    """
    with ExitStack() as ends:
        workers = [_Worker(f"{i + 1} of {num}", ends) for i in range(num)]
        for worker in workers:  # all of them are on their way
            worker.start(tokenizer)
        under_way: deque[tuple[_Worker, list[Placed]]] = deque()
        for number, chunk in enumerate(_chunks(rows)):
            if len(under_way) == UNDER_WAY * num:
                yield from _taken(*under_way.popleft())
            worker = workers[number % num]
            worker.give(chunk)
            under_way.append((worker, chunk))
        while under_way:
            yield from _taken(*under_way.popleft())


def _chunks(rows: Iterable[Placed]) -> Iterator[list[Placed]]:
    chunk, chars = [], 0
    for row in rows:
        chunk.append(row)
        chars += num_chars(row.row.content)
        if len(chunk) >= CHUNK_ROWS or chars >= CHUNK_CHARS:
            yield chunk
            chunk, chars = [], 0
    if chunk:
        yield chunk


def _taken(worker: _Worker, chunk: list[Placed]) -> Iterator[tuple[Placed, Result | None]]:
    found = iter(worker.take(chunk))
    return ((row, None if row.unused else next(found)) for row in chunk)


class _Worker:
    """A process that tokenises, from this side of its pipe."""

    def __init__(self, name: str, ends: ExitStack) -> None:
        self._name = name
        self._said = ends.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - closed by `ends`
        self._pipe, theirs = Pipe()
        # Of the folders in which Python looks those of this process, and not the current one before all others (-P).
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-P", "-m", "pentamesh.run.data.worker", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said
            )
        ends.callback(self._end)

    def start(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._send(tokenizer, "its start")

    def give(self, chunk: list[Placed]) -> None:
        self._send([(row.form, row.row) for row in chunk if not row.unused], _named(chunk))

    def take(self, chunk: list[Placed]) -> list[Result]:
        try:
            found: list[Result] | PentameshError = self._pipe.recv()
        except (EOFError, OSError):
            raise self._died(_named(chunk)) from None
        if isinstance(found, PentameshError):
            raise found
        return found

    def _send(self, value: Any, doing: str) -> None:
        try:
            self._pipe.send(value)
        except OSError:
            raise self._died(doing) from None

    def _died(self, doing: str) -> RunFailed:
        code = self._process.wait(END_S)
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip().splitlines() or [""]
        what = f"process {self._name} that tokenise ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
        return RunFailed(": ".join(filter(None, (what, said[-1]))), where=doing, hint="if memory ran out, set data.workers to fewer")

    def _end(self) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.wait()


def _named(chunk: list[Placed]) -> str:
    return f"{chunk[0].row.where} to {chunk[-1].row.where}"
