"""`problems`: why a layout cannot carry a model and a batch - every reason at once, each with degrees that would work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from pentamesh.errors import Problem
from pentamesh.job.division import choice, divisors, uneven_batch, uneven_sequence
from pentamesh.job.job import Batch
from pentamesh.layout.mesh import DATA_AXES, Layout
from pentamesh.layout.rules import on_expert_view
from pentamesh.layout.split import split
from pentamesh.model.roles import Role
from pentamesh.model.spec import ModelSpec

__all__ = ["grad_accum", "problems"]

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


class _Asked(NamedTuple):
    """What is judged: the three facts that every rule reads."""

    model: ModelSpec
    layout: Layout
    batch: Batch


def problems(model: ModelSpec, layout: Layout, batch: Batch) -> list[Problem]:
    """Everything that keeps `layout` from carrying `model` with `batch`; empty when it is legal."""
    asked = _Asked(model, layout, batch)
    return [problem for rule in _RULES for problem in rule(asked)]


def grad_accum(layout: Layout, batch: Batch) -> int:
    """Micro-batches per step and data rank. The batch must be legal (see `problems`)."""
    return batch.global_batch // (batch.micro_batch * layout.mesh.degree(*DATA_AXES))


def _described(asked: _Asked) -> Iterator[Problem]:
    axes = [axis for axis in ("tp", "pp", "cp", "ep") if asked.layout.mesh.degree(axis) > 1]
    if axes and not asked.model.is_described:
        yield Problem(
            f"the family of {asked.model.name} is not described: its dimensions have no names to cut along {', '.join(axes)}",
            "layout",
            "use the data axes (tensor = pipeline = context = expert = 1), or describe the family in pentamesh/model/families",
        )


def _tensor(asked: _Asked) -> Iterator[Problem]:
    tp, model = asked.layout.mesh.tp, asked.model
    if tp == 1 or not model.is_described:
        return
    # Key heads that are fewer than the ranks serve several of them each, unless one tensor holds queries and keys.
    fused = any(dim.name == "heads" and len(dim.parts) > 1 for tensor in model.block for dim in tensor.dims)

    def cuts(dim: str, units: int, ranks: int) -> bool:
        return units % ranks == 0 or (dim == "kv_heads" and not fused and ranks % units == 0)

    dims = {"heads": model.num_heads, "kv_heads": model.num_kv_heads}
    works = choice(n for n in range(model.num_heads, 0, -1) if all(cuts(*item, n) for item in dims.items()))
    for dim, units in dims.items():
        first = _first(asked, dim) or (_first(asked, "heads") if units != model.num_heads else "")
        if not cuts(dim, units, tp) and first:
            yield Problem(f"tensor = {tp} does not divide {dim} = {units}", f"layout.tensor    {first}", f"use tensor = {works}")
    widths = {"vocab": model.vocab, "ffn": min(filter(None, (model.ffn, model.experts.shared_ffn if model.experts else 0)), default=0)}
    for dim, units in widths.items():
        # Other dims may be cut unevenly, but a module computes with something.
        if units and -(-units // tp) * (tp - 1) >= units:
            what = f"tensor = {tp} leaves the last rank nothing of {dim} = {units}"
            yield Problem(what, f"layout.tensor    {_first(asked, dim)}", "use a smaller degree")


def _pipeline(asked: _Asked) -> Iterator[Problem]:
    pp, layers = asked.layout.mesh.pp, asked.model.num_layers
    if pp > layers:
        yield Problem(f"pipeline = {pp} is more than the {layers} layers of {asked.model.name}", "layout.pipeline", f"use at most {layers}")


def _experts(asked: _Asked) -> Iterator[Problem]:
    mesh, model = asked.layout.mesh, asked.model
    if not model.is_described:
        return
    if model.experts is None:
        if mesh.ep > 1:
            yield Problem(f"expert = {mesh.ep}, but {model.name} has no experts", "layout.expert", "use expert = 1")
        return
    if mesh.tp > 1 and not asked.layout.sequence_parallel:
        what = f"tensor = {mesh.tp} without sequence parallel: all tensor ranks would send the same tokens to the experts of {model.name}"
        yield Problem(what, "layout.sequence_parallel", "set sequence_parallel: true")
    if mesh.ep > 1:
        yield from _parted(asked, model.experts.count)


def _parted(asked: _Asked, count: int) -> Iterator[Problem]:
    """Experts divide among ranks; and what ranks have of them is cut further with the rest, evenly: each cut is a part of a matrix's rows."""
    mesh, where = asked.layout.mesh, f"layout.expert    {_first(asked, 'experts')}"
    if count % mesh.ep:
        yield Problem(f"expert = {mesh.ep} does not divide experts = {count}", where, f"use expert = {divisors(count)}")
    if not asked.layout.cuts_state:
        what = f"expert = {mesh.ep} beside copies of all weights (shard = none): experts would be parted where nothing else is"
        yield Problem(what, "layout.shard", "use shard: optimizer, gradients or parameters")
        return
    experts = [t for unit in asked.model.kinds for t in unit.tensors if on_expert_view(t, asked.layout) and len(t.dims) > 1]
    uneven = {t.dims[1].size: t for t in experts if t.dims[1].size % mesh.edp}
    for size, tensor in uneven.items():
        what = f"data x context x tensor / expert = {mesh.edp} does not divide {tensor.dims[1].name} = {size} of each expert"
        yield Problem(what, f"layout.expert    {split(tensor, Role.WEIGHT, Layout())}", "use a larger expert degree, or copies (layout.replicate)")


