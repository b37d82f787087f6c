"""Write the parts of the documentation that the code already says: between `<!-- generated: NAME -->` and `<!-- end -->` in a page.

`--check` writes nothing and exits with 1 when a page is stale; `make check` and a test do that.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import pentamesh.errors
from pentamesh.errors import PentameshError
from pentamesh.job.job import Job
from pentamesh.layout.mesh import SHARD_AXES, Layout, Mesh, Shard
from pentamesh.layout.rules import SHARDED_KINDS, TABLE

DOCS = Path(__file__).parent
_REGION = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> Iterator[tuple[Path, str]]:
    """Every page that has generated parts, with the text it should have."""
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text()
        if _REGION.search(text):
            yield path, _REGION.sub(lambda region: f"{region[1]}\n{PARTS[region[2]]()}\n\n{region[3]}", text)


def stale() -> list[Path]:
    """The pages whose generated parts are not what the code says."""
    return [path for path, text in pages() if path.read_text() != text]


# The job file.


def keys(section: type[BaseModel] = Job, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of a section and of the sections in it, as a dotted path."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", field
        if inner := _section(field):
            yield from keys(inner, f"{prefix}{name}{_index(field)}.")


def job_keys() -> str:
    """One table a section, the keys of the top level first."""
    sections: list[tuple[str, str, type[BaseModel]]] = [("Top level", "", Job)]
    sections += [(f"`{name}{_index(field)}`", f"{name}{_index(field)}.", inner) for name, field in keys() if (inner := _section(field))]
    return "\n\n".join(f"## {title}\n\n{_keys_table(section, prefix)}" for title, prefix, section in sections)


def _keys_table(section: type[BaseModel], prefix: str) -> str:
    rows = [
        (f"`{prefix}{name}`", _values(f"{prefix}{name}", field), _default(field), field.description or "")
        for name, field in section.model_fields.items()
    ]
    return _table(("key", "values", "default", "meaning"), rows)


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a key holds, or may hold, itself or in a list, beside a short form."""
    return next((kind for kind in _kinds(field.annotation) if inspect.isclass(kind) and issubclass(kind, BaseModel)), None)


def _kinds(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in get_args(annotation):
        yield from _kinds(inner)


def _index(field: FieldInfo) -> str:
    """What stands behind a key that holds a list of sections."""
    return "[]" if any(get_origin(kind) is tuple and _section(FieldInfo(annotation=kind)) for kind in _kinds(field.annotation)) else ""


def _values(name: str, field: FieldInfo) -> str:
    anchor = name.replace(".", "")
    kinds = _type_name(field.annotation).replace(_SECTION, f"[a section](#{anchor})").replace(_SECTIONS, f"[a list of sections](#{anchor})")
    bounds = [f"{sign} {getattr(m, bound)}" for m in field.metadata for bound, sign in _BOUNDS.items() if getattr(m, bound, None) is not None]
    return ", ".join([kinds, *bounds])


_SECTION, _SECTIONS = "a section", "sections in a list"
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_WORDS = {int: "whole number", float: "number", str: "text", bool: "true, false", type(None): "null", dict: "mapping"}


def _type_name(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin is tuple and inspect.isclass(args[0]) and issubclass(args[0], BaseModel):
        return _SECTIONS
    if origin is tuple and args[-1] is Ellipsis:
        return f"list of {_type_name(args[0])}"
    if origin is tuple:
        return f"list of {len(args)} numbers"
    if origin is dict:
        return _WORDS[dict]
    if hasattr(kind, "__metadata__"):
        return _type_name(args[0])
    if args:
        return ", ".join(map(_type_name, args))
    return _SECTION if issubclass(kind, BaseModel) else _WORDS[kind]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is PydanticUndefined:
        return ""
    return f"`{field.default if isinstance(field.default, str) else json.dumps(field.default)}`"


# Errors.


def exception_tree() -> str:
    drawn = inspect.cleandoc(pentamesh.errors.__doc__ or "").split("\n\n")[1]
    return f"```text\n{inspect.cleandoc(drawn)}\n```"


def exit_codes() -> str:
    """One row a kind of error, beside success and the keyboard's interrupt."""
    kinds = [kind for kind in vars(pentamesh.errors).values() if isinstance(kind, type) and issubclass(kind, PentameshError)]
    rows = [(f"`{k.exit_code}`", f"`{k.__name__}`", inspect.getdoc(k) or "") for k in kinds if k is not PentameshError]
    rows = [("`0`", "", "Done."), *sorted(rows), ("`128 + n`", "", "Ended by signal n: 130 from the keyboard, 143 by a scheduler.")]
    return _table(("code", "error", "meaning"), rows)


# The table.


def layout_table() -> str:
    """The table of `pentamesh.layout.rules`: from the name of a dim and a role to the axes that cut it."""

    def axes(entries: tuple[str, ...]) -> str:
        return ", ".join(map(_entry, entries)) or "whole"

    rows = [(f"`{dim}`", axes(row.store), axes(row.use), axes(row.attend), axes(row.carry)) for dim, row in TABLE.items()]
    return _table(("dim", "STORE", "USE", "ATTEND", "CARRY"), [*rows, ("everything else", "whole", "whole", "whole", "whole")])


def shard_table() -> str:
    """What each value of `layout.shard` cuts over the data axes."""
    over = ", ".join(f"`{axis}`" for axis in SHARD_AXES)
    rows = []
    for shard in get_args(Shard):
        named = {kind.value for kind in SHARDED_KINDS[shard]}
        strategy = Layout(Mesh(dp_shard=2), shard=shard).strategy
        rows.append((f"`{shard}`", f"`{strategy}`", *(over if kind in named else "whole" for kind in ("weight", "gradient", "state"))))
    return _table(("`layout.shard`", "strategy", "weight", "gradient", "optimizer state"), rows)


def _entry(entry: str) -> str:
    axis, _, condition = entry.partition("?")
    return f"`{axis}` ({condition.replace('_', ' ')})" if condition else f"`{axis}`"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


PARTS: dict[str, Callable[[], str]] = {
    "job-keys": job_keys,
    "exception-tree": exception_tree,
    "exit-codes": exit_codes,
    "layout-table": layout_table,
    "shard-table": shard_table,
}


def main() -> int:
    """Write the stale pages, or with `--check` only name them."""
    check, found = "--check" in sys.argv[1:], stale()
    for path, text in pages():
        if path in found and not check:
            path.write_text(text)
    for path in found:
        print(f"{path.relative_to(DOCS.parent)} {'is stale: run `make docs`' if check else 'written'}", file=sys.stderr)
    return 1 if check and found else 0


if __name__ == "__main__":
    sys.exit(main())
