"""From the name of a model to its spec: a folder, a config.json, a GGUF file, a catalogue name, or a hub id - without torch, and without weights."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from pentamesh.errors import InputError
from pentamesh.model import catalogue
from pentamesh.model.config import BUILT_AS, as_built, canonical, parse_config, read_config
from pentamesh.model.families import describe, generic
from pentamesh.model.faults import check
from pentamesh.model.spec import ModelSpec
from pentamesh.model.traced import facts_of

__all__ = ["cached_config", "files_of", "hub_cache", "read_model", "resolved"]

# What a person waits for one small file before hearing why there is none.
TIMEOUT_S = 10.0
HUB_ID = re.compile(r"[\w.-]+(?:/[\w.-]+)?")


def resolved(name: str, base: Path | None = None) -> str:
    """What `name` stands for: the absolute path of what is there (relative to `base`, `~` from home), or the hub id under which it is published.

    Raises InputError for a path that leads nowhere.
    """
    if (local := _local(name, base)).exists():
        return str(local.resolve())
    found = catalogue.find(name)
    if name.startswith((".", "/", "~")) or name.endswith(".json") or not (found or HUB_ID.fullmatch(name)):
        raise InputError(f"there is no model folder {name}", where=f"model.name, looked for in {local.parent}", hint=catalogue.nearest(name))
    return found.name if found else name


def read_model(name: str, base: Path | None = None, revision: str | None = None) -> ModelSpec:
    """The spec of the model that `name` means; `notes` says what a reader should know about that.

    Looked for in this order: a folder, config.json or GGUF file (relative to `base`), a copy in the local Hugging Face cache, the catalogue, the hub.
    Raises InputError with everything that is wrong with its config.json.
    """
    if (local := _local(name, base)).exists():
        return _of_path(local, name)
    published, found = resolved(name, base), catalogue.find(name)
    if cached := cached_config(published, revision):
        # The snapshots of a model are links into its own blobs: both lie in the folder of the model.
        repository = cached.parents[2]
        notes = tuple(note for note in found.notes if "not published" in note) if found else ()
        return _spec(read_config(cached, within=repository), published, str(cached), notes)
    if found:
        said = (f"revision {revision} was not looked at: the sizes are the catalogue's",) if revision else ()
        notes = (*found.notes, *filter(None, [found.entry.note]), *said)
        return replace(_spec(found.entry.config, published, f"the catalogue's {found.entry.id}", notes), is_assumed=True)
    return _of_hub(name, revision)


def files_of(name: str, base: Path | None = None, revision: str | None = None) -> Path | None:
    """The folder or GGUF file of the model that `name` means, where it is on this machine."""
    from pentamesh.model.gguf import gguf_file  # few plans read one, and all would import it

    if (local := _local(name, base)).exists():
        return gguf_file(local) or (local if local.is_dir() else local.parent)
    cached = cached_config(resolved(name, base), revision)
    return cached.parent if cached else None


def _local(name: str, base: Path | None) -> Path:
    return (base or Path()) / os.path.expanduser(name)


def _of_path(path: Path, name: str) -> ModelSpec:
    from pentamesh.model.gguf import gguf_config, gguf_file, read_gguf  # few plans read one, and all would import it

    if gguf := gguf_file(path):
        found = read_gguf(gguf)
        return _spec(gguf_config(found), name, str(gguf), (f"its weights are de-quantised from {gguf.name} to {found.dtype} before training",))
    if path.is_dir():
        folder, path = path, path / "config.json"
        if not path.is_file():
            has = f"it has {', '.join(sorted(p.name for p in folder.iterdir())[:6]) or 'no files'}"
            raise InputError(f"there is no config.json in {folder}", where=str(folder), hint=f"{has}; give a Hugging Face model folder")
    elif not path.is_file() or path.suffix != ".json":
        raise InputError(
            f"{path} is neither a folder, a config.json nor a .gguf file", where="model.name", hint="give the folder that holds config.json"
        )
    return _spec(read_config(path, within=_root(path.parent)), name, str(path))


def _root(folder: Path) -> Path:
    """The folder that a model's files may not leave: its own, or for a snapshot in a Hugging Face cache that of all its snapshots."""
    parents = folder.resolve().parents
    in_cache = len(parents) > 1 and parents[0].name == "snapshots" and parents[1].name.startswith("models--")
    return parents[1] if in_cache else folder


