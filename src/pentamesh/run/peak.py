"""Peak memory of torch's allocator over a piece of work, on CUDA and on CPU alike."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch._C._profiler import _EventType
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
    allocations that torch's profiler reports, which slows the block a little: the loop does so for two steps of a run, not for all. The block
    must leave nothing that it allocated.
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
    results: Any = profiler.profiler
    found.peak_bytes = at_start + max(accumulate(_changes(_allocations(results.kineto_results)), initial=0))


def _allocations(kineto: Any) -> list[tuple[int, int, int]]:
    """(time, address, bytes) of every allocation and, with negative bytes, of every free that the profiler saw, in their order."""
    found, waiting = [], list(kineto.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return sorted(found)


def _changes(allocations: Sequence[tuple[int, int, int]]) -> list[int]:
    """Bytes that come and go, with the frees that the profiler does not see.

    Which thread drops a buffer of a collective last is chance, and gloo's threads are not watched. What is allocated where something stands, and
    what still stands at the end, shows one that was missed: that buffer counts until one of its size comes next, as the next collective's does.
    """
    changes = [num_bytes for _, _, num_bytes in allocations]
    sizes, standing, missed = tuple(changes), {}, []
    for index, (_, address, num_bytes) in enumerate(allocations):
        before = standing.pop(address, None)
        if num_bytes > 0:
            missed += [] if before is None else [before]
            standing[address] = index
    for index in (*missed, *standing.values()):
        following = (later for later in range(index + 1, len(sizes)) if sizes[later] == sizes[index])
        changes[next(following, index)] -= sizes[index]
    return changes


def standing_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each counted once."""
    storages = {s.data_ptr(): s.nbytes() for s in (local(t).untyped_storage() for t in tensors)}
    return sum(storages.values())


def rss_peak_bytes() -> int:
    """The largest resident set this process has had; it stands beside the allocator's peak and is never predicted."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
