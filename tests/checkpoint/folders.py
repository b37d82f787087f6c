"""Toy Hugging Face folders, made with transformers' own saver, and what is read of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pentamesh.checkpoint import weights
from pentamesh.model.families import describe
from pentamesh.model.spec import ModelSpec


def toy(folder: Path, *, tied: bool = False, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB") -> LlamaForCausalLM:
    """A two-layer Llama with sizes that nothing divides, saved to `folder`."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).to(dtype=dtype)  # pyright: ignore[reportArgumentType, reportCallIssue]
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def spec(folder: Path, **changes: Any) -> ModelSpec:
    """The spec of a folder's config."""
    config = json.loads((folder / "config.json").read_text()) | changes
    described = describe(config, "toy")
    assert described is not None
    return described


class Watched(NamedTuple):
    """The names of tensors that were asked for, and of each read how many values."""

    asked: list[str]
    read: list[int]


def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """What is read of weights from now on."""
    found, real = Watched([], []), weights.safe_open

    class Slice:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getitem__(self, item: tuple[slice, ...]) -> torch.Tensor:
            values = self.inner[item]
            found.read.append(values.numel())
            return values

    class File:
        def __init__(self, *args: Any, **more: Any) -> None:
            self.file = real(*args, **more)

        def __enter__(self) -> File:
            self.inner = self.file.__enter__()
            return self

        def __exit__(self, *args: object) -> None:
            self.file.__exit__(*args)

        def get_slice(self, name: str) -> Slice:
            found.asked.append(name)
            return Slice(self.inner.get_slice(name))

    monkeypatch.setattr(weights, "safe_open", File)
    return found
