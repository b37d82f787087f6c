"""SLURM: a task that `srun` started is a rank, and its environment says which.

    srun --nodes=2 --ntasks-per-node=8 python -m pentamesh train job.yaml

Torch wants RANK, WORLD_SIZE, LOCAL_RANK and a place to meet; here they follow from what srun says. A single task starts its own ranks, as
anywhere else, and what torchrun has set is left alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from pentamesh.errors import InputError

__all__ = ["adopt", "first_host", "ranks_of"]

# Job ids are spread over the ports that neither the system nor torchrun's default (29500) uses.
FIRST_PORT, NUM_PORTS = 15000, 14000


def adopt() -> None:
    """Put what torch wants into this process's environment, when srun started it as one task of several. Raises InputError."""
    os.environ.update(ranks_of(os.environ))


def ranks_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Torch's variables as SLURM's say them; none outside a step of several tasks, or where they are set already.

    Raises InputError where SLURM does not say them all.
    """
    if "RANK" in environ or "SLURM_STEP_ID" not in environ or environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1")) == "1":
        return {}
    size = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", ""))
    said = {"RANK": environ.get("SLURM_PROCID"), "WORLD_SIZE": size, "LOCAL_RANK": environ.get("SLURM_LOCALID")}
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    job, num_nodes = environ.get("SLURM_JOB_ID", "0"), environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES", "1"))
    if not nodes or not all(text and re.fullmatch("[0-9]{1,18}", text) for text in (*said.values(), job, num_nodes)):
        missing = "SLURM_PROCID, SLURM_LOCALID, SLURM_NTASKS, SLURM_NNODES, SLURM_JOB_ID and SLURM_JOB_NODELIST"
        raise InputError("this is a task of a SLURM step that does not say which", where="the environment", hint=f"srun sets {missing}")
    port = FIRST_PORT + int(job) % NUM_PORTS
    local = {"LOCAL_WORLD_SIZE": str(int(size) // max(1, int(num_nodes))), "GROUP_WORLD_SIZE": num_nodes}
    meet = {"MASTER_ADDR": environ.get("MASTER_ADDR", first_host(nodes)), "MASTER_PORT": environ.get("MASTER_PORT", str(port))}
    return {name: str(text) for name, text in said.items()} | local | meet


def first_host(nodes: str) -> str:
    """The first host of SLURM's compressed list: `gpu[03-07,12],login1` begins with `gpu03`.

    Source: SLURM's hostlist expressions, as `scontrol show hostnames` expands them.
    """
    found = re.match(r"(?P<prefix>[^\[,]+)(\[(?P<first>\d+)[^\]]*\](?P<suffix>[^,\[]*))?", nodes)
    if found is None:
        raise InputError(f"{nodes!r} is no list of hosts", where="SLURM_JOB_NODELIST")
    return found["prefix"] + (found["first"] or "") + (found["suffix"] or "")
