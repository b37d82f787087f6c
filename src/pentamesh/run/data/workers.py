"""Workers: processes that tokenise chunks of rows, whose results come back in the order of the rows, whatever their number.

At most two chunks a worker are under way.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pentamesh.run.data.child import Child
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
MODULE, HINT = "pentamesh.run.data.worker", "if memory ran out, set data.workers to fewer"


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
        workers = [Child(MODULE, f"process {i + 1} of {num} that tokenise", ends, HINT) for i in range(num)]
        for worker in workers:  # all of them are on their way
            worker.send(tokenizer, "its start")
        under_way: deque[tuple[Child, list[Placed]]] = deque()
        for number, chunk in enumerate(_chunks(rows)):
            if len(under_way) == UNDER_WAY * num:
                yield from _taken(*under_way.popleft())
            worker = workers[number % num]
            worker.send([(row.form, row.row) for row in chunk if not row.unused], _named(chunk))
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


def _taken(worker: Child, chunk: list[Placed]) -> Iterator[tuple[Placed, Result | None]]:
    found = iter(worker.receive(_named(chunk)))
    return ((row, None if row.unused else next(found)) for row in chunk)


def _named(chunk: list[Placed]) -> str:
    return f"{chunk[0].row.where} to {chunk[-1].row.where}"
