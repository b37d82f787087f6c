"""The preview: what is measured of the rows, and how it looks."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pentamesh import cli
from pentamesh.errors import InputError
from pentamesh.job.job import Job
from pentamesh.report.page import page
from pentamesh.report.preview import preview, totals
from pentamesh.run.data.preview import collect
from tests.run import toy


def job(seq_len: int = 64, **data: Any) -> Job:
    return Job.model_validate({"model": {"name": "x"}, "data": {"train": "train.jsonl"} | data, "batch": {"seq_len": seq_len}})


def shown(found: dict[str, Any], **console: Any) -> str:
    file = io.StringIO()
    Console(file=file, width=120, **console).print(preview(found))
    return file.getvalue()


@pytest.fixture
def talks(write_rows: Any, talk: Any) -> list[Any]:
    rows = [{"messages": talk("hello", "fine thanks", "how are you", "bye now")}, *({"messages": talk("how", "fine" + " now" * i)} for i in range(9))]
    write_rows(rows)
    return rows


def test_pieces_are_the_row_and_trained_pieces_the_turns(chatml: Any, talks: list[Any], tmp_path: Path) -> None:
    data = collect(job(), chatml, tmp_path)
    assert [row.where for row in data.rows] == [f"{tmp_path}/train.jsonl:{i}" for i in (1, 2, 3)]
    first = data.rows[0]
    assert "".join(piece.text for piece in first.pieces) == chatml.apply_chat_template(talks[0]["messages"], tokenize=False)
    assert [(p.text, p.num_tokens) for p in first.pieces if p.trained] == [("fine thanks<|im_end|>", 4), ("bye now<|im_end|>", 4)]
    assert (first.num_tokens, first.num_trained) == (34, 8)


def test_counts_and_lengths_are_of_all_rows(chatml: Any, talks: list[Any], tmp_path: Path) -> None:
    data = collect(job(seq_len=24), chatml, tmp_path)
    # A short row has 12 tokens up to its answer: 2 of "fine", i of "now", the end of turn and a newline make 16 + i, of which 15 + i are read.
    assert data.lengths.min == 14
    assert data.lengths.max == 34
    assert data.lengths.median == 18
    assert data.num_tokens == 34 + sum(14 + i for i in range(9))
    assert data.num_trained == 8 + sum(3 + i for i in range(9))
    assert data.num_too_long == 1
    assert sum(count for _, _, count in data.lengths.bins) == data.num_measured == 10
    assert data.all_measured


def test_padding_is_of_what_is_computed_at_once(write_rows: Any, chatml: Any, tmp_path: Path) -> None:
    """Six rows of 14 + i tokens, two computed at once, the longest first; packs of 40 hold 19 + 18, 17 + 16 and 15 + 14."""
    from tests.run.data.conftest import conversation

    write_rows([{"messages": conversation("how", "fine" + " now" * i)} for i in range(6)])
    asked = job(seq_len=40)
    data = collect(asked.model_copy(update={"batch": asked.batch.model_copy(update={"micro_batch": 2, "global_batch": 6})}), chatml, tmp_path)
    tokens = sum(14 + i for i in range(6))
    assert data.padding.num_packed == 3
    assert data.padding.alone == pytest.approx(1 - tokens / (2 * (19 + 17 + 15)))
    assert data.padding.packed == pytest.approx(1 - tokens / (2 * 37 + 29))
    assert "padding    3% of what is computed; with packing 4%, in 3 rows" in shown(data.to_json())


def test_large_data_is_measured_in_part_and_says_so(chatml: Any, talks: list[Any], tmp_path: Path) -> None:
    data = collect(job(), chatml, tmp_path, max_measured=4)
    assert (data.num_measured, data.all_measured) == (4, False)
    assert "in the first 4 rows" in shown(data.to_json())


def test_faults_are_told_as_in_training(chatml: Any, write_rows: Any, tmp_path: Path) -> None:
    write_rows([{"messages": []}])
    with pytest.raises(InputError, match="`messages` is empty"):
        collect(job(), chatml, tmp_path)


def test_trained_tokens_are_marked_with_and_without_colour(chatml: Any, talks: list[Any], tmp_path: Path) -> None:
    found = json.loads(json.dumps(collect(job(seq_len=24), chatml, tmp_path).to_json()))
    plain = shown(found, no_color=True)
    assert "⟦fine thanks<|im_end|>⟧" in plain
    assert "34 tokens, 8 trained (by turn: 4, 4)" in plain
    assert "min 14, median 18, 95% 34, max 34 tokens" in plain
    assert "1 rows exceed seq_len 24 (training stops: set batch.seq_len: 34 or data.too_long)" in plain
    assert "\x1b[" not in shown(found, force_terminal=False)
    coloured = shown(found, force_terminal=True, no_color=False, color_system="truecolor", _environ={})
    assert "\x1b[1;32m⟦fine thanks<|im_end|>⟧" in coloured


def test_markup_in_the_data_is_text(chatml: Any, write_rows: Any, talk: Any, tmp_path: Path) -> None:
    write_rows([{"messages": talk("[bold]how[/bold]", "[red]fine[/nothing] \x1b[31m")}])
    text = shown(collect(job(), chatml, tmp_path).to_json(), no_color=True)
    assert "[bold]how[/bold]" in text
    assert "⟦[red]fine[/nothing] \\x1b[31m" in text


def test_text_rows_are_cut_and_not_too_long(chatml: Any, write_rows: Any, tmp_path: Path) -> None:
    write_rows([{"text": "how are you " * 30}])
    data = collect(job(seq_len=8), chatml, tmp_path)
    assert data.num_too_long == 0
    assert "documents are cut to seq_len 8" in shown(data.to_json())


def test_rows_that_are_dropped_or_repeated_are_counted(chatml: Any, write_rows: Any, talk: Any, tmp_path: Path) -> None:
    held, long = {"messages": talk("how", "bye")}, {"messages": talk("how", "fine" + " now" * 40)}
    silent = {"messages": [{**turn, "train": False} for turn in talk("how", "fine")]}
    shouted = {"messages": talk("HOW ", "fine")}
    good = {"messages": talk("how", "fine")}
    write_rows([held], "held.jsonl")
    write_rows([held, long, silent, good, good, shouted])
    data = collect(job(seq_len=24, held_out="held.jsonl", too_long="drop"), chatml, tmp_path).to_json()
    assert data["version"] == 3
    assert data["dropped"] == {"equal_to_held_out": 1, "too_long": 1, "nothing_to_train": 1}
    assert data["repeated"] == {"exact": 1, "but_for_case_and_white_space": 1}
    text = shown(data)
    assert "dropped    1 rows: equal to held out, 1 rows: nothing to train, 1 rows: too long" in text
    assert "repeated   1 rows exactly, 1 more but for case and white space" in text
    assert "too long" not in shown(collect(job(seq_len=24), chatml, tmp_path).to_json()).partition("dropped")[2].partition("\n")[0]


def test_the_page_stands_alone_and_shows_whatever_rows_say_as_text(chatml: Any, write_rows: Any, talk: Any, tmp_path: Path) -> None:
    write_rows([{"messages": talk("<script>alert(1)</script>", "</pre><img src=x onerror='go()'> \x1b[31m")}])
    found = collect(job(), chatml, tmp_path).to_json()
    html = page(found | {"rows": [found["rows"][0] | {"where": "<b>.jsonl:1"}]})
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<mark>&lt;/pre&gt;&lt;img src=x onerror=&#x27;go()&#x27;&gt; \\x1b[31m&lt;|im_end|&gt;</mark>" in html
    assert "&lt;b&gt;.jsonl:1" in html
    assert [part for part in ("<script", "<img", "<b>", "http://", "https://", "<link", 'src="') if part in html] == []
    for name, said in totals(found):
        assert f"<th>{name}</th>" in html
        assert said in html


@pytest.mark.parametrize(("name", "code", "said"), [("rows.html", 0, "written rows.html"), ("job.yaml", 2, "does not end in .html")])
def test_a_page_is_written_beside_what_is_shown(
    name: str, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = toy.job(tmp_path).read_bytes()
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["pentamesh", "data", "preview", "job.yaml", "--json", "--html", name])
    with pytest.raises(SystemExit) as left:
        cli.main()
    shown = capsys.readouterr()
    assert (left.value.code or 0, said in shown.err) == (code, True)
    assert Path("job.yaml").read_bytes() == written
    if code == 0:
        assert json.loads(shown.out)["schema"] == "pentamesh.data_preview"
        assert Path(name).read_text(encoding="utf-8").startswith("<!doctype html>")
