"""Data sets of the hub, by a local folder that stands in for one: what is asked of the library, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from pentamesh.errors import InputError
from pentamesh.job.job import Job
from pentamesh.job.read import check_trainable, is_hub_data
from pentamesh.run.asked import located
from pentamesh.run.data.places import hub_split
from pentamesh.run.data.prepare import prepare
from pentamesh.run.data.preview import collect
from pentamesh.run.data.rows import Row, read_rows

CARD = """---
configs:
- config_name: default
  data_files: [{split: train, path: train.jsonl}, {split: test, path: test.jsonl}]
- config_name: plain
  data_files: [{split: train_sft, path: plain.jsonl}]
- config_name: torn
  data_files: [{split: train, path: torn.jsonl}]
---
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, talk: Any) -> list[tuple[Any, ...]]:
    """`org/talks` with two subsets, on a hub that is a folder; what was asked of it."""
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "README.md").write_text(CARD)
    for split, num_rows in (("train", 6), ("test", 2)):
        lines = [json.dumps({"messages": talk(f"hello {split}", " fine" * (i + 1))}) + "\n" for i in range(num_rows)]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    (folder / "plain.jsonl").write_text('{"text": "be kind"}\n{"text": "how are you"}\n')
    (folder / "torn.jsonl").write_text('{"text": "be kind"}\n{"text": ')
    asked: list[tuple[Any, ...]] = []
    load = datasets.load_dataset_builder

    def builder(name: str, subset: str | None) -> Any:
        asked.append((name, subset))
        if name != "org/talks":
            raise FileNotFoundError(f"Dataset '{name}' doesn't exist on the Hub or cannot be accessed.")
        return load(str(folder), subset, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    return asked


def job(**data: Any) -> Job:
    return Job.model_validate({"model": {"name": "x"}, "data": data, "batch": {"seq_len": 64}, "training": {"steps": 1}})


def test_a_split_is_read_row_by_row_and_named_by_its_data_set(hub: Any) -> None:
    place = hub_split("org/talks", "plain", "train_sft", "data.train")
    assert list(read_rows((place,))) == [Row(f"org/talks/plain train_sft[{i}]", {"text": t}) for i, t in enumerate(("be kind", "how are you"))]
    assert hub == [("org/talks", "plain")]


def test_training_and_held_out_rows_of_two_splits(hub: Any, chatml: Any, tmp_path: Path) -> None:
    asked = job(train="org/talks", held_out="org/talks")
    prepared = prepare(asked, chatml, tmp_path, tmp_path / "prepared")
    assert prepared.held_out is not None
    assert (len(prepared.train), len(prepared.held_out)) == (6, 2)
    assert prepare(asked, chatml, tmp_path, tmp_path / "prepared").report == prepared.report
    assert collect(asked, chatml, tmp_path).rows[0].where == "org/talks train[0]"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"train": "org/talkz"}, r"org/talkz, split train is neither a file here nor .*\(HF_HUB_OFFLINE is set\): Dataset 'org/talkz' doesn't exist"),
        ({"train": "org/talks", "split": "trian"}, r"split trian is neither .*trian"),
        ({"train": "org/talks", "subset": "plane"}, r"subset plane, split train is neither .*plane"),
        ({"train": "org/talks", "subset": "torn"}, r"subset torn, split train is neither .*JSON parse error"),
    ],
)
def test_what_the_hub_does_not_give(hub: Any, chatml: Any, tmp_path: Path, data: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected) as error:
        prepare(job(**data), chatml, tmp_path, tmp_path / "prepared")
    assert error.value.problems[0].where == "data.train"
    assert not (tmp_path / "prepared").exists()


def test_offline_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"neither a file here nor data that the hub gives \(HF_HUB_OFFLINE is set\)"):
        hub_split("org/absent", None, "train", "data.train")


def test_a_data_set_that_is_no_table_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builders of other kinds may unpickle what they find in an archive."""
    (tmp_path / "a.py").write_text("raise SystemExit('code of a data set was run')")
    builder = type("Builder", (), {"__module__": "datasets.packaged_modules.webdataset.webdataset"})
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: builder())
    with pytest.raises(InputError, match="org/tars is made of webdataset files, not of rows"):
        hub_split("org/tars", None, "train", "data.train")


@pytest.mark.parametrize(("name", "of_hub"), [("org/talks", True), ("org/rows.jsonl", False), ("here/talks", False), ("./org/talks", False)])
def test_a_local_path_always_wins(tmp_path: Path, name: str, of_hub: bool) -> None:
    (tmp_path / "here").mkdir()
    assert is_hub_data(name, tmp_path) is of_hub
    made = located(job(train=name), tmp_path, "job")
    assert (made.data.train == name) is of_hub
    if of_hub:
        check_trainable(made, "job.yaml", tmp_path)
    else:
        with pytest.raises(InputError, match="no file"):
            check_trainable(job(train=name), "job.yaml", tmp_path)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"train": "rows.jsonl", "split": "train"}, r"split = train and data.train = rows.jsonl, which is no hub data set\n  where  data.split"),
        ({"train": "rows.jsonl", "subset": "plain"}, r"subset = plain and data.train = rows.jsonl, which is no hub"),
        ({"train": "org/talks", "held_out": 0.2, "held_out_split": "test"}, r"held_out_split = test and data.held_out = 0.2, which is no hub"),
        ({"train": "org/talks", "held_out": "rows.jsonl", "held_out_split": "test"}, r"held_out_split = test and data.held_out = rows.jsonl"),
    ],
)
def test_a_split_of_files_is_refused(hub: Any, chatml: Any, write_rows: Any, talk: Any, tmp_path: Path, data: Any, expected: str) -> None:
    write_rows([{"messages": talk("hello", "fine")}], "rows.jsonl")
    with pytest.raises(InputError, match=expected):
        prepare(job(**data), chatml, tmp_path, tmp_path / "prepared")
