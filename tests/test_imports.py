"""Who may import what: the plan world stays light, every exported name exists, and tests have no network."""

from __future__ import annotations

import importlib
import json
import pkgutil
import socket
import subprocess
import sys
from importlib.util import find_spec

import pytest

import pentamesh

HEAVY = {"torch", "transformers", "numpy", "datasets", "safetensors", "huggingface_hub", "accelerate"}
PLAN_WORLD = [
    "pentamesh.errors",
    "pentamesh.units",
    "pentamesh.job.job",
    "pentamesh.model.families",
    "pentamesh.layout.rhythm",
    "pentamesh.plan.plan",
    "pentamesh.cli",
]
MODULES = sorted(m.name for m in pkgutil.walk_packages(pentamesh.__path__, "pentamesh.") if not m.name.endswith("__main__"))


def _loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("module", PLAN_WORLD)
def test_plan_world_is_light(module: str) -> None:
    if module == "pentamesh.cli" and find_spec(module) is None:
        pytest.skip("there is no command line yet")
    assert not _loaded_by(f"import {module}") & HEAVY


@pytest.mark.parametrize("name", ["worker", "streamer"])
def test_a_process_that_tokenises_is_without_torch(name: str) -> None:
    assert not _loaded_by(f"import pentamesh.run.data.{name}") & {"torch", "datasets", "pyarrow"}


def test_light_is_measured_where_heavy_is_seen() -> None:
    assert "numpy" in _loaded_by("import numpy")


@pytest.mark.parametrize("name", MODULES)
def test_exported_names_exist(name: str) -> None:
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert [n for n in exported if not hasattr(module, n)] == []
    assert len(exported) == len(set(exported))


def test_connections_stay_on_this_machine() -> None:
    with socket.socket() as probe, pytest.raises(OSError, match="tests use no network"):
        probe.connect(("192.0.2.1", 80))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as probe:
        probe.connect(server.getsockname())
