"""Tools and thoughts of rows: every spelling becomes one, what is wrong is named, and what a template does not show is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pentamesh.errors import InputError, Problem
from pentamesh.job.job import Data, Job
from pentamesh.run.data.encode import encoder
from pentamesh.run.data.forms import Sample, checked_rows, form_of
from pentamesh.run.data.prepare import prepare
from pentamesh.run.data.rows import Problems
from pentamesh.run.data.tokens import Encoded
from pentamesh.run.data.turns import Conversation

ASK = {"role": "user", "content": "How warm is it?"}
RESULT = {"role": "tool", "content": "19"}
SAID = {"role": "assistant", "content": "19 degrees."}
FUNCTION = {"name": "weather", "arguments": {"city": "Lisbon"}}
CALLS = [{"type": "function", "function": FUNCTION}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLED = [ASK, {"role": "assistant", "content": "", "tool_calls": CALLS}, RESULT, SAID]


def read(path: Path, **data: Any) -> list[Sample]:
    asked = Data.model_validate(data)
    with Problems() as problems:
        return list(checked_rows((path,), form_of((path,), "auto", asked.columns), problems, data=asked))


def calling(**turn: Any) -> dict[str, Any]:
    return {"messages": [ASK, {"role": "assistant", **turn}, RESULT, SAID]}


def shared_gpt(value: str, role: str = "observation", **row: Any) -> dict[str, Any]:
    turns = (("human", ASK["content"]), ("function_call", value), (role, "19"), ("gpt", SAID["content"]))
    return {"conversations": [{"from": name, "value": said} for name, said in turns]} | row


TEXT = json.dumps(FUNCTION["arguments"])
# A row as somebody spells it, and the tools that it offers. The messages are the same.
SPELLINGS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "as OpenAI does": (calling(content=None, tool_calls=[{"type": "function", "function": {"name": "weather", "arguments": TEXT}}]), []),
    "arguments that are an object": (calling(tool_calls=CALLS), []),
    "without the wrapping": (calling(content="", tool_calls=[FUNCTION]), []),
    "as text": (calling(content="", tool_calls=json.dumps(CALLS)), []),
    "the old field": (calling(content=None, function_call={"name": "weather", "arguments": TEXT}), []),
    "an empty field beside it": (calling(content=None, tool_calls=[FUNCTION], function_call=None), []),
    "sharegpt": (shared_gpt(json.dumps(FUNCTION)), []),
    "sharegpt, arguments as text": (shared_gpt(json.dumps({"name": "weather", "arguments": TEXT})), []),
    "sharegpt, a list": (shared_gpt(json.dumps([FUNCTION]), "function"), []),
    "sharegpt with tools as text": (shared_gpt(json.dumps(FUNCTION), "tool", tools=json.dumps([TOOL["function"]])), [TOOL]),
    "tools as a list": (calling(tool_calls=CALLS) | {"tools": [TOOL]}, [TOOL]),
    "functions": (calling(tool_calls=CALLS) | {"functions": [TOOL]}, [TOOL]),
    "functions that are tools": (calling(tool_calls=CALLS) | {"functions": [TOOL["function"]], "tools": [TOOL]}, [TOOL]),
    "tools without the wrapping": (calling(tool_calls=CALLS) | {"tools": [TOOL["function"]]}, [TOOL]),
    "tools that are none": (calling(tool_calls=CALLS) | {"tools": "[]"}, []),
}


@pytest.mark.parametrize("case", SPELLINGS)
def test_every_spelling_is_the_same_conversation(write_rows: Any, case: str) -> None:
    row, tools = SPELLINGS[case]
    (sample,) = read(write_rows([row]))
    assert sample.content == Conversation(CALLED, (1, 3), tools)


def test_ids_stay_and_names_are_as_the_job_says(write_rows: Any) -> None:
    turn = {"who": "assistant", "calls": [{"id": "abc", **FUNCTION}]}
    row = {"dialog": [{"who": "user", "content": "x"}, turn, {"who": "api", "content": "19", "tool_call_id": "abc"}], "functions": [TOOL]}
    columns = {"messages": "dialog", "role": "who", "tool_calls": "calls", "tools": "functions"}
    (sample,) = read(write_rows([row]), columns=columns, roles={"api": "tool"})
    assert isinstance(sample.content, Conversation)
    assert sample.content.tools == [TOOL]
    assert sample.content.messages[1]["tool_calls"] == [{"id": "abc", **CALLS[0]}]
    assert sample.content.messages[2] == {"role": "tool", "content": "19", "tool_call_id": "abc"}


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_have_one_name_here_and_the_one_that_the_template_reads_there(styled: Any, write_rows: Any, name: str) -> None:
    (sample,) = read(write_rows([{"messages": [ASK, {**SAID, name: "I look."}]}]))
    assert isinstance(sample.content, Conversation)
    assert sample.content.messages[1] == {**SAID, "reasoning_content": "I look."}
    own = styled("qwen3").chat_template
    for template in (own, own.replace("reasoning_content", "thinking"), own.replace("reasoning_content", "reasoning")):
        found = encoder(styled("qwen3", template), "messages")(sample)
        assert isinstance(found, Encoded)
        assert styled("qwen3").decode(found.ids[found.trained]) == "<think>\nI look.\n</think>\n\n19 degrees.<|im_end|>"


def test_the_same_thoughts_under_two_names_are_one(write_rows: Any) -> None:
    (sample,) = read(write_rows([{"messages": [ASK, {**SAID, "reasoning": "I look.", "reasoning_content": "I look.", "thinking": ""}]}]))
    assert isinstance(sample.content, Conversation)
    assert sample.content.messages[1] == {**SAID, "reasoning_content": "I look."}


def test_nulls_of_parquet_are_no_arguments(tmp_path: Path) -> None:
    other = [{"type": "function", "function": {"name": "time", "arguments": {"zone": "UTC"}}}]
    rows = [{"messages": [{**CALLED[1], "tool_calls": calls}]} for calls in (CALLS, other)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = [sample.content for sample in read(tmp_path / "rows.parquet")]
    assert [talk.messages[0]["tool_calls"] for talk in found if isinstance(talk, Conversation)] == [CALLS, other]


def messages(*turns: dict[str, Any], **row: Any) -> dict[str, Any]:
    return {"messages": [ASK, *turns, SAID]} | row


def with_call(call: Any) -> dict[str, Any]:
    return messages({"role": "assistant", "tool_calls": call})


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "tools that are an object": (messages(tools={"name": "f"}), "`tools` is an object, not a list"),
    "functions that are not the tools": (messages(tools=[TOOL], functions=[{"name": "f"}]), "`tools` and `functions` are both given and differ"),
    "functions that are names": (messages(functions=["f"]), "`functions[0]` is a string, not an object"),
    "tools that are a number": (messages(tools=3), "`tools` is a number, not a list"),
    "tools as Python prints them": (messages(tools="[{'name': 'f'}]"), "`tools` is text that is not JSON: Expecting property name"),
    "tools cut short": (messages(tools='[{"name": "f"'), "`tools` is text that is not JSON"),
    "a tool that is a name": (messages(tools=["f"]), "`tools[0]` is a string, not an object"),
    "a tool without a name": (messages(tools=[TOOL, {"description": "x"}]), "`tools[1]` has no `name`"),
    "a tool around nothing": (messages(tools=[{"type": "function", "function": None}]), "`tools[0].function` is null, not an object"),
    "a tool with an empty name": (messages(tools=[{"name": " "}]), "`tools[0].name` is empty"),
    "a tool with a number for a name": (messages(tools=[{"function": {"name": 3}}]), "`tools[0].function.name` is a number"),
    "parameters that are no schema": (messages(tools=[{"name": "f", "parameters": ["city"]}]), "`tools[0]` has `parameters` that are a list"),
    "half a character in a tool": (messages(tools=[{"name": "f", "description": "\ud83d"}]), "`tools` has half of a surrogate pair"),
    "calls that are a number": (with_call(3), "`messages[1].tool_calls` is a number, not a list"),
    "calls that are text": (with_call("weather()"), "`messages[1].tool_calls` is text that is not JSON"),
    "a call that is a name": (with_call(["weather"]), "`messages[1].tool_calls[0]` is a string, not an object"),
    "a call without a name": (with_call([{"function": {"arguments": {}}}]), "`messages[1].tool_calls[0].function` has no `name`"),
    "arguments that are no JSON": (
        with_call([{"name": "f", "arguments": "city=Lisbon"}]),
        "`messages[1].tool_calls[0].arguments` is text that is not",
    ),
    "arguments that are a list": (with_call([{"name": "f", "arguments": ["x"]}]), "`messages[1].tool_calls[0].arguments` is a list, not an object"),
    "arguments that are a number in text": (with_call([{"name": "f", "arguments": "3"}]), "tool_calls[0].arguments` is a number, not an object"),
    "a call of the user": (messages({**ASK, "tool_calls": CALLS}), "`messages[1].tool_calls` is given, and the role is user"),
    "two fields of calls": (messages({**CALLED[1], "function_call": FUNCTION}), "`messages[1].tool_calls` and `messages[1].function_call` are both"),
    "an answer that is null without a call": (messages({"role": "assistant", "content": None, "tool_calls": []}), "`messages[1].content` is null"),
    "a content of another kind beside a call": (messages({**CALLED[1], "content": 3}), "`messages[1].content` is a number"),
    "a result without a content": (messages(CALLED[1], {"role": "tool"}), "`messages[2]` has no `content`"),
    "a result that is an object": (messages(CALLED[1], {"role": "tool", "content": {"degrees": 19}}), "`messages[2].content` is an object"),
    "thoughts that are a list": (messages({**SAID, "reasoning_content": ["x"]}), "`messages[1].reasoning_content` is a list"),
    "thoughts that are true": (messages({**SAID, "thinking": True}), "`messages[1].thinking` is a boolean"),
    "thoughts of the user": (messages({**ASK, "reasoning": "x"}), "`messages[1].reasoning` is given, and only the assistant reasons"),
    "two thoughts": (
        messages({**SAID, "reasoning": "x", "thinking": "y"}),
        "`messages[1].thinking` and `messages[1].reasoning` are both given and differ",
    ),
    "sharegpt, a call that is text": (shared_gpt("weather in Lisbon"), "`conversations[1].value` is text that is not JSON"),
    "sharegpt, an empty call": (shared_gpt(""), "`conversations[1].value` is empty"),
    "sharegpt, a call without a name": (shared_gpt('{"arguments": {}}'), "`conversations[1].value[0]` has no `name`"),
    "text with tools": ({"text": "x", "tools": [TOOL]}, "`tools` are given, and the row has no turns that call them"),
    "a pair with tools": ({"prompt": "x", "completion": "y", "tools": [TOOL]}, "`tools` are given, and the row has no turns"),
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


PLAIN = "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor -%}"
FIRST_CALL = PLAIN.replace("m.content", "(m.content or m.tool_calls[0].function.name)")
NO_RESULTS = "{%- for m in messages if m.role != 'tool' -%}" + PLAIN.partition("-%}")[2]
NO_SYSTEM = "{%- for m in messages if m.role != 'system' -%}" + PLAIN.partition("-%}")[2]
# A template, a conversation, and what it does not show.
UNSEEN: dict[str, tuple[str, str, Conversation, list[str]]] = {
    "tools": ("chatml", PLAIN, Conversation([ASK, SAID], (1,), [TOOL]), ["tools"]),
    "a call": ("chatml", PLAIN, Conversation(CALLED, (1, 3)), ["messages[1].tool_calls[0]"]),
    "all calls but the first": (
        "chatml",
        FIRST_CALL,
        Conversation([ASK, {**CALLED[1], "tool_calls": CALLS * 2}, SAID], (1, 2)),
        ["messages[1].tool_calls[1]"],
    ),
    "a call that is only read": ("chatml", PLAIN, Conversation(CALLED, (3,)), ["messages[1].tool_calls[0]"]),
    "results": ("chatml", NO_RESULTS, Conversation([ASK, SAID, RESULT, SAID], (3,)), ["messages[2].content"]),
    "a system turn": ("chatml", NO_SYSTEM, Conversation([{"role": "system", "content": "x"}, ASK, SAID], (2,)), ["messages[0].content"]),
    "the text beside a call": ("llama31", "", Conversation([ASK, {**CALLED[1], "content": "I look."}, RESULT, SAID], (3,)), ["messages[1].content"]),
    "thoughts": ("llama31", "", Conversation([ASK, {**SAID, "reasoning_content": "x"}], (1,)), ["messages[1].reasoning_content"]),
    "thoughts of earlier turns alone": (
        "qwen3",
        "",
        Conversation([ASK, {**SAID, "reasoning_content": "x"}, ASK, SAID], (1, 3)),
        ["messages[1].reasoning_content"],
    ),
}


@pytest.mark.parametrize("case", UNSEEN)
def test_what_the_template_does_not_show_is_refused(styled: Any, case: str) -> None:
    style, template, talk, expected = UNSEEN[case]
    tokenizer = styled(style, template)
    encode = encoder(tokenizer, "messages")
    for where in ("rows.jsonl:3", "rows.jsonl:4"):  # the second is known by its shape
        found = encode(Sample(where, talk))
        assert isinstance(found, list)
        assert [(p.what, p.where) for p in found] == [(f"the chat template does not show `{what}`", where) for what in expected]
        assert all(isinstance(p, Problem) and p.hint for p in found)


CUTS = PLAIN.replace("m.content", "m.content.split('</think>')[-1]")


def test_thoughts_within_an_answer_that_the_template_cuts_off_are_not_lost_in_silence(styled: Any) -> None:
    talk = Conversation([ASK, {**SAID, "content": "<think>\nI look.\n</think>\n\n19 degrees."}], (1,))
    found = encoder(styled("chatml", CUTS), "messages")(Sample("rows.jsonl:3", talk))
    assert isinstance(found, list)
    assert [(p.what, p.where) for p in found] == [("the chat template does not show the thoughts in `messages[1].content`", "rows.jsonl:3")]
    shown = encoder(styled("chatml", PLAIN), "messages")(Sample("here", talk))
    assert isinstance(shown, Encoded)
    assert styled("chatml").decode(shown.ids[shown.trained]) == "<think>\nI look.\n</think>\n\n19 degrees.<|im_end|>"
    empty = Conversation([ASK, {**SAID, "content": "<think>\n\n</think>\n\n19 degrees."}], (1,))
    assert isinstance(encoder(styled("chatml", CUTS), "messages")(Sample("here", empty)), Encoded)


def test_a_stray_field_does_not_take_the_place_of_what_is_said(write_rows: Any) -> None:
    turns = [{"from": "human", "value": "x", "content": "other"}, {"from": "gpt", "value": "y", "role": "system"}]
    (sample,) = read(write_rows([{"conversations": turns}]))
    assert isinstance(sample.content, Conversation)
    assert sample.content.messages == [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]


def test_arguments_are_text_for_a_template_that_takes_them_so(styled: Any) -> None:
    """The way of DeepSeek, which adds the arguments to a text; and of templates that print an object as Python does."""
    for shown in ("'{' + call.function.arguments + '}'", "'{' ~ call.function.arguments ~ '}'"):
        calls = "{%- for call in m.tool_calls or [] -%}{{ call.function.name + SHOWN }}{%- endfor -%}".replace("SHOWN", shown)
        template = "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content }}" + calls + "{{ '<|im_end|>\\n' }}{%- endfor -%}"
        tokenizer = styled("chatml", template)
        found = encoder(tokenizer, "messages")(Sample("here", Conversation(CALLED, (1,))))
        assert isinstance(found, Encoded)
        assert tokenizer.decode(found.ids[found.trained]) == 'weather{{"city": "Lisbon"}}<|im_end|>'


def test_an_id_that_the_template_asks_for_is_named(styled: Any) -> None:
    found = encoder(styled("mistral3"), "messages")(Sample("here", Conversation(CALLED, (1, 3))))
    assert isinstance(found, list)
    assert "ids of calls have nine characters" in found[0].what


def test_real_rows_with_tools(styled: Any, shared: Path, tmp_path: Path) -> None:
    """Every call and every answer of 300 conversations is trained with its end of turn, and nothing that tools or people said."""
    rows = shared / "data/chat/glaive_toolcall_sharegpt_300.json"
    tokenizer = styled("qwen2")
    encode = encoder(tokenizer, "sharegpt")
    for sample in read(rows):
        talk, found = sample.content, encode(sample)
        assert isinstance(talk, Conversation)
        assert isinstance(found, Encoded)
        text = tokenizer.decode(found.ids[found.trained])
        turns = [talk.messages[i] for i in talk.trained]
        assert text.count("<|im_end|>") == len(turns)
        assert text.count("<tool_call>") == sum(len(turn.get("tool_calls", ())) for turn in turns)
        assert "<tool_response>" not in text
    job = Job.model_validate({"model": {"name": "x"}, "data": {"train": str(rows)}, "batch": {"seq_len": 16384}})
    assert len(prepare(job, tokenizer, tmp_path, tmp_path / "data").train) == 300
