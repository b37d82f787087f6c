"""THE table: from the name of a dim and a role to the mesh axes that cut it.

Memory, DTensor placements, weight loading, checkpoints, collectives and FLOPs all follow from this table; nothing else says where a tensor
lives. Under STORE, the data axes cut dim 0 (dim 1 of experts) of what the strategy shards, inside what the table gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from pentamesh.layout.mesh import SHARD_AXES, Layout
from pentamesh.model.dims import Dim, TensorSpec
from pentamesh.model.roles import STORE, Role

__all__ = [
    "SHARDED_KINDS",
    "TABLE",
    "axes_of",
    "copies",
    "cutting_axes",
    "on_expert_view",
    "partial_axes",
    "sharding_of",
    "shared_by",
    "tensor_partial",
]


@dataclass(frozen=True)
class Row:
    """The axes of one dim by role, outer to inner. An entry `axis?condition` counts only where that condition of the layout holds."""

    store: tuple[str, ...] = ()
    use: tuple[str, ...] = ()
    attend: tuple[str, ...] = ()
    carry: tuple[str, ...] = ()


TABLE = {
    "layers": Row(store=("pp",), use=("pp",), attend=("pp",), carry=("pp",)),
    "experts": Row(store=("ep",), use=("ep",)),
    "heads": Row(store=("tp",), use=("tp",), attend=("tp", "cp?ulysses")),
    "kv_heads": Row(store=("tp",), use=("tp",), attend=("tp", "cp?ulysses")),
    "ffn": Row(store=("tp",), use=("tp",)),
    "vocab": Row(store=("tp",), use=("tp",)),
    "batch": Row(use=("dp_replicate", "dp_shard"), attend=("dp_replicate", "dp_shard"), carry=("dp_replicate", "dp_shard")),
    "seq": Row(use=("cp",), attend=("cp?split_queries",), carry=("cp", "tp?sequence_parallel")),
    # Keys and values inside attention: passed round a ring they stay cut, gathered or exchanged they are whole.
    "kv_seq": Row(use=("cp",), attend=("cp?ring",), carry=("cp", "tp?sequence_parallel")),
}

_CONDITIONS = {
    "sequence_parallel": lambda layout: layout.sequence_parallel,
    "ulysses": lambda layout: layout.context == "ulysses",
    "split_queries": lambda layout: layout.context != "ulysses",
    "ring": lambda layout: layout.context == "ring",
}

# What each value of `layout.shard` cuts over the data axes: the strategies of ZeRO by their kinds of STORE.
SHARDED_KINDS: dict[str, tuple[Role, ...]] = {
    "none": (),
    "optimizer": (Role.STATE,),
    "gradients": (Role.GRADIENT, Role.STATE),
    "parameters": (Role.WEIGHT, Role.GRADIENT, Role.STATE),
}


@lru_cache(maxsize=2**12)
def axes_of(dim: str, role: Role, layout: Layout) -> tuple[str, ...]:
    """The axes of degree above one that cut `dim` in `role`, outer to inner, before the data axes cut what is stored."""
    row = TABLE.get(dim, Row())
    entries = {Role.ATTEND: row.attend, Role.CARRY: row.carry}.get(role, row.use if role in (Role.USE, Role.COMPUTED) else row.store)
    axes = []
    for entry in entries:
        axis, _, condition = entry.partition("?")
        if layout.mesh.degree(axis) > 1 and (not condition or _CONDITIONS[condition](layout)):
            axes.append(axis)
    return tuple(axes)


def on_expert_view(tensor: TensorSpec, layout: Layout) -> bool:
    """Whether `tensor` lives on the expert view of the mesh, where ep and edp stand for the ranks of dp_shard, cp and tp. Where experts are not
    parted there is no such view, and they are as other tensors."""
    return layout.mesh.ep > 1 and tensor.is_expert


def cutting_axes(tensor: TensorSpec, position: int, role: Role, layout: Layout) -> tuple[str, ...]:
    """As `axes_of`, for a dim of `tensor` by position: tp cuts neither an expert, which works on the stream as it lies between blocks, nor the one
    key head that all its ranks share."""
    dim = tensor.dims[position]
    whole = tensor.is_expert or copies(dim, layout.mesh.tp) == layout.mesh.tp
    return tuple(axis for axis in axes_of(dim.name, role, layout) if axis != "tp" or not whole)


def copies(dim: Dim, degree: int) -> int:
    """The neighbours among `degree` ranks that hold the same units of `dim`: key heads that are fewer than the ranks serve several of them each."""
    shares = dim.name == "kv_heads" and not dim.parts and dim.num_units < degree and degree % dim.num_units == 0
    return degree // dim.num_units if shares else 1


def shared_by(tensor: TensorSpec, layout: Layout) -> int:
    """The tensor ranks that hold the same key heads of `tensor`; 1 where each has its own, or all have all."""
    return max((copies(dim, layout.mesh.tp) for dim in tensor.dims), default=1)


def sharding_of(tensor: TensorSpec, role: Role, layout: Layout) -> tuple[int, tuple[str, ...]]:
    """The dim (by position) and the axes over which the strategy cuts a stored tensor; no axes where it does not, as no buffer."""
    expert = on_expert_view(tensor, layout)
    axes = ("edp",) if expert else tuple(a for a in SHARD_AXES if layout.mesh.degree(a) > 1)
    if tensor.kind == "buffer" or role not in STORE or role not in SHARDED_KINDS[layout.shard] or layout.mesh.degree(*axes) == 1:
        return 0, ()
    return (1 if expert and len(tensor.dims) > 1 else 0), axes


def partial_axes(tensor: TensorSpec, layout: Layout) -> tuple[str, ...]:
    """The axes over which the gradient of `tensor` is a partial sum when its block's backward is done.

    A gradient is partial over every axis that cuts a dim of the activation which the weight lacks: batch and sequence for all, heads for a
    per-head norm, the sequence over tp for what acts on a sequence-parallel residual stream. Each rank that shares a key head has its own queries'
    part of that head's.
    """
    if tensor.acts_on is None:
        return ()
    own = {d.name for d in tensor.dims}
    lacking = [dim for dim in tensor.acts_on.dims if dim not in own]
    axes = {axis for dim in lacking for axis in axes_of(dim, tensor.acts_on.role, layout)}
    if (shared := shared_by(tensor, layout)) > 1:
        axes.add(layout.mesh.inner("tp", shared))
    if on_expert_view(tensor, layout):
        # Tokens reach their experts from every rank of dp_shard x cp x tp; seen from there only edp is left to sum over.
        axes = (axes - {"dp_shard", "cp", "tp"}) | ({"edp"} if layout.mesh.edp > 1 else set())
    order = ("dp_replicate", "dp_shard", "cp", "edp", "tp")
    return tuple(sorted(axes, key=lambda axis: order.index(axis.partition("/")[0])))


def tensor_partial(tensor: TensorSpec, layout: Layout) -> tuple[str, ...]:
    """Of `partial_axes`, the tensor axis or the inner part of it, over which a sum waits for the end of the step."""
    return tuple(axis for axis in partial_axes(tensor, layout) if axis.partition("/")[0] == "tp")
