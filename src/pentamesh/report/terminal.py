"""What a plan looks like on a terminal: verdict and layout first, then memory, communication and time, then what lost and what would fit.

Every line reads the same without colour; colour only repeats what the words say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from pentamesh.layout.mesh import AXES
from pentamesh.plan.plan import Plan, Range
from pentamesh.plan.reasons import NAMES, WAYS
from pentamesh.units import format_bytes, format_count, format_flop_per_s, format_seconds

if TYPE_CHECKING:
    from pentamesh.plan.explain import Table as Explained

__all__ = ["show_plan", "show_table"]

WIDTH = 100
BAR = 32
_VERDICT = {"fits": ("FITS", "bold green"), "at_risk": ("AT RISK", "bold yellow"), "does_not_fit": ("DOES NOT FIT", "bold red")}
_TITLE = "bold"
# Where the parts of memory come from, in the words of the table.
_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "working": "gathered, cast or unreduced",
    "activations": "activations",
    "experts": "rows that came to experts",
    "context": "keys of other context ranks",
    "logits": "logits and loss",
    "copy": "checkpoint on its way to disk",
    "framework": "CUDA context and NCCL",
    "allocator": "allocator slack",
}


def show_plan(plan: Plan, stream: TextIO | None = None) -> None:
    """Print a plan for people, at most as wide as the terminal."""
    console = _console(stream)
    for part in (*_head(plan), *_memory(plan), *_communication(plan), *_time(plan), *_alternatives(plan), *_changes(plan), *_notes(plan)):
        console.print(part)


def show_table(explained: Explained, stream: TextIO | None = None) -> None:
    """Print a table of `explain`; bytes and seconds in people's units."""
    console = _console(stream)
    console.print(Text(explained.title, style=_TITLE))
    table = _table(*explained.columns)
    for row in explained.rows:
        table.add_row(*(Text(_cell(cell, column in explained.seconds)) for column, cell in zip(explained.columns, row, strict=True)))
    console.print(table)
    for note in _bullets(explained.notes):
        console.print(note)


def _cell(cell: object, is_time: bool) -> str:
    if not isinstance(cell, (int, float)):
        return "" if cell is None else str(cell)
    return format_seconds(cell) if is_time else format_bytes(cell)


def _console(stream: TextIO | None) -> Console:
    console = Console(file=stream, highlight=False, emoji=False)
    console.width = min(console.width, 120) if console.is_terminal else WIDTH
    return console


def _head(plan: Plan) -> Iterator[RenderableType]:
    word, style = _VERDICT[plan.verdict]
    facts, batch = plan.model, plan.job.batch
    yield Text.assemble(
        (word, style), f"  {facts['name']} ({format_count(facts['num_parameters'])} parameters), {plan.job.method}, {plan.precision.name}"
    )
    num_micros = plan.policy.grad_accum
    accum = f"{num_micros:,} micro-batch{'es' if num_micros > 1 else ''} of {plan.policy.micro_batch}"
    yield Text(f"on {plan.hardware['description']}")
    yield Text(f"{format_count(batch.global_batch)} sequences of {format_count(batch.seq_len)} tokens a step, {accum} a data rank")
    yield Text.assemble("\n", ("Layout  ", _TITLE), f"{NAMES[plan.strategy]}: {_layout(plan)}")
    yield from _bullets(plan.reasons)


_REDUCED = {"once": "once a step", "each": "each micro-batch", "node": "in the node each micro-batch, between nodes once a step"}


_RECOMPUTED = {
    "none": "activations kept",
    "selective": "matmuls and attention kept, the rest of blocks recomputed in backward",
    "full": "blocks recomputed in backward",
}


def _layout(plan: Plan) -> str:
    """`dp_shard 8, blocks recomputed, gathered again for backward, reduced each micro-batch`."""
    policy, said = plan.policy, [str(plan.layout.mesh)]
    if plan.layout.mesh.cp > 1:
        said.append(WAYS[plan.layout.context])
    said.append(_RECOMPUTED[policy.recompute] + (" from inputs kept on the host" if policy.offload else ""))
    if plan.layout.cuts_weights:
        gathered = "gathered once a step" if policy.keep_gathered else "gathered again for backward" if policy.reshard else "gathered until backward"
        said.append(f"parameters {gathered}")
    if policy.grad_accum > 1 and plan.layout.mesh.num_ranks > 1:
        said.append("gradients reduced " + _REDUCED[policy.reduce])
    return ", ".join(said)


def _memory(plan: Plan) -> Iterator[RenderableType]:
    memory = plan.memory
    peak = f"{_range(memory.peak_bytes, format_bytes)} of {format_bytes(memory.usable_bytes)} usable"
    yield Text.assemble("\n", (f"Memory of the fullest {_rank(plan)}  ", _TITLE), peak)
    table = _table("part", ">bytes", "share of usable", header=False)
    for part, num_bytes in memory.parts_bytes.items():
        if num_bytes:
            table.add_row(_PARTS.get(part, part), format_bytes(num_bytes), _bar(num_bytes / memory.usable_bytes))
    total = memory.peak_bytes.expected
    table.add_row(Text("expected peak", style=_TITLE), format_bytes(total), _bar(total / memory.usable_bytes))
    yield table
    if memory.host_bytes:
        yield Text(f"  in host memory  {format_bytes(memory.host_bytes)} a {_rank(plan)}")
    if memory.copy_bytes and "copy" not in memory.parts_bytes:
        yield Text(f"  in host memory  {format_bytes(memory.copy_bytes)} a {_rank(plan)}, of a checkpoint on its way to disk")
    if len(memory.stages) > 1:
        stages = ", ".join(f"{s.stage}: {format_bytes(s.peak_bytes.expected)}" for s in memory.stages)
        yield Text(f"  by pipeline stage  {stages}")


