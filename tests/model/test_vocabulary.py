"""The tokens that files say a model has, beside those that the loaded tokenizer has: the same texts, and as many."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pentamesh.errors import InputError
from pentamesh.model.vocabulary import vocabulary
from pentamesh.run.grow import with_tokens
from pentamesh.run.source import tokenizer_of
from tests.run import toy

MARKS = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Prepend", "prepend": "▁"}
SPACES = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
META = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def sequence(key: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", key: list(parts)}


SPELLED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "bytes": ({"pre_tokenizer": BYTES, "decoder": BYTES}, [" house", "é"], ["house"]),
    "split, then bytes": (
        {"pre_tokenizer": sequence("pretokenizers", {"type": "Digits", "individual_digits": True}, BYTES), "decoder": BYTES},
        [" house", "é"],
        ["house"],
    ),
    "marks": ({"normalizer": MARKS, "decoder": SPACES}, [" house", "tree"], ["house", "é"]),
    "marks before": (
        {"normalizer": sequence("normalizers", PREPEND, MARKS), "decoder": sequence("decoders", SPACES, {"type": "Fuse"}, STRIP)},
        ["house"],
        ["é", "houses"],
    ),
    "metaspace": ({"pre_tokenizer": META, "decoder": META}, ["house"], ["é"]),
    "as it is": ({"pre_tokenizer": {"type": "Whitespace"}}, ["tree"], ["house", "é"]),
}


@pytest.mark.parametrize("case", SPELLED)
def test_a_text_is_found_however_it_is_spelled(tmp_path: Path, case: str) -> None:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    parts, known, new = SPELLED[case]
    pieces = ["<unk>", "Ġhouse", "▁house", "Ã©", "tree", *"abcdefghijklmnopqrstuvwxyz▁Ġ"]
    model = {"type": "Unigram", "unk_id": 0, "vocab": [[piece, -1.0] for piece in pieces], "byte_fallback": False}
    built = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": None}
    written = json.dumps({**built, "post_processor": None, "decoder": None, "model": model, **parts})
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(written), unk_token="<unk>").save_pretrained(tmp_path)
    planned = vocabulary(tmp_path)
    assert planned is not None
    for text in known:
        with pytest.raises(InputError, match=rf"{text!r} is a token of this model already \(id {planned.id_of(text)}\)"):
            with_tokens(tokenizer_of(tmp_path), [text])
    assert [planned.id_of(text) for text in new] == [None] * len(new)
    assert with_tokens(tokenizer_of(tmp_path), new) == [planned.next_id + place for place in range(len(new))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.model_folder(tmp_path_factory.mktemp("declared") / "model")


def added(content: str) -> dict[str, Any]:
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}


DECLARED: dict[str, tuple[dict[str, dict[str, Any]], int]] = {
    "nothing more": ({}, 0),
    "a role": ({"tokenizer_config.json": {"pad_token": "[PAD]"}}, 1),
    "a role with properties": ({"tokenizer_config.json": {"pad_token": {"__type": "AddedToken", **added("[PAD]")}}}, 1),
    "roles of one token, and of one model": (
        {"tokenizer_config.json": {"image_token": "<image>", "cls_token": "[C]", "pad_token": "[C]", "add_bos_token": False}},
        2,
    ),
    "more of them": ({"tokenizer_config.json": {"additional_special_tokens": ["<a>", "<|im_end|>", "<b>"]}}, 2),
    "more of them, as they are called now": ({"tokenizer_config.json": {"extra_special_tokens": ["<a>", "<b>"]}}, 2),
    "more of them, by name": ({"tokenizer_config.json": {"extra_special_tokens": {"image": "<image>"}}}, 1),
    "a list": ({"tokenizer_config.json": {"added_tokens_decoder": {"301": added("<b>"), "300": added("<a>"), "2": added("<|im_end|>")}}}, 2),
    "a file of those added": ({"added_tokens.json": {"<b>": 301, "<a>": 300}, "special_tokens_map.json": {"pad_token": "[PAD]"}}, 3),
    "files that a list takes the place of": (
        {"tokenizer_config.json": {"added_tokens_decoder": {"300": added("<a>")}}, "added_tokens.json": {"<b>": 301}},
        1,
    ),
}


@pytest.mark.parametrize("case", DECLARED)
def test_tokens_that_loading_adds_are_counted(folder: Path, tmp_path: Path, case: str) -> None:
    files, more = DECLARED[case]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for name, changes in files.items():
        there = json.loads((tmp_path / name).read_text()) if (tmp_path / name).exists() else {}
        (tmp_path / name).write_text(json.dumps(there | changes))
    before, planned, loaded = vocabulary(folder), vocabulary(tmp_path), tokenizer_of(tmp_path)
    assert before is not None
    assert planned is not None
    assert (planned.next_id, planned.ids) == (len(loaded), loaded.get_vocab())
    assert planned.next_id == before.next_id + more


@pytest.mark.parametrize(
    ("name", "text"),
    [("tokenizer_config.json", "{"), ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'), ("added_tokens.json", "[1]")],
)
def test_files_that_cannot_be_read(folder: Path, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match="its tokens cannot be read") as caught:
        vocabulary(tmp_path)
    assert caught.value.problems[0].where == str(tmp_path / name)
