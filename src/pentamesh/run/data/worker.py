"""Worker: a process that tokenises what its parent sends through a pipe, and ends when the pipe does."""

from __future__ import annotations

import os
import signal
import sys
from functools import cache
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

from pentamesh.errors import PentameshError, unexpected
from pentamesh.run.data.encode import Encode, encoder
from pentamesh.run.data.forms import Form, Sample

__all__: list[str] = []


def work(pipe: Connection) -> None:
    """Receive a tokenizer, then chunks of rows; send the tokens of each chunk, or the error that its rows end in."""
    tokenizer = pipe.recv()
    given: SimpleQueue[list[tuple[Form, Sample]]] = SimpleQueue()
    Thread(target=_receive, args=(pipe, given), daemon=True).start()
    encode = cache(lambda form: encoder(tokenizer, form))
    while True:
        pipe.send(_encoded(given.get(), encode))


def _receive(pipe: Connection, given: SimpleQueue[list[tuple[Form, Sample]]]) -> None:
    """Take chunks as they come, so that the parent never waits to give one while this process waits to answer."""
    try:
        while True:
            given.put(pipe.recv())
    except (EOFError, OSError):  # the parent is done, or dead
        os._exit(0)


def _encoded(chunk: list[tuple[Form, Sample]], encode: Any) -> list[Any] | PentameshError:
    try:
        encoders: dict[Form, Encode] = {form: encode(form) for form, _ in chunk}
        return [encoders[form](row) for form, row in chunk]
    except PentameshError as error:
        return error
    except Exception as error:
        return unexpected(error)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the keyboard it goes to all processes: the parent ends this one
    work(Connection(int(sys.argv[1])))