def _sequence(asked: _Asked) -> Iterator[Problem]:
    mesh, layout = asked.layout.mesh, asked.layout
    if layout.sequence_parallel and mesh.tp == 1:
        yield Problem("sequence_parallel cuts over the tensor axis, and tensor = 1", "layout.sequence_parallel", "set tensor above 1 or leave it out")
    cutting = mesh.tp if layout.sequence_parallel else 1
    if found := uneven_sequence(asked.batch.seq_len, mesh.cp, cutting, layout.context):
        yield Problem(found.what, "batch.seq_len", found.hint)
    if asked.model.learns_positions and asked.batch.seq_len > asked.model.max_positions:
        what = f"seq_len = {asked.batch.seq_len} is beyond the {asked.model.max_positions} positions that {asked.model.name} has a table of"
        yield Problem(what, "batch.seq_len", f"use seq_len = {asked.model.max_positions} or less")


def _dropped(asked: _Asked) -> Iterator[Problem]:
    cp, model = asked.layout.mesh.cp, asked.model
    if cp > 1 and model.score_drop:
        what = f"{model.name} drops {model.score_drop:.0%} of attention's weights at random: context = {cp} ranks would drop others than one process"
        yield Problem(what, "layout.context", "use context = 1, or a model folder whose config.json drops none")


def _exchanged(asked: _Asked) -> Iterator[Problem]:
    """Ulysses gives each rank whole key heads: there are none to give where they are fewer, or tensor ranks share them."""
    mesh, heads = asked.layout.mesh, asked.model.num_kv_heads
    if mesh.cp == 1 or asked.layout.context != "ulysses" or not asked.model.is_described or heads % (mesh.cp * mesh.tp) == 0:
        return
    degrees = f"context x tensor = {mesh.cp} x {mesh.tp} = {mesh.cp * mesh.tp}" if mesh.tp > 1 else f"context = {mesh.cp}"
    works = [n for n in range(heads // mesh.tp, 1, -1) if heads % (n * mesh.tp) == 0]
    yield Problem(
        f"{degrees} does not divide kv_heads = {heads}, over which Ulysses exchanges",
        f"layout.context    {_first(asked, 'kv_heads') or _first(asked, 'heads')}",
        "use context_attention: ring or all_gather" + (f", or context = {choice(works)}" if works else ""),
    )


def _batch(asked: _Asked) -> Iterator[Problem]:
    batch, ranks = asked.batch, asked.layout.mesh.degree(*DATA_AXES)
    if found := uneven_batch(batch.global_batch, batch.micro_batch, ranks):
        several = "several" if asked.layout.mesh.cp == 1 else "more"
        few = batch.global_batch < batch.micro_batch * ranks and asked.model.is_described
        yield Problem(found.what, "batch.global_batch", found.hint + (f", or cut each sequence over {several} ranks (layout.context)" if few else ""))


_RULES = (_described, _tensor, _pipeline, _experts, _sequence, _dropped, _exchanged, _batch)


def _first(asked: _Asked, dim: str) -> str:
    """The first tensor with `dim`, as it is stored when nothing but the data axes cut it, its layer written `*`; "" where none has it."""
    tensor = next((t for t in asked.model.tensors if any(d.name == dim for d in t.dims)), None)
    return _LAYER.sub("*", str(split(tensor, Role.WEIGHT, Layout())), count=1) if tensor else ""
