"""Parts: what a turn says as a list of pieces, `[{"type": "text", "text": "..."}]`, as one text."""

from __future__ import annotations

from typing import Any

from pentamesh.run.data.kinds import string_fault

__all__ = ["joined"]


def joined(content: Any, field: str) -> tuple[Any, str]:
    """A content whose parts are all text as one text, any other as it is; and what is wrong with a part."""
    if not isinstance(content, list) or not content or not all(isinstance(part, dict) for part in content):
        return content, ""
    fault = next((found for i, part in enumerate(content) if (found := _fault(part, f"{field}[{i}]"))), "")
    return ("", fault) if fault else ("".join(part["text"] for part in content), "")


def _fault(part: dict[str, Any], field: str) -> str:
    if part.get("type") != "text":
        return f"`{field}.type` is {part.get('type')!r}: only parts that are text are trained"
    return string_fault(part.get("text"), f"{field}.text")
