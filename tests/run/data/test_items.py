"""24 items over 4 ranks, stopped in the middle of an epoch and gone on with on as many ranks or fewer: all are seen, none twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from pentamesh.layout.mesh import Layout, Mesh
from pentamesh.run.data.batches import Batches
from pentamesh.run.data.order import first_fit_decreasing
from pentamesh.run.data.samples import Samples
from pentamesh.run.data.share import Share
from tests.run.data.test_data_batches import samples_of

LENGTHS = [1 + (7 * i) % 11 for i in range(24)]
GLOBAL_BATCH = 4
ALONE = samples_of(LENGTHS)
# Sixteen rows, of which an epoch sees eight twice, as those of a source with weight 2.
WEIGHTED = replace(samples_of(LENGTHS[:16]), spans=np.concatenate([ALONE.spans[:16], ALONE.spans[8:16]]))
PACKED = replace(ALONE, packs=first_fit_decreasing(np.sort(ALONE.lengths)[::-1], 11))
CASES: dict[str, tuple[Samples, bool]] = {
    "alone": (ALONE, False),
    "grouped by length": (ALONE, True),
    "packed": (PACKED, False),
    "sources with weights": (WEIGHTED, False),
    "weights, grouped": (WEIGHTED, True),
}


def tokens_of(samples: Samples, group: bool, ranks: int, steps: range, epochs: int) -> Iterator[list[int]]:
    """What the model reads in each of these steps, on all ranks, without what pads it."""
    for step in steps:
        shares = [Share(Layout(Mesh(dp_shard=ranks)), rank) for rank in range(ranks)]
        worlds = [Batches(samples, 3, GLOBAL_BATCH, 1, share, samples.num_rows * epochs, group_by_length=group) for share in shares]
        read = [int(token) for batches in worlds for micro in batches.step(step * GLOBAL_BATCH) for token in micro.input_ids.flatten()]
        yield [token for token in read if token]


def expected(samples: Samples, epochs: int) -> Counter[int]:
    """Every token of every item but its last, once an epoch for each time that an epoch sees the item."""
    return Counter(int(token) for i in range(len(samples)) for token in samples.sample(i)[0][:-1] for _ in range(epochs))


@pytest.mark.parametrize("ranks", [4, 2, 1])
@pytest.mark.parametrize("case", CASES)
def test_all_items_are_seen_and_none_twice(case: str, ranks: int) -> None:
    """Every token that is read is counted: items that were cut, left out or read again would differ. The order is the undisturbed one."""
    samples, group = CASES[case]
    assert len(samples) == 24
    for epochs in (1, 2):
        num_steps = -(-samples.num_rows * epochs // GLOBAL_BATCH)
        stop = num_steps // 2 if epochs == 1 else num_steps - 2  # in the middle of an epoch
        assert stop * GLOBAL_BATCH % samples.num_rows
        before = list(tokens_of(samples, group, 4, range(stop), epochs))
        after = list(tokens_of(samples, group, ranks, range(stop, num_steps), epochs))
        assert Counter(token for step in (*before, *after) for token in step) == expected(samples, epochs)
        undisturbed = tokens_of(samples, group, 4, range(num_steps), epochs)
        assert [sorted(step) for step in (*before, *after)] == [sorted(step) for step in undisturbed]
