"""Written: a YAML text as plain values, with the line of every key, or everything that is wrong with its writing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from pentamesh.errors import InputError, Problem

__all__ = ["KeyPath", "Written", "dotted", "read_text", "read_value", "read_yaml"]

KeyPath = tuple[str, ...]
EXAMPLE = "a job begins like `model: llama-3.1-8b`"
PLAIN_TAGS = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}
# YAML 1.1 reads `010` as eight and `1:30` as ninety, which nobody who writes a job means. Source: yaml.org/type/int.html, float.html.
SURPRISING = re.compile(r"[-+]?(0[0-9_]+|[0-9_]+(:[0-5]?[0-9])+(\.[0-9_]*)?)")
# `%TAG` and `!` markers could ask for objects; a job file holds plain values only.
TOO_DEEP = "nested too deeply to be a job file"


def dotted(path: Sequence[str]) -> str:
    """A path as people write it: `data.train[1].weight`, where `[1]` is a key of its own."""
    return "".join(key if key.startswith("[") else f".{key}" for key in path).removeprefix(".")


@dataclass
class Written:
    """The values of a text and where each was written: `lines` by path of keys, `sources` for what came from elsewhere (`--set`)."""

    name: str
    tree: dict[str, Any] = field(default_factory=dict)
    lines: dict[KeyPath, int] = field(default_factory=dict)
    sources: dict[KeyPath, str] = field(default_factory=dict)

    def at(self, path: Sequence[str]) -> str:
        """Where `path` was written (`job.yaml:14 layout.tensor`); the nearest key above it, or below, when it was not."""
        for length in range(len(path), 0, -1):
            prefix = tuple(path[:length])
            if prefix in self.sources:
                return self.sources[prefix]
            if prefix in self.lines:
                return f"{self.name}:{self.lines[prefix]} {dotted(path)}"
        below = (source for key, source in self.sources.items() if key[: len(path)] == tuple(path))
        return next(below, f"{self.name} {dotted(path)}") if path else self.name


class _Loader(yaml.SafeLoader):
    """Safe, without aliases (a few of them nested stand for billions of values), and with `1e-5` read as a number."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="an alias (`*name`) stands for other values", problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789"))


def read_text(path: Path) -> str:
    """The text of a file. Raises InputError where there is none, or it is not UTF-8."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        beside = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        hint = f"{path.parent} has {', '.join(beside[:5])}" if beside else f"no job file in {path.parent}"
        raise InputError(f"there is no file {path}", where=str(path), hint=hint) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", where=str(path), hint="give a readable YAML file") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise InputError(f"byte 0x{raw[error.start]:02x} is not UTF-8", where=f"{path}:{line}", hint="save the file as UTF-8") from None


def read_yaml(text: str, name: str) -> Written:
    """A text of keys and values. Raises InputError for what is no YAML, not keys, or written twice: all of it that can be found."""
    written, problems = Written(name), []
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode):
            written.tree = _mapping(loader, node, (), written, problems)
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(*_unreadable(text, name, error)) from None
    if node is None:
        problems.append(Problem(f"{name} is empty", name, EXAMPLE))
    elif not isinstance(node, yaml.MappingNode):
        what = "a list" if isinstance(node, yaml.SequenceNode) else f"the text {node.value[:40]!r}"
        problems.append(Problem(f"{name} holds {what}, not keys with values", f"{name}:{node.start_mark.line + 1}", EXAMPLE))
    if problems:
        raise InputError(*problems)
    return written


def read_value(text: str, where: str) -> Any:
    """One value as it would stand behind a key. Raises InputError."""
    problems: list[Problem] = []
    written = Written(where)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        value = None if node is None else _value(loader, node, (), written, problems)
    except (yaml.YAMLError, RecursionError):
        raise InputError(f"{text!r} is not a value", where=where, hint="quote what holds `: `, `#` or brackets") from None
    if problems:
        raise InputError(*(replace(problem, where=where) for problem in problems))
    return value


def _mapping(loader: _Loader, node: yaml.MappingNode, path: KeyPath, written: Written, problems: list[Problem]) -> dict[str, Any]:
    if node.tag not in PLAIN_TAGS:
        problems.append(_tagged(node, path, written))
        return {}
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(Problem("a key is a list or a mapping", f"{written.name}:{line}", "a key is one word"))
            continue
        inner = (*path, key_node.value)
        if key_node.value in found:
            what = f"`{key_node.value}` is written twice, on lines {written.lines[inner]} and {line}"
            problems.append(Problem(what, f"{written.name}:{line} {dotted(inner)}", "keep one of them"))
            continue
        written.lines[inner] = line
        found[key_node.value] = _value(loader, value_node, inner, written, problems)
    return found


def _value(loader: _Loader, node: yaml.Node, path: KeyPath, written: Written, problems: list[Problem]) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(loader, node, path, written, problems)
    if isinstance(node, yaml.SequenceNode) and node.tag in PLAIN_TAGS:
        return [_item(loader, item, (*path, f"[{i}]"), written, problems) for i, item in enumerate(node.value)]
    try:
        if isinstance(node, yaml.ScalarNode):
            value = loader.construct_object(node)
            if isinstance(value, int | float) and SURPRISING.fullmatch(node.value):
                problems.append(_surprising(node, value, path, written))
            return value
    except (yaml.YAMLError, ValueError):
        pass
    problems.append(_tagged(node, path, written))
    return None


def _item(loader: _Loader, node: yaml.Node, path: KeyPath, written: Written, problems: list[Problem]) -> Any:
    written.lines[path] = node.start_mark.line + 1
    return _value(loader, node, path, written, problems)


def _surprising(node: yaml.ScalarNode, value: float, path: KeyPath, written: Written) -> Problem:
    hint = "write it in plain digits, or in quotes where text is meant"
    return Problem(f"{node.value} would be read as {value:g}", f"{written.name}:{node.start_mark.line + 1} {dotted(path)}", hint)


def _tagged(node: yaml.Node, path: KeyPath, written: Written) -> Problem:
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    what = f"{node.value!r} cannot be read as {kind}" if isinstance(node, yaml.ScalarNode) else f"a value of the kind `{kind}`"
    return Problem(what, f"{written.name}:{node.start_mark.line + 1} {dotted(path)}", "write text, numbers, lists and keys; put text in quotes")


def _unreadable(text: str, name: str, error: Exception) -> list[Problem]:
    """What to say of a text that is no YAML: every tab that indents, or the place where reading stopped."""
    lines = text.splitlines()
    mark = getattr(error, "problem_mark", None)
    indents = [n for n, line in enumerate(lines, 1) if "\t" in line[: len(line) - len(line.lstrip())] and line.strip()]
    stopped = mark.line + 1 if mark else None
    if stopped and stopped not in indents and stopped <= len(lines) and "cannot start any token" in str(error) and "\t" in lines[stopped - 1]:
        indents.append(stopped)
    if indents:
        return [Problem("a tab where YAML wants spaces", f"{name}:{n}", "replace the tab by spaces") for n in sorted(indents)]
    if isinstance(error, RecursionError):
        return [Problem(f"{name} is {TOO_DEEP}", name, EXAMPLE)]
    if isinstance(error, yaml.reader.ReaderError):
        line = text[: error.position].count("\n") + 1 if isinstance(error.position, int) else 1
        return [Problem(f"character U+{ord(text[error.position]):04X} cannot stand in YAML", f"{name}:{line}", "remove it")]
    said = getattr(error, "problem", None) or "it is not YAML"
    return [Problem(f"YAML cannot be read here: {said}", f"{name}:{stopped or 1}", "check indentation, and quote what holds `: `, `#` or brackets")]
