"""Checkpoints by URL: saved, found, gone on from and removed in an object store that speaks S3, by the processes of a run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from pentamesh.checkpoint import manifest as checking
from pentamesh.checkpoint import save as saving
from pentamesh.checkpoint.disk import check_room, location
from pentamesh.checkpoint.keep import Retention, newest, prune
from pentamesh.checkpoint.load import load
from pentamesh.checkpoint.manifest import MANIFEST, File, verify
from pentamesh.checkpoint.names import latest, left, published
from pentamesh.checkpoint.save import save
from pentamesh.cli import app
from pentamesh.errors import InputError, RunFailed
from pentamesh.run.options import Options
from tests.run import toy
from tests.run.test_loop import metrics, trained

BUCKET = "runs"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of an S3 server of this test's own, and the environment that leads to it."""
    pytest.importorskip("s3fs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    before = dict(os.environ)
    os.environ |= {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    try:
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.1)
        location(f"s3://{BUCKET}").mkdir()
        yield address
    finally:
        process.kill()
        process.wait()
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def folder(server: str, request: pytest.FixtureRequest) -> Path:
    """A folder of the store that no other test uses."""
    return location(f"s3://{BUCKET}/{request.node.name}/checkpoints")


def tensors(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"model.a": torch.randn(100, 30), "model.none": torch.zeros(0, 3), "optimizer.step": torch.tensor(float(seed))}


def loaded(checkpoint: Path) -> dict[str, torch.Tensor]:
    found = {name: torch.full_like(tensor, 99) for name, tensor in tensors(0).items()}
    load(checkpoint, found)
    return found


def same(found: dict[str, torch.Tensor], seed: int) -> bool:
    return all(torch.equal(tensor, found[name]) for name, tensor in tensors(seed).items())


def test_the_newest_one_comes_back_bit_for_bit(folder: Path) -> None:
    check_room(folder, 10**15)  # what a store has free is not known
    assert published(folder) == []
    assert [save(folder, step, tensors(step), {}).name for step in (1, 2, 3)] == ["step-00000001", "step-00000002", "step-00000003"]
    assert newest(folder) == latest(folder) == folder / "step-00000003"
    assert same(loaded(folder / "step-00000003"), 3)
    assert prune(folder, Retention(1), folder / "step-00000003") == [folder / "step-00000002", folder / "step-00000001"]
    assert sorted(path.name for path in folder.iterdir()) == ["latest.json", "step-00000003"]


def test_a_step_saved_again_never_touches_the_one_that_is_there(folder: Path) -> None:
    save(folder, 1, tensors(1), {})
    again = save(folder, 1, tensors(5), {})
    assert again.name == "step-00000001.2"
    assert newest(folder) == latest(folder) == again
    assert same(loaded(again), 5)
    assert prune(folder, Retention(1), again) == [folder / "step-00000001"]
    assert same(loaded(again), 5)


def test_what_a_dead_run_left_is_no_checkpoint_and_goes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(folder, 1, tensors(1), {})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_text", killed)
        patch.setattr(saving, "discard", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            save(folder, 2, tensors(2), {})
    assert [path.name for path, _, _ in left(folder)] == ["step-00000002"]
    assert newest(folder) == folder / "step-00000001"
    assert verify(folder / "step-00000002") != []
    third = save(folder, 3, tensors(3), {})
    prune(folder, Retention(2), third)
    assert left(folder) == []
    assert [path.name for path in published(folder)] == ["step-00000003", "step-00000001"]


def test_a_file_that_was_altered_is_seen(folder: Path) -> None:
    first = save(folder, 1, tensors(1), {})
    second = save(folder, 2, tensors(2), {})
    shard = next(path for path in second.iterdir() if path.name != MANIFEST)
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(bytes(content))
    said: list[str] = []
    assert newest(folder, say=said.append) == first
    assert f"{shard.name} is not as it was written" in said[0]
    shard.unlink()
    assert "is missing" in str(verify(second)[0])


def test_a_store_that_cannot_be_reached_or_opened_is_said_before_any_step(server: str) -> None:
    with pytest.raises(InputError, match="there is no s3://no-such-bucket"):
        check_room(location("s3://no-such-bucket/run"), 1)
    with pytest.raises(InputError, match="nosuch://run cannot be opened"):
        location("nosuch://run")
    assert location("file:///tmp/run") == Path("/tmp/run")


def test_without_credentials_there_is_a_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    type(folder.fs).clear_instance_cache()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(InputError, match="cannot be used: NoCredentialsError: Unable to locate credentials"):
        published(location(f"s3://{BUCKET}/elsewhere"))
    with pytest.raises(InputError, match="credentials and endpoint"):
        check_room(location(f"s3://{BUCKET}/elsewhere"), 1)
    type(folder.fs).clear_instance_cache()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_failed_save_leaves_what_was_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(folder, 1, tensors(1), {})
    monkeypatch.setattr(checking, "file_facts", lambda _: File(1, "another"))
    with pytest.raises(RunFailed, match="is not what was written"):
        save(folder, 2, tensors(2), {})
    assert published(folder) == [folder / "step-00000001"]
    assert left(folder) == []


def pentamesh(*asked: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*asked, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_run_keeps_its_checkpoints_there_and_goes_on_from_them(server: str, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/whole run/checkpoints"
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = trained(toy.job(tmp_path / "whole"))
    job = toy.job(tmp_path / "parts", checkpoint__folder=url, checkpoint__keep=1)
    trained(job, Options(stop_at=4))
    run = trained(job, Options(resume=True))
    assert not (run.path / "checkpoints").exists()
    assert [row["loss"] for row in metrics(run)] == [row["loss"] for row in metrics(whole)]
    assert (run.export / "model.safetensors").read_bytes() == (whole.export / "model.safetensors").read_bytes()
    for asked in (str(run.path), url):
        assert [row["step"] for row in pentamesh("checkpoint", "list", asked)["checkpoints"]] == [6]
        assert pentamesh("checkpoint", "verify", asked)["resume_from"] == "step-00000006"
    copy = f"s3://{BUCKET}/copies/step-00000006"
    done = CliRunner().invoke(app, ["checkpoint", "convert", f"{url}/step-00000006", copy], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert verify(location(copy)) == []
