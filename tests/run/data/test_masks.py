"""What is trained, family by family, written out: index-exact masks of conversations of several turns, with tools and with thoughts.

Each is computed twice: by `Chat`, and by looking the expected text up in what the tokens decode to, one after the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pentamesh.run.data.chat import Chat
from pentamesh.run.data.turns import Conversation, answers
from tests.run.data.templates import FAMILIES

USER = {"role": "user", "content": "Name the capital of Portugal."}
AGAIN = {"role": "user", "content": "And of Spain?"}
WEATHER = {"role": "user", "content": "How warm is it there?"}
SYSTEM = {"role": "system", "content": "Be brief."}
LISBON = {"role": "assistant", "content": "Lisbon."}
MADRID = {"role": "assistant", "content": "Madrid."}
WARM = {"role": "assistant", "content": "19 degrees."}
RESULT = {"role": "tool", "content": '{"degrees": 19}', "tool_call_id": "abcdefghi"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}


def call(city: str = "Lisbon", content: str = "") -> dict[str, Any]:
    made = {"type": "function", "id": "abcdefghi", "function": {"name": "weather", "arguments": {"city": city}}}
    return {"role": "assistant", "content": content, "tool_calls": [made]}


def thought(message: dict[str, Any], said: str) -> dict[str, Any]:
    return {**message, "reasoning_content": said}


QWEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Lisbon"}}\n</tool_call><|im_end|>'
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Lisbon"}}<|eot_id|>'
MISTRAL_CALL = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Lisbon"}, "id": "abcdefghi"}]</s>'
GLM_CALL = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Lisbon</arg_value>\n</tool_call>"
TALK = [USER, LISBON, AGAIN, MADRID]
TOOLS = [USER, LISBON, WEATHER, call(), RESULT, WARM]
TOOLS_TWICE = [WEATHER, call(), RESULT, WARM, AGAIN, call(), RESULT, MADRID]
THINKING = [USER, thought(LISBON, "Easy."), WEATHER, thought(call(), "Ask."), RESULT, thought(WARM, "Read it.")]

# The family, the messages, whether tools are offered, and all that is trained, turn by turn.
CASES: dict[str, tuple[str, list[dict[str, Any]], bool, list[str]]] = {
    "chatml": ("qwen2", TALK, False, ["Lisbon.<|im_end|>", "Madrid.<|im_end|>"]),
    "chatml with a system turn": ("qwen2", [SYSTEM, *TALK], False, ["Lisbon.<|im_end|>", "Madrid.<|im_end|>"]),
    "chatml with tools": ("qwen2", TOOLS, True, ["Lisbon.<|im_end|>", QWEN_CALL, "19 degrees.<|im_end|>"]),
    "chatml with tools twice": ("qwen2", TOOLS_TWICE, True, [QWEN_CALL, "19 degrees.<|im_end|>", QWEN_CALL, "Madrid.<|im_end|>"]),
    "chatml, text before a call": (
        "qwen2",
        [WEATHER, call(content="I look."), RESULT, WARM],
        True,
        ["I look.\n" + QWEN_CALL, "19 degrees.<|im_end|>"],
    ),
    "qwen3": ("qwen3", TALK, False, ["Lisbon.<|im_end|>", "<think>\n\n</think>\n\nMadrid.<|im_end|>"]),
    "qwen3 with thoughts": (
        "qwen3",
        [USER, thought(LISBON, "Easy."), AGAIN, thought(MADRID, "Easy too.")],
        False,
        ["Lisbon.<|im_end|>", "<think>\nEasy too.\n</think>\n\nMadrid.<|im_end|>"],
    ),
    "qwen3 with tools": ("qwen3", TOOLS, True, ["Lisbon.<|im_end|>", QWEN_CALL, "<think>\n\n</think>\n\n19 degrees.<|im_end|>"]),
    "qwen3 with tools twice": (
        "qwen3",
        TOOLS_TWICE,
        True,
        [QWEN_CALL, "19 degrees.<|im_end|>", QWEN_CALL, "<think>\n\n</think>\n\nMadrid.<|im_end|>"],
    ),
    "qwen3 with thoughts and tools": (
        "qwen3",
        THINKING,
        True,
        ["Lisbon.<|im_end|>", "<think>\nAsk.\n</think>\n\n" + QWEN_CALL, "<think>\nRead it.\n</think>\n\n19 degrees.<|im_end|>"],
    ),
    "llama 3": ("llama31", TALK, False, ["Lisbon.<|eot_id|>", "Madrid.<|eot_id|>"]),
    "llama 3 with a system turn": ("llama31", [SYSTEM, *TALK], False, ["Lisbon.<|eot_id|>", "Madrid.<|eot_id|>"]),
    "llama 3 with tools": ("llama31", TOOLS, True, ["Lisbon.<|eot_id|>", LLAMA_CALL, "19 degrees.<|eot_id|>"]),
    "llama 3 with tools twice": ("llama31", TOOLS_TWICE, True, [LLAMA_CALL, "19 degrees.<|eot_id|>", LLAMA_CALL, "Madrid.<|eot_id|>"]),
    "mistral": ("mistral3", TALK, False, ["Lisbon.</s>", "Madrid.</s>"]),
    "mistral with tools": ("mistral3", TOOLS, True, ["Lisbon.</s>", MISTRAL_CALL, "19 degrees.</s>"]),
    "mistral with tools twice": ("mistral3", TOOLS_TWICE, True, [MISTRAL_CALL, "19 degrees.</s>", MISTRAL_CALL, "Madrid.</s>"]),
    "gemma": ("gemma", TALK, False, ["Lisbon.<end_of_turn>", "Madrid.<end_of_turn>"]),
    "glm": (
        "glm",
        TALK,
        False,
        ["\n<think></think>\nLisbon.<|user|>", "\n<think></think>\nMadrid.<|endoftext|>"],
    ),
    "glm with thoughts": (
        "glm",
        [USER, thought(LISBON, "Easy."), AGAIN, thought(MADRID, "Easy too.")],
        False,
        ["\n<think></think>\nLisbon.<|user|>", "\n<think>Easy too.</think>\nMadrid.<|endoftext|>"],
    ),
    "glm with thoughts and tools": (
        "glm",
        THINKING,
        True,
        [
            "\n<think></think>\nLisbon.<|user|>",
            f"\n<think>Ask.</think>\n{GLM_CALL}<|observation|>",
            "\n<think>Read it.</think>\n19 degrees.<|endoftext|>",
        ],
    ),
    "glm with tools twice": (
        "glm",
        TOOLS_TWICE,
        True,
        [
            f"\n<think></think>\n{GLM_CALL}<|observation|>",
            "\n<think></think>\n19 degrees.<|user|>",
            f"\n<think></think>\n{GLM_CALL}<|observation|>",
            "\n<think></think>\nMadrid.<|endoftext|>",
        ],
    ),
}


def looked_up(tokenizer: Any, ids: list[int], expected: list[str]) -> list[int]:
    """The tokens that reach into the expected texts, each searched behind the one before; the search begins at the last such place."""
    stops = [len(tokenizer.decode(ids[: k + 1])) for k in range(len(ids))]
    text = tokenizer.decode(ids)
    end, found = len(text), []
    for piece in reversed(expected):
        start = text.rindex(piece, 0, end)
        found += [k for k, stop in enumerate(stops) if stop > start and (stops[k - 1] if k else 0) < start + len(piece)]
        end = start
    return sorted(found)


@pytest.mark.parametrize("case", CASES)
def test_exactly_this_is_trained(styled: Any, case: str) -> None:
    name, messages, offered, expected = CASES[case]
    tokenizer, talk = styled(name), Conversation(messages, answers(messages), [TOOL] if offered else [])
    text, spans = Chat.of(tokenizer).spans(talk)
    assert [text[start:stop] for start, stop in spans] == expected
    encoded = Chat.of(tokenizer).encode(talk)
    assert np.flatnonzero(encoded.trained).tolist() == looked_up(tokenizer, encoded.ids.tolist(), expected)
    rendered = tokenizer.apply_chat_template(messages, tools=talk.tools or None, tokenize=False)
    assert tokenizer.decode(encoded.ids).startswith(rendered)
    assert (encoded.ids[encoded.trained] == tokenizer.convert_tokens_to_ids(tokenizer.pad_token)).sum() == (1 if name == "glm" else len(expected))


def test_the_same_is_trained_under_a_published_vocabulary(shared: Path) -> None:
    """SmolLM2's, whose padding is the end-of-turn token, with the templates of its kind; its thoughts and calls are no tokens of their own."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared / "data/tokenizers/smollm2")
    assert tokenizer.pad_token == "<|im_end|>"
    for name, messages, offered, expected in (case for case in CASES.values() if case[0] in ("qwen2", "qwen3")):
        tokenizer.chat_template = FAMILIES[name]["template"]
        encoded = Chat.of(tokenizer).encode(Conversation(messages, answers(messages), [TOOL] if offered else []))
        assert np.flatnonzero(encoded.trained).tolist() == looked_up(tokenizer, encoded.ids.tolist(), expected)
        assert tokenizer.decode(encoded.ids[encoded.trained]) == "".join(expected)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama31", "gemma", "glm"])
def test_it_is_what_follows_the_generation_prompt_turn_by_turn(styled: Any, name: str) -> None:
    """The conversation tokenised as it grows: to the prompt, and to the answer. The ends of turns are special, so no token crosses them."""
    tokenizer, grown = styled(name), [SYSTEM, *TALK] if name not in ("gemma", "glm", "qwen3") else TALK
    for i in answers(grown):
        prompt, turn = (
            tokenizer.apply_chat_template(grown[:n], add_generation_prompt=asked, return_dict=False) for n, asked in ((i, True), (i + 1, False))
        )
        found = Chat.of(tokenizer).encode(Conversation(grown[: i + 1], (i,)))
        assert turn[: len(prompt)] == prompt
        end = len(turn) - (name in ("qwen2", "qwen3", "gemma")) + (name == "glm")  # the line break behind the end; GLM has no end but the text's
        assert np.flatnonzero(found.trained).tolist() == list(range(len(prompt), end))
