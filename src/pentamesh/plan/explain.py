"""`explain`: the tables behind a plan - where dims live, what states take under each strategy, what a job can say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic.fields import FieldInfo

from pentamesh.cost.holding import Holding, states, widths
from pentamesh.job.job import Job, Section
from pentamesh.job.precision import PRECISIONS
from pentamesh.layout.mesh import SHARDS, Layout, Mesh, Shard
from pentamesh.layout.rules import SHARDED_KINDS, TABLE
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec
from pentamesh.plan.reasons import NAMES

__all__ = ["Table", "keys", "strategies", "table"]


# GPUs of a usual node.
A_NODE = 8


@dataclass(frozen=True)
class Table:
    """A table to show or to write as JSON: what it is, its columns and rows, and notes beneath. Numbers are bytes, or seconds in the columns
    that `seconds` names."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    notes: tuple[str, ...] = ()
    seconds: frozenset[str] = frozenset()

    def to_json(self) -> dict[str, Any]:
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"schema": "pentamesh.table", "version": 1, "title": self.title, "rows": rows, "notes": list(self.notes)}


def table() -> Table:
    """From the name of a dim to the axes that cut it, in each role: `pentamesh.layout.rules.TABLE`."""

    def axes(entries: tuple[str, ...]) -> str:
        return ", ".join(
            f"{axis} ({condition.replace('_', ' ')})" if condition else axis for axis, _, condition in (e.partition("?") for e in entries)
        )

    rows = [(dim, axes(row.store), axes(row.use), axes(row.attend), axes(row.carry)) for dim, row in TABLE.items()]
    kinds = "; ".join(f"{shard}: {', '.join(k.value for k in kinds) or 'nothing'}" for shard, kinds in SHARDED_KINDS.items())
    notes = (
        f"stored tensors are also cut over dp_shard and cp along dim 0, by layout.shard - {kinds}",
        "what is not named here is whole on every rank",
    )
    return Table("Which mesh axes cut which dim", ("dim", "store", "use", "attend", "carry"), tuple(rows), notes)


def strategies(model: ModelSpec, degrees: Sequence[int], precision: str = "bf16") -> Table:
    """Weights, gradients and optimizer state of the fullest rank, in bytes, for every strategy and number of GPUs; exact from `split`."""
    rows = []
    for shard in SHARDS:
        cells = [sum(states(Holding(model, _layout(shard, degree)), PRECISIONS[precision]).values()) for degree in degrees]
        layout = _layout(shard, 8)
        cut = ", ".join(kind.value for kind in SHARDED_KINDS[shard]) or "nothing"
        rows.append((NAMES[layout.strategy], cut, _formula(layout, precision), *cells))
    rows += _parted(model, degrees, precision)
    columns = ("strategy", "cut", "bytes", *(f"{degree} GPUs" for degree in degrees))
    notes = (
        f"{model.num_parameters:,} parameters, precision {precision}; hybrid shard is full shard over the GPUs of one node",
        "activations, gathered parameters and the framework come on top: `pentamesh plan` counts them",
        *([f"experts: parted over E GPUs of a node, at most {A_NODE} (layout.expert)"] if model.experts else []),
    )
    return Table(f"States of {model.name} per GPU", columns, tuple(rows), notes)


def _parted(model: ModelSpec, degrees: Sequence[int], precision: str) -> Iterator[tuple[Any, ...]]:
    """The strategies that shard, with experts parted as far as they divide and a node reaches."""
    if model.experts is None:
        return
    most = {degree: max(n for n in range(1, min(degree, A_NODE) + 1) if degree % n == model.experts.count % n == 0) for degree in degrees}
    for shard in SHARDS[1:3]:  # under full shard experts are cut as far without
        layouts = [Layout(Mesh(dp_shard=degree, ep=ep), shard) for degree, ep in most.items()]
        cells = [sum(states(Holding(model, layout), PRECISIONS[precision]).values()) for layout in layouts]
        cut = ", ".join(kind.value for kind in SHARDED_KINDS[shard])
        formula = _formula(_layout(shard, 8), precision).replace("P ", "P/E ", 1)
        yield (f"{NAMES[_layout(shard, 8).strategy]}, experts", cut, f"{formula} of experts", *cells)


def keys() -> Table:
    """Every key of a job file: its kind, its default and what it means."""
    return Table("Keys of a job file", ("key", "kind", "default", "meaning"), tuple(_keys(Job, "")))


def _layout(shard: Shard, degree: int) -> Layout:
    return Layout(Mesh(dp_replicate=degree) if shard == "none" else Mesh(dp_shard=degree), shard)


def _formula(layout: Layout, precision: str) -> str:
    """`4P + 12P/N` from the widths themselves."""
    width, cut = widths(PRECISIONS[precision], layout), SHARDED_KINDS[layout.shard]
    kinds = ((Role.WEIGHT, width.weight), (Role.GRADIENT, width.gradient), (Role.STATE, width.state))
    whole, shared = (sum(size for kind, size in kinds if (kind in cut) is is_cut) for is_cut in (False, True))
    return " + ".join([f"{whole}P"] * bool(whole) + [f"{shared}P/N"] * bool(shared))


def _keys(section: type[Section], prefix: str) -> list[tuple[str, str, str, str]]:
    found = []
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            found += _keys(inner, f"{prefix}{name}.")
        else:
            found.append((prefix + name, _kind(field), _default(field), field.description or ""))
    return found


def _kind(field: FieldInfo) -> str:
    """The kind of a key in people's words: its choices, or the names of its types."""
    if get_args(field.annotation)[1:] == (Ellipsis,):
        return f"list of {_one_kind(get_args(field.annotation)[0])}"
    options = [o for o in (get_args(field.annotation) or (field.annotation,)) if o is not type(None)]
    return " | ".join(_one_kind(option) for option in options)


def _one_kind(option: Any) -> str:
    if isinstance(option, type):
        return {"str": "text", "int": "count", "float": "number", "bool": "true | false"}.get(option.__name__, option.__name__)
    if inner := get_args(option):
        return " | ".join(dict.fromkeys(_one_kind(o) for o in inner if isinstance(o, (type, str)) or get_args(o)))
    return str(option)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if value in (None, ()) else str(value).lower() if isinstance(value, bool) else str(value)
