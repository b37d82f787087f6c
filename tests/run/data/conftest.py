"""Tokenizers and data files that the tests make for themselves: a byte-level BPE of whole test words, under templates of three families."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.run.data.templates import FAMILIES, THOUGHTS

CORPUS = ["system user assistant be kind hello there how are you fine thanks bye now café 1 2 3"] * 4 + [
    " be kind hello there how are you fine thanks bye now"
] * 4

CHATML = """{%- for m in messages -%}
{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

LLAMA3 = """{{- bos_token -}}
{%- for m in messages -%}
{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}"""

# Mistral has no generation prompt, and puts a system turn into the first user turn.
MISTRAL = """{{- bos_token -}}
{%- set told = '' -%}
{%- if messages[0]['role'] == 'system' -%}{%- set told = messages[0]['content'] + '\\n\\n' -%}{%- set messages = messages[1:] -%}{%- endif -%}
{%- for m in messages -%}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate: user, assistant') }}{%- endif -%}
{%- if m['role'] == 'user' -%}{{ '[INST] ' + (told if loop.first else '') + m['content'] + ' [/INST]' }}
{%- else -%}{{ ' ' + m['content'] + '</s>' }}{%- endif -%}
{%- endfor -%}"""

STYLES: dict[str, dict[str, Any]] = {
    # As SmolLM2 publishes it: the padding token *is* the end-of-turn token.
    "chatml": {
        "template": CHATML,
        "special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
    },
    # The end-of-turn token is none of the named ones.
    "llama3": {
        "template": LLAMA3,
        "special": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end_of_text|>",
    },
    "mistral": {"template": MISTRAL, "special": ["<s>", "</s>", "[INST]", "[/INST]"], "bos_token": "<s>", "eos_token": "</s>"},
} | FAMILIES


def make_tokenizer(style: str, template: str | None = "") -> PreTrainedTokenizerFast:
    """A tokenizer of the style, with its own template or another."""
    asked = dict(STYLES[style])
    own, special = asked.pop("template"), asked.pop("special")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False))
    backend.add_special_tokens(special)
    if style in FAMILIES:
        backend.add_tokens(THOUGHTS)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **asked)
    tokenizer.chat_template = own if template == "" else template
    return tokenizer


@pytest.fixture(scope="session")
def chatml() -> PreTrainedTokenizerFast:
    return make_tokenizer("chatml")


@pytest.fixture(scope="session")
def llama3() -> PreTrainedTokenizerFast:
    return make_tokenizer("llama3")


@pytest.fixture(scope="session")
def mistral() -> PreTrainedTokenizerFast:
    return make_tokenizer("mistral")


@pytest.fixture(scope="session")
def styled() -> Callable[..., PreTrainedTokenizerFast]:
    return make_tokenizer


def conversation(*turns: str, system: str | None = None) -> list[dict[str, str]]:
    """Turns of user and assistant, one after the other."""
    told = [{"role": "system", "content": system}] if system else []
    return told + [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


@pytest.fixture(scope="session")
def talk() -> Callable[..., list[dict[str, str]]]:
    return conversation


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Write rows as JSONL into the test's folder."""

    def write(rows: list[Any], name: str = "train.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write
