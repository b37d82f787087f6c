"""Child: a process beside this one that prepares data, from this side of its pipe.

It is a new interpreter without torch, ready in about a second: nothing is forked, so no lock of another thread is copied. It ends with its pipe, so
that none outlives its parent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from multiprocessing.connection import Pipe
from typing import Any

from pentamesh.errors import PentameshError, RunFailed

__all__ = ["Child"]

END_S = 5.0


class Child:
    """The process of a module of this package, whose only argument is the number of its end of the pipe. `ends` ends it.

    Raises: RunFailed where it died, with what it said last, and what it sends where that is an error; `doing` says what it was asked for.
    """

    def __init__(self, module: str, name: str, ends: ExitStack, hint: str) -> None:
        self._name, self._hint = name, hint
        self._said = ends.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - closed by `ends`
        self._pipe, theirs = Pipe()
        # Of the folders in which Python looks those of this process, and not the current one before all others (-P).
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-P", "-m", module, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said
            )
        ends.callback(self._end)

    def send(self, value: Any, doing: str) -> None:
        try:
            self._pipe.send(value)
        except OSError:
            raise self._died(doing) from None

    def receive(self, doing: str) -> Any:
        try:
            found = self._pipe.recv()
        except (EOFError, OSError):
            raise self._died(doing) from None
        if isinstance(found, PentameshError):
            raise found
        return found

    def _died(self, doing: str) -> RunFailed:
        code = self._process.wait(END_S)
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip().splitlines() or [""]
        what = f"{self._name} ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
        return RunFailed(": ".join(filter(None, (what, said[-1]))), where=doing, hint=self._hint)

    def _end(self) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.wait()
