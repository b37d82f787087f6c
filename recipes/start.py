"""From a line of flags to its run: what train.py and finetune.py share."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pentamesh.errors import PentameshError, unexpected
from pentamesh.run.slurm import adopt
from pentamesh.translate.finetune import Defaults, Start, read_flags

__all__ = ["main"]


def main(argv: Sequence[str], defaults: Defaults, description: str, name: str) -> int:
    """Run what the flags ask for, or show its plan, and return the exit code. Errors are said once, by the first process."""
    try:
        adopt()  # what a device's share of a batch is depends on how many srun started
        asked = read_flags(argv, defaults, description)
        return _show(asked, name) if asked.plan_only else _run(asked, name)
    except PentameshError as error:
        return _fail(error)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if os.environ.get("PENTAMESH_TRACEBACK"):
            raise
        return _fail(unexpected(error))


def _fail(error: PentameshError) -> int:
    if os.environ.get("RANK", "0") == "0":
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
