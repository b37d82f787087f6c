"""What this machine cannot start is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pentamesh.errors import InputError
from pentamesh.run.asked import read_asked
from pentamesh.run.launch import train
from pentamesh.run.options import Options
from tests.run import toy


@pytest.mark.parametrize(
    ("hardware", "said"), [("4096xCPU", "4096 processes for the"), ("8xH100", "the plan is for 8 x H100-SXM-80GB, and this machine has")]
)
def test_more_devices_than_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hardware: str, said: str) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    job = toy.job(tmp_path, hardware=hardware, batch__global_batch=8192, data__held_out=None, training__evaluate_every=None)
    with pytest.raises(InputError, match=said):
        train(lambda: read_asked(job), Options(), even_so=True)
    assert not (tmp_path / "runs").exists()
