"""Kinds of files beside JSON lines: arrays decoded element by element, Parquet in batches, and rows beyond any use."""

from __future__ import annotations

import datetime
import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentamesh.errors import InputError, Problem
from pentamesh.run.data import arrays, lines
from pentamesh.run.data.arrays import Cut, elements
from pentamesh.run.data.forms import checked_rows, form_of
from pentamesh.run.data.rows import Problems, Row, read_rows

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def told(path: Path, form: Any = "messages") -> str:
    with pytest.raises(InputError) as error, Problems() as problems:
        list(checked_rows((path,), form, problems))
    return str(error.value)


def found(path: Path) -> list[Any]:
    return [row.value if isinstance(row, Row) else row for row in read_rows((path,))]


@given(st.lists(JSON, max_size=6), st.integers(1, 7), st.sampled_from([None, 1, 2]), st.booleans())
def test_the_elements_of_an_array_whatever_the_chunks(values: list[Any], chunk: int, indent: int | None, escaped: bool) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(arrays, "CHUNK_BYTES", chunk)
        found = [json.loads(element.decode("utf-8", "surrogatepass")) for element in elements(io.BytesIO(b"\xef\xbb\xbf " + text + b"\n"), 10**6)]
    assert found == values


@pytest.mark.parametrize(
    ("text", "index", "why"),
    [
        ('[{"a": 1}, {"a": ', 1, "ends inside an element"),
        ('[{"a": 1}, {"a": "x', 1, "ends inside an element"),
        ('[{"a": 1}', 0, "ends inside an element"),
        ('[{"a": 1},', 1, "does not end"),
        ("[", 0, "does not end"),
        ('[{"a": 1}] [2]', 1, "text follows its end"),
    ],
)
def test_an_array_that_is_not_whole_names_the_row(tmp_path: Path, text: str, index: int, why: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    last = list(read_rows((path,)))[-1]
    assert isinstance(last, Problem)
    assert why in last.what
    assert last.where == f"{path}[{index}]"


@pytest.mark.parametrize("text", ["[1,,2]", "[1,]", "[,1]", "[{]}", '[{"a": 1} {"a": 2}]'])
def test_an_element_that_is_no_json_is_a_problem_of_its_row(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    problems = [row for row in read_rows((path,)) if isinstance(row, Problem)]
    assert problems
    assert all(problem.where.startswith(f"{path}[") for problem in problems)


def test_a_single_object_over_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"text": "x"}, indent=2))
    assert found(path) == [{"text": "x"}]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.parquet"])
def test_memory_does_not_grow_with_the_rows(tmp_path: Path, name: str) -> None:
    def peak(num_rows: int) -> int:
        path = tmp_path / name
        values = [{"text": f"{i} " + "hello there " * 40} for i in range(num_rows)]
        if name == "a.parquet":
            pq.write_table(pa.Table.from_pylist(values), path, row_group_size=500)
        else:
            path.write_text(json.dumps(values) if name == "a.json" else "".join(json.dumps(value) + "\n" for value in values))
        del values
        tracemalloc.start()
        assert sum(1 for _ in read_rows((path,))) == num_rows
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return highest

    peak(1000)
    assert peak(40_000) < max(4e6, 1.2 * peak(10_000))


def test_a_gigantic_line_is_named_and_the_lines_after_it_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_ROW_BYTES", 100)
    monkeypatch.setattr(lines, "CHUNK_BYTES", 7)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": "' + "x" * 1000 + '"}\r\n{"text": "b"}\n')
    first, second, third = read_rows((path,))
    assert isinstance(first, Row)
    assert isinstance(third, Row)
    assert isinstance(second, Problem)
    assert (second.what, second.where) == ("the row is longer than 100 B", f"{path}:2")
    assert third == Row(f"{path}:3", {"text": "b"})


def test_a_gigantic_element_and_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_ROW_BYTES", 100)
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 16)
    (tmp_path / "a.json").write_text(json.dumps([{"text": "a"}, {"text": "x" * 1000}]))
    (tmp_path / "a.txt").write_text("x" * 1000)
    assert f"{tmp_path}/a.json[1]" in told(tmp_path / "a.json", "text")
    assert "the file is one document and longer than 100 B" in told(tmp_path / "a.txt", "text")


def test_elements_stop_at_the_limit() -> None:
    with pytest.raises(Cut) as cut:
        list(elements(io.BytesIO(b'["' + b"x" * 3_000_000 + b'"]'), 2_000_000))
    assert cut.value.too_long


# Parquet.


def parquet(path: Path, values: list[dict[str, Any]], **schema: Any) -> Path:
    pq.write_table(pa.Table.from_pylist(values, **schema), path, row_group_size=2)
    return path


TALK = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "fine", "name": "x"}]


def test_parquet_rows_are_those_that_were_written(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", [{"messages": TALK, "id": i} for i in range(5)])
    assert form_of((path,), "auto") == "messages"
    with Problems() as problems:
        samples = list(checked_rows((path,), "messages", problems))
    assert [sample.where for sample in samples] == [f"{path}[{i}]" for i in range(5)]
    # A column has one kind of turn: `name` is there for both, and null for the first. Templates ask whether it is there.
    assert all(sample.content.messages == TALK for sample in samples)  # type: ignore[union-attr]


SCHEMA = pa.schema([("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))])
BAD_PARQUET = [
    ([], {"schema": SCHEMA}, "the file has no rows", ""),
    ([{"other": 1}, {"other": 2}], {}, "no `messages` in the row; its keys: other", "[0], "),
    ([{"messages": TALK}, {"messages": None}], {"schema": SCHEMA}, "`messages` is null, not a list", "[1]"),
    ([{"messages": TALK}, {"messages": [{"role": "assistant", "content": None}]}], {"schema": SCHEMA}, "`messages[0]` has no `content`", "[1]"),
    ([{"messages": datetime.date(2026, 1, 1)}], {}, "`messages` is of the type date, not a list", "[0]"),
    ([{"messages": b"x"}], {}, "`messages` is of the type bytes, not a list", "[0]"),
]


@pytest.mark.parametrize(("values", "schema", "what", "at"), BAD_PARQUET)
def test_what_is_wrong_with_parquet_rows(tmp_path: Path, values: list[Any], schema: dict[str, Any], what: str, at: str) -> None:
    path = parquet(tmp_path / "a.parquet", values, **schema)
    message = told(path)
    assert what in message
    assert f"{path}{at}" in message
    assert message.count("error:") == 1


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_corrupt_parquet_file(tmp_path: Path, cut: int) -> None:
    path = parquet(tmp_path / "a.parquet", [{"text": "hello " * 50}] * 6)
    path.write_bytes(path.read_bytes()[:cut])
    message = told(path, "text")
    assert "not a whole Parquet file" in message
    assert str(path) in message
    assert message.count("error:") == 1


def test_a_parquet_file_with_a_torn_page(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", [{"text": f"{i} hello"} for i in range(6)])
    content = bytearray(path.read_bytes())
    content[4:40] = b"\xff" * 36
    path.write_bytes(bytes(content))
    assert "not a whole Parquet file" in told(path, "text")
