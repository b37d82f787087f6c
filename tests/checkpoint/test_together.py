"""Work that one rank does for all: the others wait however long it takes, and not for a rank that is gone."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from pentamesh.checkpoint import alone
from pentamesh.checkpoint.together import first, place_in
from pentamesh.errors import InputError, RunFailed
from pentamesh.run.worlds import run_world

TIMEOUT_S = 2


def patient(work_s: float) -> tuple[str, float]:
    """What came of work that takes `work_s` in a group whose collectives may take two seconds, and how long it took to come."""
    group: Any = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))

    def work() -> str:
        time.sleep(work_s)
        return f"made by {place_in()[0]}"

    began = time.monotonic()
    return first("working", work, group), time.monotonic() - began


def test_no_collective_waits_for_work_of_one_rank() -> None:
    for made, took_s in run_world(patient, 3, 2.5 * TIMEOUT_S):
        assert made == "made by 0"
        assert took_s < 2.5 * TIMEOUT_S + 2 * alone.BEAT_S + 1


def quick() -> float:
    began = time.monotonic()
    for _ in range(50):
        first("nothing", lambda: None)
    return (time.monotonic() - began) / 50


def test_waiting_costs_little() -> None:
    assert max(run_world(quick, 2)) < 0.05


def orphaned() -> str:
    """What a rank hears when the first one is gone before it has done anything."""
    alone.SILENT_S = 1.0
    if place_in()[0] == 0:
        return ""
    with pytest.raises(RunFailed) as caught:
        first("preparing the data", lambda: None)
    return str(caught.value)


def test_a_first_rank_that_is_gone_is_not_waited_for() -> None:
    _, *others = run_world(orphaned, 3, timeout_s=30)
    for said in others:
        assert "rank 0 has not been heard of for 1 s\n  where  preparing the data" in said


def refused() -> None:
    def refuse() -> None:
        raise InputError("no rows", where="rows.jsonl")

    first("reading", refuse)


def test_what_the_first_rank_refuses_all_refuse() -> None:
    with pytest.raises(InputError, match="no rows"):
        run_world(refused, 2)
