"""Model folders that lie: a wrong tokenizer or template is told as what it is, and nothing of the folder's own is run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pentamesh.errors import InputError
from pentamesh.job.job import Model
from pentamesh.job.precision import PRECISIONS
from pentamesh.job.read import read_job
from pentamesh.model.faults import ACTIVATIONS, ROPE_TYPES
from pentamesh.model.read import resolved
from pentamesh.run.asked import located
from pentamesh.run.data.chat import encode_chat
from pentamesh.run.evaluate import evaluate
from pentamesh.run.source import model_source, tokenizer_of
from tests.run import toy

TALK = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sees a dog"}]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.model_folder(tmp_path_factory.mktemp("good") / "model")


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "model"))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_names_in_a_config_are_those_of_transformers() -> None:
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert set(ACTIVATIONS) <= set(ACT2FN)
    assert set(ROPE_TYPES) == {"default", *ROPE_INIT_FUNCTIONS}


def test_a_tokenizer_with_more_tokens_than_the_model(folder: Path) -> None:
    """Found before the first forward pass, where it would be an index out of range."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = torch.narrow(tensors["model.embed_tokens.weight"], 0, 0, 100).clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit(folder / "config.json", vocab_size=100)
    path = toy.job(folder.parent)
    job = located(read_job(path)[0], path.parent, path.stem)
    with pytest.raises(InputError, match=r"the vocabulary of .*model has 100 tokens"):
        evaluate(job, folder, PRECISIONS["fp32"])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("tokenizer.json", None, "no tokenizer can be read"),
        ("tokenizer.json", "[]", "no tokenizer can be read"),
        ("tokenizer.json", '{"version":', "no tokenizer can be read"),
        ("tokenizer_config.json", "{", "no tokenizer can be read"),
        ("tokenizer_config.json", '{"eos_token": 5}', "no tokenizer can be read"),
    ],
)
def test_a_tokenizer_that_is_none(folder: Path, name: str, text: str | None, said: str) -> None:
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(InputError, match=said) as caught:
        tokenizer_of(folder)
    assert "\n" not in caught.value.problems[0].what


def test_code_beside_a_tokenizer_is_not_run(folder: Path) -> None:
    mark = folder.parent / "ran"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Tokenizer: pass\n")
    edit(folder / "tokenizer_config.json", tokenizer_class="Tokenizer", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]})
    with pytest.raises(InputError, match="no tokenizer can be read"):
        tokenizer_of(folder)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no system turn, please') }}", "no system turn, please\nhint: change the roles or their order"),
        ("{% for %}", "hint: mend the chat template"),
        ("{{ messages.absent.content }}", "hint: mend the chat template"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "SecurityError"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
        ("{% include '/etc/passwd' %}", "hint: mend the chat template"),
        ("{% set _ = messages.append(messages[0]) %}", "SecurityError"),
    ],
)
def test_a_template_that_cannot_be_used(folder: Path, template: str, said: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(InputError) as caught:
        encode_chat(tokenizer_of(folder), TALK)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./absent", "a/b/c", "../absent", "~nobody/x"])
def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="there is no model folder"):
        model_source(Model(name=resolved(name, tmp_path)))


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty has no config\.json"):
        model_source(Model(name=resolved("empty", tmp_path)))
