"""Every value is looked at, however many at a time."""

from __future__ import annotations

import pytest
import torch

from pentamesh.checkpoint import finite


@pytest.mark.parametrize("at_once", [1, 3, 10, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_is_counted(at_once: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "_LOOKED_AT_ONCE", at_once)
    values = torch.ones(2, 5, dtype=dtype)
    assert finite.num_not_finite(values) == 0
    for number, (place, bad) in enumerate([((0, 0), torch.nan), ((1, 4), torch.inf), ((0, 4), -torch.inf)], start=1):
        values[place] = bad
        assert finite.num_not_finite(values) == finite.num_not_finite(values.T) == number
    assert finite.num_not_finite(torch.empty(0, 3, dtype=dtype)) == 0
    assert finite.num_not_finite(torch.tensor(torch.nan, dtype=dtype)) == 1
