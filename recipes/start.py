"""From a line of flags to its run: what the recipes share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pentamesh.errors import PentameshError, unexpected
from pentamesh.run.slurm import adopt
from pentamesh.translate.finetune import Defaults, Start, read_flags

__all__ = ["ended", "main", "speaks"]


def main(argv: Sequence[str], defaults: Defaults, description: str, name: str) -> int:
    """Run what the flags ask for, or show its plan, and return the exit code."""

    def work() -> int:
        asked = read_flags(argv, defaults, description)
        return _show(asked, name) if asked.plan_only else _run(asked, name)

    return ended(work)


def ended(work: Callable[[], int]) -> int:
    """The exit code of `work` in a process that knows its place among those that srun started; errors are said once, by the first one."""
    try:
        adopt()
        return work()
    except PentameshError as error:
        return _fail(error)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if os.environ.get("PENTAMESH_TRACEBACK"):
            raise
        return _fail(unexpected(error))


def speaks() -> bool:
    """Whether this process is the first."""
    return os.environ.get("RANK", "0") == "0"


def _fail(error: PentameshError) -> int:
    if speaks():
        print(error, file=sys.stderr)
    return error.exit_code


def _run(start: Start, name: str) -> int:
    from pentamesh.run.asked import Asked
    from pentamesh.run.launch import train
    from pentamesh.run.options import Options

    asked = Asked(start.job, "the command line", Path(), name)
    return train(lambda: asked, Options(start.resume, start.stop_at), even_so=start.even_so)


def _show(start: Start, name: str) -> int:
    from pentamesh.report.terminal import show_plan
    from pentamesh.run.asked import Asked, planned

    show_plan(planned(Asked(start.job, "the command line", Path(), name)))
    return 0
