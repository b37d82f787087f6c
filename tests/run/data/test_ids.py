"""Rows of token ids, and rows that are cut into pieces: what is a target, index by index, and what is wrong with others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pentamesh.errors import InputError
from pentamesh.job.job import Data, Job
from pentamesh.run.data.encode import encoder
from pentamesh.run.data.forms import Sample, checked_rows, form_of
from pentamesh.run.data.ids import Ids
from pentamesh.run.data.prepare import prepare
from pentamesh.run.data.preview import collect
from pentamesh.run.data.rows import Problems
from pentamesh.run.data.tokens import Encoded


def job(seq_len: int, **data: Any) -> Job:
    return Job.model_validate({"model": {"name": "x"}, "data": {"train": "train.jsonl"} | data, "batch": {"seq_len": seq_len}})


def read(path: Path, **data: Any) -> list[Any]:
    asked = Data.model_validate(data)
    with Problems() as problems:
        form = form_of((path,), "auto", asked.columns)
        return [sample.content for sample in checked_rows((path,), form, problems, data=asked)]


N = -100
# What the job says, a row, its tokens, and which of them are trained.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[int], list[int]]] = {
    "ids alone": ({}, {"input_ids": [5, 6, 7]}, [5, 6, 7], [1, 1, 1]),
    "labels": ({}, {"input_ids": [5, 6, 7, 8], "labels": [N, N, 7, 8]}, [5, 6, 7, 8], [0, 0, 1, 1]),
    "nothing is trained": ({}, {"input_ids": [5, 6], "labels": [N, N]}, [5, 6], [0, 0]),
    "padding behind": ({}, {"input_ids": [5, 6, 0, 0], "labels": [N, 6, N, N], "attention_mask": [1, 1, 0, 0]}, [5, 6], [0, 1]),
    "padding before": ({}, {"input_ids": [0, 0, 5, 6], "attention_mask": [0, 0, 1, 1]}, [5, 6], [1, 1]),
    "labels under padding": ({}, {"input_ids": [5, 6, 0], "labels": [5, 6, 9], "attention_mask": [1, 1, 0]}, [5, 6], [1, 1]),
    "a mask that keeps all": ({}, {"input_ids": [5, 6], "attention_mask": [1, 1]}, [5, 6], [1, 1]),
    "fields that are null": ({}, {"input_ids": [5, 6], "labels": None, "attention_mask": None, "loss_mask": None}, [5, 6], [1, 1]),
    "the end of text is an id like any": ({}, {"input_ids": [5, 2, 2], "labels": [N, 2, N]}, [5, 2, 2], [0, 1, 0]),
    "messages beside them": ({}, {"input_ids": [5, 6], "messages": [{"role": "user", "content": "x"}], "text": "x"}, [5, 6], [1, 1]),
    "other names": (
        {"columns": {"input_ids": "tokens", "labels": "targets"}},
        {"tokens": [5, 6, 7], "targets": [N, N, 7], "labels": "x"},
        [5, 6, 7],
        [0, 0, 1],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_ids_are_trained_as_their_labels_say(styled: Any, write_rows: Any, case: str) -> None:
    data, row, ids, trained = CASES[case]
    (content,) = read(write_rows([row]), **data)
    assert content == Ids(ids, [bool(t) for t in trained])
    found = encoder(styled("chatml", None), "tokens")(Sample("here", content))  # no template is needed
    assert isinstance(found, Encoded)
    assert (found.ids.tolist(), found.trained.astype(int).tolist()) == (ids, trained)


def test_ids_of_parquet(tmp_path: Path) -> None:
    table = {"input_ids": [[5, 6], [7, 8, 9]], "labels": [[N, 6], None], "attention_mask": pa.array([[1, 1], [1, 1, 0]], pa.list_(pa.int8()))}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    assert read(tmp_path / "rows.parquet") == [Ids([5, 6], [False, True]), Ids([7, 8], [True, True])]


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "ids that are text": ({"input_ids": "5 6 7"}, "`input_ids` is a string, not a list of whole numbers"),
    "ids that are null": ({"input_ids": None}, "`input_ids` is null, not a list"),
    "no ids": ({"input_ids": []}, "`input_ids` is empty"),
    "ids in a list of lists": ({"input_ids": [[5, 6]]}, "`input_ids[0]` is a list, not a whole number"),
    "ids that are floats": ({"input_ids": [5, 6.0]}, "`input_ids[1]` is 6.0, not a whole number"),
    "ids that are words": ({"input_ids": [5, "the"]}, "`input_ids[1]` is a string, not a whole number"),
    "ids that are true": ({"input_ids": [5, True]}, "`input_ids[1]` is a boolean, not a whole number"),
    "a null among ids": ({"input_ids": [5, None]}, "`input_ids[1]` is null, not a whole number"),
    "a negative id": ({"input_ids": [5, -1]}, "`input_ids[1]` is -1: an id is at least 0"),
    "the ignored label as an id": ({"input_ids": [5, -100]}, "`input_ids[1]` is -100"),
    "an id beyond 32 bits": ({"input_ids": [5, 2**31]}, "`input_ids[1]` is 2147483648: an id is at least 0 and below 2^31"),
    "labels too short": ({"input_ids": [5, 6, 7], "labels": [5, 6]}, "`labels` has 2 entries and `input_ids` 3"),
    "a mask too long": ({"input_ids": [5], "attention_mask": [1, 1]}, "`attention_mask` has 2 entries and `input_ids` 1"),
    "labels that are shifted": (
        {"input_ids": [5, 6, 7], "labels": [6, 7, N]},
        "`labels[0]` is 6 and `input_ids[0]` 5: a label is its own token, not the",
    ),
    "labels that are 0 or 1": ({"input_ids": [5, 6], "labels": [0, 1]}, "`labels[0]` is 0 and `input_ids[0]` 5"),
    "labels that are text": ({"input_ids": [5], "labels": "x"}, "`labels` is a string"),
    "a mask that is text": ({"input_ids": [5], "attention_mask": ["1"]}, "`attention_mask[0]` is a string, not a whole number"),
    "a mask of other numbers": ({"input_ids": [5, 6], "attention_mask": [1, 2]}, "`attention_mask[1]` is 2, neither 0 nor 1"),
    "a mask with a hole": ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, "`attention_mask[1]` is 0 between tokens"),
    "nothing but padding": ({"input_ids": [0, 0], "attention_mask": [0, 0]}, "`attention_mask` has no 1: all of the row is padding"),
    **{
        f"what is trained under the name {name}": (
            {"input_ids": [5, 6], name: [0, 1]},
            f"`{name}` is not read: write `labels`, each its own token where it is trained and -100 where not",
        )
        for name in ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")
    },
    "a mask beside labels": ({"input_ids": [5, 6], "labels": [N, 6], "loss_mask": [0, 1]}, "take `loss_mask` out"),
    "positions": ({"input_ids": [5, 6], "position_ids": [0, 0]}, "`position_ids` are not read: positions count from 0 in each row"),
    "tools beside ids": ({"input_ids": [5], "tools": [{"name": "f"}]}, "`tools` are given, and the row has no turns"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_wrong_is_named_with_its_row_and_field(write_rows: Any, case: str) -> None:
    row, expected = HOSTILE[case]
    path = write_rows([row])
    with pytest.raises(InputError) as error:
        read(path)
    assert expected in str(error.value)
    assert f"where  {path}:1" in str(error.value)
    assert str(error.value).count("error:") == 1


def test_an_id_that_the_model_has_not_is_refused(write_rows: Any, tmp_path: Path, chatml: Any) -> None:
    write_rows([{"input_ids": [5, 6, 900]}])
    samples = prepare(job(8), chatml, tmp_path, tmp_path / "data").train
    with pytest.raises(InputError, match="900"):
        samples.within(600, "x")


def test_a_row_is_split_into_pieces_that_follow_each_other(write_rows: Any, tmp_path: Path, chatml: Any) -> None:
    """Every trained token but the first of a row is a target once; a piece without one is no sample, and is counted."""
    ids = list(range(10, 23))  # the pieces: 10..14, 14..18, 18..22
    labels = [token if token in (13, 14, 18, 19) else N for token in ids]
    write_rows([{"input_ids": ids}, {"input_ids": ids, "labels": labels}, {"input_ids": ids, "labels": [N] * 9 + ids[9:]}, {"input_ids": ids[:5]}])
    with (tmp_path / "train.jsonl").open("a") as rows:  # the first token of a piece is a target of the one before
        rows.write(json.dumps({"input_ids": ids, "labels": [token if token == 14 else N for token in ids]}) + "\n")
    prepared = prepare(job(4, too_long="split"), chatml, tmp_path, tmp_path / "data")
    found = [(tokens.tolist(), tokens[1:][trained[1:]].tolist()) for tokens, trained in map(prepared.train.sample, range(len(prepared.train)))]
    assert found == [
        ([10, 11, 12, 13, 14], [11, 12, 13, 14]),
        ([14, 15, 16, 17, 18], [15, 16, 17, 18]),
        ([18, 19, 20, 21, 22], [19, 20, 21, 22]),
        ([10, 11, 12, 13, 14], [13, 14]),
        ([14, 15, 16, 17, 18], [18]),
        ([18, 19, 20, 21, 22], [19]),
        ([18, 19, 20, 21, 22], [19, 20, 21, 22]),
        ([10, 11, 12, 13, 14], [11, 12, 13, 14]),
        ([10, 11, 12, 13, 14], [14]),
    ]
    split = prepared.report["splits"]["train"]
    assert (split["rows"], split["samples"], split["split"], split["untrained_pieces"], split["dropped"]) == (5, 9, 4, 4, {})
    assert split["trained_tokens"] == sum(len(targets) for _, targets in found) == 25
    assert (split["tokens"], split["longest"]) == (36, 4)


def test_a_conversation_is_split_and_a_preview_says_so(write_rows: Any, tmp_path: Path, chatml: Any, talk: Any) -> None:
    write_rows([{"messages": talk("hello", "fine thanks", "how are you", "bye now")}])
    whole = prepare(job(64), chatml, tmp_path, tmp_path / "whole").train
    pieces = prepare(job(10, too_long="split"), chatml, tmp_path, tmp_path / "pieces").train
    assert sum(1 for _ in range(len(pieces))) == 3
    assert pieces.num_trained == whole.num_trained == 8
    shown = collect(job(10, too_long="split"), chatml, tmp_path)
    assert (shown.num_too_long, shown.too_long) == (1, "split")


def test_other_ways_stay_as_they_are_for_ids(write_rows: Any, tmp_path: Path, chatml: Any) -> None:
    write_rows([{"input_ids": list(range(20))}, {"input_ids": [1, 2, 3]}])
    with pytest.raises(InputError, match=r"1 rows are longer than batch.seq_len = 4(.|\n)*drop, truncate or split"):
        prepare(job(4), chatml, tmp_path, tmp_path / "data")
    assert len(prepare(job(4, too_long="drop"), chatml, tmp_path, tmp_path / "data").train) == 1
    assert prepare(job(4, too_long="truncate"), chatml, tmp_path, tmp_path / "data").train.lengths.tolist() == [4, 2]
