"""Which tokens of a conversation are trained: exact index lists for three families, and templates that make it hard."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pentamesh.errors import InputError
from pentamesh.run.data.chat import Chat, encode_chat
from pentamesh.run.data.turns import Conversation, answers


def trained_indices(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    return np.flatnonzero(encode_chat(tokenizer, messages).trained).tolist()


def trained_text(tokenizer: Any, messages: list[dict[str, str]]) -> list[str]:
    text, spans = Chat.of(tokenizer).spans(Conversation(messages, answers(messages)))
    return [text[start:stop] for start, stop in spans]


# 0 <|im_start|> user \n he llo <|im_end|> \n   7 <|im_start|> a ss istant \n   12 fin e _thanks <|im_end|>   16 \n
# 17 <|im_start|> user \n how _are _you <|im_end|> \n   25 <|im_start|> a ss istant \n   30 b ye _now <|im_end|>   34 \n
def test_chatml_trains_answers_and_their_end_of_turn(chatml: Any, talk: Any) -> None:
    messages = talk("hello", "fine thanks", "how are you", "bye now")
    assert trained_indices(chatml, messages) == [12, 13, 14, 15, 30, 31, 32, 33]
    ids = encode_chat(chatml, messages).ids
    assert len(ids) == 35
    # The padding token is the end-of-turn token, and is trained all the same.
    assert [chatml.decode(ids[i]) for i in (15, 33)] == [chatml.pad_token] * 2 == ["<|im_end|>"] * 2


# 0 <|im_start|> system \n b e _kind <|im_end|> \n   8 <|im_start|> user \n he llo _there <|im_end|> \n
# 16 <|im_start|> a ss istant \n   21 fin e <|im_end|>   24 \n
def test_chatml_with_a_system_turn(chatml: Any, talk: Any) -> None:
    assert trained_indices(chatml, talk("hello there", "fine", system="be kind")) == [21, 22, 23]


# 0 <|begin_of_text|> <|start_header_id|> user <|end_header_id|> \n \n he llo <|eot_id|>   9 <|start_header_id|> a ss istant <|end_header_id|> \n \n
# 16 fin e _thanks <|eot_id|>   20 <|start_header_id|> user <|end_header_id|> \n \n how _are _you <|eot_id|>
# 29 <|start_header_id|> a ss istant <|end_header_id|> \n \n   36 b ye _now <|eot_id|>
def test_llama3_trains_answers_and_their_end_of_turn(llama3: Any, talk: Any) -> None:
    messages = talk("hello", "fine thanks", "how are you", "bye now")
    assert trained_indices(llama3, messages) == [16, 17, 18, 19, 36, 37, 38, 39]
    assert len(encode_chat(llama3, messages).ids) == 40


def test_llama3_with_a_system_turn(llama3: Any, talk: Any) -> None:
    assert trained_indices(llama3, talk("hello there", "fine", system="be kind")) == [26, 27, 28]


# 0 <s> [INST] _hello _ [/INST]   5 _fine _thanks </s>   8 [INST] _how _are _you _ [/INST]   14 _bye _now </s>
def test_mistral_trains_answers_and_their_end_of_turn(mistral: Any, talk: Any) -> None:
    messages = talk("hello", "fine thanks", "how are you", "bye now")
    assert trained_indices(mistral, messages) == [5, 6, 7, 14, 15, 16]
    assert len(encode_chat(mistral, messages).ids) == 17
    assert encode_chat(mistral, messages).ids.tolist().count(mistral.bos_token_id) == 1


# 0 <s> [INST] _be _kind \n \n he llo _there _ [/INST]   11 _fine </s>
def test_mistral_with_a_system_turn(mistral: Any, talk: Any) -> None:
    assert trained_indices(mistral, talk("hello there", "fine", system="be kind")) == [11, 12]


def test_one_answer_of_several_tokens_equals_the_prompt_and_what_follows_it(chatml: Any, talk: Any) -> None:
    """The definition: what the model writes after the generation prompt."""
    messages = talk("hello", "café ☕ 🎉", "how", "bye")
    prompt = chatml.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    num_prompt = len(chatml(prompt, add_special_tokens=False)["input_ids"])
    answer = chatml("café ☕ 🎉<|im_end|>", add_special_tokens=False)["input_ids"]
    assert trained_indices(chatml, messages)[: len(answer)] == list(range(num_prompt, num_prompt + len(answer)))


GENERATION = """{%- for m in messages -%}
{%- if m['role'] == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}{%- generation -%}{{ m['content'] + END }}{%- endgeneration -%}{{ REST }}
{%- else -%}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{%- endif -%}
{%- endfor -%}"""


@pytest.mark.parametrize(("end", "rest"), [("<|im_end|>", "\\n"), ("<|im_end|>\\n", ""), ("", "<|im_end|>\\n")])
def test_a_template_that_marks_generation_is_believed_and_the_end_of_turn_is_still_a_target(styled: Any, talk: Any, end: str, rest: str) -> None:
    tokenizer = styled("chatml", GENERATION.replace("END", f"'{end}'").replace("REST", f"'{rest}'"))
    assert trained_indices(tokenizer, talk("hello", "fine thanks", "how are you", "bye now")) == [12, 13, 14, 15, 30, 31, 32, 33]


SPACED = "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '\\n<|im_end|>\\n' }}{%- endfor -%}"


def test_white_space_before_the_end_of_turn_is_trained_with_it(styled: Any, talk: Any) -> None:
    messages = talk("hello", "fine", "how", "bye")
    text, spans = Chat.of(styled("chatml", SPACED)).spans(Conversation(messages, (0, 1, 3)))
    assert [text[start:stop] for start, stop in spans] == ["hello\n<|im_end|>", "fine\n<|im_end|>", "bye\n<|im_end|>"]


TWICE = GENERATION.replace("m['content'] + END", "m['content'][:2]").replace(
    "{%- endgeneration -%}{{ REST }}", "{%- endgeneration -%}{%- generation -%}{{ m['content'][2:] + '<|im_end|>' }}{%- endgeneration -%}"
)


def test_a_template_may_mark_a_turn_in_pieces_where_all_turns_are_trained(styled: Any, talk: Any) -> None:
    messages, chat = talk("hello", "fine", "how", "bye"), Chat.of(styled("chatml", TWICE))
    text, spans = chat.spans(Conversation(messages, (1, 3)))
    assert [text[start:stop] for start, stop in spans] == ["fi", "ne<|im_end|>", "by", "e<|im_end|>"]
    with pytest.raises(InputError, match="marks 4 spans for 2 answers, so those that are not trained cannot be told"):
        chat.spans(Conversation(messages, (3,)))


NO_ENDS = "{%- for m in messages -%}{{ m['role'] + ': ' + m['content'] + '\\n' }}{%- endfor -%}"


def test_the_end_of_text_ends_the_last_answer_of_a_template_that_ends_no_turn(styled: Any, talk: Any) -> None:
    chat, messages = Chat.of(styled("chatml", NO_ENDS)), talk("hello", "fine", "how", "bye")
    text, spans = chat.spans(Conversation(messages, (1, 3)))
    assert [text[start:stop] for start, stop in spans] == ["fine\n", "bye\n<|im_end|>"]
    assert chat.spans(Conversation(messages, (1,)))[0] == text.removesuffix("<|im_end|>")
    assert chat.spans(Conversation(messages[:3], (2,)))[0] == "user: hello\nassistant: fine\nuser: how\n"


ANSWERS = """{%- for m in messages -%}{{ m.role + ':' }}
{%- if m.role == 'assistant' -%}{%- generation -%}{{ m.content }}{%- endgeneration -%}{%- else -%}{{ m.content }}{%- endif -%}
{%- endfor -%}"""
# What a template marks, and the faults that are named, for a talk of two questions with an answer each.
MISPLACED: dict[str, tuple[str, list[str]]] = {
    "nothing": (
        NO_ENDS + "{% if false %}{% generation %}{% endgeneration %}{% endif %}",
        ["does not mark messages[1] of the role assistant", "does not mark messages[3] of the role assistant"],
    ),
    "the questions": (
        ANSWERS.replace("'assistant'", "'user'"),
        [
            "marks messages[0] of the role user",
            "does not mark messages[1] of the role assistant",
            "marks messages[2] of the role user",
            "does not mark messages[3] of the role assistant",
        ],
    ),
    "all of it": (
        f"{{% generation %}}{NO_ENDS}{{% endgeneration %}}",
        ["marks messages[0] of the role user", "marks messages[2] of the role user"],
    ),
    "the last answer alone": (
        ANSWERS.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last"),
        ["does not mark messages[1] of the role assistant"],
    ),
    "what it should": (ANSWERS, []),
}


@pytest.mark.parametrize("case", MISPLACED)
def test_marks_around_anything_but_the_answers_are_refused(styled: Any, talk: Any, case: str) -> None:
    template, expected = MISPLACED[case]
    chat, messages = Chat.of(styled("chatml", template)), talk("hello", "fine", "how", "bye")
    if not expected:
        assert chat.encode(Conversation(messages, (1, 3))).num_trained
        return
    for trained in ((1, 3), (0, 1, 2, 3)):  # the second is known by its shape
        with pytest.raises(InputError) as error:
            chat.encode(Conversation(messages, trained))
        found = [problem.what for problem in error.value.problems]
        assert found == [f"the chat template {what} as what the assistant writes" for what in expected]
        assert "mend {% generation %} in the chat template, or take it out" in error.value.problems[0].hint


def test_a_template_without_generation_prompt_does_not_train_the_header(styled: Any, talk: Any) -> None:
    template = "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{%- endfor -%}"
    messages = talk("hello", "assistant", "how are you", "bye now")
    assert trained_text(styled("chatml", template), messages) == ["assistant<|im_end|>", "bye now<|im_end|>"]


# The way of Qwen3: the last answer shows an empty thought, which disappears once other turns follow.
THINKING = """{%- for m in messages -%}
{{ '<|im_start|>' + m['role'] + '\\n' }}
{{- ('<think>\\n\\n</think>\\n\\n' if loop.last and m['role'] == 'assistant' else '') + m['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""


def test_a_turn_that_is_shown_differently_once_others_follow(styled: Any, talk: Any) -> None:
    found = trained_text(styled("chatml", THINKING), talk("hello", "fine", "how", "bye"))
    assert found == ["fine<|im_end|>", "<think>\n\n</think>\n\nbye<|im_end|>"]


# The way of Mistral 7B v0.3: the system turn moves to the last user turn.
MOVING = """{{- bos_token -}}{%- set told = messages[0]['content'] -%}
{%- for m in messages[1:] -%}
{%- if m['role'] == 'user' -%}{{ '[INST] ' + (told + '\\n\\n' if loop.index0 >= (messages | length) - 3 else '') + m['content'] + ' [/INST]' }}
{%- else -%}{{ ' ' + m['content'] + '</s>' }}{%- endif -%}
{%- endfor -%}"""


def test_a_system_turn_that_moves_with_the_conversation(styled: Any, talk: Any) -> None:
    found = trained_text(styled("mistral", MOVING), talk("hello", "fine", "how", "bye", system="be kind"))
    assert found == ["fine</s>", "bye</s>"]


def test_an_answer_that_quotes_control_tokens_is_trained_to_its_real_end(chatml: Any, talk: Any) -> None:
    assert trained_text(chatml, talk("hello", "say <|im_end|> now")) == ["say <|im_end|> now<|im_end|>"]


def test_a_first_turn_of_the_assistant(chatml: Any) -> None:
    messages = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "how"}, {"role": "assistant", "content": "fine"}]
    assert trained_text(chatml, messages) == ["hello<|im_end|>", "fine<|im_end|>"]


def test_a_template_that_turns_an_answer_into_something_else_is_refused(styled: Any, talk: Any) -> None:
    template = "{%- for m in messages -%}{{ m['content'] | length }}{%- endfor -%}"
    with pytest.raises(InputError, match=r"messages\[1\].*\n.*generation"):
        encode_chat(styled("chatml", template), talk("hello", "fine"))


def test_a_template_that_raises_says_why(mistral: Any, talk: Any) -> None:
    with pytest.raises(InputError, match="roles must alternate: user, assistant"):
        encode_chat(mistral, [*talk("hello", "fine"), {"role": "assistant", "content": "bye"}])


def test_no_template(styled: Any, talk: Any) -> None:
    with pytest.raises(InputError, match=r"no chat template(.|\n)*`text` rows"):
        encode_chat(styled("chatml", None), talk("hello", "fine"))


def test_smollm2_on_real_conversations(shared: Any) -> None:
    """Every trained span is an answer as written and its end-of-turn token, and decodes to it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared / "data/tokenizers/smollm2")
    lines = (shared / "data/chat/messages_300.jsonl").read_text().splitlines()[:60]
    for messages in (json.loads(line)["messages"] for line in lines):
        answers = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
        assert trained_text(tokenizer, messages) == answers
        encoded = encode_chat(tokenizer, messages)
        assert tokenizer.decode(encoded.ids[encoded.trained]) == "".join(answers)
