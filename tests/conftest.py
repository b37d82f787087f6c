"""What every test gets: no network, few threads, the shared data folder where it exists, and a line at the end for what was proved."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from pentamesh.run import worlds

ROOT = Path(__file__).parents[1]

# Before any test imports torch, tokenizers or huggingface_hub: they read these once. Worlds of several processes share a few cores.
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "NO_COLOR": "1"}
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Worlds of whole runs start in half the time from a server that has imported this too.
worlds.PRELOAD += ["pentamesh.run.loop", "transformers.models.auto.modeling_auto", "transformers.models.encoder_decoder", "torch.profiler"]

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


@pytest.fixture
def record_proof(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`record_proof(title, things=3, worst_relative_error=1e-16)`: counts add up, errors keep their worst, text is kept.

    It goes along with the test's report, which comes from whichever process ran the test.
    """

    def record(title: str, **facts: Any) -> None:
        plain = {name: float(value) if isinstance(value, float) else value for name, value in facts.items()}
        request.node.user_properties.append((PROOF, [title, plain]))

    return record


PROOF = "proof"
_PROVED: dict[str, dict[str, Any]] = defaultdict(dict)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Each report of a test carries what it recorded until then, and the last one all of it."""
    if report.when == "teardown":
        recorded: list[Any] = [value for name, value in report.user_properties if name == PROOF]
        for title, facts in recorded:
            _add(_PROVED[title], facts)


def _add(totals: dict[str, Any], facts: dict[str, Any]) -> None:
    for name, value in facts.items():
        if isinstance(value, str):
            totals[name] = value
        else:
            totals[name] = max(totals.get(name, 0.0), value) if name.startswith("worst") else totals.get(name, 0) + value


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for title, facts in _PROVED.items():
        terminalreporter.write_line(f"proof: {title}: {', '.join(_said(name.replace('_', ' '), value) for name, value in facts.items())}")


def _said(name: str, value: Any) -> str:
    if isinstance(value, str):
        return f"{name} {value}"
    return f"{value:.1e} {name}" if isinstance(value, float) else f"{value:,} {name}"


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
