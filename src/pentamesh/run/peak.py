"""Peak memory of torch's allocator over a piece of work, on CUDA and on CPU alike."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pentamesh.run.place import local

__all__ = ["Peak", "measured_peak", "rss_peak_bytes", "standing_bytes"]


@dataclass
class Peak:
    """Filled when the `with` block ends."""

    peak_bytes: int = 0


@contextmanager
def measured_peak(device: torch.device, standing: Iterable[torch.Tensor]) -> Iterator[Peak]:
    """The peak of what torch's allocator holds inside the block.

    CUDA keeps that number itself. On CPU it is what stands at the start (`standing`: weights, gradients, state) plus the running sum of the
    allocations that torch's profiler reports, which slows the block a little: the loop does so for two steps of a run, not for all.
    """
    found = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        found.peak_bytes = torch.cuda.max_memory_allocated(device)
        return
    at_start = standing_bytes(standing)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as profiler:
        yield found
    results: Any = profiler.profiler  # kineto's own events: the averaged ones leave out when memory was taken
    changes = sorted((e.start_ns(), e.nbytes()) for e in results.kineto_results.events() if e.name() == "[memory]")
    found.peak_bytes = at_start + max(accumulate((n for _, n in changes), initial=0))


def standing_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each counted once."""
    storages = {s.data_ptr(): s.nbytes() for s in (local(t).untyped_storage() for t in tensors)}
    return sum(storages.values())


def rss_peak_bytes() -> int:
    """The largest resident set this process has had; it stands beside the allocator's peak and is never predicted."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
