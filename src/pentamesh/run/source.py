"""Where a model's files are: a local folder, or a hub id's files brought into the local cache once a node."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pentamesh.errors import InputError
from pentamesh.job.job import Model

__all__ = ["model_folder", "tokenizer_of"]

# Weights as safetensors, and what describes them: never pickles, never code.
_WANTED = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "*.txt")


def model_folder(model: Model, base: Path) -> Path:
    """The folder with the model's config, weights and tokenizer; a hub id is downloaded if it is not in the cache. Raises InputError."""
    for candidate in (base / model.name, Path(model.name)):
        if (candidate / "config.json").is_file():
            return candidate.resolve()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model.name, revision=model.revision, allow_patterns=list(_WANTED)))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise InputError(
            f"model {model.name!r} is neither a folder with a config.json nor a hub id that can be reached{offline}: {str(error).splitlines()[0]}",
            where="model.name",
            hint="give a folder, or log in with `hf auth login` and check the name",
        ) from error


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase:
    """The folder's tokenizer, without any code of the folder's own. Raises InputError."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise InputError(
            f"no tokenizer can be read from {folder}: {str(error).splitlines()[0]}",
            where="model.name",
            hint="the folder needs tokenizer.json and tokenizer_config.json beside config.json",
        ) from error
