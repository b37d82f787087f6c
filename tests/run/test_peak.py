"""The peak of torch's allocator on CPU, frees that the profiler misses included."""

from __future__ import annotations

import torch

from pentamesh.run.peak import _changes, measured_peak


def test_the_peak_of_what_comes_and_goes() -> None:
    standing = torch.ones(1000)
    with measured_peak(torch.device("cpu"), [standing, standing.view(10, 100)]) as peak:
        first = standing + 1
        second = first * 2
        del first
        third = second.sum()
        del second, third
    assert 3 * 4000 <= peak.peak_bytes < 3 * 4000 + 200


def test_frees_on_threads_that_nobody_watches() -> None:
    """At address 1 a buffer comes twice and leaves once; at 3 it never leaves."""
    seen = [(0, 1, 100), (1, 2, 10), (2, 1, 100), (3, 3, 7), (4, 1, -100), (5, 2, -10), (6, 9, -50)]
    assert _changes(seen) == [100, 10, -100, 100, 0, -100, -10, -50]
