"""The forms of rows: what each becomes, which of its tokens are trained, and its faults with their keys."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pentamesh.errors import InputError
from pentamesh.job.job import Data, Job
from pentamesh.run.data.encode import encoder
from pentamesh.run.data.forms import FORMS, Form, Given, Pair, Sample, checked_rows, form_of
from pentamesh.run.data.prepare import prepare
from pentamesh.run.data.rows import Problems
from pentamesh.run.data.tokens import Encoded
from pentamesh.run.data.turns import Conversation, answers


def read(path: Path, form: Form | None = None, **data: Any) -> list[Sample]:
    asked = Data.model_validate(data)
    with Problems() as problems:
        return list(checked_rows((path,), form or form_of((path,), "auto", asked.columns), problems, data=asked))


def conversation(messages: list[Any], num_given: int = 0) -> Conversation:
    return Conversation(messages, answers(messages, num_given))


def turns(*said: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in said]


SPELLED: list[tuple[dict[str, Any], Form, Any]] = [
    (
        {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "fine"}]},
        "sharegpt",
        turns(("user", "hello"), ("assistant", "fine")),
    ),
    (
        {"system": "be kind", "conversations": [{"from": "user", "value": "hello"}, {"from": "assistant", "value": "fine"}], "tools": ""},
        "sharegpt",
        turns(("system", "be kind"), ("user", "hello"), ("assistant", "fine")),
    ),
    (
        {"conversations": [{"from": "system", "value": "be kind"}, {"from": "human", "value": "hello"}, {"from": "gpt", "value": "fine"}]},
        "sharegpt",
        turns(("system", "be kind"), ("user", "hello"), ("assistant", "fine")),
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "how "}, {"type": "text", "text": "are you", "image_url": None}]},
                {"role": "assistant", "content": [{"type": "text", "text": "fine"}]},
            ]
        },
        "messages",
        turns(("user", "how are you"), ("assistant", "fine")),
    ),
    (
        {"conversations": [{"from": "human", "value": [{"type": "text", "text": "hello"}]}, {"from": "gpt", "value": "fine"}]},
        "sharegpt",
        turns(("user", "hello"), ("assistant", "fine")),
    ),
    ({"instruction": "hello", "input": "", "output": "fine"}, "alpaca", turns(("user", "hello"), ("assistant", "fine"))),
    ({"instruction": "hello", "output": "fine"}, "alpaca", turns(("user", "hello"), ("assistant", "fine"))),
    ({"instruction": "how", "input": "are you", "output": "fine"}, "alpaca", turns(("user", "how\nare you"), ("assistant", "fine"))),
    (
        {"instruction": "hello", "input": None, "output": "fine", "system": "be kind", "text": "hello fine"},
        "alpaca",
        turns(("system", "be kind"), ("user", "hello"), ("assistant", "fine")),
    ),
]


@pytest.mark.parametrize(("row", "form", "messages"), SPELLED)
def test_other_spellings_of_a_conversation(write_rows: Any, row: dict[str, Any], form: Form, messages: list[Any]) -> None:
    path = write_rows([row])
    assert form_of((path,), "auto") == form
    assert [sample.content for sample in read(path)] == [conversation(messages)]


@pytest.mark.parametrize(("row", "form", "messages"), SPELLED)
def test_whatever_the_spelling_the_same_tokens_are_trained(write_rows: Any, chatml: Any, tmp_path: Path, row: Any, form: Form, messages: Any) -> None:
    def made(rows: list[Any], name: str) -> tuple[list[int], list[bool]]:
        write_rows(rows, name)
        job = Job.model_validate({"model": {"name": "x"}, "data": {"train": name}, "batch": {"seq_len": 64}})
        ids, trained = prepare(job, chatml, tmp_path, tmp_path / f"{name}.prepared").train.sample(0)
        return ids.tolist(), trained.tolist()

    found, expected = made([row], "row.jsonl"), made([{"messages": messages}], "messages.jsonl")
    assert found == expected
    assert any(found[1])


TALK = turns(("user", "hello"), ("assistant", "fine"))
DIALOG = [{"speaker": "user", "text": "hello"}, {"speaker": "assistant", "text": "fine"}]
NAMES = {"messages": "dialog", "role": "speaker", "content": "text"}
# What the job says of names, a row, its form and the messages that it is.
RENAMED: dict[str, tuple[dict[str, Any], dict[str, Any], Form, Any]] = {
    "fields of rows and turns": ({"columns": NAMES}, {"dialog": DIALOG}, "messages", TALK),
    "what has our name is something else": ({"columns": NAMES}, {"dialog": DIALOG, "messages": 3, "text": "x"}, "messages", TALK),
    "names that change places": (
        {"columns": {"role": "content", "content": "role"}},
        {"messages": [{"content": "user", "role": "hello"}, {"content": "assistant", "role": "fine"}]},
        "messages",
        TALK,
    ),
    "a field of rows is none of turns": (
        {"columns": {"instruction": "content"}},
        {"messages": turns(("user", "hello"), ("assistant", "fine"))},
        "messages",
        TALK,
    ),
    "alpaca": (
        {"columns": {"instruction": "question", "output": "answer", "input": "context", "system": "told"}},
        {"question": "hello", "context": "there", "answer": "fine", "told": "be kind"},
        "alpaca",
        turns(("system", "be kind"), ("user", "hello\nthere"), ("assistant", "fine")),
    ),
    "sharegpt as messages": (
        {"columns": {"messages": "conversations", "role": "from", "content": "value"}, "roles": {"human": "user", "gpt": "assistant"}},
        {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "fine"}]},
        "messages",
        TALK,
    ),
    "roles": (
        {"roles": {"Kunde": "user", "0": "assistant"}},
        {"conversations": [{"from": "Kunde", "value": "hello"}, {"from": "0", "value": "fine"}]},
        "sharegpt",
        TALK,
    ),
    "a role that means another here": (
        {"roles": {"assistant": "user", "user": "assistant"}},
        {"messages": turns(("assistant", "hello"), ("user", "fine"))},
        "messages",
        TALK,
    ),
}


@pytest.mark.parametrize("case", RENAMED)
def test_names_of_fields_and_roles_are_as_the_job_says(write_rows: Any, case: str) -> None:
    data, row, form, messages = RENAMED[case]
    path = write_rows([row])
    assert form_of((path,), "auto", data.get("columns")) == form
    assert [sample.content for sample in read(path, **data)] == [conversation(messages)]


RENAMED_FAULTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"columns": NAMES}, {"messages": DIALOG}, "no `dialog` in the row; its keys: messages"),
    ({"columns": NAMES}, {"x": 1}, "data.columns.messages = dialog is not what the file calls it"),
    ({"columns": NAMES}, {"dialogs": DIALOG}, "did you mean 'dialogs'?"),
    ({"columns": NAMES}, {"dialog": "x"}, "`dialog` is a string, not a list"),
    ({"columns": NAMES}, {"dialog": [{"role": "user", "content": "x"}]}, "`dialog[0]` has no `speaker`"),
    ({"columns": NAMES}, {"dialog": [{"role": "user", "content": "x"}]}, "data.columns says so; the turn has role, content"),
    ({"columns": NAMES}, {"dialog": [{"speaker": "user", "text": 3}]}, "`dialog[0].text` is a number, not a string"),
    ({"columns": NAMES}, {"dialog": [{"speaker": "usr", "text": "x"}]}, "`dialog[0].speaker` is 'usr'"),
    ({"roles": {"agent": "assistant"}}, {"messages": [{"role": "agnt", "content": "x"}]}, "did you mean 'agent'?"),
    ({"columns": {"prompt": "messages"}}, {"messages": TALK}, "our `prompt` is called `messages` here by data.columns, and there is no `completion`"),
    ({"columns": {"prompt": "messages"}}, {"messages": TALK}, "out of data.columns, or say there what the file calls `completion`"),
    ({"columns": {"system": "messages"}}, {"messages": TALK}, "our `system` is called `messages` here by data.columns, and there is no `messages`"),
    ({"columns": {"output": "answer"}}, {"instruction": "x", "answer": " "}, "`answer` is empty"),
    ({"columns": {"text": "body"}}, {"body": None}, "`body` is null, not a string"),
]


@pytest.mark.parametrize(("data", "row", "expected"), RENAMED_FAULTS)
def test_faults_are_told_in_the_names_of_the_file(write_rows: Any, data: dict[str, Any], row: dict[str, Any], expected: str) -> None:
    path = write_rows([row])
    with pytest.raises(InputError) as error:
        read(path, **data)
    assert expected in str(error.value)
    assert f"{path}:1" in str(error.value)


NEARLY: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    *(
        ({}, {"messages": [TALK[0], {**TALK[1], key: [{"name": "f"}] if "l" in key else "x"}]}, f"`messages[1].{key}` is not read", meant)
        for key, meant in {
            "toolCalls": "tool_calls",
            "toolcalls": "tool_calls",
            "reasoningContent": "reasoning_content",
            "thoughts": "reasoning_content",
            "Weight": "weight",
            "Content": "content",
        }.items()
    ),
    ({}, {"messages": [TALK[0], {"role": "assistant", "Content": "x"}]}, "`messages[1].Content` is not read", "content"),
    ({}, {"messages": [{"Role": "user", "content": "x"}]}, "`messages[0].Role` is not read", "role"),
    ({"columns": NAMES}, {"dialog": [{**DIALOG[0], "Speaker": "x"}]}, "`dialog[0].Speaker` is not read", "speaker"),
    ({}, {"messages": TALK, "Tools": [{"name": "f"}]}, "`Tools` is not read", "tools"),
    ({"columns": {"system": "told"}}, {"conversations": [{"from": "gpt", "value": "x"}], "Told": "x"}, "`Told` is not read", "told"),
    ({}, {"instruction": "x", "Input": "z", "output": "y"}, "`Input` is not read", "input"),
    ({}, {"input_ids": [5, 6], "Labels": [-100, 6]}, "`Labels` is not read", "labels"),
]


@pytest.mark.parametrize(("data", "row", "expected", "meant"), NEARLY)
def test_a_field_that_is_nearly_one_of_ours_is_not_left_out(write_rows: Any, data: Any, row: dict[str, Any], expected: str, meant: str) -> None:
    path = write_rows([row])
    with pytest.raises(InputError) as error:
        read(path, **data)
    assert [(problem.what, problem.where, problem.hint) for problem in error.value.problems] == [
        (expected, f"{path}:1", f"did you mean `{meant}`?"),
    ]


def test_other_fields_may_stand_beside_ours(write_rows: Any) -> None:
    row = {"messages": [{**TALK[0], "id": 3, "toolCalls": None}, {**TALK[1], "thoughts": "", "From": "x"}], "Prompt": "x", "Text": 3, "Tools": []}
    (sample,) = read(write_rows([row]))
    assert isinstance(sample.content, Conversation)
    assert [message["content"] for message in sample.content.messages] == ["hello", "fine"]
    columns = {"reasoning_content": "thoughts", "system": "told"}
    (sample,) = read(write_rows([{"conversations": [{"from": "gpt", "value": "x", "thoughts": "y"}], "System": "z"}]), columns=columns)
    assert isinstance(sample.content, Conversation)
    assert sample.content.messages == [{"role": "assistant", "content": "x", "reasoning_content": "y"}]


def encoded(tokenizer: Any, content: Any, form: Form = "prompt_completion") -> Encoded:
    found = encoder(tokenizer, form)(Sample("here", content))
    assert isinstance(found, Encoded), found
    return found


# 0 he llo   2 _how _are   4 _you </s>
def test_a_pair_is_text_trained_from_the_completion_to_the_end_of_text(mistral: Any, write_rows: Any) -> None:
    path = write_rows([{"prompt": "hello how are", "completion": " you"}])
    (sample,) = read(path)
    assert sample.content == Pair("hello how are", " you")
    found = encoded(mistral, sample.content)
    assert found.trained.nonzero()[0].tolist() == [len(found.ids) - 2, len(found.ids) - 1]
    assert mistral.decode(found.ids) == "hello how are you</s>"


def test_a_token_across_the_border_of_a_pair_is_trained(chatml: Any) -> None:
    found = encoded(chatml, Pair("how a", "re you"))
    assert chatml.decode(found.ids[found.trained]) == " are you<|im_end|>"


def test_the_end_of_text_of_a_pair_is_trained_where_the_tokenizer_puts_it(mistral: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    ids = [(token, mistral.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    backend = mistral.backend_tokenizer
    before = backend.post_processor
    backend.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    try:
        found = encoded(mistral, Pair("hello", " fine"))
    finally:
        backend.post_processor = before
    assert mistral.decode(found.ids) == "<s>hello fine</s>"
    assert mistral.decode(found.ids[found.trained]) == " fine</s>"


def test_answers_in_the_prompt_are_not_trained(chatml: Any, write_rows: Any, talk: Any) -> None:
    path = write_rows([{"prompt": talk("hello", "fine thanks", "how are you"), "completion": turns(("assistant", "bye now"))}])
    (sample,) = read(path)
    found = encoded(chatml, sample.content)
    assert chatml.decode(found.ids) == chatml.apply_chat_template(talk("hello", "fine thanks", "how are you", "bye now"), tokenize=False)
    assert chatml.decode(found.ids[found.trained]) == "bye now<|im_end|>"


MARKED = """{%- for m in messages -%}
{%- if m['role'] == 'assistant' -%}{{ 'A:' }}{%- generation -%}{{ m['content'] + '<|im_end|>' }}{%- endgeneration -%}
{%- else -%}{{ 'U:' + m['content'] }}{%- endif -%}{%- endfor -%}"""


def test_answers_in_the_prompt_are_not_trained_where_the_template_marks_them(styled: Any, talk: Any) -> None:
    tokenizer = styled("chatml", MARKED)
    found = encoded(tokenizer, conversation(talk("hello", "fine thanks", "how", "bye now"), num_given=3))
    assert tokenizer.decode(found.ids[found.trained]) == "bye now<|im_end|>"


def test_pairs_need_no_template_and_lists_of_messages_do(styled: Any, talk: Any) -> None:
    bare = styled("chatml", None)
    assert encoded(bare, Pair("hello", " fine")).num_trained
    found = encoder(bare, "prompt_completion")(Sample("a.jsonl:3", conversation(talk("hello", "fine"), 1)))
    assert isinstance(found, list)
    assert found[0].where == "a.jsonl:3"
    assert "no chat template" in found[0].what
    with pytest.raises(InputError, match="no chat template"):
        encoder(bare, "alpaca")


FAULTS: list[tuple[Form, dict[str, Any], str]] = [
    ("alpaca", {"instruction": "x"}, "no `output` in the row; its keys: instruction"),
    ("alpaca", {"instruction": 3, "output": "y"}, "`instruction` is a number, not a string"),
    ("alpaca", {"instruction": " ", "output": "y"}, "`instruction` is empty"),
    ("alpaca", {"instruction": "x", "output": None}, "`output` is null, not a string"),
    ("alpaca", {"instruction": "x", "output": ""}, "`output` is empty"),
    ("alpaca", {"instruction": "x", "input": ["z"], "output": "y"}, "`input` is a list, not a string"),
    ("alpaca", {"instruction": "x", "output": "y", "history": [["a", "b"]]}, "`history` is given"),
    ("alpaca", {"instruction": "x", "output": "y", "system": 1}, "`system` is a number"),
    ("messages", {"messages": [{"role": "user", "content": []}]}, "`messages[0].content` is a list, not a string"),
    ("messages", {"messages": [{"role": "user", "content": ["x"]}]}, "`messages[0].content` is a list, not a string"),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": "y"}]}]},
        "`messages[0].content[1].type` is 'image_url': only parts that are text are trained",
    ),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "`messages[0].content[0].text` is null, not a string"),
    (
        "messages",
        {"messages": [{"role": "assistant", "content": [{"type": "text", "text": " "}]}]},
        "`messages[0].content` is empty: the assistant would learn to say nothing",
    ),
    ("sharegpt", {"conversations": None}, "`conversations` is null, not a list"),
    ("sharegpt", {"conversations": []}, "`conversations` is empty"),
    ("sharegpt", {"conversations": ["x"]}, "`conversations[0]` is a string, not an object"),
    ("sharegpt", {"conversations": [{"value": "x"}]}, "`conversations[0]` has no `from`\n"),
    ("sharegpt", {"conversations": [{"role": "user", "content": "x"}]}, "`role` and `content` are the messages form: name the field `messages`"),
    ("sharegpt", {"conversations": [{"from": "gpt"}]}, "`conversations[0]` has no `value`"),
    ("sharegpt", {"conversations": [{"from": "gpt", "value": 1}]}, "`conversations[0].value` is a number"),
    ("sharegpt", {"conversations": [{"from": "gpt", "value": " "}]}, "`conversations[0].value` is empty: the assistant would learn to say nothing"),
    ("sharegpt", {"conversations": [{"from": "GPT", "value": "x"}]}, "did you mean 'gpt'"),
    ("sharegpt", {"conversations": [{"from": "bot", "value": "x"}]}, "did you mean 'assistant'"),
    ("sharegpt", {"conversations": [{"from": "human", "value": "x"}]}, "no assistant turn: nothing to train"),
    ("prompt_completion", {"prompt": "x"}, "no `completion` in the row"),
    ("prompt_completion", {"prompt": None, "completion": "y"}, "`prompt` is null, not a string"),
    ("prompt_completion", {"prompt": "x", "completion": ""}, "`completion` is empty"),
    ("prompt_completion", {"prompt": "x", "completion": []}, "`prompt` is a string and `completion` is a list"),
    ("prompt_completion", {"prompt": [{"role": "user", "content": "x"}], "completion": [{"role": "user", "content": "y"}]}, "no assistant turn"),
    ("prompt_completion", {"prompt": [{"role": "user"}], "completion": []}, "`prompt[0]` has no `content`"),
    ("text", {"prompt": "x", "rejected": 1, "chosen": 2}, "rows of the preference form"),
]


@pytest.mark.parametrize(("form", "row", "expected"), FAULTS)
def test_faults_name_the_key_and_the_line(write_rows: Any, form: Form, row: dict[str, Any], expected: str) -> None:
    path = write_rows([row])
    with pytest.raises(InputError) as error:
        read(path, form)
    assert expected in str(error.value)
    assert f"{path}:1" in str(error.value)


def test_forms_are_not_mixed_and_every_place_is_named(write_rows: Any, talk: Any) -> None:
    path = write_rows([{"messages": talk("hello", "fine")}, {"instruction": "x", "output": "y"}, {"text": "z"}, {"text": "z"}])
    with pytest.raises(InputError) as error:
        read(path)
    assert re.findall(r"it looks like the (\w+) form", str(error.value)) == ["alpaca", "text"]
    assert f"where  {path}:3, {path}:4" in str(error.value)


def test_messages_beside_preferences_are_trained_when_asked_for(write_rows: Any, talk: Any) -> None:
    path = write_rows([{"messages": talk("hello", "fine"), "chosen": talk("hello", "fine"), "rejected": talk("hello", "bye")}])
    with pytest.raises(InputError, match=r"rows of the preference form(.|\n)*set data\.form: .*messages"):
        form_of((path,), "auto")
    assert [sample.content for sample in read(path, "messages")] == [conversation(talk("hello", "fine"))]


def test_every_form_is_in_the_job_and_its_example_is_of_the_form() -> None:
    from typing import get_args

    assert set(FORMS) == set(get_args(Data.model_fields["form"].annotation)) - {"auto"} == set(get_args(Form))
    for form, shape in FORMS.items():
        assert not isinstance(shape.read(Given(json.loads(shape.example), "here")), list)
        assert all(key in json.loads(shape.example) for key in shape.keys), form


def test_real_alpaca_and_sharegpt_rows(shared: Path) -> None:
    assert len(read(shared / "data/instruct/self_instruct_alpaca_427.json")) == 427
    assert len(read(shared / "data/chat/glaive_toolcall_sharegpt_300.json")) == 300
    with pytest.raises(InputError, match="preference"):
        read(shared / "data/preference/dpo_en_sharegpt_300.json")
