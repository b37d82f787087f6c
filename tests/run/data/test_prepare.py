"""Prepared once, mapped by all: what is in the samples, what was dropped and why, and when it is made again."""

from __future__ import annotations

import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pentamesh.errors import InputError
from pentamesh.job.job import Job
from pentamesh.run.data import prepare as module
from pentamesh.run.data.batches import held_out_batches
from pentamesh.run.data.chat import encode_chat
from pentamesh.run.data.prepare import prepare
from pentamesh.run.data.samples import Samples, open_prepared
from pentamesh.run.data.source import source
from pentamesh.run.data.split import survey
from pentamesh.run.data.tokens import Encoded, windows


def job(seq_len: int = 64, seed: int = 0, **data: Any) -> Job:
    return Job.model_validate(
        {"model": {"name": "x"}, "data": {"train": "train.jsonl"} | data, "batch": {"seq_len": seq_len}, "training": {"seed": seed}}
    )


def rows_of(samples: Samples | None) -> list[list[int]]:
    return [samples.sample(i)[0].tolist() for i in range(len(samples))] if samples else []


@pytest.fixture
def made(tmp_path: Path, chatml: Any) -> Any:
    """Prepare a job in the test's folder."""
    return lambda asked, tokenizer=chatml: prepare(asked, tokenizer, tmp_path, tmp_path / "prepared")


@pytest.fixture
def chats(talk: Any) -> Any:
    """Different conversations, each with an answer of one more word than the last."""
    return lambda n: [{"messages": talk(f"how {i}", " fine" * (i + 1))} for i in range(n)]


def test_a_conversation_is_a_sample_with_its_targets(made: Any, chats: Any, write_rows: Any, chatml: Any) -> None:
    rows = chats(5)
    write_rows(rows)
    prepared = made(job())
    for i, row in enumerate(rows):
        tokens, trained = prepared.train.sample(i)
        encoded = encode_chat(chatml, row["messages"])
        assert tokens.tolist() == encoded.ids.tolist()
        assert trained.tolist() == encoded.trained.tolist()
    split = prepared.report["splits"]["train"]
    assert (split["rows"], split["samples"], split["dropped"], split["truncated"]) == (5, 5, {}, 0)
    assert prepared.train.lengths.tolist() == [len(t) - 1 for t in rows_of(prepared.train)]
    assert prepared.train.num_tokens == split["tokens"] == int(prepared.train.lengths.sum())
    assert prepared.train.num_trained == split["trained_tokens"] == sum(encode_chat(chatml, r["messages"]).num_trained for r in rows)
    assert split["longest"] == prepared.train.lengths.max()
    assert prepared.train.pad_id == chatml.pad_token_id
    assert prepared.held_out is None


def test_other_ranks_map_what_one_has_made(made: Any, chats: Any, write_rows: Any) -> None:
    write_rows(chats(3))
    prepared = made(job())
    mapped = open_prepared(prepared.folder)
    assert isinstance(mapped.train.tokens, np.memmap)
    assert rows_of(mapped.train) == rows_of(prepared.train)
    assert mapped.report == prepared.report


@pytest.mark.parametrize(("num_tokens", "expected"), [(2, [(0, 2)]), (5, [(0, 5)]), (6, [(0, 5), (4, 2)]), (9, [(0, 5), (4, 5)]), (1, []), (0, [])])
def test_windows_overlap_by_one(num_tokens: int, expected: list[tuple[int, int]]) -> None:
    assert windows(num_tokens, 4) == expected


def test_text_is_cut_so_that_each_token_is_predicted_once_and_documents_stay_apart(made: Any, write_rows: Any, mistral: Any) -> None:
    texts = ["how are you fine thanks bye now", "hello", " be kind" * 7]
    write_rows([{"text": text} for text in texts])
    prepared = made(job(seq_len=4), mistral)
    documents = [[*mistral(text)["input_ids"], mistral.eos_token_id] for text in texts]
    targets = [t for i in range(len(prepared.train)) for t in prepared.train.sample(i)[0][1:].tolist()]
    assert targets == [token for document in documents for token in document[1:]]
    joined = [" ".join(map(str, document)) for document in documents]
    assert all(any(" ".join(map(str, window)) in document for document in joined) for window in rows_of(prepared.train))
    assert prepared.report["splits"]["train"]["sources"][0]["form"] == "text"
    assert prepared.train.lengths.max() == 4
    assert prepared.report["splits"]["train"]["dropped"] == {}


