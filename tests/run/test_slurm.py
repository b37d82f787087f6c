"""What srun says of a task, as torch wants to hear it."""

from __future__ import annotations

import pytest

from pentamesh.errors import InputError
from pentamesh.run.slurm import first_host, ranks_of

STEP = {
    "SLURM_JOB_ID": "77123",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
    "SLURM_NTASKS": "16",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "gpu[03-04]",
}


def test_a_task_is_a_rank() -> None:
    found = ranks_of(STEP)
    assert found == {
        "RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu03", "MASTER_PORT": str(15000 + 77123 % 14000),
    }  # fmt: skip


def test_all_tasks_meet_at_one_place() -> None:
    met = [(found["MASTER_ADDR"], found["MASTER_PORT"]) for n in range(16) for found in [ranks_of(STEP | {"SLURM_PROCID": str(n)})]]
    assert len(set(met)) == 1


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {k: v for k, v in STEP.items() if k != "SLURM_STEP_ID"},  # the batch script itself
        STEP | {"SLURM_NTASKS": "1"},
        STEP | {"RANK": "0", "WORLD_SIZE": "16"},  # torchrun inside srun
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},  # one task a node that starts torchrun, or an interactive shell
    ],
    ids=["no SLURM", "batch script", "one task", "torchrun", "a step of one task"],
)
def test_others_are_left_alone(environ: dict[str, str]) -> None:
    assert ranks_of(environ) == {}


def test_a_step_that_says_too_little() -> None:
    with pytest.raises(InputError, match="does not say which"):
        ranks_of({k: v for k, v in STEP.items() if k != "SLURM_PROCID"})


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_LOCALID"])
@pytest.mark.parametrize("text", ["many", "-1", "\N{SUPERSCRIPT TWO}", ""])
def test_a_step_that_says_no_numbers(name: str, text: str) -> None:
    with pytest.raises(InputError, match="does not say which"):
        ranks_of(STEP | {name: text})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("node7", "node7"), ("a1,a2", "a1"), ("gpu[03-07,12],x1", "gpu03"), ("r[1-2]-ib", "r1-ib"), ("n[10,12]", "n10"), ("a-b.c.d", "a-b.c.d")],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host
