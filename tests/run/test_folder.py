"""The run folder: lines are dropped where a run is taken up again, and failures are told in order of what they say."""

from __future__ import annotations

import json
from pathlib import Path

from pentamesh.errors import InputError, RunFailed
from pentamesh.run.folder import RunFolder


def test_rewinding_drops_later_lines_and_one_cut_short(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in range(1, 6):
        folder.append_metrics({"step": step, "loss": 1.0})
    with folder.metrics.open("a") as file:
        file.write('{"step": 6, "lo')
    folder.rewind(3)
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
