"""Alone: the first rank at work while the others wait, for as long as it lives and not for as long as a collective may take.

The ranks meet in the store that every process group has. The first one counts a beat a second there, and says when it is done; the others look,
at first often, then every second.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from pentamesh.errors import RunFailed

__all__ = ["awaited", "working"]

BEAT_S = 1.0
# A rank that has not beaten for so long is dead, or its machine is: a launcher on this machine ends the others sooner.
SILENT_S = 60.0

# Calls so far by group: ranks call in the same order, so that a number means the same call on all.
_calls: Counter[str] = Counter()


@contextmanager
def working(group: dist.ProcessGroup) -> Iterator[None]:
    """The first rank's side: beats while the block runs, and done however it ends."""
    store, call = _meeting(group)
    ended = threading.Event()
    thread = threading.Thread(target=_beat, args=(store, call, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        store.set(f"{call}/done", "")


def awaited(group: dist.ProcessGroup, doing: str) -> None:
    """The others' side: return when the first rank is done. Raises RunFailed when nothing is heard of it any more."""
    hint = "see how its process ended; --resume goes on from the newest checkpoint"
    try:
        silent = _watch(*_meeting(group))
    except dist.DistError as error:
        raise RunFailed(f"rank 0 cannot be reached any more: {str(error).splitlines()[0]}", where=doing, hint=hint) from error
    if silent:
        raise RunFailed(f"rank 0 has not been heard of for {SILENT_S:g} s", where=doing, hint=hint)


def _watch(store: dist.Store, call: str) -> bool:
    """Look until the first rank is done, or has been silent for too long, and say whether it is silent."""
    began = heard = time.monotonic()
    beats = 0
    while not store.check([f"{call}/done"]):
        now = time.monotonic()
        if (found := store.add(f"{call}/beats", 0)) != beats:
            beats, heard = found, now
        elif now - heard > SILENT_S:
            return True
        time.sleep(min(BEAT_S, 0.001 + 0.1 * (now - began)))
    return False


def _meeting(group: dist.ProcessGroup) -> tuple[dist.Store, str]:
    """The store of a group, and the name of this call in it."""
    name = group.group_name
    _calls[name] += 1
    return dist.distributed_c10d._get_process_group_store(group), f"pentamesh/first/{_calls[name]}"


def _beat(store: dist.Store, call: str, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        store.add(f"{call}/beats", 1)
