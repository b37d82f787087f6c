"""Candidates: the layouts that a request leaves open on a machine, and for each the policies worth judging."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pentamesh.errors import InputError, Problem
from pentamesh.job.hardware import Hardware
from pentamesh.job.job import Job, LayoutRequest
from pentamesh.layout.legal import grad_accum, problems
from pentamesh.layout.mesh import Layout, Mesh, Shard
from pentamesh.layout.policy import Policy
from pentamesh.model.spec import ModelSpec

__all__ = ["described", "layouts", "policies"]

_SHARDS: tuple[Shard, ...] = ("none", "optimizer", "gradients", "parameters")


def layouts(job: Job, model: ModelSpec, hardware: Hardware) -> list[Layout]:
    """Every legal layout of the request, simplest first. Raises InputError with all problems when there is none."""
    found, refused = [], []
    for layout in _meshes(job.layout, hardware):
        wrong = problems(model, layout, job.batch)
        refused += wrong
        found += [] if wrong else [layout]
    if not found:
        raise InputError(*dict.fromkeys(refused))
    return found


def policies(layout: Layout, job: Job, *, lean: bool = False) -> Iterator[Policy]:
    """The policies of one layout; `lean` gives only the one that takes least memory."""
    asked, accum = job.layout, grad_accum(layout, job.batch)
    recomputes = ("none", "full") if asked.activation_checkpointing == "auto" else (asked.activation_checkpointing,)
    timings = [t for t in _timings(layout, accum) if asked.reshard_after_forward in ("auto", t[0])]
    if lean:
        recomputes, timings = recomputes[-1:], timings[:1]
    for recompute, (reshard, keep, reduce) in itertools.product(recomputes, timings):
        yield Policy(job.batch.micro_batch, accum, recompute, reshard, keep, reduce)


def described(layout: Layout, policy: Policy) -> dict[str, Any]:
    """A candidate as plain values: strategy, degrees and policy."""
    whole = asdict(layout)
    mesh = whole.pop("mesh")
    return {"strategy": layout.strategy, **mesh, "edp": layout.mesh.edp, **whole, **asdict(policy)}


def _timings(layout: Layout, accum: int) -> list[tuple[bool, bool, Any]]:
    """(reshard, keep gathered, reduce) from least memory to most. Only full shard has a choice: DDP accumulates in whole gradients, ZeRO-1 and
    ZeRO-2 keep whole weights over a step, and ZeRO-2 has no whole gradient to accumulate in."""
    each = "each" if accum > 1 else "once"
    if layout.shard != "parameters":
        return {"none": [(True, False, "once")], "optimizer": [(False, True, "once")], "gradients": [(False, True, each)]}[layout.shard]
    # Over copies of the model, only what a node has summed and cut need cross between nodes, once.
    reduces = ("once",) if accum == 1 else ("node", "once") if layout.mesh.dp_replicate > 1 else ("each", "once")
    gathers = [(True, False), (False, False)] + ([(False, True)] if accum > 1 else [])
    return [(*gather, reduce) for reduce in reduces for gather in gathers]


def _meshes(asked: LayoutRequest, hardware: Hardware) -> Iterator[Layout]:
    """The layouts of the request before anyone asks whether the model allows them."""
    data = _data_degree(asked, hardware)
    others = {"pp": asked.pipeline, "cp": asked.context, "tp": asked.tensor, "ep": asked.expert}
    for shard in _shards(asked, data):
        for copies in _copies(shard, asked, data, hardware):
            mesh = {"dp_replicate": copies, "dp_shard": data // copies}
            # Experts need dp_shard, cp or tp to live on: where a strategy leaves none, it cannot carry them.
            if (data // copies * asked.context * asked.tensor) % asked.expert == 0 or asked.shard != "auto":
                yield Layout(Mesh(**others, **mesh), shard, asked.sequence_parallel)


def _data_degree(asked: LayoutRequest, hardware: Hardware) -> int:
    others, devices = asked.pipeline * asked.context * asked.tensor, hardware.num_devices
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


def _shards(asked: LayoutRequest, data: int) -> tuple[Shard, ...]:
    if asked.shard != "auto":
        return (asked.shard,)
    if data * asked.context == 1:
        return ("none",)
    if (asked.replicate or 1) > 1:
        return ("parameters",)
    return _SHARDS


def _copies(shard: Shard, asked: LayoutRequest, data: int, hardware: Hardware) -> list[int]:
    """Degrees of dp_replicate: all of the data axis when nothing is cut; for full shard one, and one copy a node (hybrid)."""
    if shard == "none":
        return [data]
    if shard != "parameters" or asked.replicate:
        return [asked.replicate or 1]
    nodes = hardware.num_nodes
    return [1, nodes] if nodes > 1 and data % nodes == 0 and data > nodes else [1]
