"""Push: an exported folder to a repository on the Hugging Face hub, with a card that says how it was trained.

Who pushes is whom `hf auth login` or HF_TOKEN says: the token is huggingface_hub's to find, and is written nowhere.
"""

from __future__ import annotations

import json
from pathlib import Path

from pentamesh.checkpoint.disk import write_text
from pentamesh.checkpoint.export import RECORD
from pentamesh.errors import InputError, RunFailed, reason
from pentamesh.job.repository import HOW, is_repository
from pentamesh.run.card import card
from pentamesh.run.folder import RunFolder
from pentamesh.units import format_path

__all__ = ["check_push", "push"]

# What an export calls its weights.
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"


def check_push(repository: str | None, where: str) -> None:
    """Raises InputError for a name that is no repository's, and where nobody is logged in or the hub is out of reach by choice. No network."""
    if repository is None:
        return
    if not is_repository(repository):
        raise InputError(f"{repository!r} is no name of a repository on the hub", where=where, hint=HOW)
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise InputError(
            "the export is to be pushed, and HF_HUB_OFFLINE is set", where=where, hint="unset it, or push later: `pentamesh export --push`"
        )
    try:
        token = get_token()
    except Exception as error:  # of whatever was set up to give one
        raise InputError(f"no token for the hub could be had: {reason(error)}", where=where, hint=_LOG_IN) from error
    if not token:
        raise InputError("the export is to be pushed to the hub, and nobody is logged in there", where=where, hint=_LOG_IN)


def push(run: Path, exported: Path, repository: str, *, private: bool) -> str:
    """Upload what a run has `exported`, with its card, and return the address; a repository that is not there yet is made, `private` or not.

    Raises RunFailed, with the command that tries again: the run and its export stay as they are.
    """
    from huggingface_hub import HfApi

    record = json.loads((exported / RECORD).read_text())
    write_text(exported / "README.md", card(RunFolder(run), record["step"], repository))
    api = HfApi(library_name="pentamesh")
    try:
        made = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=exported,
            commit_message=f"Step {record['step']} of plan {record['plan']}",
            ignore_patterns=[RECORD],  # it names folders of this machine
            delete_patterns=list(WEIGHTS),  # of an earlier push: loaders would take one whole file before several
        )
    except Exception as error:  # the kinds of its errors differ between releases of huggingface_hub
        what = f"the export could not be pushed to {repository}: {reason(error)}"
        hint = f"the run is whole and its export stays: `pentamesh export {format_path(run)} --push {repository}` tries again"
        raise RunFailed(what, where=format_path(exported), hint=hint) from error
    return str(made)
