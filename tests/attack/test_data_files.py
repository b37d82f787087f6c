"""Data that cannot be trained on: one clear error with file and place, exit code 2, no traceback and nothing left behind."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import ipc

from pentamesh import cli
from pentamesh.errors import InputError
from pentamesh.job.read import read_job
from pentamesh.run.asked import located
from pentamesh.run.data import lines
from pentamesh.run.data.prepare import prepare
from pentamesh.run.source import tokenizer_of
from tests.run import toy

GOOD = {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sees the dog"}]}
LINE = json.dumps(GOOD).encode() + b"\n"
SHEET = b"instruction,output\nthe cat,sees the dog\n"
SILENT = "{% for m in messages %}{% if m['role'] != 'assistant' %}{{ m['content'] }}{% endif %}{% endfor %}"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('system turns are not supported') }}{% endif %}" + toy.CHATML


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.model_folder(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def job(tmp_path: Path, model: Path) -> Path:
    """A job on rows.jsonl, with a copy of the model's tokenizer that a test may spoil."""
    (tmp_path / "model").mkdir()
    for file in model.iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "rows.jsonl").write_bytes(LINE * 3)
    return toy.job(tmp_path, data__held_out=None, training__evaluate_every=None)


def content(data: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / "rows.jsonl").write_bytes(data)


def template(text: str, *more: dict[str, Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / "model/chat_template.jinja").write_text(text)
        (folder / "rows.jsonl").write_bytes(LINE + b"".join(json.dumps(row).encode() + b"\n" for row in more))

    return spoil


def parquet(*values: dict[str, Any], cut: int | None = None) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(list(values), schema=None if values else pa.schema([("messages", pa.string())])), path)
        path.write_bytes(path.read_bytes()[:cut])

    return spoil


def far_future(folder: Path) -> None:
    rows = pa.table({"messages": [GOOD["messages"]] * 2, "at": pa.array([0, 9 * 10**15], pa.timestamp("s"))})
    pq.write_table(rows, folder / "rows.parquet")


def absent_template(folder: Path) -> None:
    (folder / "model/chat_template.jinja").unlink()


def write(name: str, data: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(data)


def saved(state: bytes) -> Callable[[Path], None]:
    """A folder that `datasets` has saved, with another state."""

    def spoil(folder: Path) -> None:
        (folder / "rows").mkdir()
        (folder / "rows/dataset_info.json").write_text("{}")
        (folder / "rows/state.json").write_bytes(state)

    return spoil


def arrow(values: list[dict[str, Any]], kind: pa.DataType | None = None, cut: int | None = None) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        table = pa.Table.from_pylist(values, schema=kind and pa.schema([("messages", kind)]))
        with ipc.new_file(str(folder / "rows.feather"), table.schema) as writer:
            writer.write_table(table)
        (folder / "rows.feather").write_bytes((folder / "rows.feather").read_bytes()[:cut])

    return spoil


def lying_offsets(folder: Path) -> None:
    """Text of which the second row begins far outside of the file."""
    offsets = pa.py_buffer(struct.pack("<4i", 0, 1, 2**30, 3))
    column = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"abc")])
    batch = pa.RecordBatch.from_arrays([column], ["text"])
    with ipc.new_stream(str(folder / "rows.arrow"), batch.schema) as writer:
        writer.write_batch(batch)


def column_twice(folder: Path) -> None:
    table = pa.table([pa.array(["x"]), pa.array(["y"])], names=["messages", "messages"])
    with ipc.new_file(str(folder / "rows.feather"), table.schema) as writer:
        writer.write_table(table)


def nowhere(folder: Path) -> None:
    table = pa.table({"text": ["x"], "at": pa.array([1], pa.timestamp("s", "Nowhere/City"))})
    with ipc.new_file(str(folder / "rows.feather"), table.schema) as writer:
        writer.write_table(table)


def row(**value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


USER, ANSWER = GOOD["messages"]
CALLING = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}


def turns(*said: dict[str, Any], **more: Any) -> Callable[[Path], Any]:
    """A good row, and one of these turns."""
    return content(LINE + row(messages=list(said), **more))


