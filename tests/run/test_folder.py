"""The run folder: lines are dropped where a run is taken up again, and failures are told in order of what they say."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest

from pentamesh.errors import InputError, RunFailed
from pentamesh.run.folder import RunFolder


def test_rewinding_drops_later_lines_and_one_cut_short(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in range(1, 6):
        folder.append_metrics({"step": step, "loss": 1.0})
    with folder.metrics.open("a") as file:
        file.write('{"step": 6, "lo')
    (tmp_path / "metrics.jsonl.123.partial").write_text("of a process that was killed while it rewound")
    folder.rewind(3)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] == [1, 2, 3]


def test_what_was_refused_on_purpose_outranks_a_lost_peer(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.record_failure(1, RuntimeError("connection closed by peer"))
    assert (folder.read_outcome() or {})["exit_code"] == RunFailed.exit_code
    folder.record_failure(0, InputError("no rows", where="rows.jsonl"))
    folder.record_failure(2, RuntimeError("connection closed by peer"))
    found = folder.read_outcome() or {}
    assert found["exit_code"] == InputError.exit_code
    assert found["problems"] == [{"what": "no rows", "where": "rows.jsonl", "hint": ""}]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    """JSON has neither NaN nor infinities; a reader of another language stops at them."""
    folder = RunFolder(tmp_path)
    folder.append_metrics({"step": 1, "grad_norm": math.nan, "inner": {"loss": [math.inf, 1.0]}})
    read = json.loads(folder.metrics.read_text(), parse_constant=pytest.fail)
    assert (read["grad_norm"], read["inner"]) == (None, {"loss": [None, 1.0]})


def test_what_cannot_be_written_is_no_second_failure(tmp_path: Path) -> None:
    """A full disk: here, a folder in place of the file."""
    folder = RunFolder(tmp_path)
    folder.outcome.mkdir()
    folder.record_failure(0, RunFailed("the disk is full"))
    assert folder.read_outcome() is None


def test_a_line_that_cannot_be_written_says_which_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.mkdir()
    with pytest.raises(RunFailed, match=r"metrics.jsonl cannot be written: Is a directory"):
        folder.append_metrics({"step": 1})


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", "\ufeff"])
def test_an_outcome_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "outcome.json").write_text(text)
    assert RunFolder(tmp_path).read_outcome() is None


def test_the_file_that_failed_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.record_failure(1, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full/metrics.jsonl"))
    assert (folder.read_outcome() or {})["problems"] == [{"what": "No space left on device", "where": "/full/metrics.jsonl (rank 1)", "hint": ""}]
