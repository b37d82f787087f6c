"""Data doctor: every fault counted and placed in the sentences of training, mappings proposed from the rows and checked, rows sifted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pentamesh import cli
from pentamesh.errors import InputError
from pentamesh.job.job import Data
from pentamesh.job.read import read_job_text
from pentamesh.run.data import doctor as doctor_module
from pentamesh.run.data import lines
from pentamesh.run.data.forms import checked_rows, form_of
from pentamesh.run.data.problems import Problems
from pentamesh.run.examine import examine
from tests.run import toy

USER, ANSWER = {"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sees the dog"}
GOOD = {"messages": [USER, ANSWER]}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(*rows: Any, name: str = "rows.jsonl") -> str:
    Path(name).write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return name


def faults(found: dict[str, Any]) -> list[tuple[str, int, list[tuple[str, str]]]]:
    return [(f["what"], f["num_rows"], [(s["where"], s["field"]) for s in f["places"]]) for f in found["faults"]]


def talk(*said: tuple[str, str], role: str = "speaker", content: str = "text") -> list[dict[str, str]]:
    return [{role: who, content: what} for who, what in said]


def test_faults_are_counted_by_kind_with_their_first_places() -> None:
    robot = {"messages": [{"role": "robot", "content": "x"}, ANSWER]}
    late = {"messages": [USER, {"role": "robot", "content": "x"}, ANSWER]}
    found = examine(write(GOOD, robot, late, "{", *[{"messages": 3}] * 7, GOOD))
    assert (found["num_rows"], found["num_in_order"], found["is_well"]) == (12, 2, False)
    assert faults(found) == [
        ("`messages` is a number, not a list", 7, [(f"rows.jsonl:{n}", "messages") for n in range(5, 10)]),
        ("`messages[0].role` is 'robot'", 2, [("rows.jsonl:2", "messages[0].role"), ("rows.jsonl:3", "messages[1].role")]),
        ("not JSON: Expecting property name enclosed in double quotes at byte 1", 1, [("rows.jsonl:4", "")]),
    ]


def test_sentences_are_those_of_training() -> None:
    name = write(GOOD, {"messages": [USER]}, {"messages": []}, {"text": "x"}, {"messages": [{"role": "user", "content": None}, ANSWER]})
    with pytest.raises(InputError) as raised, Problems() as problems:
        list(checked_rows((Path(name),), "messages", problems))
    assert {(p.what, p.hint) for p in raised.value.problems} == {(f["what"], f["hint"]) for f in examine(name)["faults"]}


def test_repeated_rows_are_counted_exactly_and_but_for_case_and_white_space() -> None:
    shouted = {"messages": [{"role": "user", "content": " The\n CAT"}, ANSWER]}
    found = examine(write(GOOD, GOOD, shouted, shouted, {"messages": [USER, {"role": "assistant", "content": "runs"}]}))
    assert found["repeated"] == {"exact": 2, "but_for_case_and_white_space": 1}
    assert found["is_well"]


PROPOSALS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "known spellings": (
        [{"dialog": talk(("customer", "hi"), ("agent", "hello"))}],
        {"columns": {"messages": "dialog", "role": "speaker", "content": "text"}, "roles": {"customer": "user", "agent": "assistant"}},
    ),
    "roles that alternate": (
        [{"messages": talk(("Ann", "hi"), ("Bo", "hello"), role="role", content="content")}],
        {"roles": {"Ann": "user", "Bo": "assistant"}},
    ),
    "the one who is left": (
        [{"messages": talk(("Zed", "hello"), ("user", "hi"), ("Zed", "well"), role="role", content="content")}],
        {"roles": {"Zed": "assistant"}},
    ),
    "a slip in a role": (
        [{"messages": talk(("user", "hi"), ("asistant", "hello"), role="role", content="content")}],
        {"roles": {"asistant": "assistant"}},
    ),
    "keys by structure": (
        [{"log": [{"by": who, "line": f"{who} says {n}"} for n in range(20) for who in ("user", "assistant")]}],
        {"columns": {"messages": "log", "role": "by", "content": "line"}},
    ),
    "sharegpt under another name": (
        [{"chat": talk(("human", "hi"), ("gpt", "hello"), role="from", content="value")}],
        {"columns": {"conversations": "chat"}},
    ),
    "messages in conversations": ([{"conversations": [USER, ANSWER]}], {"columns": {"messages": "conversations"}}),
    "sharegpt in messages": (
        [{"messages": talk(("human", "hi"), ("gpt", "hello"), role="from", content="value")}],
        {"columns": {"conversations": "messages"}},
    ),
    "questions and answers": ([{"Question": "why", "Answer": "so"}], {"columns": {"instruction": "Question", "output": "Answer"}}),
    "a question with a context": (
        [{"question": "why", "context": "rain", "response": "so"}],
        {"columns": {"instruction": "question", "input": "context", "output": "response"}},
    ),
    "a slip in a key": ([{"instuction": "why", "output": "so"}], {"columns": {"instruction": "instuction"}}),
    "one text": ([{"id": 1, "story": "long ago"}], {"columns": {"text": "story"}}),
    "ids": ([{"tokens": [1, 2, 3]}], {"columns": {"input_ids": "tokens"}}),
    "mixed schemas": (
        [{"dialog": talk(("customer", "hi"), ("agent", "hello"))}] * 3 + [{"text": "x"}],
        {"columns": {"messages": "dialog", "role": "speaker", "content": "text"}, "roles": {"customer": "user", "agent": "assistant"}},
    ),
    "the first row is torn": (["{", {"story": "long ago"}], {"form": "text", "columns": {"text": "story"}}),
}


@pytest.mark.parametrize("case", PROPOSALS)
def test_proposals_are_yaml_that_trains(case: str) -> None:
    """What is proposed is read as a job, and reads as many rows as it says."""
    rows, wanted = PROPOSALS[case]
    found = examine(write(*rows))
    job, _ = read_job_text(f"model: llama-3.1-8b\n{found['proposal']['yaml']}")
    assert job.data == Data(**wanted)
    form = form_of((Path("rows.jsonl"),), job.data.form, job.data.columns)
    assert len(list(checked_rows((Path("rows.jsonl"),), form, Problems(), data=job.data))) == found["proposal"]["num_in_order"] > 0


@pytest.mark.parametrize(
    "rows",
    [
        [{"messages": talk(("r1", "hi"), ("r2", "hello"), ("r3", "well"), role="role", content="content")}],
        [{"prompt": "why", "chosen": "so", "rejected": "no"}],
        [{"a": 1, "b": 2.5}],
        [{"messages": [USER]}],
        ["3", "[]"],
    ],
    ids=["roles that mean nothing", "preferences", "numbers", "no answer", "no objects"],
)
def test_nothing_is_proposed_that_reads_no_more_rows(rows: list[Any]) -> None:
    found = examine(write(*rows))
    assert not found["is_well"]
    assert found["proposal"] is None


def test_sifted_rows_are_as_they_were_read_each_once_and_others_say_why() -> None:
    odd = {"dialog": talk(("customer", "caf\u00e9 \ud800"), ("agent", "x"))}
    rows = [{"dialog": talk(("customer", f"caf\u00e9 {n % 2}"), ("agent", "x")), "id": 1} for n in range(4)]
    found = examine(write(*rows, odd, "{"), out=Path("out"))
    clean = Path("out/clean.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line) for line in clean.splitlines()] == rows[:2]
    assert "caf\u00e9" in clean
    rejected = [json.loads(line) for line in Path("out/rejected.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(r["where"], len(r["why"]), r.get("row")) for r in rejected] == [("rows.jsonl:5", 1, odd), ("rows.jsonl:6", 1, None)]
    assert "half of a surrogate pair" in rejected[0]["why"][0]
    assert (found["written"]["num_clean"], found["written"]["num_rejected"], found["written"]["repeated"]) == (2, 2, 2)
    assert sorted(os.listdir("out")) == ["clean.jsonl", "rejected.jsonl"]
    again = examine("out/clean.jsonl")
    assert again["proposal"]["num_in_order"] == 2


def test_nothing_is_written_over_and_nothing_is_left_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    name = write(GOOD)
    examine(name, out=Path("out"))
    before = Path("out/clean.jsonl").read_bytes()
    with pytest.raises(InputError, match="is there already"):
        examine(write(GOOD, GOOD), out=Path("out"))
    with pytest.raises(InputError, match="among the files that are read"):
        examine("out/clean.jsonl", out=Path("out"), force=True)
    assert Path("out/clean.jsonl").read_bytes() == before
    examine(write({"messages": 3}), out=Path("out"), force=True)
    assert Path("out/clean.jsonl").read_bytes() == b""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pentamesh.run.data.sift._line", full)
    with pytest.raises(OSError, match="No space"):
        examine(write(GOOD), out=Path("new"))
    assert not Path("new").exists()


def test_kinds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "MAX_KINDS", 3)
    found = examine(write(*({"messages": [{"role": f"r{n}", "content": "x"}]} for n in range(9))))
    assert [n for _, n, _ in faults(found)] == [6, 1, 1, 1]
    assert faults(found)[0][0] == "faults of other kinds"


def test_a_job_is_judged_by_its_template_and_its_lengths(tmp_path: Path) -> None:
    job = toy.job(tmp_path, data__held_out=None, training__evaluate_every=None, batch__seq_len=64)
    silent = {"messages": [USER, {**ANSWER, "train": False}]}
    write(GOOD, {"messages": [USER, {"role": "assistant", "content": "the dog runs " * 9}]}, silent)
    found = examine(str(job))
    assert (found["num_in_order"], found["lengths"]["exceed"]["num_rows"], found["lengths"]["seq_len"]) == (3, 1, 64)
    assert found["lengths"]["exceed"]["places"][0]["where"].endswith("rows.jsonl:2")
    assert found["nothing_to_train"]["num_rows"] == 1
    assert not found["is_well"]
    assert examine(str(job), ["data.too_long=split"])["is_well"]
    examine(str(job), out=Path("out"))
    assert json.loads(Path("out/rejected.jsonl").read_text().splitlines()[0])["why"] == [f"{found['lengths']['max']} tokens, and batch.seq_len = 64"]
    (tmp_path / "model/chat_template.jinja").write_text("{{ raise_exception('no') }}")
    refused = examine(str(job))
    assert refused["num_in_order"] == 0
    assert "the chat template refuses the conversation" in refused["faults"][0]["what"]
    (tmp_path / "model/chat_template.jinja").unlink()
    without = examine(str(job))
    assert "the model has no chat template" in without["faults"][0]["what"]
    assert without["num_in_order"] == 3
    (tmp_path / "model/tokenizer.json").unlink()
    (tmp_path / "model/tokenizer_config.json").unlink()
    assert "no tokenizer can be read" in examine(str(job))["without_model"]


def test_several_sources_and_held_out_rows_are_judged_each_in_its_form(tmp_path: Path) -> None:
    """Held-out rows have the form of all training rows, and are neither counted as repeated nor written."""
    write({"text": "long ago"}, name="old.jsonl")
    write(GOOD, GOOD, {"messages": 3}, name="new.jsonl")
    job = tmp_path / "job.yaml"
    job.write_text("model: absent/model\ndata: {train: [{rows: old.jsonl}, {rows: new.jsonl, weight: 2}]}\n")
    found = examine(str(job))
    assert [(source["name"], source["form"]) for source in found["sources"]] == [("old.jsonl", "text"), ("new.jsonl", "messages")]
    assert (
        faults(found) == [("`messages` is a number, not a list", 1, [(str(tmp_path / "new.jsonl") + ":3", "messages")])] or faults(found)[0][1] == 1
    )
    job.write_text("model: absent/model\ndata: {train: new.jsonl, held_out: old.jsonl}\n")
    found = examine(str(job), out=Path("out"))
    assert "it looks like the text form" in found["faults"][0]["hint"] + found["faults"][1]["hint"]
    assert (found["repeated"]["exact"], found["written"]["num_clean"], found["written"]["num_rejected"]) == (1, 1, 1)


def absent(_: Path) -> None: ...


def unwritable(folder: Path) -> None:
    write(GOOD)
    (folder / "out").write_text("a file")


def content(data: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / "rows.jsonl").write_bytes(data)


LINE = json.dumps(GOOD).encode() + b"\n"
# What is done, more arguments, the exit code, and what is said.
HOSTILE: dict[str, tuple[Callable[[Path], Any], list[str], int, str]] = {
    "file not found": (absent, [], 2, "no file 'rows.jsonl'"),
    "empty file": (content(b""), [], 2, "the file has no rows"),
    "blank lines": (content(b"\n \n"), [], 2, "the file has no rows"),
    "one row": (content(LINE), [], 0, "1 of 1 rows"),
    "a mark before the text": (content(b"\xef\xbb\xbf" + LINE), [], 0, "1 of 1 rows"),
    "another encoding": (content(LINE + "caf\u00e9".encode("latin1") + b"\n"), [], 2, "is not UTF-8"),
    "no row in order": (content(b"{\n3\n"), [], 2, "0 of 2 rows"),
    "a null": (content(LINE + b"null\n"), [], 2, "the row is null, not an object"),
    "lists in lists": (content(b"[" * 100_000 + b"\n" + LINE), [], 2, "JSON that cannot be read"),
    "a huge row": (content(LINE + b'{"text": "' + b"x" * 5_000 + b'"}\n' + LINE), [], 2, "the row is longer than"),
    "columns of numbers": (lambda folder: (folder / "rows.csv").write_bytes(b"a,b\n1,2\n3,4\n"), ["rows.csv"], 2, "its keys: a, b"),
    "no kind of rows": (lambda folder: (folder / "rows.xlsx").write_bytes(b"x"), ["rows.xlsx"], 2, "none of the kinds that are read"),
    "a folder without rows": (lambda folder: (folder / "rows").mkdir(), ["rows"], 2, "a folder without files of rows"),
    "a glob of nothing": (absent, ["*.jsonl"], 2, "no file '*.jsonl'"),
    "no name": (absent, [""], 2, "the name of the data is empty"),
    "a folder that is a file": (unwritable, ["rows.jsonl", "--out", "out"], 2, "out is no folder"),
    "a key of no job": (content(LINE), ["rows.jsonl", "--set", "data.form=text"], 2, "no job file"),
    "a job that is none": (lambda folder: (folder / "job.yaml").write_text("- 1"), ["job.yaml"], 2, "holds a list"),
    "a job without data": (lambda folder: (folder / "job.yaml").write_text("model: llama-3.1-8b"), ["job.yaml"], 2, "no training data"),
    "letters that move the cursor": (content(b'{"messages": [{"role": "\\u001b[31m", "content": "x"}]}\n'), [], 2, "\\x1b[31m"),
    "names with NUL": (content(b'{"\\u0000": "x", "messages": 1}\n'), [], 2, "`messages` is a number"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_data_through_the_command_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, arguments, code, said = HOSTILE[case]
    spoil(tmp_path)
    if case == "a huge row":
        monkeypatch.setattr(lines, "MAX_ROW_BYTES", 1_000)
    monkeypatch.setattr(sys, "argv", ["pentamesh", "data", "doctor", *(arguments or ["rows.jsonl"])])
    with pytest.raises(SystemExit) as left:
        cli.main()
    shown = capsys.readouterr()
    assert left.value.code == code
    assert said in shown.out + shown.err
    assert "\x1b" not in shown.out + shown.err
    assert not list(tmp_path.glob("**/*.partial"))