def test_a_text_file_is_one_document(made: Any, tmp_path: Path, chatml: Any) -> None:
    (tmp_path / "a.txt").write_text("hello there\nhow are you\n")
    prepared = made(job(train="a.txt"))
    assert rows_of(prepared.train) == [[*chatml("hello there\nhow are you\n")["input_ids"], chatml.eos_token_id]]


def test_too_long_is_an_error_that_says_what_would_fit(made: Any, chats: Any, write_rows: Any, tmp_path: Path) -> None:
    write_rows(chats(12))
    fits = made(job()).report["splits"]["train"]["longest"]
    with pytest.raises(InputError) as error:
        made(job(seq_len=fits - 7))
    assert f"7 rows are longer than batch.seq_len = {fits - 7}: the longest has {fits} tokens" in str(error.value)
    assert f"{tmp_path}/train.jsonl:6 ({fits - 6})" in str(error.value)
    assert "and 2 more" in str(error.value)
    assert f"set batch.seq_len: {fits}, or data.too_long: drop, truncate or split" in str(error.value)
    assert made(job(seq_len=fits)).report["splits"]["train"]["samples"] == 12


def test_too_long_rows_are_dropped_and_counted(made: Any, chats: Any, write_rows: Any) -> None:
    write_rows(chats(12))
    fits = made(job()).report["splits"]["train"]["longest"]
    split = made(job(seq_len=fits - 7, too_long="drop")).report["splits"]["train"]
    assert (split["rows"], split["samples"], split["dropped"], split["longest"]) == (12, 5, {"too_long": 7}, fits - 7)


def test_truncated_rows_that_train_nothing_are_dropped_and_counted(made: Any, talk: Any, write_rows: Any, chatml: Any) -> None:
    write_rows([{"messages": talk("hello", "fine " * 30)}, {"messages": talk("hello " * 30, "fine")}, {"messages": talk("hello", "fine")}])
    prepared = made(job(seq_len=20, too_long="truncate"))
    split = prepared.report["splits"]["train"]
    assert (split["rows"], split["samples"], split["truncated"], split["dropped"]) == (3, 2, 1, {"nothing_to_train": 1})
    assert prepared.train.lengths.tolist()[0] == 20
    assert rows_of(prepared.train)[0] == encode_chat(chatml, talk("hello", "fine " * 30)).ids[:21].tolist()


def test_nothing_left_is_an_error(made: Any, chats: Any, write_rows: Any) -> None:
    write_rows(chats(3))
    with pytest.raises(InputError, match=r"none of 3 rows is left to use\n.*data.train\nhint: dropped: too_long 3"):
        made(job(seq_len=3, too_long="drop"))


def test_a_share_is_held_out_by_seed_and_never_trained(made: Any, chats: Any, write_rows: Any) -> None:
    rows = chats(20)
    write_rows([*rows, *rows])  # every row twice: a split by position would leak
    prepared = made(job(held_out=0.25, seed=1))
    held, train = rows_of(prepared.held_out), rows_of(prepared.train)
    assert (len(held), len(train)) == (5, 30)
    assert not {*map(tuple, held)} & {*map(tuple, train)}
    assert len({*map(tuple, held)}) == 5
    assert prepared.report["splits"]["train"]["dropped"] == {"equal_to_held_out": 5}
    assert prepared.report["repeated_rows"] == 20
    assert rows_of(made(job(held_out=0.25, seed=2)).held_out) != held
    assert rows_of(made(job(held_out=0.25, seed=1)).held_out) == held


def test_rows_of_a_held_out_file_are_not_trained(made: Any, chats: Any, write_rows: Any) -> None:
    rows = chats(6)
    write_rows([{"id": i, **row} for i, row in enumerate(rows)])
    write_rows(rows[4:], "held.jsonl")
    prepared = made(job(held_out="held.jsonl"))
    assert (len(prepared.train), len(prepared.held_out)) == (4, 2)
    assert prepared.report["splits"]["train"]["dropped"] == {"equal_to_held_out": 2}
    assert sum(micro.num_tokens for micro in held_out_batches(prepared.held_out, 3)) == prepared.held_out.num_tokens


