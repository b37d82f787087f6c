"""Chunks of a stream: what each holds, pass after pass, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pytest

from pentamesh.errors import InputError
from pentamesh.job.job import Job
from pentamesh.job.read import read_job_text
from pentamesh.run.asked import located
from pentamesh.run.data.chunks import chunk_folder, chunks
from pentamesh.run.data.held_out import prepare_held_out
from pentamesh.run.data.places import hub_stream
from pentamesh.run.data.preview import collect
from pentamesh.run.data.record import Chunk, Record, place_of
from pentamesh.run.data.rows import Row, read_rows
from pentamesh.run.data.samples import open_prepared
from tests.run.data.test_hub import hub  # noqa: F401 - a fixture


def job(folder: Path, size: int = 4, **data: Any) -> Job:
    asked = {"model": {"name": "x"}, "data": {"train": "train.jsonl", "streaming": True, "shuffle_rows": size} | data}
    return located(Job.model_validate(asked | {"batch": {"seq_len": 64}, "training": {"steps": 1}}), folder, "job")


def texts(tokenizer: Any, folder: Path) -> list[str]:
    samples = open_prepared(folder).train
    return [tokenizer.decode(samples.sample(i)[0], skip_special_tokens=True) for i in range(len(samples))]


@pytest.fixture
def write(write_rows: Callable[..., Path]) -> Callable[..., Path]:
    return lambda words, name="train.jsonl": write_rows([{"text": word} for word in words], name)


def made(job: Job, tokenizer: Any, folder: Path, num: int, known: tuple[Chunk, ...] = (), start: int = 0) -> list[Chunk]:
    return list(islice(chunks(job, tokenizer, folder / "stream", known, start), num))


def test_sources_follow_each_other_and_begin_again(tmp_path: Path, chatml: Any, write: Any) -> None:
    write("abcde")
    write("fgh", "more.jsonl")
    both = job(tmp_path, size=3, train=[{"rows": "train.jsonl"}, {"rows": "more.jsonl"}])
    found = made(both, chatml, tmp_path, 4)
    held = [texts(chatml, chunk_folder(tmp_path / "stream", n)) for n in range(4)]
    assert held == [["a", "b", "c"], ["d", "e", "f"], ["g", "h"], ["a", "b", "c"]]
    assert [(chunk.epoch, chunk.index, chunk.rows) for chunk in found] == [(0, 0, 3), (0, 1, 3), (0, 2, 2), (1, 0, 3)]
    assert found[0].digest == found[3].digest


@pytest.mark.parametrize("start", range(7))
def test_a_stream_is_gone_on_with_from_any_chunk(tmp_path: Path, chatml: Any, write: Any, start: int) -> None:
    """Also from the end of a pass, which is found by reading on."""
    write("abcdef")
    whole = made(job(tmp_path, size=2), chatml, tmp_path, 9)
    assert made(job(tmp_path, size=2), chatml, tmp_path, 9 - start, tuple(whole[:7]), start) == whole[start:]


def test_workers_change_nothing(tmp_path: Path, chatml: Any, write: Any) -> None:
    write([f"be kind {i}" for i in range(50)])
    alone = made(job(tmp_path, size=20), chatml, tmp_path, 4)
    files = {p.name: p.read_bytes() for p in chunk_folder(tmp_path / "stream", 3).iterdir()}
    assert made(job(tmp_path, size=20, workers=2), chatml, tmp_path, 4) == alone
    assert {p.name: p.read_bytes() for p in chunk_folder(tmp_path / "stream", 3).iterdir()} == files


def test_held_out_rows_are_not_trained_and_a_chunk_of_them_is_passed_by(tmp_path: Path, chatml: Any, write: Any) -> None:
    write("aabbcc")
    write("bx", "held.jsonl")
    asked = job(tmp_path, size=2, held_out="held.jsonl")
    assert [chunk.rows for chunk in made(asked, chatml, tmp_path, 4)] == [2, 0, 2, 2]
    assert not chunk_folder(tmp_path / "stream", 1).exists()
    held_out = prepare_held_out(asked, chatml, tmp_path, tmp_path / "data")
    assert held_out is not None
    assert len(held_out) == 2


def test_rows_of_which_none_is_left(tmp_path: Path, chatml: Any, write: Any) -> None:
    write("aab")
    write("ab", "held.jsonl")
    with pytest.raises(InputError, match="none of the rows is left to train on"):
        made(job(tmp_path, size=2, held_out="held.jsonl"), chatml, tmp_path, 9)


def test_a_fault_ends_the_stream_where_it_lies(tmp_path: Path, chatml: Any, write_rows: Any) -> None:
    rows = [{"text": word} for word in "abcd"]
    write_rows([*rows, {"text": 5}, {"text": ""}, {"text": "e"}, {"text": "f"}, *rows, 7])
    found: Iterator[Chunk] = chunks(job(tmp_path, size=2), chatml, tmp_path / "stream", (), 0)
    assert [next(found).rows, next(found).rows] == [2, 2]
    with pytest.raises(InputError, match=r"`text` is a number(.|\n)*train.jsonl:5(.|\n)*`text` is empty(.|\n)*train.jsonl:6"):
        next(found)


def test_a_row_that_is_too_long_ends_the_stream_too(tmp_path: Path, chatml: Any, write_rows: Any) -> None:
    write_rows([{"prompt": "a", "completion": "b" * n} for n in (3, 4, 500, 3)])
    found = chunks(job(tmp_path, size=2), chatml, tmp_path / "stream", (), 0)
    next(found)
    with pytest.raises(InputError, match=r"1 rows are longer than batch.seq_len = 64(.|\n)*train.jsonl:3"):
        next(found)


def test_rows_that_change_between_passes_are_refused(tmp_path: Path, chatml: Any, write: Any) -> None:
    write("abcd")
    found = chunks(job(tmp_path, size=2), chatml, tmp_path / "stream", (), 0)
    assert [next(found).epoch, next(found).epoch] == [0, 0]
    write("abxd")
    assert next(found).epoch == 1
    with pytest.raises(InputError, match="rows 3 to 4 are not those that the run has read there before"):
        next(found)


def test_a_record_ends_where_a_crash_cut_it_short(tmp_path: Path) -> None:
    record, of = Record(tmp_path / "chunks.jsonl", "a"), [Chunk(0, 0, 0, 5, "x"), Chunk(1, 0, 1, 0, "y"), Chunk(2, 0, 2, 3, "z")]
    record.write(of[:2])
    record.add(of[2])
    assert record.read() == of
    record.path.write_text(record.path.read_text()[:-9])
    assert record.read() == of[:2]
    assert Record(record.path, "b").read() == Record(tmp_path / "absent", "a").read() == []
    assert [place_of(row, of) for row in (0, 4, 5, 7, 8, 99)] == [(0, 0), (0, 0), (2, 5), (2, 5), (3, 8), (3, 8)]


def test_a_data_set_of_the_hub_is_streamed(hub: Any, chatml: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    builder = datasets.DatasetBuilder
    monkeypatch.setattr(builder, "download_and_prepare", lambda *_, **__: pytest.fail("the whole data set was fetched"))
    place = hub_stream("org/talks", "plain", "train_sft", "data.train")
    expected = [Row(f"org/talks/plain train_sft[{i}]", {"text": t}) for i, t in enumerate(("be kind", "how are you"))]
    assert list(read_rows((place,))) == list(read_rows((place,))) == expected
    asked = job(tmp_path, train="org/talks")
    assert [chunk.rows for chunk in made(asked, chatml, tmp_path, 3)] == [4, 2, 4]
    assert collect(asked, chatml, tmp_path).rows[0].where == "org/talks train[0]"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"train": "org/talkz"}, r"org/talkz, split train is neither a file here nor .*\(HF_HUB_OFFLINE is set\): Dataset 'org/talkz' doesn't exist"),
        ({"train": "org/talks", "split": "trian"}, r"split trian is neither .*trian"),
        ({"train": "org/talks", "subset": "torn"}, r"subset torn, split train is neither "),
    ],
)
def test_what_the_hub_does_not_give(hub: Any, chatml: Any, tmp_path: Path, data: dict[str, Any], expected: str) -> None:  # noqa: F811
    with pytest.raises(InputError, match=expected) as error:
        made(job(tmp_path, **data), chatml, tmp_path, 1)
    assert error.value.problems[0].where == "data.train"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data: {train: a.jsonl, streaming: true}\ntraining: {epochs: 2}", r"epochs = 2 with streaming(.|\n)*training.epochs(.|\n)*training.steps"),
        ("data: {train: a.jsonl, streaming: true, held_out: 0.1}", r"held_out = 0.1 with streaming: a share is drawn(.|\n)*name a file or a split"),
        ("data: {train: [{rows: a.jsonl}, {rows: b.jsonl, weight: 2}], streaming: true}", r"weight = 2 of b.jsonl with streaming(.|\n)*train\[1\]"),
        ("data: {train: a.jsonl, shuffle_rows: 5}", r"shuffle_rows = 5 without streaming(.|\n)*add data.streaming: true"),
        ("data: {train: a.jsonl, streaming: true, shuffle_rows: 0}", "shuffle_rows = 0 is not a whole number of at least 1"),
    ],
)
def test_what_does_not_go_with_a_stream(text: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        read_job_text(f"model: x\n{text}\n")


def test_the_record_is_read_by_others(tmp_path: Path) -> None:
    record = Record(tmp_path / "chunks.jsonl", "a")
    record.write([Chunk(0, 0, 0, 5, "x")])
    head, line = map(json.loads, record.path.read_text().splitlines())
    assert head == {"schema": "pentamesh.stream", "version": 1, "settings": "a"}
    assert line == {"number": 0, "epoch": 0, "index": 0, "rows": 5, "digest": "x"}
