"""A run goes on though what it no longer keeps cannot be removed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pentamesh.checkpoint import keep as keeping
from pentamesh.checkpoint.keep import Retention
from pentamesh.checkpoint.manifest import name_of
from pentamesh.checkpoint.names import published
from pentamesh.checkpoint.saver import Saver


class LostError(Exception):
    """An error of a library, which is none of the system's."""


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("error", [LostError("the endpoint is gone"), OSError("Access Denied"), OSError(13, "Permission denied")])
def test_what_cannot_be_removed_is_said_and_stays(asynchronous: bool, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise error

    monkeypatch.setattr(keeping, "retire", lost)
    heard: list[str] = []
    with Saver(tmp_path, Retention(1), asynchronous=asynchronous, say=heard.append) as saver:
        for step in (1, 2):
            saver.begin(step, {"model.w": torch.full((2,), float(step))}, {})
            saver.proved()
        saver.settle(proved=True)
    assert [path.name for path in published(tmp_path)] == [name_of(2), name_of(1)]
    saved, *others = (line for line in heard if not line.startswith("saved step-00000002"))
    assert saved.startswith("saved step-00000001: ")
    assert others == [f"older checkpoints could not be removed: {type(error).__name__}: {error}"]