def _bar(share: float) -> str:
    """`######........ 42%`, with `>` at the end of what goes beyond."""
    filled = min(BAR, round(share * BAR))
    return "#" * (filled - (share > 1)) + ">" * (share > 1) + "." * (BAR - filled) + f" {share:4.0%}"


def _communication(plan: Plan) -> Iterator[RenderableType]:
    told = [c for c in plan.communication if c.bytes_per_rank]
    if not told:
        return
    yield Text("\nCommunication of one step", style=_TITLE)
    table = _table("axis", "kind", ">count", f">sent a {_rank(plan)}", "link", ">takes", ">exposed")
    for c in sorted(told, key=lambda c: -c.seconds):
        sent = format_bytes(c.bytes_per_rank)
        table.add_row(c.axis, c.kind, f"{c.count:,}", sent, c.link, format_seconds(c.seconds), format_seconds(c.exposed_s))
    yield table


def _time(plan: Plan) -> Iterator[RenderableType]:
    time, table = plan.time, _table("what", "value", header=False)
    yield Text("\nTime", style=_TITLE)
    table.add_row("step", _range(time.step_s, format_seconds))
    table.add_row("computing", format_seconds(time.compute_s))
    table.add_row("waiting for communication", format_seconds(time.exposed_communication_s))
    if time.bubble_s:
        table.add_row("pipeline bubble", format_seconds(time.bubble_s))
    step = time.step_s
    speeds = Range(*(plan.tokens_per_s * step.expected / s for s in (step.high, step.expected, step.low)))
    table.add_row("tokens/s", f"{_range(speeds, format_count)}; {format_count(plan.tokens_per_s_per_gpu)} a {_rank(plan)}")
    peak = plan.hardware["device"]["flop_per_s"].get(plan.precision.compute)
    of = f" of {format_flop_per_s(peak)} dense {plan.precision.compute}" if peak else ""
    table.add_row("MFU", f"{plan.mfu:.0%}{of}")
    yield table


def _alternatives(plan: Plan) -> Iterator[RenderableType]:
    if not plan.alternatives:
        return
    yield Text("\nAlso judged", style=_TITLE)
    table = _table("layout", "verdict", ">step", "why not")
    for a in plan.alternatives:
        table.add_row(_name(a.layout), _VERDICT[a.verdict][0].lower(), format_seconds(a.step_s), a.why_not)
    yield table


def _name(layout: dict[str, Any]) -> str:
    """`full shard, recomputed`; beyond the data axes the degrees, with what is cut over the data axes."""
    name = NAMES[layout["strategy"]]
    if layout["strategy"] == "multi_axis":
        degrees = [f"{axis} {layout[axis]}" + (f" ({layout['context']})" if axis == "cp" else "") for axis in (*AXES, "ep") if layout[axis] > 1]
        name = " x ".join(degrees) + ("" if layout["shard"] == "none" else f", shard: {layout['shard']}")
    return name + {"none": "", "selective": ", partly recomputed", "full": ", recomputed"}[layout["recompute"]]


def _changes(plan: Plan) -> Iterator[RenderableType]:
    if plan.verdict != "does_not_fit":
        return
    yield Text("\nWhat would fit", style=_TITLE)
    yield from _bullets(plan.changes_that_fit or ("no single change that was tried: fewer parameters, or many more GPUs with tensor parallel",))


def _notes(plan: Plan) -> Iterator[RenderableType]:
    notes = (*plan.model.get("notes", ()), *plan.hardware.get("notes", ()))
    if notes:
        yield Text("\nTaken for granted", style=_TITLE)
        yield from _bullets(notes)


def _bullets(sentences: tuple[str, ...]) -> Iterator[RenderableType]:
    for sentence in sentences:
        grid = Table.grid(padding=(0, 1))
        grid.add_row(" -", Text(sentence))
        yield grid


def _table(*columns: str, header: bool = True) -> Table:
    """A table without lines; a column written `>name` is aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD if header else None, show_header=header, pad_edge=header, show_edge=False, padding=(0, 1))
    if not header:
        table = Table(box=None, show_header=False, padding=(0, 2))
    for i, column in enumerate(columns):
        # The first column names the row and is never broken.
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold", no_wrap=i == 0)
    return table


def _range(value: Range, to_text: Callable[[float], str]) -> str:
    return f"{to_text(value.expected)} ({to_text(value.low)} to {to_text(value.high)})"


def _rank(plan: Plan) -> str:
    return "GPU" if plan.hardware["device"]["kind"] == "cuda" else "process"
