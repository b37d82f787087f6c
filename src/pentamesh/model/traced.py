"""Where the facts of an architecture come from: the catalogue, what this machine has kept, or a helper process that asks transformers once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

from pentamesh.errors import InputError
from pentamesh.model import catalogue
from pentamesh.model.facts import Facts, fingerprint, read_facts

__all__ = ["facts_of", "kept_in"]

# Importing transformers takes 4 s and building modules without weights up to 2; a busy machine needs a multiple.
TIMEOUT_S = 180.0


def facts_of(config: Mapping[str, Any], where: str) -> Facts:
    """The facts of a config.json of no described family. Raises InputError where nobody here can tell them."""
    mark = fingerprint(config)
    shipped = next((e for e in catalogue.entries() if e.config["model_type"] == config["model_type"] and fingerprint(e.config) == mark), None)
    if shipped:
        resource = files("pentamesh.model") / "facts" / f"{shipped.id.replace('/', '--')}.json"
        return read_facts(resource.read_text(encoding="utf-8"), str(resource))
    kept = _kept(mark)
    if kept is None:
        kept = kept_in() / f"{mark}-transformers-{_transformers(config, where)}.json"
        _keep(kept, _ask(config, where))
    return read_facts(kept.read_text(encoding="utf-8"), str(kept))


def kept_in() -> Path:
    """The folder of this user where facts are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pentamesh" / "facts"


def _kept(mark: str) -> Path | None:
    """The facts kept under a fingerprint: of the installed transformers, or without one of any."""
    try:
        exact = kept_in() / f"{mark}-transformers-{version('transformers')}.json"
        return exact if exact.is_file() else None
    except PackageNotFoundError:
        return max(kept_in().glob(f"{mark}-transformers-*.json"), default=None)


def _transformers(config: Mapping[str, Any], where: str) -> str:
    try:
        return version("transformers")
    except PackageNotFoundError:
        what = f"model_type = {config['model_type']!r} is of no described family, and transformers is not installed to say which tensors it has"
        raise InputError(what, where=f"{where} model_type", hint="pip install pentamesh[train]") from None


def _ask(config: Mapping[str, Any], where: str) -> str:
    """What `pentamesh.run.trace` says of a config, in a process of its own: planning itself imports neither torch nor transformers."""
    sys.stderr.write(f"reading the tensors of {config['model_type']} from transformers, once (about 6 s)\n")
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "config.json")
        written.write_text(json.dumps(config), encoding="utf-8")
        offline = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "pentamesh.run.trace", str(written)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=offline, check=False)
        except subprocess.TimeoutExpired:
            raise InputError(f"transformers did not build this model in {TIMEOUT_S:.0f} s", where=where, hint="check the sizes in it") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        hint = "check the config, or update transformers; code that comes with a model is never run"
        raise InputError(f"transformers cannot build a model of this config: {said}", where=where, hint=hint)
    return done.stdout


def _keep(path: Path, text: str) -> None:
    """Write facts whole or not at all: other processes may be reading."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        where = f"{path.parent}"
        raise InputError(f"facts cannot be kept: {error.strerror}", where=where, hint="set XDG_CACHE_HOME to a folder that can be written") from None
