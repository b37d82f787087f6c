"""A rank of `pentamesh train` that is ended from one moment to the next: `torchrun driver.py PHASE NTH RANK DELAY_S HEARD JOB [flags]`.

That rank writes each phase that it begins, with its thread, to the file HEARD, so that whoever started it can see in which one it died. After
a delay it dies by the system's timer, which waits for no interpreter; without one by SIGKILL where the phase begins, before anything of it is done,
which cannot be too late.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from pentamesh.checkpoint import phases


def main() -> None:
    phase, nth, rank, delay_s, heard, *arguments = sys.argv[1:]
    if os.environ["RANK"] == rank:
        phases.listeners.append(_Killer(phase, int(nth), float(delay_s), Path(heard)).hear)
    sys.argv = ["pentamesh", "train", *arguments]
    from pentamesh.cli import main as pentamesh

    pentamesh()


class _Killer:
    """Counts phases; when its own comes, lets it go on for a moment, or not at all, and ends this process."""

    def __init__(self, phase: str, nth: int, delay_s: float, heard: Path) -> None:
        self.phase, self.left, self.delay_s = phase, nth, delay_s
        self.heard = heard.open("a", buffering=1)

    def hear(self, phase: str) -> None:
        self.heard.write(f"{threading.get_ident()} {phase}\n")
        self.left -= phase == self.phase
        if phase == self.phase and self.left == 0:
            self.heard.write(f"{threading.get_ident()} {phase} meant\n")
            if self.delay_s:
                signal.setitimer(signal.ITIMER_REAL, self.delay_s)
            else:
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
