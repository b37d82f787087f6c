"""Files and rows: what is read, and that every fault is named by file, row and field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pentamesh.errors import InputError, Problem
from pentamesh.run.data.forms import checked_rows, form_of
from pentamesh.run.data.places import find_files
from pentamesh.run.data.problems import MAX_PROBLEMS, Problems
from pentamesh.run.data.rows import Row, read_rows

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def told(path: Path, form: Any = "messages") -> str:
    with pytest.raises(InputError) as error, Problems() as problems:
        list(checked_rows((path,), form, problems))
    return str(error.value)


def written(tmp_path: Path, data: bytes | str, name: str = "rows.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def values(path: Path) -> list[Any]:
    return [row.value for row in read_rows((path,)) if isinstance(row, Row)]


def test_jsonl_json_array_and_text_are_read(tmp_path: Path) -> None:
    assert values(written(tmp_path, '{"a": 1}\n\n{"a": 2}\r\n{"a": 3}')) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert values(written(tmp_path, '\n[{"a": 1},\n {"a": 2}]', "a.json")) == [{"a": 1}, {"a": 2}]
    assert values(written(tmp_path, '{"a": 1}\n{"a": 2}\n', "lines.json")) == [{"a": 1}, {"a": 2}]
    assert values(written(tmp_path, "one\ntwo\n", "a.txt")) == [{"text": "one\ntwo\n"}]


def test_rows_say_where_they_stand(tmp_path: Path) -> None:
    lines, array = written(tmp_path, "{}\n\n{}\n"), written(tmp_path, "[{}, {}]", "a.json")
    assert [row.where for row in read_rows((lines, array)) if isinstance(row, Row)] == [f"{lines}:1", f"{lines}:3", f"{array}[0]", f"{array}[1]"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
def test_a_byte_order_mark_is_accepted(tmp_path: Path, name: str) -> None:
    row = {"text": "x"}
    content = {"a.jsonl": json.dumps(row), "a.json": json.dumps([row]), "a.txt": "x"}[name]
    assert values(written(tmp_path, b"\xef\xbb\xbf" + content.encode(), name)) == [row]


def test_line_separators_inside_strings_do_not_end_a_row(tmp_path: Path) -> None:
    assert values(written(tmp_path, '{"text": "a\u2028b\u0085c"}\n')) == [{"text": "a\u2028b\u0085c"}]


def test_jsonl_is_streamed(tmp_path: Path) -> None:
    """The first row is there before the rest is read: what follows it is not even JSON."""
    rows = read_rows((written(tmp_path, json.dumps(GOOD) + "\n" + "x" * 10_000_000),))
    assert isinstance(next(rows), Row)


MESSAGES = [
    ('{"messages": [', r"not JSON: .* at byte 14"),
    ('{"é": }', r"not JSON: Expecting value at byte 7"),  # é has two bytes
    ("[" * 100_000, r"JSON that cannot be read|not JSON"),
    ('{"a": ' + "9" * 5000 + "}", r"JSON that cannot be read"),
    (b'{"a": "\xff"}', r"byte 7 \(0xff\) is not UTF-8"),
    ("[1, 2]", r"the row is a list, not an object"),
    ("null", r"the row is null"),
    ('{"message": []}', r"no `messages` in the row; its keys: message\n.*\nhint: did you mean 'message'"),
    ("{}", r"its keys: none"),
    ('{"messages": null}', r"`messages` is null, not a list"),
    ('{"messages": {"role": "user"}}', r"`messages` is an object, not a list"),
    ('{"messages": []}', r"`messages` is empty"),
    ('{"messages": ["hi"]}', r"`messages\[0\]` is a string, not an object"),
    ('{"messages": [{"content": "x"}]}', r"`messages\[0\]` has no `role`"),
    ('{"messages": [{"from": "human", "value": "x"}]}', r"`messages\[0\]` has no `role`(.|\n)*sharegpt"),
    ('{"messages": [{"role": "asistant", "content": "x"}]}', r"`messages\[0\].role` is 'asistant'(.|\n)*did you mean 'assistant'"),
    ('{"messages": [{"role": "human", "content": "x"}]}', r"did you mean 'user'"),
    ('{"messages": [{"role": 3, "content": "x"}]}', r"`messages\[0\].role` is 3"),
    ('{"messages": [{"role": "tool", "content": "x"}]}', r"no assistant turn: nothing to train"),
    ('{"messages": [{"role": "narrator", "content": "x"}]}', r"roles: system, user, assistant, tool.*data\.roles says what others mean"),
    ('{"messages": [{"role": ["user"], "content": "x"}]}', r"`messages\[0\].role` is \['user'\]"),
    ('{"messages": [{"role": "assistant"}]}', r"`messages\[0\]` has no `content`"),
    ('{"messages": [{"role": "assistant", "content": null}]}', r"`messages\[0\].content` is null, not a string"),
    ('{"messages": [{"role": "assistant", "content": ["x"]}]}', r"`messages\[0\].content` is a list, not a string"),
    ('{"messages": [{"role": "assistant", "content": 1.5}]}', r"`messages\[0\].content` is a number"),
    ('{"messages": [{"role": "assistant", "content": true}]}', r"`messages\[0\].content` is a boolean"),
    ('{"messages": [{"role": "assistant", "content": " \\n"}]}', r"`messages\[0\].content` is empty"),
    ('{"messages": [{"role": "assistant", "content": "\\ud83d"}]}', r"half of a surrogate pair at character 0"),
    ('{"messages": [{"role": "user", "content": "x"}]}', r"no assistant turn: nothing to train"),
    ('{"instruction": "x", "output": "y"}', r"no `messages` in the row(.|\n)*it looks like the alpaca form: .* here messages"),
    ('{"conversations": []}', r"it looks like the sharegpt form"),
    ('{"prompt": "x", "completion": "y"}', r"it looks like the prompt_completion form"),
    ('{"text": "x"}', r"it looks like the text form"),
    ('{"prompt": [], "chosen": "x"}', r"rows of the preference form: that form comes later(.|\n)*set data.form"),
    ('{"input_ids": [1]}', r"it looks like the tokens form"),
]


@pytest.mark.parametrize(("line", "expected"), MESSAGES)
def test_each_fault_is_named_with_its_row(tmp_path: Path, line: str | bytes, expected: str) -> None:
    first = json.dumps(GOOD).encode() + b"\n"
    path = written(tmp_path, first + (line if isinstance(line, bytes) else line.encode()) + b"\n" + first)
    message = told(path)
    assert re.search(expected, message), message
    assert f"{path}:2" in message
    assert message.count("error:") == 1


TEXTS = [('{"text": 3}', "`text` is a number"), ('{"text": null}', "`text` is null"), ('{"text": " "}', "`text` is empty"), ('{"txt": "a"}', "'txt'")]


@pytest.mark.parametrize(("line", "expected"), TEXTS)
def test_faults_of_text_rows(tmp_path: Path, line: str, expected: str) -> None:
    assert expected in told(written(tmp_path, line), "text")


@pytest.mark.parametrize(("name", "data"), [("a.jsonl", b""), ("a.jsonl", b"\n \n"), ("a.json", b""), ("a.json", b"[]"), ("a.txt", b" \n")])
def test_a_file_without_rows(tmp_path: Path, name: str, data: bytes) -> None:
    assert "the file has no rows" in told(written(tmp_path, data, name))


@pytest.mark.parametrize(("data", "kind"), [("a".encode("utf-16"), "UTF-16"), (b"\x1f\x8b\x08", "gzip")])
def test_known_encodings_are_called_by_name(tmp_path: Path, data: bytes, kind: str) -> None:
    assert f"it looks like {kind}" in told(written(tmp_path, data, "a.json"))


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, json.dumps(GOOD))

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    assert f"cannot be read: Permission denied\n  where  {path}" in told(path)


def test_the_same_fault_is_told_once_with_its_places(tmp_path: Path) -> None:
    path = written(tmp_path, '{"messages": []}\n' * 4000)
    message = told(path)
    assert message.count("error:") == 1
    assert f"{path}:1, {path}:2, {path}:3, {path}:4, {path}:5 and 3,995 more" in message


def test_different_faults_are_told_at_once_up_to_a_limit(tmp_path: Path) -> None:
    lines = [json.dumps({f"key{i}": 1}) for i in range(MAX_PROBLEMS + 5)]
    message = told(written(tmp_path, "\n".join(lines)))
    assert message.count("error: no `messages`") == MAX_PROBLEMS
    assert f"at least 1 more problem, at {tmp_path / 'rows.jsonl'}:{MAX_PROBLEMS + 1}" in message


def test_the_form_is_found_from_the_first_row(tmp_path: Path) -> None:
    assert form_of((written(tmp_path, json.dumps(GOOD)),), "auto") == "messages"
    assert form_of((written(tmp_path, '{"text": "x"}'),), "auto") == "text"
    assert form_of((written(tmp_path, "x", "a.txt"),), "auto") == "text"
    assert form_of((written(tmp_path, '{"conversations": []}'),), "auto") == "sharegpt"
    with pytest.raises(InputError, match=r"no `messages` in the row; its keys: question"):
        form_of((written(tmp_path, '{"question": "x"}'),), "auto")
    with pytest.raises(InputError, match="preference"):
        form_of((written(tmp_path, '{"conversations": [], "chosen": {}}'),), "auto")
    with pytest.raises(InputError, match="not JSON"):
        form_of((written(tmp_path, "{"),), "auto")


def test_globs_are_sorted_and_relative_to_the_job(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        written(tmp_path, "{}", name)
    assert [f.name for f in find_files("*.jsonl", tmp_path, "data.train")] == ["a.jsonl", "b.jsonl"]
    assert [f.name for f in find_files("**/*.jsonl", tmp_path, "data.train")] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    written(tmp_path, "{}", "odd[1].jsonl")
    assert [f.name for f in find_files("odd[1].jsonl", tmp_path, "data.train")] == ["odd[1].jsonl"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("trian.jsonl", r"looked for .*trian.jsonl\n.*data.train\nhint: did you mean train.jsonl"),
        ("no/train.jsonl", r"there is no folder .*no"),
        ("*.json", r"no file '\*.json'"),
        ("sub", r"is a folder without files of rows\n.*\nhint: kinds that are read: .jsonl"),
        ("x.rst", r"none of the kinds that are read: .jsonl"),
        ("dangling.jsonl", r"is a link to gone.jsonl, which is not there"),
        ("loop.jsonl", r"is a link to loop.jsonl, which is not there"),
    ],
)
def test_files_that_are_not_there_say_where_was_looked(tmp_path: Path, pattern: str, expected: str) -> None:
    written(tmp_path, "{}", "train.jsonl")
    written(tmp_path, "{}", "x.rst")
    (tmp_path / "dangling.jsonl").symlink_to("gone.jsonl")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    (tmp_path / "sub").mkdir()
    with pytest.raises(InputError, match=expected):
        find_files(pattern, tmp_path, "data.train")


def test_problems_do_not_hide_another_error() -> None:
    def fail() -> None:
        with Problems() as problems:
            problems.add(Problem("x", "y"))
            raise KeyError("z")

    with pytest.raises(KeyError):
        fail()