@pytest.mark.parametrize(("rows", "share"), [(1, 0.2), (3, 0.999), (2, 0.8)])
def test_a_share_that_leaves_nothing_to_train_on(made: Any, chats: Any, write_rows: Any, rows: int, share: float) -> None:
    write_rows(chats(rows) * 2)
    with pytest.raises(InputError, match=f"held_out = {share:g} of {rows} different rows leaves none to train on"):
        made(job(held_out=share))


@pytest.mark.parametrize("name", ["prepared", "prepared.partial"])
def test_a_folder_of_someone_else_is_never_replaced(made: Any, chats: Any, write_rows: Any, tmp_path: Path, name: str) -> None:
    """`logging.folder: .` would put prepared data into `data/`, where people keep their own."""
    write_rows(chats(3))
    (tmp_path / name).mkdir()
    (tmp_path / name / "precious.jsonl").write_text("{}")
    with pytest.raises(InputError, match=r"not ours to replace: it holds precious\.jsonl"):
        made(job())
    assert (tmp_path / name / "precious.jsonl").read_text() == "{}"


def test_a_file_in_place_of_the_folder(made: Any, chats: Any, write_rows: Any, tmp_path: Path) -> None:
    write_rows(chats(3))
    (tmp_path / "prepared").write_text("mine")
    with pytest.raises(InputError, match="not ours to replace"):
        made(job())
    assert (tmp_path / "prepared").read_text() == "mine"


def test_tokens_that_the_model_lacks(made: Any, chats: Any, write_rows: Any) -> None:
    """A tokenizer that grew without its model, or belongs to another one."""
    write_rows(chats(3))
    samples = made(job()).train
    assert samples.largest_id == max(map(max, rows_of(samples)))
    assert samples.within(samples.largest_id + 1, "m").pad_id == samples.pad_id
    with pytest.raises(InputError, match=f"the tokenizer gives token {samples.largest_id}, and the vocabulary of m has {samples.largest_id} tokens"):
        samples.within(samples.largest_id, "m")


def test_padding_that_the_model_lacks_is_another_token(made: Any, chats: Any, write_rows: Any) -> None:
    write_rows(chats(3))
    samples = replace(made(job()).train, pad_id=100_000)
    assert samples.within(samples.largest_id + 1, "m").pad_id == 0


@pytest.mark.parametrize("share", [0.0, 1.0, 1.5])
def test_a_share_that_is_none(made: Any, chats: Any, write_rows: Any, share: float) -> None:
    write_rows(chats(3))
    with pytest.raises(InputError, match=r"cannot be held out"):
        made(job(held_out=share))


def test_only_the_first_rows(made: Any, chats: Any, write_rows: Any) -> None:
    write_rows([*chats(5), {"messages": []}])
    assert len(made(job(max_rows=3)).train) == 3