# What is done to the folder, overrides, the place that is named, and what is said of it.
CASES: dict[str, tuple[Callable[[Path], Any], list[str], str, str]] = {
    "truncated line": (content(LINE + LINE[:40]), [], "rows.jsonl:2", "not JSON"),
    "a key that is twice": (
        content(LINE + b'{"messages": [{"role": "user", "content": "q", "content": "z"}]}\n'),
        [],
        "rows.jsonl:2",
        "`content` is twice in one object",
    ),
    "a key that is twice in an array": (
        write("rows.json", b"[" + LINE + b',{"text": "x", "text": "y"}]'),
        ["data.train=rows.json"],
        "rows.json[1]",
        "`text` is twice in one object",
    ),
    "a key that is twice in the first of lines": (
        write("rows.json", b'{"text": "x", "text": "y"}\n' + LINE),
        ["data.train=rows.json"],
        "rows.json:1",
        "`text` is twice in one object",
    ),
    "a key that is twice in the only object": (
        write("rows.json", b'{"text": "x",\n"text": "y"}\n'),
        ["data.train=rows.json"],
        "rows.json",
        "`text` is twice in one object",
    ),
    "wrong type": (content(LINE + row(messages="x")), [], "rows.jsonl:2", "`messages` is a string, not a list"),
    "wrong type of a content": (content(row(messages=[{"role": "user", "content": 3}])), [], "rows.jsonl:1", "`messages[0].content` is a number"),
    "empty file": (content(b""), [], "rows.jsonl", "the file has no rows"),
    "blank file": (content(b"\xef\xbb\xbf\r\n \n"), [], "rows.jsonl", "the file has no rows"),
    "one of two files is empty": (lambda folder: (folder / "rows2.jsonl").touch(), ["data.train=rows*.jsonl"], "rows2.jsonl", "the file has no rows"),
    "parquet without rows": (parquet(), ["data.train=rows.parquet"], "rows.parquet", "the file has no rows"),
    "parquet without the column": (parquet({"other": 1}), ["data.train=rows.parquet"], "rows.parquet[0]", "no `messages` in the row"),
    "parquet with a null": (parquet(GOOD, {"messages": None}), ["data.train=rows.parquet"], "rows.parquet[1]", "`messages` is null"),
    "date beyond the calendar": (far_future, ["data.train=rows.parquet"], "rows.parquet, after 0 rows", "a value cannot be read"),
    "corrupt parquet": (parquet(GOOD, cut=60), ["data.train=rows.parquet"], "rows.parquet", "not a whole Parquet file"),
    "parquet by name only": (
        lambda folder: (folder / "rows.jsonl").rename(folder / "rows.parquet"),
        ["data.train=rows.parquet"],
        "rows.parquet",
        "not a whole Parquet file",
    ),
    "array cut short": (
        lambda folder: (folder / "rows.json").write_bytes(b"[" + LINE + b"," + LINE[:30]),
        ["data.train=rows.json"],
        "rows.json[1]",
        "not a whole JSON array",
    ),
    "missing template": (absent_template, [], "model.name", "the model has no chat template"),
    "template that raises": (template("{{ 1 / 0 }}"), [], "rows.jsonl:1", "ZeroDivisionError"),
    "template that is nested too deeply": (
        template("{% if true %}" * 1000 + toy.CHATML + "{% endif %}" * 1000),
        [],
        "rows.jsonl:1",
        "the chat template is nested too deeply",
    ),
    "role unknown to the template": (
        template(NO_SYSTEM, {"messages": [{"role": "system", "content": "x"}, *GOOD["messages"]]}),
        [],
        "rows.jsonl:2",
        "system turns are not supported",
    ),
    "role unknown to all": (
        content(LINE + row(messages=[{"role": "narrator", "content": "x"}])),
        [],
        "rows.jsonl:2",
        "`messages[0].role` is 'narrator'",
    ),
    "template that drops the answers": (template(SILENT), [], "rows.jsonl:1", "renders messages[1] differently"),
    "nothing trained": (content(LINE + row(messages=GOOD["messages"][:1])), [], "rows.jsonl:2", "no assistant turn: nothing to train"),
    "invalid UTF-8": (content(LINE + b'{"messages": "\xe9"}\n'), [], "rows.jsonl:2", "byte 14 (0xe9) is not UTF-8"),
    "UTF-16": (content(LINE.decode().encode("utf-16")), [], "rows.jsonl:1", "it looks like UTF-16"),
    "gzip": (content(b"\x1f\x8b\x08\x00" + bytes(20)), [], "rows.jsonl:1", "it looks like gzip: let its name end in .gz"),
    "link to nothing": (
        lambda folder: (folder / "link.jsonl").symlink_to("/nowhere/rows.jsonl"),
        ["data.train=link.jsonl"],
        "data.train",
        "no file '/nowhere/rows.jsonl'",
    ),
    "link to itself": (
        lambda folder: (folder / "link.jsonl").symlink_to("link.jsonl"),
        ["data.train=link.jsonl"],
        "data.train",
        "link.jsonl is a link to link.jsonl, which is not there",
    ),
    "folder": (lambda folder: (folder / "rows").mkdir(), ["data.train=rows"], "data.train", "is a folder without files of rows"),
    "folder named like a file": (
        lambda folder: (folder / "d.jsonl").mkdir(),
        ["data.train=d.jsonl"],
        "data.train",
        "is a folder without files of rows",
    ),
    "glob without a match": (lambda folder: None, ['data.train="*.ndjson"'], "data.train", "*.ndjson': looked for"),
    "glob of folders": (lambda folder: (folder / "d.ndjson").mkdir(), ['data.train="*.ndjson"'], "data.train", "*.ndjson': looked for"),
    "another kind of file": (lambda folder: (folder / "rows.pkl").touch(), ["data.train=rows.pkl"], "data.train", "none of the kinds that are read"),
    "mixture of forms": (content(LINE + row(instruction="x", output="y")), [], "rows.jsonl:2", "it looks like the alpaca form"),
    "no form": (content(row(question="x", answer="y")), [], "rows.jsonl:1", "no `messages` in the row; its keys: question, answer"),
    "another form than asked": (lambda folder: None, ["data.form=sharegpt"], "rows.jsonl:1", "it looks like the messages form"),
    "gigantic line": (content(LINE + b'{"messages": "' + b"x" * 5000 + b'"}\n'), [], "rows.jsonl:2", "the row is longer than 4 kB"),
    "deep nesting": (content(LINE + b"[" * 3000 + b"\n"), [], "rows.jsonl:2", "JSON"),
    "number of thousands of digits": (content(LINE + b'{"messages": ' + b"9" * 3900 + b"}\n"), [], "rows.jsonl:2", "messages` is a number"),
    "tools that the template does not show": (
        turns(USER, ANSWER, tools=[{"name": "look"}]),
        [],
        "rows.jsonl:2",
        "the chat template does not show `tools`",
    ),
    "tools as Python prints them": (turns(USER, ANSWER, tools="[{'name': 'look'}]"), [], "rows.jsonl:2", "`tools` is text that is not JSON"),
    "a call that the template does not show": (turns(USER, CALLING, ANSWER), [], "rows.jsonl:2", "does not show `messages[1].tool_calls[0]`"),
    "arguments that are no object": (
        turns(USER, {**CALLING, "tool_calls": [{"function": {"name": "look", "arguments": "[1]"}}]}, ANSWER),
        [],
        "rows.jsonl:2",
        "`messages[1].tool_calls[0].arguments` is a list, not an object",
    ),
    "thoughts that the template does not show": (
        turns(USER, {**ANSWER, "reasoning_content": "a cat, a dog"}),
        [],
        "rows.jsonl:2",
        "does not show `messages[1].reasoning_content`",
    ),
    "half a weight": (turns(USER, {**ANSWER, "weight": 0.5}), [], "rows.jsonl:2", "`messages[1].weight` is 0.5"),
    "a mark that is text": (turns(USER, {**ANSWER, "train": "no"}), [], "rows.jsonl:2", "`messages[1].train` is a string"),
    "a column that is not there": (lambda folder: None, ["data.columns={messages: dialog}"], "rows.jsonl:1", "no `dialog` in the row"),
    "a column of turns that is not there": (
        content(row(messages=[ANSWER])),
        ["data.columns={role: who}"],
        "rows.jsonl:1",
        "`messages[0]` has no `who`",
    ),
    "a role that is none by the job": (lambda folder: None, ["data.train_on=[system]"], "rows.jsonl:1", "no system turn: nothing to train"),
    "a system turn for text": (content(row(text="the cat")), ["data.system=x"], "rows.jsonl:1", "data.system is given, and the row has no turns"),
    "a system turn that the template refuses": (template(NO_SYSTEM), ["data.system=x"], "rows.jsonl:1", "system turns are not supported"),
    "labels that are shifted": (
        content(row(input_ids=[5, 6, 7], labels=[6, 7, -100])),
        [],
        "rows.jsonl:1",
        "`labels[0]` is 6 and `input_ids[0]` 5: a label is its own token, not the next one",
    ),
    "labels too short": (content(row(input_ids=[5, 6, 7], labels=[5])), [], "rows.jsonl:1", "`labels` has 1 entries and `input_ids` 3"),
    "a mask with a hole": (
        content(row(input_ids=[5, 6, 7], attention_mask=[1, 0, 1])),
        [],
        "rows.jsonl:1",
        "`attention_mask[1]` is 0 between tokens",
    ),
    "ids in batches": (content(row(input_ids=[[5, 6], [7, 8]])), [], "rows.jsonl:1", "`input_ids[0]` is a list, not a whole number"),
    "negative ids": (content(row(input_ids=[5, -100])), [], "rows.jsonl:1", "`input_ids[1]` is -100: an id is at least 0"),
    "sheet without a balance of quotes": (
        write("rows.csv", SHEET + b'"the cat sees,y\n' + SHEET * 3),
        ["data.train=rows.csv"],
        "rows.csv:3",
        "not CSV: unexpected end of data",
    ),
    "quote inside a quoted cell": (write("rows.csv", SHEET + b'"say "hi" now",y\n'), ["data.train=rows.csv"], "rows.csv:3", "expected after"),
    "sheet with an empty header": (write("rows.csv", b",,\n1,2,3\n"), ["data.train=rows.csv"], "rows.csv:1", "the first line names no column"),
    "sheet without rows": (write("rows.csv", b"instruction,output\n"), ["data.train=rows.csv"], "rows.csv", "the file has no rows"),
    "sheet that is empty": (write("rows.csv", b""), ["data.train=rows.csv"], "rows.csv", "the file has no rows"),
    "sheet with one name twice": (
        write("rows.csv", b"output,instruction,output\n1,2,3\n"),
        ["data.train=rows.csv"],
        "rows.csv:1",
        "the first line names `output` twice",
    ),
    "sheet with a short row": (write("rows.csv", SHEET + b"x\n"), ["data.train=rows.csv"], "rows.csv:3", "the row has 1 cells"),
    "sheet with a long row": (write("rows.csv", SHEET + b"x,y,z\n"), ["data.train=rows.csv"], "rows.csv:3", "the row has 3 cells"),
    "sheet of semicolons": (
        write("rows.csv", SHEET.replace(b",", b";")),
        ["data.train=rows.csv"],
        "rows.csv:1",
        "it looks like semicolons: separate by commas",
    ),
    "tabs under the name of commas": (
        write("rows.csv", SHEET.replace(b",", b"\t")),
        ["data.train=rows.csv"],
        "rows.csv:1",
        "it looks like tabs: let its name end in .tsv",
    ),
    "sheet in Latin-1": (write("rows.csv", SHEET + b"caf\xe9,y\n"), ["data.train=rows.csv"], "rows.csv:3", "byte 3 (0xe9) is not UTF-8"),
    "sheet in UTF-16": (
        write("rows.csv", SHEET.decode().encode("utf-16")),
        ["data.train=rows.csv"],
        "rows.csv:1",
        "it looks like UTF-16: convert it to UTF-8 text",
    ),
    "sheet with a gigantic cell": (write("rows.csv", SHEET + b"x" * 5000 + b",y\n"), ["data.train=rows.csv"], "rows.csv:3", "the row is longer than"),
    "sheet with Python's spelling of turns": (
        write("rows.csv", b"messages\n\"[{'role': 'user', 'content': 'x'}]\"\n"),
        ["data.train=rows.csv"],
        "rows.csv:2",
        "`messages` is not the JSON text of a list: Expecting property name",
    ),
    "sheet with an object for turns": (write("rows.csv", b"messages\n{}\n"), ["data.train=rows.csv"], "rows.csv:2", "it is another value"),
    "sheet with an empty cell for turns": (
        write("rows.csv", b"messages,id\n,2\n"),
        ["data.train=rows.csv"],
        "rows.csv:2",
        "`messages` is null, not a list",
    ),
    "gzip cut short": (
        write("rows.jsonl.gz", gzip.compress(LINE * 3)[:-12]),
        ["data.train=rows.jsonl.gz"],
        "rows.jsonl.gz, after 1 rows",
        "not a whole gzip file: Compressed file ended",
    ),
    "gzip with bytes changed": (
        write("rows.jsonl.gz", gzip.compress(LINE * 3)[:-8] + bytes(8)),
        ["data.train=rows.jsonl.gz"],
        "rows.jsonl.gz, after ",
        "not a whole gzip file: CRC check failed",
    ),
    "gzip by name only": (
        write("rows.jsonl.gz", LINE),
        ["data.train=rows.jsonl.gz"],
        "rows.jsonl.gz, after 0 rows",
        "not a whole gzip file: Not a gzipped file",
    ),
    "bzip2 by name only": (
        write("rows.txt.bz2", LINE),
        ["data.train=rows.txt.bz2"],
        "rows.txt.bz2, after 0 rows",
        "not a whole bzip2 file: Invalid data stream",
    ),
    "xz cut short": (
        write("rows.json.xz", lzma.compress(LINE)[:-20]),
        ["data.train=rows.json.xz"],
        "rows.json.xz, after 0 rows",
        "not a whole xz file: Compressed file ended",
    ),
    "Zstandard cut short": (
        write("rows.csv.zst", pa.compress(SHEET * 9, "zstd", asbytes=True)[:-3]),
        ["data.train=rows.csv.zst"],
        "rows.csv.zst, after 0 rows",
        "not a whole Zstandard file",
    ),
    "Zstandard under a plain name": (
        content(pa.compress(LINE, "zstd", asbytes=True)),
        [],
        "rows.jsonl:1",
        "it looks like Zstandard: let its name end in .zst",
    ),
    "compressed Parquet": (
        lambda folder: (folder / "rows.parquet.gz").touch(),
        ["data.train=rows.parquet.gz"],
        "data.train",
        "none of the kinds that are read",
    ),
    "folder of other files": (
        lambda folder: [(folder / "rows").mkdir(), (folder / "rows/a.pkl").touch()],
        ["data.train=rows"],
        "data.train",
        "is a folder without files of rows",
    ),
    "folder of folders": (
        lambda folder: (folder / "rows/inner").mkdir(parents=True),
        ["data.train=rows"],
        "data.train",
        "or a glob: `rows/**/*.jsonl`",
    ),
    "saved data set without its files": (saved(b'{"_data_files": [{"filename": "gone.arrow"}]}'), ["data.train=rows"], "data.train", "gone.arrow"),
    "saved data set with a torn state": (saved(b'{"_data_files": '), ["data.train=rows"], "data.train", "state.json cannot be read"),
    "saved data set with another state": (saved(b"[]"), ["data.train=rows"], "data.train", "state.json cannot be read"),
    "Arrow by name only": (write("rows.arrow", LINE), ["data.train=rows.arrow"], "rows.arrow", "not a whole Arrow file"),
    "empty Arrow file": (write("rows.arrow", b""), ["data.train=rows.arrow"], "rows.arrow", "not a whole Arrow file"),
    "Arrow file cut short": (arrow([GOOD], cut=-30), ["data.train=rows.feather"], "rows.feather", "not a whole Arrow file"),
    "Arrow file with offsets that lie": (lying_offsets, ["data.train=rows.arrow"], "rows.arrow", "not a whole Arrow file"),
    "turns as a map": (
        arrow([{"messages": [("role", "user")]}], pa.map_(pa.string(), pa.string())),
        ["data.train=rows.feather"],
        "rows.feather[0]",
        "`messages[0]` is of the type tuple, not an object",
    ),
    "turns as a structure of lists": (
        arrow([{"messages": {"role": ["user"], "content": ["x"]}}]),
        ["data.train=rows.feather"],
        "rows.feather[0]",
        "`messages` is an object, not a list",
    ),
    "bytes as a content": (
        arrow([{"messages": [{"role": "user", "content": b"x"}]}]),
        ["data.train=rows.feather"],
        "rows.feather[0]",
        "`messages[0].content` is of the type bytes",
    ),
    "column twice": (column_twice, ["data.train=rows.feather"], "rows.feather, after 0 rows", "several columns are called messages"),
    "time zone that nobody knows": (nowhere, ["data.train=rows.feather"], "rows.feather, after 0 rows", "a value cannot be read"),
    "list with an empty source": (
        write("empty.jsonl", b""),
        ["data.train=[{rows: rows.jsonl}, {rows: empty.jsonl}]"],
        "empty.jsonl",
        "the file has no rows",
    ),
    "list with a source that is not there": (
        lambda folder: None,
        ["data.train=[{rows: rows.jsonl}, {rows: gone.csv}]"],
        "data.train[1]",
        "no file",
    ),
    "the same file twice": (
        lambda folder: (folder / "link.jsonl").symlink_to("rows.jsonl"),
        ["data.train=[{rows: rows.jsonl}, {rows: link.jsonl}]"],
        "data.train[1]",
        "is named by data.train[0] already",
    ),
    "a folder and a file of it": (
        write("rows.csv", SHEET),
        ["data.train=[{rows: rows.csv}, {rows: '*.csv'}]"],
        "data.train[1]",
        "rows.csv is named by data.train[0] already",
    ),
    "source of another form than it says": (
        write("rows.csv", SHEET),
        ["data.train=[{rows: rows.jsonl}, {rows: rows.csv, form: text}]"],
        "rows.csv:2",
        "no `text` in the row",
    ),
    "source with a split of files": (
        lambda folder: None,
        ["data.train=[{rows: rows.jsonl, split: train}]"],
        "data.train[0].split",
        "which is no hub data set",
    ),
    "hub data without a network": (
        lambda folder: None,
        ["data.train=nobody/nothing"],
        "data.train",
        "neither a file here nor data that the hub gives",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_clear_error(job: Path, case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, overrides, where, what = CASES[case]
    spoil(job.parent)
    monkeypatch.setattr(lines, "MAX_ROW_BYTES", 4000)
    before = {path: path.stat().st_mtime_ns for path in job.parent.rglob("*") if path.exists()}
    monkeypatch.setattr(sys, "argv", ["pentamesh", "data", "preview", str(job), *(f"--set={override}" for override in overrides)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "")
    assert said.err.count("error:") == 1, said.err
    assert "Traceback" not in said.err
    assert what in said.err
    assert where in said.err
    asked, _ = read_job(job, overrides)
    asked = located(asked, job.parent, job.stem)
    with pytest.raises(InputError) as error:
        prepare(asked, tokenizer_of(job.parent / "model"), Path(), job.parent / "prepared")
    assert where in str(error.value)
    assert {path: path.stat().st_mtime_ns for path in job.parent.rglob("*") if path.exists()} == before


def test_rows_that_are_too_long_leave_nothing_behind(job: Path) -> None:
    asked = located(read_job(job, ["batch.seq_len=4"])[0], job.parent, job.stem)
    with pytest.raises(InputError, match=r"rows are longer than batch.seq_len = 4(.|\n)*rows\.jsonl:1"):
        prepare(asked, tokenizer_of(job.parent / "model"), Path(), job.parent / "prepared")
    assert list(job.parent.glob("prepared*")) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(job: Path) -> None:
    (job.parent / "rows.jsonl").chmod(0)
    with pytest.raises(InputError, match="cannot be read: Permission denied"):
        prepare(located(read_job(job)[0], job.parent, job.stem), tokenizer_of(job.parent / "model"), Path(), job.parent / "prepared")


def test_windows_line_ends_and_byte_order_marks_are_no_fault(job: Path) -> None:
    found = {}
    for name, data in (("unix", LINE * 3), ("windows", b"\xef\xbb\xbf" + (LINE * 3).replace(b"\n", b"\r\n")), ("no end", (LINE * 3).rstrip())):
        (job.parent / "rows.jsonl").write_bytes(data)
        asked = located(read_job(job)[0], job.parent, job.stem)
        found[name] = prepare(asked, tokenizer_of(job.parent / "model"), Path(), job.parent / "prepared").train_digest
    assert len(set(found.values())) == 1
