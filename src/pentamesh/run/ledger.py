"""The ledger: every collective that a step really makes, in the same rows that `layout.rhythm` predicts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch._library.custom_ops import _maybe_get_opdef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pentamesh.layout.crossings import LedgerRow
from pentamesh.run.world import World

__all__ = ["Recorder", "differences"]

# c10d's operators by the words of `Move`, and which of their tensors is the whole buffer: the largest.
_KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "send": "send",
    "broadcast_": "broadcast",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "barrier": "barrier",
    # What torch.compile makes of them.
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    # And where it sends in parts beside matmuls.
    "fused_all_gather_matmul": "all_gather",
    "fused_matmul_reduce_scatter": "reduce_scatter",
}
_SEEN_ELSEWHERE = {"recv_", "recv_any_source_", "monitored_barrier_", "wait_tensor"}


class Recorder(TorchDispatchMode):
    """Records collectives while it is entered: `with Recorder(world) as ledger: ...; ledger.rows()`.

    A collective belongs to `backward` while autograd runs, else to the phase that the world is in: `forward` or `step`.
    """

    # Compiled blocks call some: attention that is computed again saves the state of the random generator.
    supports_higher_order_operators = True

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._counts: Counter[tuple[str, str, tuple[str, ...], int, int]] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled blocks run compiled while this records, instead of eagerly."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "symm_mem") and func._opname not in _SEEN_ELSEWHERE:
            self._record(func._opname, tree_leaves((args, kwargs or {})))
        if func.namespace == "pentamesh" and (ours := _maybe_get_opdef(func)) is not None:
            with self:  # for a mode it is one operator, which may speak with other ranks inside
                return ours._init_fn(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _record(self, name: str, leaves: list[Any]) -> None:
        group = next(found for leaf in leaves if (found := _group_of(leaf)) is not None)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if name == "alltoall_base_":  # what is sent; what comes may be another number of rows
            tensors = tensors[1:]
        num_bytes = max((t.numel() * t.element_size() for t in tensors), default=0)
        if name == "all_gather_into_tensor":  # of which only the input is an argument
            num_bytes *= group.size()
        elif name == "fused_all_gather_matmul":
            num_bytes = tensors[0].numel() * tensors[0].element_size() * group.size()
        elif name == "fused_matmul_reduce_scatter":
            num_bytes = tensors[0].numel() // tensors[1].shape[0] * tensors[1].shape[1] * tensors[0].element_size()
        key = (self._phase(), _KINDS.get(name, name), self._world.axes_of(group), group.size(), num_bytes)
        if group.size() > 1:
            self._counts[key] += 1

    def _phase(self) -> str:
        return "backward" if torch._C._current_graph_task_id() != -1 else self._world.phase

    def rows(self) -> list[LedgerRow]:
        """What was recorded, in the order of `layout.crossings.ledger`."""
        return sorted(LedgerRow(*key, count) for key, count in self._counts.items())


def differences(predicted: list[LedgerRow], recorded: list[LedgerRow]) -> list[str]:
    """One line for every row that one side has and the other has not; empty when they are equal."""
    only = [f"predicted, not recorded: {row}" for row in predicted if row not in recorded]
    return only + [f"recorded, not predicted: {row}" for row in recorded if row not in predicted]


def _group_of(leaf: Any) -> dist.ProcessGroup | None:
    """The process group that an argument is, boxed or by its name in a compiled graph."""
    try:
        if isinstance(leaf, torch.ScriptObject):
            return dist.ProcessGroup.unbox(leaf)
        named: Any = leaf
        return dist.distributed_c10d._resolve_process_group(named) if isinstance(leaf, str) else None
    except (RuntimeError, TypeError, ValueError):
        return None
