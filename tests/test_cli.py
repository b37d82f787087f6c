"""The command line as a user meets it: data on stdout, talk on stderr, exit codes, no tracebacks."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from pentamesh import cli

JOB = """\
model: llama-3.1-8b
hardware: 8xRTX-5090
batch:
  global_batch: 128
"""


def pentamesh(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pentamesh", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60, check=False, env=os.environ | environment)


def test_json_is_alone_on_stdout(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    done = pentamesh("plan", "job.yaml", "--set", "batch.micro_batch=2", "--seq-len", "2048", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["verdict"], found["strategy"], found["job"]["batch"]["micro_batch"]) == ("fits", "full_shard", 2)
    assert found["overrides"] == {"batch.seq_len": "2048", "batch.micro_batch": "2"}


def test_nothing_fits_is_exit_3_with_the_best_attempt() -> None:
    done = pentamesh("plan", "llama-3.3-70b", "--on", "8xRTX-4090", "--json")
    assert done.returncode == 3
    found = json.loads(done.stdout)
    assert found["verdict"] == "does_not_fit"
    assert found["changes_that_fit"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "llama-3.1-8b", "--on", "8xH10"), "did you mean H100"),
        (("plan", "lama-3.1-8b", "--on", "8xH100"), "lama-3.1-8b"),
        (("plan", "absent.yaml"), "absent.yaml"),
        (("plan", "llama-3.1-8b", "--on", "3xH100", "--layout", "tensor=3"), "tensor = 3 does not divide kv_heads = 8"),
        (("plan", "llama-3.1-8b", "--on", "8xH100", "--layout", "tensor"), "write it like --layout tensor=8"),
        (("plan", "llama-3.1-8b", "--on", "8xH100", "--global-batch", "12"), "use global_batch = 8 or 16"),
        (("plan", "llama-3.1-8b", "--on", "8xH100", "--precision", "bf61"), "--precision"),
        (("plan", "llama-3.1-8b", "--on", "8xH100", "--set", "batch.micro_bach=2"), "micro_batch"),
        (("explain", "strategies", "llama-3.1-8b", "--gpus", "8,x"), "--gpus"),
        (("plan", "llama-3.1-8b", "--onn", "8xH100"), "--onn"),
        (("plan", "llama-3.1-8b", "--on", ""), "--on is empty"),
        (("plan", "llama-3.1-8b", "--on", "8xH100", "--layout", ""), "--layout"),
        (("plan", "llama-3.1-8b", "--on", "8xH100", "--seq-len", "1e300"), "--seq-len"),
        (("plan", "llama-3.1-8b", "--on", f"{'9' * 5000}xH100"), "more than 262,144 devices"),
        (("plan", "x" * 300, "--on", "8xH100"), "File name too long"),
        (("explain", "strategies", "llama-3.1-8b", "--gpus", "\u00b2"), "--gpus"),
        (("explain", "strategies", "llama-3.1-8b", "--gpus", "9" * 5000), "--gpus"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, tuple) else "",
)
def test_user_errors(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = pentamesh(*arguments, cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr


def test_help_and_version() -> None:
    assert pentamesh("--version").stdout.startswith("pentamesh ")
    done = pentamesh("plan", "--help")
    assert done.returncode == 0
    for word in ("--on", "--layout", "--json", "pentamesh plan llama-3.1-8b"):
        assert word in done.stdout


def test_explain() -> None:
    assert "kv_heads" in pentamesh("explain", "table").stdout
    rows = json.loads(pentamesh("explain", "strategies", "llama-3.1-8b", "--gpus", "8", "--json").stdout)["rows"]
    assert [row["bytes"] for row in rows] == ["16P", "4P + 12P/N", "2P + 14P/N", "16P/N"]
    assert "batch.seq_len" in pentamesh("explain", "keys").stdout


def test_planning_is_light() -> None:
    """Neither torch nor transformers nor numpy, and well under a second of CPU (0.27 s on two shared cores)."""
    code = (
        "import sys; from pentamesh.cli import app; app(standalone_mode=False); print(sorted(m for m in sys.modules if m in HEAVY), file=sys.stderr)"
    )
    code = code.replace("HEAVY", "('torch', 'transformers', 'numpy', 'huggingface_hub')")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", code, "plan", "llama-3.1-8b", "--on", "8xRTX-5090", "--global-batch", "128"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"\nCPU time of one plan: {spent:.2f} s")
    assert done.stderr.strip() == "[]"
    assert spent < 5


def test_a_full_disk_behind_stdout_is_said() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pentamesh", "explain", "table", "--json"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 5
    assert done.stderr.startswith("error: No space left on device")
    assert "Traceback" not in done.stderr


def test_what_nobody_expected_is_told_in_one_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 5
    assert "nobody expected this: ZeroDivisionError: by zero\n  where  " in capsys.readouterr().err
    monkeypatch.setenv("PENTAMESH_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        cli.main()
