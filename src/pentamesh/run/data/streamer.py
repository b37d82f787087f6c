"""Streamer: a process that makes the next chunk of a stream whenever its parent says so, and ends when the pipe does."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

from pentamesh.errors import PentameshError, unexpected
from pentamesh.run.data.chunks import chunks

__all__: list[str] = []


def work(pipe: Connection) -> None:
    """Receive what `chunks` takes; send each chunk, or the error that the stream ends in, and wait for the word to make another."""
    given: SimpleQueue[Any] = SimpleQueue()
    asked = pipe.recv()
    Thread(target=_receive, args=(pipe, given), daemon=True).start()
    try:
        for chunk in chunks(*asked):
            pipe.send(chunk)
            given.get()
    except PentameshError as error:
        pipe.send(error)
    except Exception as error:
        pipe.send(unexpected(error))
    given.get()  # the parent reads what was sent, and ends this process


def _receive(pipe: Connection, given: SimpleQueue[Any]) -> None:
    try:
        while True:
            given.put(pipe.recv())
    except (EOFError, OSError):  # the parent is done, or dead
        os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the keyboard it goes to all processes: the parent ends this one
    work(Connection(int(sys.argv[1])))
