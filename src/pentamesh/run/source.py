"""Where a model's files are: a local folder or GGUF file, or a hub id's files brought into the local cache once a node."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pentamesh.errors import InputError, reason
from pentamesh.job.job import Model
from pentamesh.model.gguf import gguf_file
from pentamesh.run.grow import grown_folder, with_tokens
from pentamesh.run.unpack import gguf_tokenizer, unpacked

__all__ = ["model_folder", "model_source", "tokenizer_of"]

# The folder, beside that of an unpacked model, in which one with new tokens lies.
GROWN = "grown"
# Weights as safetensors, and what describes them: never pickles, never code.
_WANTED = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "*.txt")


def model_folder(model: Model, unpack_to: Path) -> Path:
    """The folder with the model's config, weights and tokenizer: that of a GGUF file is made at `unpack_to`, once, and that of a model with new
    tokens beside it. Raises InputError."""
    found = model_source(model)
    folder = found if found.is_dir() else unpacked(found, unpack_to)
    return grown_folder(folder, model.new_tokens, unpack_to.with_name(GROWN), tokenizer_of) if model.new_tokens else folder


def model_source(model: Model) -> Path:
    """The folder or GGUF file of a model whose name is `resolved`: a path, or a hub id that is downloaded if it is not in the cache.

    Raises InputError.
    """
    path = Path(model.name)
    if path.is_absolute():
        if gguf := gguf_file(path):
            return gguf
        folder = path.parent if path.name == "config.json" else path
        if not (folder / "config.json").is_file():
            what = f"{path} has no config.json" if folder.is_dir() else f"there is no model folder {path}"
            raise InputError(what, where="model.name", hint="give a Hugging Face model folder")
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model.name, revision=model.revision, allow_patterns=list(_WANTED)))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise InputError(
            f"model {model.name!r} is neither a folder with a config.json nor a hub id that can be reached{offline}: {reason(error)}",
            where="model.name",
            hint="give a folder, or log in with `hf auth login` and check the name",
        ) from error


def tokenizer_of(source: Path, chat_template: str | None = None, new_tokens: Sequence[str] = ()) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or GGUF file, without any code of its own; with its chat template or another, and `new_tokens` added. Raises
    InputError."""
    found = _tokenizer(source) if source.is_dir() else gguf_tokenizer(source)
    with_tokens(found, new_tokens)
    if chat_template is not None:
        found.chat_template = chat_template
    return found


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise InputError(
            f"no tokenizer can be read from {folder}: {reason(error)}",
            where="model.name",
            hint="the folder needs tokenizer.json and tokenizer_config.json beside config.json",
        ) from error
