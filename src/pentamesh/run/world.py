"""World: this process among all ranks - its device, its place on the mesh, and the group of any set of axes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pentamesh.errors import InputError
from pentamesh.job.started import environment
from pentamesh.layout.mesh import AXES, EXPERT_AXES, SHARD_AXES, Layout
from pentamesh.run.data.share import Share

__all__ = ["World", "connect", "join", "leave"]


@dataclass
class World:
    """One rank of a running job. Groups are made on first use, by all ranks in the same order.

    `phase` is `step` while the loop exchanges its own numbers, else `forward`; the ledger reads it.
    """

    layout: Layout
    rank: int
    device: torch.device
    phase: str = "forward"
    _groups: dict[tuple[str, ...], dist.ProcessGroup] = field(default_factory=dict, repr=False)

    @property
    def num_ranks(self) -> int:
        return self.layout.mesh.num_ranks

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.rank == 0

    @property
    def share(self) -> Share:
        """What this rank reads of every step."""
        return Share(self.layout, self.rank)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """torch's view of the same mesh, with our axis names; the axes that cut parameters together are one, `shard`."""
        axes = {"pp": ("pp",), "dp_replicate": ("dp_replicate",), "shard": SHARD_AXES, "tp": ("tp",)}
        degrees = tuple(self.layout.mesh.degree(*together) for together in axes.values())
        return init_device_mesh(self.device.type, degrees, mesh_dim_names=tuple(axes))

    @cached_property
    def expert_mesh(self) -> DeviceMesh:
        """torch's view of the ranks that hold the same experts: copies, and along edp those that cut them."""
        mesh = self.layout.mesh
        ranks = torch.tensor([mesh.peers(rank, ("edp",)) for rank in mesh.peers(self.rank, ("dp_replicate",))])
        groups = [self.group((axis,), apart=True) for axis in ("dp_replicate", "edp")]
        return DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=("dp_replicate", "edp"))

    def group(self, axes: tuple[str, ...], *, apart: bool = False) -> dist.ProcessGroup:
        """The process group of this rank along `axes`. Collective: every rank asks for the same axes in the same order.

        Axes of the expert view have groups of their own where others join the same ranks. A group `apart` exists also where axes hold one rank.
        """
        axes = axes if apart else tuple(axis for axis in axes if self.layout.mesh.degree(axis) > 1)
        if axes not in self._groups:
            mine = self.layout.mesh.peers(self.rank, axes)
            if len(mine) == self.num_ranks and not set(axes) & set(EXPERT_AXES):
                self._groups[axes] = dist.distributed_c10d._get_default_group()
            else:
                made = {ranks: dist.new_group(list(ranks)) for ranks in self.layout.mesh.groups(axes)}
                self._groups[axes] = made[mine]  # pyright: ignore[reportArgumentType]
        return self._groups[axes]

    def axes_of(self, group: dist.ProcessGroup) -> tuple[str, ...]:
        """The axes that a process group runs along: those of the expert view that it was made for, else those on which its ranks differ, or the inner
        part of one."""
        for axes, made in self._groups.items():
            if set(axes) & set(EXPERT_AXES) and made.group_name == group.group_name:
                return axes
        mesh = self.layout.mesh
        coords = [mesh.coords(rank) for rank in dist.get_process_group_ranks(group)]
        places = {axis: len({c[axis] for c in coords}) for axis in AXES}
        return tuple(mesh.inner(axis, count) for axis, count in places.items() if count > 1)

    def sum(self, values: list[int] | list[float], axes: tuple[str, ...]) -> list[float]:
        """`values` summed over `axes`: one all-reduce of int64 or float64, or none where the axes hold one rank."""
        axes = tuple(axis for axis in axes if self.layout.mesh.degree(axis) > 1)
        if not axes:
            return [float(value) for value in values]
        whole = all(isinstance(value, int) for value in values)
        tensor = torch.tensor(values, dtype=torch.int64 if whole else torch.float64, device=self.device)
        group = self.group(axes)
        with self.bookkeeping():
            dist.all_reduce(tensor, group=group)
        return [float(value) for value in tensor.tolist()]

    def max(self, values: list[int]) -> list[int]:
        """The largest of each value over all ranks."""
        if self.num_ranks == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    @contextmanager
    def bookkeeping(self) -> Iterator[None]:
        """Mark the collectives inside as the step's own, not a forward pass's."""
        self.phase = "step"
        try:
            yield
        finally:
            self.phase = "forward"

    def barrier(self) -> None:
        """Return once every rank has come here."""
        if self.num_ranks > 1:
            dist.barrier()


def connect(timeout_s: float = 1800) -> None:
    """Make the process group that torchrun's environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); one process needs no network.

    Raises InputError for an environment that describes none.
    """
    if dist.is_initialized():
        return
    rank, size = environment("RANK", 0), environment("WORLD_SIZE", 1)
    if rank >= size:
        hint = "torchrun and SLURM set both; unset both to start here"
        raise InputError(f"this is process {rank}, counted from 0, of {size}", where="RANK and WORLD_SIZE in the environment", hint=hint)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if size == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def join(layout: Layout, device_type: str | None = None) -> World:
    """Take this process's place in the job's world. Raises InputError when the number of processes is not the layout's."""
    size = environment("WORLD_SIZE", 1)
    if size != layout.mesh.num_ranks:
        raise InputError(
            f"{size} processes were started for a layout of {layout.mesh.num_ranks} ranks ({layout.mesh})",
            where="torchrun --nproc-per-node x --nnodes",
            hint=f"start {layout.mesh.num_ranks} processes, or plan the job for {size}",
        )
    connect()
    return World(layout, environment("RANK", 0), _device(device_type or ("cuda" if torch.cuda.is_available() else "cpu")))


def leave() -> None:
    """Take the process groups down."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _device(kind: str) -> torch.device:
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device("cuda", environment("LOCAL_RANK", 0))
    torch.cuda.set_device(device)
    return device
