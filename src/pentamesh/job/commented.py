"""Commented: a job file of some keys, each line with what the key means, in the words in which `job.py` declares it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import yaml
from pydantic.fields import FieldInfo

from pentamesh.job.job import Job, Section

__all__ = ["commented"]


def commented(values: Mapping[str, Any], heading: str) -> str:
    """The text of a job file that says `values`, of dotted keys, in the order of their declaration, below a heading."""
    lines = list(_lines(values))
    width = max(len(line) for line, _ in lines)
    return f"# {heading}\n" + "".join(f"{line:<{width}}  # {said}\n" for line, said in lines)


def _lines(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, field in Job.model_fields.items():
        if name in values:
            yield _line(name, values[name]), _short(field)
        if inner := {key: f for key, f in _keys(field).items() if f"{name}.{key}" in values}:
            yield f"{name}:", _short(field)
            yield from ((f"  {_line(key, values[f'{name}.{key}'])}", _short(f)) for key, f in inner.items())


def _keys(field: FieldInfo) -> dict[str, FieldInfo]:
    kinds = (field.annotation, *get_args(field.annotation))
    return next((dict(kind.model_fields) for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), {})


def _line(key: str, value: Any) -> str:
    flow = None if isinstance(value, dict | list) else False
    line = yaml.safe_dump({key: value}, default_flow_style=flow, sort_keys=False, allow_unicode=True, width=10**6).rstrip("\n")
    return line if "\n" not in line else f"{key}: {json.dumps(value)}"


def _short(field: FieldInfo) -> str:
    """The first thing that a description says."""
    return re.split(r"[;.:](?: |$)", field.description or "", maxsplit=1)[0]
