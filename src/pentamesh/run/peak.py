"""Peak memory of torch's allocator over a piece of work, on CUDA and on CPU alike."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["Peak", "count_allocations", "measured_peak", "rss_peak_bytes"]

# Source: torch, c10/core/CPUAllocator.cpp. While it is set, every allocation and every release is counted, whichever thread makes it (about 1 us
# each); else only those of threads that are profiled, and gloo's, which release what a collective held, are not.
_COUNTS = "FLAGS_caffe2_report_cpu_memory_usage"


@dataclass
class Peak:
    """Filled when the `with` block ends; None where it cannot be measured."""

    peak_bytes: int | None = None


def count_allocations() -> None:
    """Let torch's CPU allocator keep its total from here on: called before anything is allocated, the total is of all there is."""
    if (counts := _counts()) is not None:
        counts.value = True


@contextmanager
def measured_peak(device: torch.device) -> Iterator[Peak]:
    """The peak of what torch's allocator holds inside the block.

    CUDA keeps that number itself. On CPU it is the largest of the totals that the allocator reports to torch's profiler, with each allocation,
    since `count_allocations`; that slows the block a little.
    """
    found = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        found.peak_bytes = torch.cuda.max_memory_allocated(device)
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as profiler:
        yield found
    if (counts := _counts()) is not None and counts.value:
        results: Any = profiler.profiler
        found.peak_bytes = max(_totals(results.kineto_results.experimental_event_tree()), default=0)


def _counts() -> ctypes.c_bool | None:
    """torch's switch, for which it has no function; None in a build that hides it."""
    try:
        return ctypes.c_bool.in_dll(ctypes.CDLL(torch._C.__file__), _COUNTS)
    except (OSError, ValueError):
        return None


def _totals(events: Iterable[Any]) -> Iterator[int]:
    """What was allocated on the CPU after each change."""
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if hasattr(event.extra_fields, "total_allocated") and event.extra_fields.device.type == "cpu":
            yield event.extra_fields.total_allocated


def rss_peak_bytes() -> int:
    """The largest resident set this process has had; it stands beside the allocator's peak and is never predicted."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
