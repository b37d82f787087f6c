"""Rows tokenised by several processes: the same bytes whatever their number, and no end that leaves anything behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pentamesh.errors import InputError, RunFailed
from pentamesh.job.job import Job
from pentamesh.run.data import workers
from pentamesh.run.data.forms import Pair, Sample
from pentamesh.run.data.ids import Ids
from pentamesh.run.data.pace import Pace
from pentamesh.run.data.prepare import prepare
from pentamesh.run.data.samples import MANIFEST
from pentamesh.run.data.split import Placed, num_chars
from pentamesh.run.data.turns import Conversation
from pentamesh.run.data.workers import encoded_by, num_workers


def job(num: int, packing: bool = False, **data: Any) -> Job:
    batch = {"seq_len": 64, "packing": packing}
    return Job.model_validate({"model": {"name": "x"}, "data": {"train": "train.jsonl", "workers": num} | data, "batch": batch})


def rows(texts: list[str]) -> list[Placed]:
    return [Placed("train", 0, "text", Sample(f"row {i}", text)) for i, text in enumerate(texts)]


def children() -> set[int]:
    """The workers that this process has started and that still run."""
    found = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=True).stdout
    return {int(line.split()[0]) for line in found.splitlines() if "pentamesh.run.data.worker" in line}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also small data is worth workers, and chunks are small."""
    monkeypatch.setattr(workers, "WORTH_CHARS", 0)
    monkeypatch.setattr(workers, "CHUNK_ROWS", 7)


def test_how_many() -> None:
    assert num_workers(None, workers.WORTH_CHARS - 1) == num_workers(9, 100) == 1
    assert num_workers(9, workers.WORTH_CHARS) == 9
    assert num_workers(None, workers.WORTH_CHARS) == min(len(os.sched_getaffinity(0)), workers.MOST_WORKERS)


def test_the_same_bytes_whatever_the_number(small: None, tmp_path: Path, write_rows: Any, talk: Any, chatml: Any) -> None:
    """With sources of two forms, held-out rows, rows that are too long and texts that are cut."""
    chats = [{"messages": talk(f"how {i % 60}", " fine" * (i % 60 + 1))} for i in range(120)]
    write_rows(chats, "chats.jsonl")
    write_rows([{"text": f"{i} hello there " * (i + 1)} for i in range(40)], "texts.jsonl")
    asked = [{"rows": "chats.jsonl", "weight": 1.5}, {"rows": "texts.jsonl"}]
    heard: dict[int, list[int]] = {1: [], 3: []}
    for num, told in heard.items():
        prepare(job(num, train=asked, held_out=0.2, too_long="drop"), chatml, tmp_path, tmp_path / str(num), progress=told.append)
    one, three = ({file.name: file.read_bytes() for file in (tmp_path / str(num)).iterdir()} for num in heard)
    assert one == three
    assert json.loads(one[MANIFEST])["splits"]["train"]["dropped"].keys() == {"too_long", "equal_to_held_out"}
    assert heard[1] == heard[3] == list(range(1, 161))
    assert not children()


def test_the_same_packs_whatever_the_number(small: None, tmp_path: Path, write_rows: Any, talk: Any, chatml: Any) -> None:
    """With weights, names of the job's own, long rows in pieces, rows of tokens and a chat template of the job's."""
    chatml = deepcopy(chatml)
    chatml.chat_template = chatml.chat_template.replace("m['content']", "m['content'] + ' now'")
    write_rows([{"dialog": talk(f"how {i % 60}", " fine" * (i % 60 + 1))} for i in range(120)], "chats.jsonl")
    write_rows([{"input_ids": list(range(i + 2))} for i in range(90)], "tokens.jsonl")
    asked = [{"rows": "chats.jsonl", "weight": 1.5}, {"rows": "tokens.jsonl", "weight": 0.4}]
    for num in (1, 3):
        wanted = job(num, packing=True, train=asked, too_long="split", columns={"messages": "dialog"})
        prepare(wanted, chatml, tmp_path, tmp_path / str(num))
    one, three = ({file.name: file.read_bytes() for file in (tmp_path / str(num)).iterdir()} for num in (1, 3))
    assert one == three
    split = json.loads(one[MANIFEST])["splits"]["train"]
    assert 0 < split["packs"] < split["samples"]
    assert split["split"] == sum(source["split"] for source in split["sources"]) > 0
    assert " fine now" in chatml.decode(np.frombuffer(one["train.tokens"], "<i4")[:40])