def _spec(config: dict[str, Any], name: str, where: str, notes: tuple[str, ...] = ()) -> ModelSpec:
    check(config, where)
    spec = describe(canonical(config), name) or _undescribed(config, name, where)
    if built_as := BUILT_AS.get(config["model_type"]):
        notes = (*notes, f"{config['model_type']} is built as {built_as}")
    if "auto_map" in config:
        notes = (*notes, "auto_map is left out: code that comes with a model is never run")
    if config.get("quantization_config"):
        notes = (*notes, "its files hold quantised weights: it is planned as if they were not")
        spec = replace(spec, untrainable=generic.QUANTISED)
    return replace(spec, notes=(*spec.notes, *notes))


def _undescribed(config: dict[str, Any], name: str, where: str) -> ModelSpec:
    """A model of no described family: its config in its own spelling, its tensors as transformers builds them."""
    return generic.describe(facts_of(found := as_built(config), where), found, name)


def hub_cache() -> Path:
    """The folder of the local Hugging Face cache, by the environment variables that huggingface_hub reads."""
    if chosen := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(chosen).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def cached_config(hub_id: str, revision: str | None = None) -> Path | None:
    """The config.json of a hub id in the local cache: of `revision`, else of `main`, else of the newest snapshot; None where there is none."""
    repository = hub_cache() / f"models--{hub_id.replace('/', '--')}"
    if ".." in hub_id.split("/") or not repository.is_dir():
        return None
    ref = repository / "refs" / (revision or "main")
    inside = ref.resolve().is_relative_to(repository.resolve())
    commit = ref.read_text(encoding="utf-8").strip() if inside and ref.is_file() else revision
    if commit is not None:
        exact = repository / "snapshots" / commit / "config.json"
        return exact if exact.is_file() and "/" not in commit else None
    snapshots = [found for found in repository.glob("snapshots/*/config.json") if found.is_file()]
    return max(snapshots, key=lambda found: (found.parent.stat().st_mtime, found.parent.name), default=None)


def _of_hub(name: str, revision: str | None) -> ModelSpec:
    """A model known to the hub alone: its config.json is fetched by one request, nothing else."""
    looked = f"model.name, looked for in the working folder, {hub_cache()} and the catalogue"

    def absent(why: str, hint: str = "") -> InputError:
        return InputError(f"the model {name} is not on this machine{why}", where=looked, hint=hint or catalogue.nearest(name))

    if "/" not in name:
        raise absent("")
    try:
        from huggingface_hub import constants, get_session, hf_hub_url  # an optional part, and the only step that may use a network
        from huggingface_hub.utils import build_hf_headers
    except ImportError:
        raise absent(", and huggingface-hub is not installed to fetch its config.json") from None
    if constants.HF_HUB_OFFLINE:
        raise absent(", and HF_HUB_OFFLINE is set")
    url = hf_hub_url(name, "config.json", revision=revision)
    try:
        # One request: huggingface_hub's own download would try six times, and a slip in a name would take half a minute.
        answer = get_session().get(url, headers=build_hf_headers(), timeout=TIMEOUT_S)
    except Exception as error:  # the session's library, and with it the kinds of its errors, differs between releases of huggingface_hub
        raise absent(f", and the hub does not answer ({error})") from error
    if answer.status_code in (401, 403):
        raise absent(", and the hub asks who you are, as for any name it does not show", "check the name; accept its licence and `hf auth login`")
    if answer.status_code != 200:
        raise absent(f", and the hub answers {answer.status_code} for its config.json" + (f" at revision {revision}" if revision else ""))
    return _spec(parse_config(answer.content, url), name, url, (f"config.json of {name} was fetched from the hub",))
