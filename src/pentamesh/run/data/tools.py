"""Tools: the functions that a row offers and the calls of them, in the one spelling that templates know.

tools       {"type": "function", "function": {"name": "...", "description": "...", "parameters": {...}}}
tool calls  {"type": "function", "function": {"name": "...", "arguments": {...}}}, and an "id" where the row has one

Either may be the inner object alone, and the whole list, or the arguments of a call, may be text that is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pentamesh.errors import Problem
from pentamesh.run.data.kinds import kind, string_fault

__all__ = ["read_calls", "read_tools"]

Function = dict[str, Any]
Read = tuple[list[Function], list[Problem]]

TOOL_EXAMPLE = 'a tool looks like {"type": "function", "function": {"name": "...", "parameters": {...}}}'
CALL_EXAMPLE = 'a tool call looks like {"type": "function", "function": {"name": "...", "arguments": {...}}}'


def read_tools(value: Any, field: str, where: str) -> Read:
    """The tools of a row, none where `value` is empty; and what is wrong with them."""
    return _read(value, field, where, TOOL_EXAMPLE, _check_parameters)


def read_calls(value: Any, field: str, where: str) -> Read:
    """The tool calls of a turn, their arguments as objects; and what is wrong with them. One call may stand without a list."""
    given, faults = _unpacked(value, field, where, CALL_EXAMPLE)
    return ([], faults) if faults else _read([given] if isinstance(given, dict) else given, field, where, CALL_EXAMPLE, _open_arguments)


def _read(value: Any, field: str, where: str, example: str, inner: Callable[[Function, str, str], list[Problem]]) -> Read:
    given, faults = _unpacked(value, field, where, example)
    if faults or given is None:
        return [], faults
    if not isinstance(given, list):
        return [], [Problem(f"`{field}` is {kind(given)}, not a list", where, example)]
    found = []
    for i, item in enumerate(given):
        whole, more = _wrapped(item, f"{field}[{i}]", where, example)
        faults += more or inner(whole["function"], f"{field}[{i}]", where)
        found.append(whole)
    return found, faults


def _unpacked(value: Any, field: str, where: str, example: str) -> tuple[Any, list[Problem]]:
    """What text that is JSON says, or the value itself; None for what is empty."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            what = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
            return None, [Problem(f"`{field}` is text that is not JSON: {what}", where, example)]
    if fault := string_fault(json.dumps(value, ensure_ascii=False, default=str), field):
        return None, [Problem(fault, where)]
    return (None if isinstance(value, str) or value in (None, [], {}) else value), []


def _wrapped(item: Any, field: str, where: str, example: str) -> tuple[Function, list[Problem]]:
    """A tool or call around its function, the function a copy of its own."""
    if not isinstance(item, dict):
        return {}, [Problem(f"`{field}` is {kind(item)}, not an object", where, example)]
    function = item.get("function", item)
    if not isinstance(function, dict):
        return {}, [Problem(f"`{field}.function` is {kind(function)}, not an object", where, example)]
    field = f"{field}.function" if "function" in item else field
    if "name" not in function:
        return {}, [Problem(f"`{field}` has no `name`", where, example)]
    name = function["name"]
    fault = string_fault(name, f"{field}.name") or ("" if name.strip() else f"`{field}.name` is empty")
    around = {key: value for key, value in item.items() if "function" in item or key == "id"}
    inner = {key: value for key, value in function.items() if "function" in item or key not in ("id", "type")}
    return {"type": "function"} | around | {"function": inner}, [Problem(fault, where)] if fault else []


def _check_parameters(function: Function, field: str, where: str) -> list[Problem]:
    schema = function.get("parameters")
    wrong = schema is not None and not isinstance(schema, dict)
    return [Problem(f"`{field}` has `parameters` that are {kind(schema)}, not a JSON schema", where, TOOL_EXAMPLE)] if wrong else []


def _open_arguments(function: Function, field: str, where: str) -> list[Problem]:
    """Make the arguments of a call an object in place; returns what keeps them from being one."""
    given, faults = _unpacked(function.get("arguments"), f"{field}.arguments", where, CALL_EXAMPLE)
    if not faults and not isinstance(given, dict | None):
        faults = [Problem(f"`{field}.arguments` is {kind(given)}, not an object", where, CALL_EXAMPLE)]
    function["arguments"] = given or {}
    return faults
