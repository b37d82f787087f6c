"""Candidates: the layouts that a request leaves open on a machine, and for each the policies worth judging."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from pentamesh.errors import InputError, Problem
from pentamesh.job.division import CONTEXT_WAYS, ContextWay
from pentamesh.job.hardware import Hardware
from pentamesh.job.job import Job, LayoutRequest
from pentamesh.layout.balance import balance, unbalanced
from pentamesh.layout.legal import grad_accum, problems
from pentamesh.layout.mesh import SHARDS, Layout, Mesh, Shard
from pentamesh.layout.policy import Policy
from pentamesh.model.spec import ModelSpec

__all__ = ["described", "layouts", "policies"]


def layouts(job: Job, model: ModelSpec, hardware: Hardware, axes: Sequence[str] = ()) -> list[Layout]:
    """Every legal layout of the request, simplest first; beside data, degrees are tried of those `axes` that it leaves open. Raises InputError with
    all problems when there is none."""
    found, refused, uneven = [], [], [*unbalanced(job.experts, model), *_opaque(job, model)]
    for degrees in _degrees(job, model, hardware, axes):
        for layout in _meshes(degrees, hardware):
            wrong = [*problems(model, layout, job.batch), *uneven]
            refused += wrong if degrees == _given(job.layout) else []
            found += [] if wrong else [layout]
    if not found:
        raise InputError(*dict.fromkeys(refused))
    return found


def _opaque(job: Job, model: ModelSpec) -> Iterator[Problem]:
    """Of blocks with experts the attention is compiled apart: nothing in it can be kept by itself."""
    if job.training.compile and model.experts and job.layout.activation_checkpointing == "selective":
        what = f"activation_checkpointing = selective with compile = true: the attention beside the experts of {model.name} is compiled as one"
        yield Problem(what, "layout.activation_checkpointing", "use activation_checkpointing: full, none or auto, or leave training.compile out")


def policies(layout: Layout, job: Job, model: ModelSpec, *, lean: bool = False) -> Iterator[Policy]:
    """The policies of one layout; `lean` gives only the one that takes least memory."""
    asked, accum = job.layout, grad_accum(layout, job.batch)
    recomputes = ("none", "selective", "full") if asked.activation_checkpointing == "auto" else (asked.activation_checkpointing,)
    recomputes = ("full",) if asked.activation_offload else recomputes
    if job.training.compile and model.experts and len(recomputes) > 1:
        recomputes = ("none", "full")  # what is compiled of such a block is kept or computed again as one
    timings = [t for t in _timings(layout, accum) if asked.reshard_after_forward in ("auto", t[0])]
    if lean:
        recomputes, timings = recomputes[-1:], timings[:1]
    for recompute, (reshard, keep, reduce) in itertools.product(recomputes, timings):
        when = (job.batch.micro_batch, accum, recompute, reshard, keep, reduce)
        how = (asked.activation_offload, job.training.compile, asked.async_tensor_parallel, job.batch.packing)
        yield Policy(*when, *how, *balance(job.experts, model), job.experts.dispatch)


def described(layout: Layout, policy: Policy) -> dict[str, Any]:
    """A candidate as plain values: strategy, degrees and policy."""
    whole = asdict(layout)
    mesh = whole.pop("mesh")
    return {"strategy": layout.strategy, **mesh, "edp": layout.mesh.edp, **whole, **asdict(policy)}


def _timings(layout: Layout, accum: int) -> list[tuple[bool, bool, Any]]:
    """(reshard, keep gathered, reduce) from least memory to most. Only full shard has a choice: DDP accumulates in whole gradients, ZeRO-1 and
    ZeRO-2 keep whole weights over a step, and ZeRO-2 has no whole gradient to accumulate in."""
    each = "each" if accum > 1 else "once"
    if not layout.cuts_weights:
        return {"none": [(True, False, "once")], "optimizer": [(False, True, "once")], "gradients": [(False, True, each)]}[layout.shard]
    # Over copies of the model, only what a node has summed and cut need cross between nodes, once.
    reduces = ("once",) if accum == 1 else ("node", "once") if layout.mesh.dp_replicate > 1 else ("each", "once")
    gathers = [(True, False), (False, False)] + ([(False, True)] if accum > 1 else [])
    return [(*gather, reduce) for reduce in reduces for gather in gathers]


def _given(asked: LayoutRequest) -> LayoutRequest:
    """The request with every degree that was not given at 1: the data axes alone."""
    degrees = {axis: getattr(asked, axis) or 1 for axis in ("tensor", "pipeline", "context", "expert")}
    return asked.model_copy(update=degrees)


def _degrees(job: Job, model: ModelSpec, hardware: Hardware, axes: Sequence[str]) -> Iterator[LayoutRequest]:
    """The request with its degrees filled in: the data axes alone first, then tensor, context and expert inside a node, and pipeline, where they were
    open; `nodes` among the axes lets experts be parted over several.

    With them goes what makes them worth their while: sequence parallel, and an optimizer cut over the data and context axes (full shard without
    pipeline).
    """
    asked, alone = job.layout, _given(job.layout)
    yield alone
    fixed = asked.data is not None or asked.replicate is not None or (asked.shard != "auto" and not asked.tensor and not asked.pipeline)
    axes = [axis for axis in axes if not fixed or axis in ("expert", "nodes")]  # which ask for no other data ranks
    # Whoever forbids recomputing is told that it would do, before more axes are tried.
    forbids = asked.activation_checkpointing == "none" and job.method != "pretrain"
    if not axes or forbids or job.method not in ("full", "pretrain"):
        return
    for tensor, pipeline, context, expert in itertools.product(*_open_degrees(asked, model, hardware, axes)):
        degrees = {"tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert}
        used = tensor * pipeline * context
        if all(getattr(alone, axis) == degree for axis, degree in degrees.items()) or hardware.num_devices % used:
            continue
        if (hardware.num_devices // pipeline // (asked.replicate or 1)) % expert:
            continue
        degrees["sequence_parallel"] = asked.sequence_parallel or tensor > 1
        for shard in _worthwhile(tensor * pipeline == hardware.num_devices, pipeline, expert) if asked.shard == "auto" else [asked.shard]:
            yield alone.model_copy(update=degrees | {"shard": shard})


def _open_degrees(asked: LayoutRequest, model: ModelSpec, hardware: Hardware, axes: Sequence[str]) -> Iterator[Sequence[int]]:
    """For tensor, pipeline, context and expert the degrees to try: the one that is asked for, 1, or all that an axis of `axes` may have."""
    node, devices = hardware.devices_per_node, hardware.num_devices
    able = {
        "tensor": _powers_of_two(node),
        "pipeline": _powers_of_two(min(devices, 16)),
        "context": _powers_of_two(node // (asked.tensor or 1)),
        "expert": _expert_degrees(model, hardware, axes),
    }
    for axis, degrees in able.items():
        given = getattr(asked, axis)
        yield [given] if given else degrees if axis in axes else [1]


def _expert_degrees(model: ModelSpec, hardware: Hardware, axes: Sequence[str]) -> list[int]:
    """Degrees that experts divide by: of an axis alone all inside a node, over nodes those beyond one; among other axes the widest inside a node."""
    count = model.experts.count if model.experts else 1
    every = [degree for degree in range(1, min(count, hardware.num_devices) + 1) if count % degree == 0 and hardware.num_devices % degree == 0]
    inside = [degree for degree in every if degree <= hardware.devices_per_node]
    if "nodes" in axes:
        return [degree for degree in every if degree not in inside]
    return inside if len(axes) == 1 else sorted({1, inside[-1]})


def _worthwhile(is_alone: bool, pipeline: int, expert: int) -> Sequence[Shard]:
    """What to cut over the data axis, where anything is left to cut; beside experts that are parted there is always something."""
    return ("none",) if is_alone and expert == 1 else ("optimizer", "parameters")[: 3 - min(pipeline, 2)]


def _powers_of_two(most: int) -> list[int]:
    return [2**i for i in range(max(1, most).bit_length()) if 2**i <= max(1, most)]


class _Cut(NamedTuple):
    """What a strategy cuts over the data axis, and over how many copies."""

    shard: Shard
    copies: int


def _meshes(asked: LayoutRequest, hardware: Hardware) -> Iterator[Layout]:
    """The layouts of a request whose degrees are filled in, before anyone asks whether the model allows them."""
    pipeline, context, tensor, expert = (getattr(asked, axis) or 1 for axis in ("pipeline", "context", "tensor", "expert"))
    data = _data_degree(asked, pipeline * context * tensor, hardware)
    cuts = [_Cut(shard, copies) for shard in _shards(asked, data * context) for copies in _copies(shard, asked, data, hardware)]
    # Experts need dp_shard, cp or tp to live on: strategies that leave none are passed over, and where all are, the mesh says why.
    able = [cut for cut in cuts if (data // cut.copies * context * tensor) % expert == 0]
    for cut, way in itertools.product(able or cuts[-1:], _ways(asked, context)):
        yield Layout(Mesh(pipeline, cut.copies, data // cut.copies, context, tensor, expert), cut.shard, asked.sequence_parallel, way)


def _ways(asked: LayoutRequest, context: int) -> Sequence[ContextWay]:
    if asked.context_attention != "auto":
        return (asked.context_attention,)
    return CONTEXT_WAYS if context > 1 else CONTEXT_WAYS[:1]


def _data_degree(asked: LayoutRequest, others: int, hardware: Hardware) -> int:
    devices = hardware.num_devices
    said = f"pipeline x context x tensor = {asked.pipeline} x {asked.context} x {asked.tensor} = {others}"
    if devices % others:
        raise InputError(f"{said} does not divide the {devices} devices of {hardware}", where="layout", hint="use degrees whose product divides it")
    data = asked.data or devices // others
    if data * others != devices:
        what = f"data = {data} times {said} is not the {devices} devices of {hardware}"
        raise InputError(Problem(what, "layout.data", f"use data = {devices // others}, or leave it out"))
    if data % (asked.replicate or 1):
        raise InputError(f"replicate = {asked.replicate} does not divide data = {data}", where="layout.replicate")
    return data


def _shards(asked: LayoutRequest, num_sharers: int) -> tuple[Shard, ...]:
    if asked.shard != "auto":
        return (asked.shard,)
    if (asked.replicate or 1) > 1 or asked.reshard_after_forward != "auto":
        return ("parameters",)
    if (asked.expert or 1) > 1:
        return SHARDS[1:]
    return SHARDS if num_sharers > 1 else ("none",)


def _copies(shard: Shard, asked: LayoutRequest, data: int, hardware: Hardware) -> list[int]:
    """Degrees of dp_replicate: all of the data axis when nothing is cut; for full shard one, and one copy a node (hybrid)."""
    if shard == "none":
        return [data]
    if shard != "parameters" or asked.replicate:
        return [asked.replicate or 1]
    nodes = hardware.num_nodes
    return [1, nodes] if nodes > 1 and data % nodes == 0 and data > nodes else [1]
