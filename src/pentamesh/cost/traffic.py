"""Every collective of a step with its seconds, and how much of each computation hides.

A block's parameters are gathered while the block before it computes, and its gradients are reduced while the next one goes back. What nothing
hides: the first gather and the last reduction, and whatever takes longer than the computing beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from pentamesh.cost.compute import Work
from pentamesh.cost.holding import NF4_BYTES, Holding, adapters
from pentamesh.cost.needs import Communication
from pentamesh.cost.network import group, link_name, seconds
from pentamesh.job.hardware import Hardware
from pentamesh.job.precision import ITEMSIZE, Precision
from pentamesh.layout.mesh import DATA_AXES, SHARD_AXES, Layout
from pentamesh.layout.moves import Move
from pentamesh.layout.policy import Policy
from pentamesh.layout.rhythm import LedgerRow, ledger, rhythm
from pentamesh.layout.stages import on_stage
from pentamesh.model.spec import ModelSpec

__all__ = ["Flow", "communication", "flows"]

_DATA = frozenset((*DATA_AXES, *SHARD_AXES, "edp"))


class Flow(NamedTuple):
    """A row of the predicted ledger and the seconds of all its collectives together."""

    row: LedgerRow
    seconds: float
    link: str

    @property
    def each_s(self) -> float:
        return self.seconds / self.row.count

    @property
    def can_hide(self) -> bool:
        """Parameters and gradients travel beside the computing; activations of the other axes are waited for."""
        return self.row.phase != "step" and set(self.row.axes) <= _DATA and self.row.kind != "send"


def flows(held: Holding, policy: Policy, precision: Precision, seq_len: int, hardware: Hardware) -> tuple[Flow, ...]:
    """All collectives of a steady step of a rank, timed."""
    mesh, found = held.layout.mesh, []
    for row in _rows(held, _telling(policy, held.layout), precision, seq_len):
        ranks = group(mesh, row.axes, hardware.devices_per_node)
        once = seconds(Move(row.kind, row.axes, row.num_ranks, row.bytes), ranks, hardware)
        found.append(Flow(row, once * row.count, link_name(ranks, hardware)))
    return tuple(found)


def communication(found: Iterable[Flow], policy: Policy, work: Work, kind: str, *, bucketed: bool) -> tuple[Communication, ...]:
    """The table by axis and kind, with what is exposed of each."""
    table: dict[tuple[str, str, str], Communication] = {}
    for flow, exposed_s in _exposed(list(found), policy, work, kind, bucketed=bucketed):
        key = ("*".join(flow.row.axes), flow.row.kind, flow.link)
        old = table.get(key, Communication(key[0], key[1], 0, 0, key[2], 0.0, 0.0))
        table[key] = replace(
            old,
            count=old.count + flow.row.count,
            bytes_per_rank=old.bytes_per_rank + round(flow.row.wire_bytes),
            seconds=old.seconds + flow.seconds,
            exposed_s=old.exposed_s + exposed_s,
        )
    return tuple(table.values())


def _telling(policy: Policy, layout: Layout) -> Policy:
    """The policy without what changes no collective: recomputing a block repeats its activations' crossings, and data axes have none."""
    return replace(policy, compile=False, offload=False, recompute=policy.recompute if layout.mesh.degree("pp", "cp", "tp", "ep") > 1 else "none")


# Rows


@lru_cache(maxsize=256)
def _rows(held: Holding, policy: Policy, precision: Precision, seq_len: int) -> list[LedgerRow]:
    """The ledger of a rank. Under adapters the base is only gathered, and only adapters are reduced."""
    if not held.is_adapted:
        return _model_rows(held.model, held, policy, precision, seq_len)
    # Where no weight is cut, the base does not travel: only its activations do.
    base_model = held.model if held.layout.cuts_weights else replace(held.model, tensors=())
    rows = _model_rows(base_model, held, policy, precision, seq_len)
    scale = NF4_BYTES / ITEMSIZE[precision.compute] if held.method == "qlora" else 1.0
    data = [r for r in rows if set(r.axes) <= _DATA and r.phase != "step"]
    base = [replace(r, bytes=round(r.bytes * scale)) for r in data if r.kind == "all_gather"] + [r for r in rows if r not in data]
    own = _model_rows(adapters(held.model), held, policy, precision, seq_len)
    return base + [r for r in own if set(r.axes) <= _DATA and r.phase != "step"]


def _model_rows(model: ModelSpec, held: Holding, policy: Policy, precision: Precision, seq_len: int) -> list[LedgerRow]:
    """`rhythm`'s ledger, with the parameters' part of the first pipeline stage taken as a model of its own."""
    pp, layout = held.layout.mesh.pp, replace(held.layout, mesh=replace(held.layout.mesh, pp=1))
    rows = ledger(rhythm(on_stage(model, pp, 0), layout, policy, precision, seq_len))
    if pp == 1:
        return rows
    between = ledger(rhythm(model, held.layout, policy, precision, seq_len))
    return [row for row in rows if row.phase != "step"] + [row for row in between if row.phase == "step" or "pp" in row.axes]


# Overlap


def _exposed(found: list[Flow], policy: Policy, work: Work, kind: str, *, bucketed: bool) -> list[tuple[Flow, float]]:
    """What is left of each flow when computing has hidden what it can. On CPU nothing hides: the cores that would carry it compute."""
    times = policy.grad_accum
    computing = {"forward": work.forward_s * times, "backward": work.backward_s * times}
    shares: list[tuple[Flow, float]] = [(f, f.seconds) for f in found if not f.can_hide or kind == "cpu"]
    hiding = [f for f in found if f.can_hide and kind != "cpu"]
    for phase, compute_s in computing.items():
        here = [f for f in hiding if f.row.phase == phase]
        every = [f for f in here if f.row.count >= times]
        once = [f for f in here if f.row.count < times]
        left = _behind(every, compute_s, times, bucketed=bucketed)
        hidden = sum(f.seconds for f in every) - sum(s for _, s in left)
        shares += left
        # What happens in one micro-batch only has one micro-batch's computing to hide behind.
        shares += _behind(once, max(0.0, compute_s - hidden) / times, 1, bucketed=bucketed)
    return shares


def _behind(found: list[Flow], compute_s: float, times: int, *, bucketed: bool) -> list[tuple[Flow, float]]:
    """Flows that share `compute_s` to hide behind: the first or last of them does not hide, nor does what exceeds it."""
    if not found:
        return []
    total = sum(f.seconds for f in found)
    # DDP's last bucket holds the embedding, the largest; where shares are gathered, the root is waited for, and one block.
    edge = max(f.each_s for f in found) if bucketed else sum(f.each_s for f in found)
    edge = min(total, edge * times)
    exposed = edge + max(0.0, total - edge - compute_s)
    return [(f, f.seconds * exposed / total) for f in found]
