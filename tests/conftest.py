"""What every test gets: no network, few threads, and the shared data folder where it exists."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).parents[1]

# Before any test imports torch, tokenizers or huggingface_hub: they read these once. Worlds of several processes share a few cores.
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "NO_COLOR": "1"}
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine is no fault of the example.
settings.register_profile("pentamesh", deadline=None)
settings.load_profile("pentamesh")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The data folder beside the checkout, or the one that PENTAMESH_SHARED names; a test that asks for it is skipped where there is none."""
    folder = Path(os.environ.get("PENTAMESH_SHARED", ROOT.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip(f"needs the shared data folder, and {folder} is not there; PENTAMESH_SHARED may name another")
    return folder


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections leave neither this machine nor its loopback."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"a test tried to reach {address[0]}; tests use no network")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="every case of the proofs, and not the reduced set that touches each axis and family")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs the shared folder, so that `-m 'not shared'` leaves it out, and leave out what `--whole` alone runs."""
    for item in items:
        if "shared" in getattr(item, "fixturenames", ()):
            item.add_marker("shared")
    if not config.getoption("whole"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("whole")])
        items[:] = [item for item in items if not item.get_closest_marker("whole")]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A session in which every test was skipped has tested nothing, and says so with the exit status of an empty one."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    ran = reporter is None or any(reporter.stats.get(outcome) for outcome in ("passed", "failed", "error", "xfailed", "xpassed"))
    if session.exitstatus == pytest.ExitCode.OK and not ran and not session.config.option.collectonly:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
