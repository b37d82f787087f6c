"""Copies: a state in host memory, as it was at one step, while the run goes on to change the original."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pentamesh.checkpoint.held import Held
from pentamesh.layout.split import Box

__all__ = ["HostCopy"]


class HostCopy:
    """Host memory for one copy of a state: pinned where the state is on a GPU, and the same from copy to copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`tensors` as they are now. Of one that is `Held` only what its box holds is copied. The copies before are written over."""
        found = {name: self._held(name, t) if isinstance(t, Held) else self._copy(name, t) for name, t in tensors.items()}
        if any(tensor.device.type == "cuda" for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()  # the copies are made one behind the other, and may not be waited for singly
        return found

    def _held(self, name: str, tensor: Held) -> Held:
        if not tensor.boxes:
            return Held(torch.empty(0, dtype=tensor.dtype), tuple(tensor.shape), [])
        (box,) = tensor.boxes  # parts that are fused in one are held each by a name of its own
        copy = self._copy(name, tensor.part(box))
        return Held(copy, tuple(tensor.shape), [Box(box.offset, box.size, (0,) * len(box.size))])

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
        return buffer.copy_(tensor, non_blocking=True)
