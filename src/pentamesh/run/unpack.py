"""Unpack: a GGUF file as the Hugging Face folder that a run trains from: its weights as numbers, its config, its tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pentamesh.checkpoint.gguf import write_dequantised
from pentamesh.errors import InputError, reason
from pentamesh.model.gguf import INSTEAD, read_gguf
from pentamesh.run.made import made_once

__all__ = ["gguf_tokenizer", "unpacked"]

# How byte-level vocabularies split text, by the name in the file: those that transformers knows, those that it splits as GPT-2 does, and one more.
KNOWN_SPLITS = ("gpt-2", "llama-bpe", "llama3", "llama-v3", "qwen2", "deepseek-r1-qwen", "tekken", "smollm")


def unpacked(gguf: Path, folder: Path) -> Path:
    """The folder with what a GGUF file holds, made now or found there; it appears at once, whole. Raises InputError."""
    stat = gguf.stat()
    record = {"schema": "pentamesh.unpacked", "version": 1, "gguf": str(gguf), "bytes": stat.st_size, "changed_ns": stat.st_mtime_ns}

    def write(partial: Path) -> None:
        gguf_tokenizer(gguf).save_pretrained(partial)
        write_dequantised(read_gguf(gguf), partial)

    return made_once(folder, "the unpacked model", record, write)


def gguf_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """The tokenizer and chat template that a GGUF file carries. Raises InputError where its text would be split otherwise than the model learned."""
    metadata = read_gguf(gguf).metadata
    split = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if metadata.get("tokenizer.ggml.model") == "gpt2" and split not in KNOWN_SPLITS:
        raise InputError(
            f"how the tokenizer {split!r} splits text is not known", where=str(gguf), hint=f"known: {', '.join(KNOWN_SPLITS)}; {INSTEAD}"
        )
    try:
        found = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    except Exception as error:  # of a reader of foreign files
        raise InputError(f"no tokenizer can be read from {gguf.name}: {reason(error)}", where=str(gguf), hint=INSTEAD) from error
    if split == "smollm":
        _split_digits(found)
    found.model_max_length = metadata.get(f"{metadata.get('general.architecture')}.context_length", found.model_max_length)
    return found


def _split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    """SmolLM's vocabulary has no numbers but digits; by that name transformers splits as for GPT-2, which keeps numbers whole."""
    digits, by_bytes = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, by_bytes])  # type: ignore[attr-defined]
