"""Which parameters patterns freeze, and what is said of patterns that freeze none or all."""

from __future__ import annotations

import pytest

from pentamesh.errors import InputError
from pentamesh.job.read import read_job_text
from pentamesh.model.frozen import frozen
from pentamesh.model.read import read_model
from pentamesh.model.spec import ModelSpec

TIED, UNTIED = read_model("llama-3.2-1b"), read_model("llama-3.1-8b")


def problems(model: ModelSpec, *patterns: str) -> list[tuple[str, str]]:
    with pytest.raises(InputError) as caught:
        frozen(model, patterns)
    assert {p.where for p in caught.value.problems} == {"training.freeze"}
    return [(p.what, p.hint) for p in caught.value.problems]


@pytest.mark.parametrize(
    ("patterns", "numel", "below"),
    [
        ((), 0, 0),
        (("model.embed_tokens.*",), 128256 * 4096, 0),
        (("*norm*",), 65 * 4096, 0),
        (("model.layers.[0-9].*",), 10 * 218_112_000, 0),
        (("model.embed_tokens.*", "model.layers.[0-9].*"), 128256 * 4096 + 10 * 218_112_000, 10),
        (("model.*",), 8_030_261_248 - 128256 * 4096, 32),
    ],
)
def test_what_patterns_freeze(patterns: tuple[str, ...], numel: int, below: int) -> None:
    model = frozen(UNTIED, patterns)
    assert model.num_parameters - model.num_trained_parameters == numel
    assert 33 - len(model.reached) == below
    assert sum(unit.count for unit in model.kinds if not unit.reached) == below


@pytest.mark.parametrize("pattern", ["lm_head.weight", "model.embed_tokens.*"])
def test_one_tensor_is_frozen_under_either_name(pattern: str) -> None:
    model = frozen(TIED, [pattern])
    assert {t.name for t in model.tensors if not t.trained} == {"lm_head.weight", "model.embed_tokens.weight"}
    assert "lm_head.weight and model.embed_tokens.weight are one tensor: it is frozen" in model.notes
    both = frozen(TIED, ["lm_head.weight", "model.embed_tokens.*"])
    assert both.notes == TIED.notes


def test_a_pattern_that_matches_nothing() -> None:
    found = problems(TIED, "model.embed_token.*", "*nrom*", "model.layers.0.*")
    assert [what for what, _ in found] == [
        f"no parameter of {TIED.name} is called model.embed_token.*",
        f"no parameter of {TIED.name} is called *nrom*",
    ]
    assert "model.embed_tokens.*" in found[0][1]
    assert "norm*" in found[1][1]


def test_everything_frozen() -> None:
    assert problems(TIED, "*")[0][0] == f"* freezes every parameter of {TIED.name}: nothing is left to train"
    assert "freezes every parameter" in problems(TIED, "model.*")[0][0]


@pytest.mark.parametrize(
    ("written", "what"),
    [
        ("training:\n  freeze: '*norm*'\n", "freeze = '*norm*' is not a list of text"),
        ("training:\n  freeze: [1, '']\n", "freeze = [1, ''] is not a list of text"),
        ("method: lora\ntraining:\n  freeze: ['*norm*']\n", "freeze with method = lora, which freezes every weight of the model and trains adapters"),
    ],
)
def test_jobs_that_cannot_be(written: str, what: str) -> None:
    with pytest.raises(InputError) as caught:
        read_job_text(f"model: m\n{written}", "job.yaml")
    assert [p.what for p in caught.value.problems] == [what]