def test_all_faults_of_all_files_at_once(made: Any, chats: Any, write_rows: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        made(job(train="a.jsonl", held_out="b.jsonl"))
    assert "a.jsonl" in str(error.value)
    assert "b.jsonl" in str(error.value)
    write_rows([*chats(1), {"messages": []}])
    write_rows([{"messages": None}], "held.jsonl")
    with pytest.raises(InputError) as error:
        made(job(held_out="held.jsonl"))
    assert f"{tmp_path}/train.jsonl:2" in str(error.value)
    assert f"{tmp_path}/held.jsonl:1" in str(error.value)


def test_what_a_template_refuses_is_named_with_its_row(made: Any, chats: Any, write_rows: Any, mistral: Any, tmp_path: Path) -> None:
    answers = [{"role": "user", "content": "how"}, {"role": "assistant", "content": "fine"}, {"role": "assistant", "content": "bye"}]
    write_rows([*chats(1), {"messages": answers}])
    with pytest.raises(InputError, match="roles must alternate") as error:
        made(job(), mistral)
    assert f"where  {tmp_path}/train.jsonl:2" in str(error.value)
    assert not (tmp_path / "prepared").exists()


def test_no_training_data(made: Any) -> None:
    with pytest.raises(InputError, match="no training data"):
        made(job(train=None))


def test_prepared_data_is_reused_while_nothing_that_matters_has_changed(
    made: Any, chats: Any, write_rows: Any, chatml: Any, styled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(chats(4))
    first = made(job())
    with monkeypatch.context() as patch:
        patch.setattr(module, "encoder", None)  # a second start tokenises nothing
        assert made(job()).report == first.report
    prints = {first.report["fingerprint"]}
    for asked in (job(seq_len=32), job(seed=1), job(too_long="drop"), job(max_rows=2), job(held_out=0.5)):
        prints.add(made(asked).report["fingerprint"])
    prints.add(made(job(), styled("llama3")).report["fingerprint"])
    prints.add(made(job(), styled("chatml", chatml.chat_template + " ")).report["fingerprint"])
    os.utime(path, ns=(1, 1))
    prints.add(made(job()).report["fingerprint"])
    assert len(prints) == 9


def test_a_torn_folder_is_refused_and_made_again(made: Any, chats: Any, write_rows: Any) -> None:
    write_rows(chats(4))
    folder = made(job()).folder
    tokens = folder / "train.tokens"
    tokens.write_bytes(tokens.read_bytes()[:-4])
    with pytest.raises(InputError, match=r"train.tokens has \d+ bytes"):
        open_prepared(folder)
    assert len(made(job()).train) == 4


def test_a_failed_preparation_leaves_nothing_that_could_be_taken_for_data(made: Any, chats: Any, write_rows: Any, tmp_path: Path) -> None:
    write_rows(chats(4))
    with pytest.raises(InputError):
        made(job(seq_len=2))
    with pytest.raises(InputError, match="holds no prepared data"):
        open_prepared(tmp_path / "prepared")


@pytest.mark.parametrize("report", [{}, {"schema": "pentamesh.data", "version": 99}, []])
def test_a_folder_of_another_kind_is_refused(tmp_path: Path, report: Any) -> None:
    (tmp_path / "data.json").write_text(json.dumps(report))
    with pytest.raises(InputError):
        open_prepared(tmp_path)


def test_progress_is_told(tmp_path: Path, chats: Any, write_rows: Any, chatml: Any) -> None:
    write_rows(chats(3))
    heard: list[int] = []
    prepare(job(), chatml, tmp_path, tmp_path / "p", progress=heard.append)
    assert heard == [1, 2, 3]


def test_memory_stays_bounded(tmp_path: Path, write_rows: Any, talk: Any) -> None:
    """1,600 rows of 40 kB, 64 MB in all, are read and judged within 16 MB of what a few of them need."""
    line = json.dumps({"messages": talk("how", "bye " * 10_000)}) + "\n"
    path = write_rows([])
    with path.open("w") as file:
        file.writelines(line for _ in range(1600))
    asked = source(job(), tmp_path)
    tracemalloc.start()
    try:
        survey(asked, seed=0)
        assert tracemalloc.get_traced_memory()[1] < 16e6
    finally:
        tracemalloc.stop()


def test_memory_of_preparing_stays_bounded(tmp_path: Path, write_rows: Any, talk: Any, chatml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,500 rows of 24 kB, 60 MB in all, within 8 MB: the tokeniser stands still, what is around it is measured."""
    line = json.dumps({"messages": talk("how", "bye " * 6_000)}) + "\n"
    with write_rows([]).open("w") as file:
        file.writelines(line for _ in range(2_500))
    encoded = Encoded(np.arange(200, dtype=np.int32), np.ones(200, bool))
    monkeypatch.setattr(module, "encoder", lambda *_: lambda _: encoded)
    tracemalloc.start()
    try:
        prepared = prepare(job(256, workers=1), chatml, tmp_path, tmp_path / "prepared")
        assert tracemalloc.get_traced_memory()[1] < 8e6
    finally:
        tracemalloc.stop()
    assert (len(prepared.train), prepared.train.num_tokens) == (2_500, 497_500)


def test_real_conversations_and_text(shared: Path, tmp_path: Path) -> None:
    """Token counts of the real files as their page gives them: conversations up to 4,575 tokens, tinyshakespeare 341,094."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared / "data/tokenizers/smollm2")
    chat = prepare(job(8192, train=str(shared / "data/chat/messages_300.jsonl"), held_out=0.1), tokenizer, tmp_path, tmp_path / "chat")
    assert (len(chat.train), len(chat.held_out or ())) == (270, 30)
    assert max(split["longest"] for split in chat.report["splits"].values()) + 1 == 4575
    text = prepare(job(256, train=str(shared / "data/text/tinyshakespeare.txt")), tokenizer, tmp_path, tmp_path / "text")
    assert text.train.num_trained == text.train.num_tokens == 341_094  # and the end-of-text token, less the first
