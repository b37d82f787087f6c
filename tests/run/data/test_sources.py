"""Several sources with weights: what an epoch sees of each, and what is said of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentamesh.errors import InputError
from pentamesh.job.job import Job
from pentamesh.job.read import check_trainable, read_job_text
from pentamesh.report.preview import preview
from pentamesh.run.asked import located
from pentamesh.run.data.batches import Batches
from pentamesh.run.data.order import order
from pentamesh.run.data.prepare import prepare
from pentamesh.run.data.preview import collect
from pentamesh.run.data.samples import Samples
from pentamesh.run.data.tally import times_seen


def job(*train: dict[str, Any], seed: int = 0, seq_len: int = 64, packing: bool = False, **data: Any) -> Job:
    batch = {"seq_len": seq_len, "packing": packing}
    return Job.model_validate({"model": {"name": "x"}, "data": {"train": list(train)} | data, "batch": batch, "training": {"seed": seed, "steps": 1}})


def seen(samples: Samples) -> Counter[tuple[int, ...]]:
    return Counter(tuple(samples.sample(i)[0].tolist()) for i in range(len(samples)))


@pytest.fixture
def made(tmp_path: Path, chatml: Any) -> Any:
    return lambda asked: prepare(asked, chatml, tmp_path, tmp_path / "prepared")


@pytest.fixture
def files(write_rows: Any, talk: Any) -> None:
    """Ten conversations, ten alpaca rows and two texts, all different."""
    write_rows([{"messages": talk(f"how {i}", " fine" * (i + 1))} for i in range(10)], "talks.jsonl")
    write_rows([{"instruction": f"hello {i}", "output": " bye" * (i + 1)} for i in range(10)], "tasks.jsonl")
    write_rows([{"text": "be kind " * 40}, {"text": "now " * 9}], "texts.jsonl")


@given(st.integers(0, 300), st.floats(0.001, 7), st.integers(0, 2**40))
def test_a_weight_is_exact(num_rows: int, weight: float, seed: int) -> None:
    times = times_seen(num_rows, weight, (seed, 0))
    assert set(times.tolist()) <= {int(weight), int(weight) + 1}
    assert times.sum() == int(weight) * num_rows + round((weight - int(weight)) * num_rows)
    assert np.array_equal(times, times_seen(num_rows, weight, (seed, 0)))


def test_sources_draw_rows_of_their_own() -> None:
    first, second = (np.flatnonzero(times_seen(1000, 0.5, (7, number, 1))) for number in (0, 1))
    assert 200 < len(np.intersect1d(first, second)) < 300
    assert 200 < len(np.intersect1d(first, order(7, 0, 1000)[:500])) < 300


def test_what_an_epoch_sees_of_each_source(files: Any, made: Any) -> None:
    once = seen(made(job({"rows": "talks.jsonl"})).train), seen(made(job({"rows": "tasks.jsonl"})).train)
    prepared = made(job({"rows": "talks.jsonl", "weight": 2.5}, {"rows": "tasks.jsonl", "weight": 0.3}))
    found = seen(prepared.train)
    talks, tasks = ({sample: times for sample, times in found.items() if sample in part} for part in once)
    assert Counter(talks.values()) == {2: 5, 3: 5}
    assert Counter(tasks.values()) == {1: 3}
    assert len(found) == 13
    split = prepared.report["splits"]["train"]
    stored = sum(len(sample) for part in once for sample in part)
    assert (split["rows"], split["samples"], split["stored_tokens"]) == (20, 28, stored)  # each row is written once
    assert prepared.train.num_tokens == sum((len(sample) - 1) * times for sample, times in found.items())
    first, second = split["sources"]
    assert (first["weight"], first["form"], first["rows"], first["samples"], second["samples"]) == (2.5, "messages", 10, 25, 3)
    assert second["form"] == "alpaca"
    assert first["trained_tokens"] + second["trained_tokens"] == split["trained_tokens"]
    trained = [prepared.train.sample(i)[1][1:].sum() for i in range(28)]
    assert (sum(trained[:25]), sum(trained[25:])) == (first["trained_tokens"], second["trained_tokens"])
    batches = Batches(prepared.train, 0, 4, 4)
    numbers = [i for step in range(7) for (i,) in batches.rows(4 * step)]
    assert sorted(numbers) == list(range(28))


def test_another_seed_draws_another_half(files: Any, made: Any) -> None:
    halves = {tuple(sorted(seen(made(job({"rows": "talks.jsonl", "weight": 0.5}, seed=seed)).train))) for seed in (1, 1, 2, 3)}
    assert len(halves) == 3
    assert {len(half) for half in halves} == {5}


def test_a_document_weighs_as_a_whole(files: Any, made: Any) -> None:
    once, twice = (made(job({"rows": "texts.jsonl", "weight": weight}, seq_len=16)) for weight in (1, 2))
    assert seen(twice.train) == {window: 2 * times for window, times in seen(once.train).items()}
    half = seen(made(job({"rows": "texts.jsonl", "weight": 0.5}, seq_len=16)).train)
    assert half.total() in {1, seen(once.train).total() - 1}  # the windows of one document of two, the short one having one


def test_a_list_of_one_is_a_name_alone(files: Any, made: Any) -> None:
    listed = made(job({"rows": "talks.jsonl"}, held_out=0.2))
    alone = made(Job.model_validate(job({"rows": "x"}, held_out=0.2).model_dump() | {"data": {"train": "talks.jsonl", "held_out": 0.2}}))
    assert alone.train_digest == listed.train_digest
    assert {k: v for k, v in alone.report.items() if k != "fingerprint"} == {k: v for k, v in listed.report.items() if k != "fingerprint"}


def test_held_out_rows_are_drawn_over_all_sources_and_count_once(files: Any, made: Any) -> None:
    prepared = made(job({"rows": "talks.jsonl", "weight": 3}, {"rows": "tasks.jsonl"}, held_out=0.25))
    held = seen(prepared.held_out)
    assert (len(held), held.total()) == (5, 5)
    assert not held.keys() & seen(prepared.train).keys()
    sources = prepared.report["splits"]["held_out"]["sources"]
    assert sum(source["samples"] for source in sources) == 5
    assert {source["weight"] for source in sources} == {1.0}


def test_held_out_rows_of_several_forms_have_their_own(files: Any, made: Any, write_rows: Any) -> None:
    write_rows([{"text": "fine"}], "held.jsonl")
    prepared = made(job({"rows": "talks.jsonl"}, {"rows": "tasks.jsonl", "form": "alpaca"}, held_out="held.jsonl"))
    assert prepared.report["splits"]["held_out"]["sources"][0]["form"] == "text"


FAULTS: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    ([{"rows": "talks.jsonl"}, {"rows": "gone.jsonl"}], {}, r"no file 'gone.jsonl'.*\n  where  data.train\[1\]"),
    ([{"rows": "talks.jsonl"}, {"rows": "empty.jsonl"}], {}, r"the file has no rows\n  where  .*empty.jsonl"),
    (
        [{"rows": "talks.jsonl"}, {"rows": "*.jsonl"}],
        {},
        r"talks.jsonl is named by data.train\[0\] already\n  where  data.train\[1\]\nhint: .* weight: 2",
    ),
    ([{"rows": "talks.jsonl"}, {"rows": "link.jsonl"}], {}, r"link.jsonl is named by data.train\[0\] already"),
    ([{"rows": "talks.jsonl", "split": "train"}], {}, r"split = train and data.train\[0\] = talks.jsonl, which .*\n  where  data.train\[0\].split"),
    ([{"rows": "talks.jsonl"}], {"subset": "en"}, r"subset = en beside a list of sources"),
    ([{"rows": "talks.jsonl", "form": "alpaca"}], {}, r"no `instruction` in the row"),
    ([{"rows": "talks.jsonl", "weight": 0.01}], {}, r"weight = 0.01 leaves none of 10 rows of .*talks.jsonl"),
]


@pytest.mark.parametrize(("train", "data", "expected"), FAULTS)
def test_what_is_wrong_with_a_source(files: Any, made: Any, write_rows: Any, tmp_path: Path, train: Any, data: Any, expected: str) -> None:
    write_rows([], "empty.jsonl")
    (tmp_path / "link.jsonl").symlink_to("talks.jsonl")
    with pytest.raises(InputError, match=expected):
        made(job(*train, **data))
    assert not (tmp_path / "prepared").exists()
    assert not (tmp_path / "prepared.partial").exists()


def test_all_sources_are_judged_at_once(made: Any, write_rows: Any) -> None:
    write_rows([], "empty.jsonl")
    with pytest.raises(InputError) as error:
        made(job({"rows": "gone.jsonl"}, {"rows": "empty.jsonl"}, {"rows": "lost/*.csv"}, held_out="none.jsonl"))
    assert len(error.value.problems) == 4


def test_what_the_job_says_of_rows_it_says_of_each_source(files: Any, made: Any, write_rows: Any, talk: Any) -> None:
    write_rows([{"dialog": talk(f"how {i}", " fine" * (i + 1))} for i in range(10)], "dialogs.jsonl")
    write_rows([{"ask": f"hello {i}", "output": " bye" * (i + 1)} for i in range(10)], "asked.jsonl")
    same = {"system": "be kind", "train_on": ["user", "assistant"], "turns": "last"}
    told = made(job({"rows": "dialogs.jsonl", "weight": 2}, {"rows": "asked.jsonl"}, columns={"messages": "dialog", "instruction": "ask"}, **same))
    plain = made(job({"rows": "talks.jsonl", "weight": 2}, {"rows": "tasks.jsonl"}, **same))
    assert told.train_digest == plain.train_digest != made(job({"rows": "talks.jsonl", "weight": 2}, {"rows": "tasks.jsonl"})).train_digest
    assert [source["form"] for source in told.report["splits"]["train"]["sources"]] == ["messages", "alpaca"]


def test_a_held_out_file_is_read_as_the_job_says(made: Any, write_rows: Any) -> None:
    write_rows([{"input_ids": [1, 2, 3]}], "ids.jsonl")
    write_rows([{"said": "be kind"}], "said.jsonl")
    write_rows([{"said": "fine"}], "held.jsonl")
    prepared = made(job({"rows": "ids.jsonl"}, {"rows": "said.jsonl"}, held_out="held.jsonl", columns={"text": "said"}))
    assert [source["form"] for source in prepared.report["splits"]["train"]["sources"]] == ["tokens", "text"]
    assert prepared.report["splits"]["held_out"]["sources"][0]["form"] == "text"


def test_rows_are_packed_as_an_epoch_sees_them(files: Any, made: Any) -> None:
    alone = made(job({"rows": "talks.jsonl", "weight": 2.5}, {"rows": "tasks.jsonl", "weight": 0.3}))
    packed = made(job({"rows": "talks.jsonl", "weight": 2.5}, {"rows": "tasks.jsonl", "weight": 0.3}, packing=True))
    assert seen(packed.train) == seen(alone.train)
    assert packed.train_digest != alone.train_digest
    assert packed.report["splits"]["train"]["packs"] == packed.train.num_rows < len(packed.train.packs) == 28
    batches = Batches(packed.train, 0, 1, 1)
    rows = [samples for number in range(packed.train.num_rows) for samples in batches.rows(number)]
    assert sorted(i for samples in rows for i in samples) == list(range(28))
    assert max(packed.train.lengths[list(samples)].sum() for samples in rows) <= 64


def test_pieces_of_long_rows_are_counted_by_source(files: Any, made: Any) -> None:
    split = made(job({"rows": "talks.jsonl"}, {"rows": "tasks.jsonl", "weight": 2}, seq_len=8, too_long="split")).report["splits"]["train"]
    for key in ("split", "untrained_pieces"):
        assert split[key] == sum(source[key] for source in split["sources"])
        assert all(source[key] for source in split["sources"])


def test_names_are_resolved_and_looked_for_from_the_job_file(files: Any, tmp_path: Path) -> None:
    asked = job({"rows": "talks.jsonl"}, {"rows": "org/name", "weight": 2}, {"rows": "gone.jsonl"})
    sources = list(located(asked, tmp_path, "x").data.sources.values())
    assert [source.rows for source in sources] == [str(tmp_path / "talks.jsonl"), "org/name", str(tmp_path / "gone.jsonl")]
    assert sources[1].weight == 2
    with pytest.raises(InputError, match=r"no file gone.jsonl in .*\n  where  job.yaml data.train\[2\]"):
        check_trainable(asked, "job.yaml", tmp_path)


def test_a_list_in_a_job_file() -> None:
    text = "model: m\ndata:\n  form: alpaca\n  train:\n  - rows: a.jsonl\n  - {rows: b, weight: 0.5, form: text, split: x, subset: y}\n"
    data = read_job_text(text)[0].data
    assert [(key, rows.rows, rows.weight, rows.form) for key, rows in data.sources.items()] == [
        ("data.train[0]", "a.jsonl", 1.0, "alpaca"),
        ("data.train[1]", "b", 0.5, "text"),
    ]
    assert read_job_text(text, overrides=["data.train=[{rows: c}]"])[0].data.sources["data.train[0]"].rows == "c"
    assert Job.model_validate(json.loads(read_job_text(text)[0].model_dump_json())) == read_job_text(text)[0]


def test_a_preview_shows_each_source(files: Any, chatml: Any, tmp_path: Path) -> None:
    found = collect(job({"rows": "talks.jsonl", "weight": 2}, {"rows": "texts.jsonl"}), chatml, tmp_path, num_rows=2)
    assert [row.where.rpartition("/")[2] for row in found.rows] == ["talks.jsonl:1", "talks.jsonl:2", "texts.jsonl:1", "texts.jsonl:2"]
    talks, texts = found.sources
    assert (talks.num_measured, texts.num_measured, found.num_measured) == (10, 2, 12)
    assert (talks.num_tokens + texts.num_tokens, talks.num_trained + texts.num_trained) == (found.num_tokens, found.num_trained)
    assert (texts.num_too_long, found.num_too_long) == (0, 0)
    assert found.padding.num_packed < found.num_measured  # over the rows of both
    from rich.console import Console

    console = Console(width=150, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(preview(found.to_json()))
    text = console.export_text()
    assert f"talks.jsonl (messages, weight 2): 10 rows, {talks.num_tokens} tokens, {talks.num_trained} trained" in text
    assert "texts.jsonl (text, weight 1): 2 rows" in text
