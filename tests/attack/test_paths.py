"""Names of files as people write them: from home, absent, or longer than any system takes; said before a process is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from pentamesh.errors import InputError
from pentamesh.job.read import read_job_text
from pentamesh.run.launch import located, planned
from tests.run import toy


def test_paths_of_a_job_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows are looked for is where they are then read."""
    monkeypatch.setenv("HOME", str(tmp_path))
    job = located(read_job_text("model: m\ndata: {train: ~/rows.jsonl}\nlogging: {folder: ~/runs}\n")[0], Path("/elsewhere/job.yaml"))
    assert (job.data.train, job.logging.folder) == (str(tmp_path / "rows.jsonl"), str(tmp_path / "runs"))


@pytest.mark.parametrize("key", ["data.train", "data.held_out"])
def test_absent_rows_are_told_while_planning(tmp_path: Path, key: str) -> None:
    job = toy.job(tmp_path)
    with pytest.raises(InputError, match=r"no file row\.jsonl") as caught:
        planned(job, [f"{key}=row.jsonl"])
    assert "rows.jsonl" in caught.value.problems[0].hint
