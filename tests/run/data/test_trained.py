"""Which turns are trained: by role, the last alone, and as a row says of its own turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pentamesh.errors import InputError
from pentamesh.job.job import Data, Job
from pentamesh.run.data.encode import encoder
from pentamesh.run.data.forms import Sample, checked_rows, form_of
from pentamesh.run.data.prepare import prepare
from pentamesh.run.data.rows import Problems
from pentamesh.run.data.tokens import Encoded
from pentamesh.run.data.turns import Conversation

END = "<|im_end|>"


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def read(path: Path, **data: Any) -> list[Sample]:
    asked = Data.model_validate(data)
    with Problems() as problems:
        return list(checked_rows((path,), form_of((path,), "auto", asked.columns), problems, data=asked))


TALK = [turn("system", "be kind"), turn("user", "hello"), turn("assistant", "fine"), turn("user", "how"), turn("assistant", "bye")]


def marked(**marks: dict[str, Any]) -> dict[str, Any]:
    """The talk, with more fields in the turns that say so."""
    return {"messages": [message | marks.get(message["content"], {}) for message in TALK]}


PROMPT = {"prompt": [*TALK[:2], TALK[2] | {"train": True}, *TALK[3:4]], "completion": TALK[4:]}
# What the job says, a row, and all that is trained of it, turn by turn.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "the assistant": ({}, marked(), ["fine", "bye"]),
    "the last turn": ({"turns": "last"}, marked(), ["bye"]),
    "the user": ({"train_on": ["user"]}, marked(), ["hello", "how"]),
    "the last of the user": ({"train_on": ["user"], "turns": "last"}, marked(), ["how"]),
    "everybody": ({"train_on": ["system", "user", "assistant"]}, marked(), ["be kind", "hello", "fine", "how", "bye"]),
    "not this one": ({}, marked(fine={"train": False}), ["bye"]),
    "not this one, by weight": ({}, marked(fine={"weight": 0}), ["bye"]),
    "weights as numbers with a point": ({}, marked(fine={"weight": 0.0}, bye={"weight": 1.0}), ["bye"]),
    "a weight of one is nothing to say": ({"turns": "last"}, marked(hello={"weight": 1}, fine={"weight": 1}), ["bye"]),
    "this one too": ({}, marked(hello={"train": True}), ["hello", "fine", "bye"]),
    "an earlier one beside the last": ({"turns": "last"}, marked(fine={"train": True}), ["fine", "bye"]),
    "not even the last": ({"turns": "last"}, marked(bye={"train": False}), []),
    "none": ({}, marked(fine={"train": False}, bye={"weight": 0}), []),
    "marks that are null": ({}, marked(fine={"train": None, "weight": None}), ["fine", "bye"]),
    "marks of another name": ({"columns": {"train": "keep"}}, marked(fine={"keep": False}), ["bye"]),
    "given answers": ({}, {"prompt": TALK[:4], "completion": TALK[4:]}, ["bye"]),
    "a given answer that says so": ({}, PROMPT, ["fine", "bye"]),
    "an instruction": ({"train_on": ["user"]}, {"instruction": "hello", "output": "fine"}, ["hello"]),
}


@pytest.mark.parametrize("case", CASES)
def test_exactly_these_turns_are_trained(chatml: Any, write_rows: Any, case: str) -> None:
    data, row, expected = CASES[case]
    (sample,) = read(write_rows([row]), **data)
    found = encoder(chatml, "messages")(sample)
    assert isinstance(found, Encoded)
    wanted, ids = [chatml(text + END, add_special_tokens=False)["input_ids"] for text in expected], found.ids.tolist()
    indices, start = [], 0
    for piece in wanted:
        start = next(k for k in range(start, len(ids)) if ids[k : k + len(piece)] == piece)
        indices += range(start, start := start + len(piece))
    assert np.flatnonzero(found.trained).tolist() == indices
    rest = [{key: value for key, value in m.items() if key in ("role", "content")} for m in row.get("messages", [])]
    if rest:  # marks are ours and never shown
        assert chatml.decode(ids) == chatml.apply_chat_template(rest, tokenize=False)


# A row, and the messages that it is under `data.system: say so`; how many of them are trained does not change.
TOLD = turn("system", "say so")
SYSTEMS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "in place of its own": ({"messages": TALK}, [TOLD, *TALK[1:]]),
    "where it has none": ({"messages": TALK[1:]}, [TOLD, *TALK[1:]]),
    "later ones stay": ({"messages": [*TALK[1:3], *TALK]}, [TOLD, *TALK[1:3], *TALK]),
    "beside an instruction": ({"instruction": "hello", "output": "fine", "system": "be kind"}, [TOLD, *TALK[1:3]]),
    "beside sharegpt": (
        {"system": "x", "conversations": [{"from": "system", "value": "y"}, {"from": "human", "value": "hello"}, {"from": "gpt", "value": "fine"}]},
        [TOLD, *TALK[1:3]],
    ),
    "in a prompt": ({"prompt": TALK[:4], "completion": TALK[4:]}, [TOLD, *TALK[1:]]),
    "in a prompt without one": ({"prompt": TALK[1:4], "completion": TALK[4:]}, [TOLD, *TALK[1:]]),
}


@pytest.mark.parametrize("case", SYSTEMS)
def test_the_system_turn_of_the_job(write_rows: Any, case: str) -> None:
    row, expected = SYSTEMS[case]
    path = write_rows([row])
    (before,), (sample,) = read(path), read(path, system="say so")
    assert isinstance(before.content, Conversation)
    assert isinstance(sample.content, Conversation)
    assert sample.content.messages == expected
    trained = [[talk.messages[i] for i in talk.trained] for talk in (before.content, sample.content)]
    assert trained[0] == trained[1]


GENERATION = """{%- for m in messages -%}
{%- if m['role'] == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}{%- generation -%}{{ m['content'] + '<|im_end|>' }}{%- endgeneration -%}{{ '\\n' }}
{%- else -%}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{%- endif -%}
{%- endfor -%}"""


@pytest.mark.parametrize("case", CASES)
def test_a_template_with_marks_trains_the_same(styled: Any, chatml: Any, write_rows: Any, case: str) -> None:
    data, row, _ = CASES[case]
    (sample,) = read(write_rows([row]), **data)
    found, plain = encoder(styled("chatml", GENERATION), "messages")(sample), encoder(chatml, "messages")(sample)
    assert isinstance(found, Encoded)
    assert isinstance(plain, Encoded)
    assert (found.ids.tolist(), found.trained.tolist()) == (plain.ids.tolist(), plain.trained.tolist())


HOSTILE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a mark that is text": ({}, marked(fine={"train": "yes"}), "`messages[2].train` is a string, not true or false"),
    "a mark that is a number": ({}, marked(fine={"train": 1}), "`messages[2].train` is a number, not true or false"),
    "half a weight": ({}, marked(fine={"weight": 0.5}), "`messages[2].weight` is 0.5: a turn is trained or not, by 1 or 0"),
    "a negative weight": ({}, marked(fine={"weight": -1}), "`messages[2].weight` is -1"),
    "a weight that is text": ({}, marked(fine={"weight": "0"}), "`messages[2].weight` is '0'"),
    "a weight that is true": ({}, marked(fine={"weight": True}), "`messages[2].weight` is True"),
    "two marks": ({}, marked(fine={"train": True, "weight": 0}), "`messages[2].train` is true and `messages[2].weight` is 0"),
    "a result that says it is trained": ({}, {"messages": [*TALK, turn("tool", "x", train=True)]}, "what tools say is never trained"),
    "no such role": ({"train_on": ["system"]}, {"messages": TALK[1:]}, "no system turn: nothing to train"),
    "none of two roles": ({"train_on": ["system", "user"]}, {"messages": TALK[2:3]}, "no system or user turn: nothing to train"),
    "a system turn of a text": ({"system": "be kind"}, {"text": "x"}, "data.system is given, and the row has no turns"),
    "roles of a text": ({"train_on": ["user"]}, {"text": "x"}, "data.train_on is given, and the row has no turns"),
    "turns of a pair": ({"turns": "last"}, {"prompt": "x", "completion": "y"}, "data.turns is given, and the row has no turns"),
    "names of roles for a text": ({"roles": {"bot": "assistant"}}, {"text": "x"}, "data.roles is given, and the row has no turns"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_wrong_is_named_with_its_row_and_field(write_rows: Any, case: str) -> None:
    data, row, expected = HOSTILE[case]
    path = write_rows([row])
    with pytest.raises(InputError) as error:
        read(path, **data)
    assert expected in str(error.value)
    assert f"where  {path}:1" in str(error.value)
    assert str(error.value).count("error:") == 1


def test_a_row_that_trains_none_of_its_turns_is_dropped_and_counted(chatml: Any, write_rows: Any, tmp_path: Path) -> None:
    untrained = marked(fine={"train": False}, bye={"train": False})
    write_rows([marked(), {"messages": [*untrained["messages"], *TALK[1:2]]}, marked(fine={"weight": 0})])
    asked = {"model": {"name": "x"}, "data": {"train": "train.jsonl"}, "batch": {"seq_len": 40}}
    report = prepare(Job.model_validate(asked), chatml, tmp_path, tmp_path / "data").report["splits"]["train"]
    assert report["dropped"] == {"nothing_to_train": 1}  # it would not fit, and need not
    assert (report["samples"], report["trained_tokens"]) == (2, 9)
