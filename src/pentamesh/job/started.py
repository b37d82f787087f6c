"""Started: the processes that torchrun or srun started, as the environment of each says."""

from __future__ import annotations

import os
import re

from pentamesh.errors import InputError

__all__ = ["environment", "started"]

LAUNCHERS = "torchrun and SLURM set it; unset it otherwise"


def environment(name: str, default: int, least: int = 0) -> int:
    """The whole number that an environment variable holds, `default` where there is none. Raises InputError for anything else."""
    text = os.environ.get(name, str(default))
    if not re.fullmatch("[0-9]{1,9}", text):
        raise InputError(f"{name} = {text!r} is not a whole number", where="the environment", hint=LAUNCHERS)
    if int(text) < least:
        raise InputError(f"{name} = {text} is not at least {least}", where="the environment", hint=LAUNCHERS)
    return int(text)


def started() -> tuple[int, int] | None:
    """Nodes, and processes on each of them; None where nobody started several. Raises InputError for numbers that contradict each other."""
    if "WORLD_SIZE" not in os.environ:
        return None
    size, nodes = environment("WORLD_SIZE", 1, 1), environment("GROUP_WORLD_SIZE", 1, 1)
    each = environment("LOCAL_WORLD_SIZE", max(1, size // nodes), 1)
    if nodes * each != size:
        what = f"{nodes} nodes of {each} processes are not the {size} of WORLD_SIZE"
        hint = "start as many processes on every node; torchrun and SLURM set all three"
        raise InputError(what, where="GROUP_WORLD_SIZE, LOCAL_WORLD_SIZE and WORLD_SIZE in the environment", hint=hint)
    return nodes, each
