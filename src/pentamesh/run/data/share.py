"""Share: what one rank reads of the rows of a step - which of them, and which tokens of each.

Ranks of the data axes read other rows, context ranks other tokens of the same rows, and tensor ranks the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pentamesh.layout.mesh import DATA_AXES, Layout
from pentamesh.layout.split import split
from pentamesh.model.dims import Dim, TensorSpec
from pentamesh.model.roles import Role

__all__ = ["ALL", "Share"]


@dataclass(frozen=True)
class Share:
    """That of `rank` under `layout`."""

    layout: Layout
    rank: int

    @property
    def data_rank(self) -> int:
        """Position among the ranks that read different rows."""
        return self.layout.mesh.coord(self.rank, DATA_AXES)

    @property
    def data_degree(self) -> int:
        return self.layout.mesh.degree(*DATA_AXES)

    @property
    def cuts_rows(self) -> bool:
        """Whether several ranks share the tokens of a row."""
        return self.layout.mesh.cp > 1

    def padded(self, length: int) -> int:
        """The length to which rows of up to `length` tokens are padded, so that it divides among ranks."""
        return -(-length // self.layout.seq_multiple) * self.layout.seq_multiple

    def places(self, length: int) -> np.ndarray:
        """Where in a row of `length` tokens those stand that this rank reads, in its own order. Shapes: [local tokens], int64."""
        row = split(TensorSpec("tokens", (Dim("seq", length),)), Role.USE, self.layout)
        return np.concatenate([np.arange(low, low + size) for low, size in row.intervals(self.rank, 0)])

    def row_length(self, num_tokens: int) -> int:
        """The length of the row of which every context rank has so many tokens."""
        return num_tokens * self.layout.mesh.cp


# Of a run of one process: every token of every row.
ALL = Share(Layout(), 0)
