"""What each rank saves of a tensor, where others hold the same: every value by exactly one, of what it holds."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pentamesh.checkpoint import held as holding
from pentamesh.checkpoint.held import Held, held, portions
from pentamesh.layout.mesh import Layout
from pentamesh.layout.split import split
from pentamesh.model.dims import Dim, TensorSpec
from pentamesh.model.roles import Role
from tests.layout.strategies import layouts, tensors


@st.composite
def key_heads(draw: st.DrawFn) -> TensorSpec:
    """Key heads that may be fewer than the tensor ranks, which then hold the same."""
    units, grain = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    return TensorSpec("weight", (Dim("kv_heads", units * grain, grain), Dim("hidden", draw(st.integers(1, 3)))))


def places(found: Held) -> Iterator[tuple[int, ...]]:
    for box in found.boxes:
        assert tuple(found.part(box).shape) == box.size
        yield from itertools.product(*(range(low, low + size) for low, size in zip(box.offset, box.size, strict=True)))


@given(st.one_of(tensors(), key_heads()), layouts(), st.sampled_from([1, 16, 2**20]))
def test_every_value_is_saved_by_one_rank_that_holds_it(tensor: TensorSpec, layout: Layout, share_bytes: int) -> None:
    layout = replace(layout, mesh=replace(layout.mesh, pp=1))  # a stage has tensors of its own
    kept, saved = split(tensor, Role.STATE, layout), Counter[tuple[str, tuple[int, ...]]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holding, "SHARE_BYTES", share_bytes)
        for rank in layout.ranks():
            local = torch.empty(kept.local_shape(rank), device="meta")
            whole, shares = held("w", local, kept, rank), held("w", local, kept, rank, shared=True)
            assert whole.keys() == shares.keys()
            for name, share in shares.items():
                assert isinstance(share, Held)
                assert len(share.boxes) <= 1  # a file has one part of a name
                mine = list(places(share))
                assert set(mine) <= set(places(whole[name]))  # type: ignore[arg-type]
                saved.update((name, place) for place in mine)
    assert saved == Counter((f"w{portion.suffix}", place) for portion in portions(tensor) for place in itertools.product(*map(range, portion.shape)))
