"""Every collective of a step with its seconds, and how much of each computation hides.

A block's parameters are gathered while the block before it computes, and its gradients are reduced while the next one goes back. What nothing
hides: the first gather and the last reduction, and whatever takes longer than the computing beside it. A ring passes a block of keys on while
attention works on the one before. Other activations are waited for, rows on their way to experts and home among them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from pentamesh.cost.compute import Work
from pentamesh.cost.experts import imbalance
from pentamesh.cost.holding import NF4_BYTES, Holding, adapters
from pentamesh.cost.needs import Communication
from pentamesh.cost.network import group, link_name, seconds
from pentamesh.job.hardware import Hardware
from pentamesh.job.precision import ITEMSIZE, Precision
from pentamesh.layout.crossings import LedgerRow, ledger
from pentamesh.layout.gathers import parameters
from pentamesh.layout.mesh import Layout
from pentamesh.layout.moves import Move
from pentamesh.layout.policy import Policy
from pentamesh.layout.rhythm import activations, sums
from pentamesh.layout.routing import evened, routed
from pentamesh.layout.stages import on_stage
from pentamesh.model.spec import ModelSpec

__all__ = ["Flow", "communication", "flows"]


class Flow(NamedTuple):
    """A row of the predicted ledger, the seconds of all its collectives together, and whether it is of parameters and their gradients."""

    row: LedgerRow
    seconds: float
    link: str
    of_parameters: bool

    @property
    def each_s(self) -> float:
        return self.seconds / self.row.count

    @property
    def is_passed(self) -> bool:
        """Whether it goes round a ring."""
        return self.row.kind == "send" and self.row.axes == ("cp",)


def flows(held: Holding, policy: Policy, precision: Precision, seq_len: int, hardware: Hardware) -> tuple[Flow, ...]:
    """All collectives of a steady step of a rank, timed."""
    rows = _rows(held, _telling(policy, held.layout), precision, seq_len)
    rows_at_most = imbalance(held.model, held.layout).expected

    def flow(row: LedgerRow, of_parameters: bool) -> Flow:
        ranks = group(held.layout.mesh, row.axes, hardware.devices_per_node)
        once = seconds(Move(row.kind, row.axes, row.num_ranks, row.bytes), ranks, hardware)
        # All wait for the rank that most rows come to.
        uneven = rows_at_most if row.axes == ("ep",) and row.kind == "all_to_all" else 1.0
        return Flow(row, once * row.count * uneven, link_name(ranks, hardware), of_parameters)

    return tuple(flow(row, of is rows.parameters) for of in rows for row in of)


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


class _Rows(NamedTuple):
    """The ledger of a rank, apart for what moves parameters and their gradients: context ranks send both kinds to the same ranks."""

    parameters: list[LedgerRow]
    others: list[LedgerRow]


@lru_cache(maxsize=256)
def _rows(held: Holding, policy: Policy, precision: Precision, seq_len: int) -> _Rows:
    """The ledger of a rank. Under adapters the base is only gathered, and only adapters are reduced."""
    moved, others = _moved(held.model, held.layout, policy, precision), _others(held.model, held.layout, policy, precision, seq_len)
    if not held.is_adapted:
        return _Rows(moved, others)
    scale = NF4_BYTES / ITEMSIZE[precision.compute] if held.method == "qlora" else 1.0
    # Where no weight is cut, the base does not travel: only its activations do.
    base = [replace(r, bytes=round(r.bytes * scale)) for r in moved if r.kind == "all_gather"] if held.layout.cuts_weights else []
    return _Rows(base + _moved(adapters(held.model), held.layout, policy, precision), others)


def _moved(model: ModelSpec, layout: Layout, policy: Policy, precision: Precision) -> list[LedgerRow]:
    """What the parameters of the first pipeline stage move, which is taken as a model of its own."""
    return ledger(parameters(on_stage(model, layout.mesh.pp, 0), _one_stage(layout), policy, precision))


def _others(model: ModelSpec, layout: Layout, policy: Policy, precision: Precision, seq_len: int) -> list[LedgerRow]:
    """What that stage moves besides, and what stages do among themselves."""
    pp = layout.mesh.pp
    within = ledger(activations(on_stage(model, pp, 0), _one_stage(layout), policy, precision, seq_len))
    between = activations(model, layout, policy, precision, seq_len) if pp > 1 else ()
    within += ledger(routed(on_stage(model, pp, 0), _one_stage(layout), policy, precision, seq_len))
    within += ledger(evened(on_stage(model, pp, 0), _one_stage(layout), policy))
    return within + ledger(crossing for crossing in between if "pp" in crossing.move.axes) + ledger(sums(model, layout, precision))


def _one_stage(layout: Layout) -> Layout:
    return replace(layout, mesh=replace(layout.mesh, pp=1))


# Overlap


def _exposed(found: list[Flow], policy: Policy, work: Work, kind: str, *, bucketed: bool) -> list[tuple[Flow, float]]:
    """What is left of each flow when computing has hidden what it can. On CPU nothing hides: the cores that would carry it compute."""
    times = policy.grad_accum
    computing = {"forward": work.forward_s * times, "backward": work.backward_s * times}
    shares: list[tuple[Flow, float]] = [(f, f.seconds) for f in found if kind == "cpu" or not (f.of_parameters or f.is_passed)]
    hiding = [f for f in found if f.of_parameters and kind != "cpu"]
    for passed in (f for f in found if f.is_passed and kind != "cpu"):
        shares.append((passed, left := _beside_attention(passed, work)))
        # The link carries nothing else meanwhile.
        computing[passed.row.phase] -= passed.seconds - left
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


def _beside_attention(passed: Flow, work: Work) -> float:
    """Of blocks passed round a ring, what takes longer than attention to the block before. Backward takes twice as long, and sends each block twice:
    keys with values, and their gradients; a forward that is repeated sends what the first did."""
    layers = sum(count for _, count in work.attention)
    waits = (max(0.0, passed.each_s - attention_s / passed.row.num_ranks) * count / layers for attention_s, count in work.attention)
    return passed.row.count * sum(waits)


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