def test_faults_that_show_in_a_worker_are_told_at_once(small: None, tmp_path: Path, write_rows: Any, talk: Any, mistral: Any) -> None:
    wrong = [{"role": "user", "content": "how"}, *talk("hello", "fine")]
    write_rows([{"messages": wrong if i in (3, 30) else talk("how", "fine")} for i in range(40)])
    with pytest.raises(InputError, match="roles must alternate") as error:
        prepare(job(2), mistral, tmp_path, tmp_path / "prepared")
    assert f"{tmp_path}/train.jsonl:4, {tmp_path}/train.jsonl:31" in str(error.value)
    assert not list(tmp_path.glob("prepared*"))
    assert not children()


def test_a_worker_that_dies_is_an_error_with_its_cause(small: None, chatml: Any) -> None:
    found = encoded_by(2, rows(["hello"] * 500), chatml)
    next(found)
    started = sorted(children())
    assert len(started) == 2
    os.kill(started[1], signal.SIGKILL)
    with pytest.raises(RunFailed, match=r"process [12] of 2 that tokenise ended with signal 9\n  where  row \d+ to row \d+\nhint: if memory ran out"):
        list(found)
    assert not children()


class Unreadable:
    """Something that a worker cannot take in."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return int, ("no tokenizer",)


def test_a_worker_that_cannot_start_says_why(small: None) -> None:
    with pytest.raises(RunFailed, match=r"ended with exit code 1: ValueError: invalid literal for int"):
        list(encoded_by(2, rows(["hello"] * 20), Unreadable()))  # type: ignore[arg-type]
    assert not children()


def test_what_nobody_expected_in_a_worker(small: None) -> None:
    with pytest.raises(RunFailed, match=r"nobody expected this: TypeError"):
        list(encoded_by(1, rows(["hello"]), 7))  # type: ignore[arg-type]


def test_rows_are_taken_a_few_chunks_ahead(small: None, chatml: Any) -> None:
    pulled = 0

    def counted() -> Iterator[Placed]:
        nonlocal pulled
        for row in rows(["hello"] * 400):
            pulled += 1
            yield row

    ahead = [pulled - done for done, _ in enumerate(encoded_by(2, counted(), chatml))]
    assert len(ahead) == 400
    assert max(ahead) <= 7 * (2 * workers.UNDER_WAY + 1)


def test_large_rows_on_both_ways_do_not_lock(small: None, chatml: Any) -> None:
    """Chunks and answers beyond what a pipe holds: neither side may wait for the other to read first."""
    text = "be kind " * 40_000
    found = list(encoded_by(2, rows([text] * 6), chatml))
    assert [row.row.where for row, _ in found] == [f"row {i}" for i in range(6)]


def test_no_process_outlives_a_parent_that_is_killed(tmp_path: Path, chatml: Any) -> None:
    chatml.save_pretrained(tmp_path / "tokenizer")
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(f"""
        import itertools, subprocess, os
        from pentamesh.run.data.forms import Sample
        from pentamesh.run.data.split import Placed
        from pentamesh.run.data.workers import encoded_by
        from transformers import PreTrainedTokenizerFast
        tokenizer = PreTrainedTokenizerFast.from_pretrained({str(tmp_path / "tokenizer")!r})
        endless = (Placed("train", 0, "text", Sample(str(i), "hello there " * 50)) for i in itertools.count())
        for number, _ in enumerate(encoded_by(2, endless, tokenizer)):
            if number == 0:
                print(subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout, flush=True)
                print("ready", flush=True)
        """)
    )
    parent = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    lines = list(iter(parent.stdout.readline, "ready\n"))
    started = [int(line.split()[0]) for line in lines if "pentamesh.run.data.worker" in line]
    assert len(started) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while any(map(alive, started)):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_characters_of_a_content() -> None:
    assert num_chars("abc") == 3
    assert num_chars(Pair("ab", "c")) == 3
    assert num_chars(Conversation([{"role": "user", "content": "ab", "said": [1, None, "c"]}], (0,))) == 7
    assert num_chars(Ids([1, 2], [True, False])) == 2


def test_the_pace_is_said_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    told = {1: 10.0, 2: 11.0, 22_000: 15.5, 23_000: 16.0, 60_000: 30.0}
    pace = Pace(clock=iter(told.values()).__next__)
    for num_rows in told:
        pace(num_rows)
    assert capsys.readouterr().err.splitlines() == ["tokenised 22,000 rows, 4,000 rows/s", "tokenised 60,000 rows, 3,000 rows/s"]
