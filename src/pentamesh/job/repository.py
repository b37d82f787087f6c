"""Repository: what can be the name of a repository on the Hugging Face hub."""

from __future__ import annotations

import re

__all__ = ["HOW", "is_repository"]

# Source: huggingface_hub, validate_repo_id.
_NAME = re.compile(r"(?!.{97})(?!.*(?:--|\.\.))(?!.*\.git$)[A-Za-z0-9][\w.-]*(?<![-.])/\w(?:[\w.-]*\w)?", re.ASCII)
HOW = "write it as organisation/name or you/name: letters, digits, `-`, `_` and `.`, 96 at most"


def is_repository(name: str) -> bool:
    """Whether `name` is spelled like an owner and a repository of the hub."""
    return _NAME.fullmatch(name) is not None
