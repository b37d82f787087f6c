"""The same rows whatever they are written as: sheets, Arrow files, compressed text, folders."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather, ipc

from pentamesh.errors import InputError, Problem
from pentamesh.job.files import TABLES, TEXTS, file_kind
from pentamesh.job.read import is_hub_data
from pentamesh.run.data.places import find_files
from pentamesh.run.data.rows import READERS, Row, read_rows

ROWS: list[dict[str, Any]] = [
    {"instruction": 'say "hi", twice', "output": "hi\nhi", "messages": [{"role": "user", "content": "é"}]},
    {"instruction": "", "output": " 日本\t", "messages": [{"role": "user", "content": "1,2"}, {"role": "assistant", "content": '"'}]},
    {"instruction": "[1, 2]", "output": "a list in a column of text stays text", "messages": []},
]


def values(*places: Path) -> list[Any]:
    return [row.value if isinstance(row, Row) else row for row in read_rows(places)]


def lines(path: Path, how: Callable[..., Any] = open) -> None:
    with how(path, "wb") as file:
        file.writelines(json.dumps(row).encode() + b"\n" for row in ROWS)


def zstandard(path: Path, _: str) -> Any:
    return pa.CompressedOutputStream(str(path), "zstd")


class Joined:
    """Writes an array where lines are given."""

    def __init__(self, path: Path, _: str) -> None:
        self._path, self._rows = path, []

    def __enter__(self) -> Joined:
        return self

    def writelines(self, rows: Any) -> None:
        self._rows = [row.decode().strip() for row in rows]

    def __exit__(self, *_: object) -> None:
        with gzip.open(self._path, "wt") as file:
            file.write(f"[{', '.join(self._rows)}]")


def sheet(path: Path, how: Callable[..., Any] = open, **dialect: Any) -> None:
    with how(path, "wt", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0], **dialect)
        writer.writeheader()
        writer.writerows({**row, "messages": json.dumps(row["messages"])} for row in ROWS)


def stream(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "a.jsonl": lines,
    "a.JSONL.GZ": lambda path: lines(path, gzip.open),
    "a.jsonl.bz2": lambda path: lines(path, bz2.open),
    "a.ndjson.xz": lambda path: lines(path, lzma.open),
    "a.jsonl.zst": lambda path: lines(path, zstandard),
    "a.json.gz": lambda path: lines(path, Joined),
    "a.csv": sheet,
    "a.csv.gz": lambda path: sheet(path, gzip.open, lineterminator="\n"),
    "a.tsv": lambda path: sheet(path, delimiter="\t"),
    "a.tsv.xz": lambda path: sheet(path, lzma.open, delimiter="\t", quoting=csv.QUOTE_ALL),
    "a.parquet": lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path),
    "a.feather": lambda path: feather.write_feather(pa.Table.from_pylist(ROWS), str(path), compression="zstd"),
    "a.arrow": stream,
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_same_rows(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    assert values(path) == ROWS
    assert find_files(name, tmp_path, "data.train") == (path,)
    assert not is_hub_data(f"absent/{name}", tmp_path)


def test_suffixes_are_those_that_are_read() -> None:
    assert set(READERS) == {*TEXTS, *TABLES}
    assert file_kind("a.b.CSV.Gz") == (".csv", ".gz")
    for other in ("a.parquet.gz", "gz", "jsonl", "a.gz", "a.pkl", "a.jsonl.gz.gz", "a.jsonl.zip"):
        assert file_kind(other) == ("", "")


def test_text_is_one_document_compressed_too(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.txt.gz", "wt") as file:
        file.write("one\ntwo\n")
    assert values(tmp_path / "a.txt.gz") == [{"text": "one\ntwo\n"}]


def test_rows_of_a_sheet_are_named_by_the_line_where_they_begin(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text,id\n"two\nlines",1\n\nx,2\n')
    assert list(read_rows((path,))) == [Row(f"{path}:2", {"text": "two\nlines", "id": "1"}), Row(f"{path}:5", {"text": "x", "id": "2"})]


def test_a_column_without_a_name_is_an_index_and_an_empty_list_is_null(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(",text,tools\n0,x,\n1,y,[]\n")
    assert values(path) == [{"text": "x", "tools": None}, {"text": "y", "tools": []}]


def test_a_line_that_is_no_text_and_the_ones_after_it(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"text\n\xe9t\xe9\nx\n")
    fault, row = read_rows((path,))
    assert isinstance(fault, Problem)
    assert (fault.what, fault.where) == ("byte 0 (0xe9) is not UTF-8", f"{path}:2")
    assert row == Row(f"{path}:3", {"text": "x"})


def test_a_folder_is_its_files_of_rows_sorted(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    (folder / "inner").mkdir(parents=True)
    for name in ("b.jsonl", "a.csv", ".hidden.jsonl", "_old.jsonl", "README.md", "inner/c.jsonl"):
        (folder / name).write_text("text\n")
    assert [file.name for file in find_files("rows", tmp_path, "data.train")] == ["a.csv", "b.jsonl"]


def test_a_data_set_saved_to_disk(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(str(tmp_path / "one"), num_shards=3)
    (tmp_path / "one" / "cache-123.arrow").write_bytes(b"left by a map")
    files = find_files("one", tmp_path, "data.train")
    assert [file.name for file in files] == [f"data-0000{i}-of-00003.arrow" for i in range(3)]
    assert values(*files) == ROWS
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(InputError, match=r"holds several splits\n.*\nhint: name one of them: `two/train`, `two/test`"):
        find_files("two", tmp_path, "data.train")
    assert values(*find_files("two/test", tmp_path, "data.train")) == ROWS
