"""Jobs with new tokens: planned at their size, trained under full shard, resumed, exported for plain transformers, evaluated."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pentamesh.checkpoint.weights import INDEX, SINGLE
from pentamesh.errors import InputError
from pentamesh.job.job import Model
from pentamesh.job.precision import PRECISIONS
from pentamesh.job.read import read_job, read_job_text
from pentamesh.plan.model import model_of
from pentamesh.plan.plan import Plan
from pentamesh.run.asked import planned, read_asked
from pentamesh.run.evaluate import evaluate
from pentamesh.run.options import Options
from pentamesh.run.source import model_folder, tokenizer_of
from tests.ggufs import write_gguf
from tests.run import toy
from tests.run.test_loop import contents, metrics, trained

NEW = ["<|think|>", "<|/think|>"]


def rows_with(path: Path, tokens: list[str]) -> Path:
    """Chat rows whose answers begin and end a thought."""
    rows = [json.loads(line) for line in toy.rows(path, 40).read_text().splitlines()]
    for turn in (turn for row in rows for turn in row["messages"] if turn["role"] == "assistant"):
        turn["content"] = f"{tokens[0]}{turn['content']}{tokens[-1]} it was"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def job_with(folder: Path, tokens: list[str], **changes: Any) -> Path:
    if not (folder / "model").exists():
        toy.model_folder(folder / "model")
    return toy.job(folder, model={"name": "model", "new_tokens": tokens}, **changes)


@pytest.mark.parametrize(("tied", "spare"), [(True, 0), (False, 0), (False, 1), (True, 5)])
def test_a_run_with_new_tokens(tmp_path: Path, tied: bool, spare: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = toy.model_folder(tmp_path / "model", tie_word_embeddings=tied)
    known = len(AutoTokenizer.from_pretrained(base))
    if spare:
        base = toy.model_folder(tmp_path / "model", tie_word_embeddings=tied, vocab_size=known + spare)
    rows_with(tmp_path / "rows.jsonl", NEW)
    # Embedding and head alone are trained, and of the embedding only rows of tokens that occur: the others stay as they were.
    changes: dict[str, Any] = {"training__freeze": ["model.layers.*", "model.norm.*"], "training__steps": 4}
    job = job_with(tmp_path, NEW, **changes)
    folder = trained(job)
    vocab = known + max(spare, len(NEW))
    plan = Plan.read(folder.plan)
    assert (plan.model["vocab"], plan.model["config"]["vocab_size"]) == (vocab, vocab)
    assert any(note.startswith(f"2 new tokens from id {known}") for note in plan.model["notes"])
    assert json.loads(folder.receipt.read_text())["ledger_equal"] is True

    tokenizer, before = AutoTokenizer.from_pretrained(folder.export), load_file(base / SINGLE)
    after = load_file(folder.export / SINGLE)
    assert json.loads((folder.export / "config.json").read_text())["vocab_size"] == vocab
    ids = [tokenizer(token, add_special_tokens=False)["input_ids"] for token in NEW]
    assert ids == [[known], [known + 1]]
    assert tokenizer("the cat" + NEW[0] + "runs", add_special_tokens=False)["input_ids"].count(known) == 1
    assert tokenizer.chat_template == toy.CHATML
    grown = load_file(folder.path / "grown" / SINGLE)
    for name, there in before.items():
        rows = min(known, len(there)) if there.shape[0] == known + spare else len(there)
        assert torch.equal(grown[name][:rows], there[:rows]), name
        if "embed_tokens" in name or "lm_head" in name:
            mean = there[:known].double().mean(0).float()
            assert grown[name].shape[0] == vocab
            assert torch.equal(grown[name][known : known + 2], mean.expand(2, -1))
            assert not torch.equal(after[name][known], after[name][known + 1])
            if not tied and "embed_tokens" in name:
                still = (after[name][:known] == there[:known]).all(-1)
                assert 100 < int(still.sum()) < known
        else:
            assert torch.equal(after[name], there), name

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder.export, output_loading_info=True)
    assert not loaded[1]["missing_keys"]
    assert not loaded[1]["mismatched_keys"]
    held_out = [row["held_out_loss"] for row in metrics(folder) if "held_out_loss" in row]
    assert held_out[-1] < held_out[0]
    assert evaluate(plan.job, folder.export, PRECISIONS["fp32"]).loss == pytest.approx(held_out[-1], rel=1e-6)

    whole = contents(folder.checkpoints / "step-00000004")
    again = job_with(tmp_path, NEW, **changes, logging__folder="halves")
    trained(again, Options(stop_at=2))
    assert contents(trained(again, Options(resume=True)).checkpoints / "step-00000004") == whole


def test_logits_of_the_export_are_those_of_the_run(tmp_path: Path) -> None:
    """Of every held-out row, one at a time, in plain transformers: the mean loss is the run's."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pentamesh.run.data.samples import open_prepared

    rows_with(tmp_path / "rows.jsonl", NEW)
    folder = trained(job_with(tmp_path, NEW, layout__tensor=2, layout__sequence_parallel=True))
    model = AutoModelForCausalLM.from_pretrained(folder.export)
    samples = open_prepared(folder.data).held_out
    assert samples is not None
    assert len(AutoTokenizer.from_pretrained(folder.export)) == model.config.vocab_size
    total, count, seen = 0.0, 0, 0
    for offset, length in samples.spans:
        tokens = torch.from_numpy(samples.tokens[offset : offset + length].astype("int64"))
        labels = tokens.masked_fill(~torch.from_numpy(samples.trained[offset : offset + length].copy()), -100)[1:]
        seen += int((tokens >= model.config.vocab_size - 2).sum())
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
        count += int((labels != -100).sum())
    assert seen
    assert total / count == pytest.approx([row["held_out_loss"] for row in metrics(folder) if "held_out_loss" in row][-1], rel=1e-6)


def test_a_base_in_several_files(tmp_path: Path) -> None:
    """Files without rows of words are shared, not written again; what lies there is the same model."""
    from transformers import AutoModelForCausalLM

    base = toy.model_folder(tmp_path / "model", tie_word_embeddings=False)
    loaded = AutoModelForCausalLM.from_pretrained(base)
    (base / SINGLE).unlink()
    loaded.save_pretrained(base, max_shard_size="30KB")
    found = model_folder(Model(name=str(base), new_tokens=tuple(NEW)), tmp_path / "base")
    assert model_folder(Model(name=str(base), new_tokens=tuple(NEW)), tmp_path / "base") == found
    shared = [path.name for path in base.glob("*.safetensors") if path.stat().st_ino == (found / path.name).stat().st_ino]
    assert 0 < len(shared) < len(list(base.glob("*.safetensors")))
    again, sizes = AutoModelForCausalLM.from_pretrained(found), json.loads((found / INDEX).read_text())["metadata"]
    assert again.config.vocab_size == loaded.config.vocab_size + 2
    assert sizes["total_size"] == sum(p.numel() * 4 for p in again.parameters())
    theirs = dict(loaded.named_parameters())
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter[: len(theirs[name])], theirs[name]), name


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "additional_chat_templates/tool.jinja", "merges.txt", "vocab.txt", "LICENSE", "tokenizer.json"]
)
def test_what_was_grown_follows_its_source(tmp_path: Path, name: str) -> None:
    """A file that goes along, once added and once changed, makes the folder anew; one that does not leaves it."""
    base, asked = toy.model_folder(tmp_path / "model"), Model(name=str(tmp_path / "model"), new_tokens=tuple(NEW))

    def is_new() -> bool:
        mark = model_folder(asked, tmp_path / "base") / "mark"
        was_there = mark.exists()
        mark.touch()
        return not was_there

    assert is_new()
    (base / "README.md").write_text("of the model")
    assert not is_new()
    path = base / name
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "{{ messages }}") + "\n")
    assert is_new()
    path.write_text(path.read_text() + "\n")
    assert is_new()
    assert not is_new()


def test_a_template_that_changes_reaches_what_was_grown(tmp_path: Path) -> None:
    base, asked = toy.model_folder(tmp_path / "model"), Model(name=str(tmp_path / "model"), new_tokens=tuple(NEW))
    model_folder(asked, tmp_path / "base")
    (base / "chat_template.jinja").write_text(toy.CHATML + "the end")
    assert tokenizer_of(model_folder(asked, tmp_path / "base")).chat_template == toy.CHATML + "the end"


def test_a_gguf_file_with_new_tokens(tmp_path: Path) -> None:
    write_gguf(toy.model_folder(tmp_path / "hf", intermediate_size=64), tmp_path / "toy.gguf", "Q8_0")
    asked = Model(name=str(tmp_path / "toy.gguf"), new_tokens=tuple(NEW))
    job = read_job_text(f"model:\n  name: {asked.name}\n  new_tokens: {NEW}\n", "job.yaml")[0]
    found = model_folder(asked, tmp_path / "base")
    assert model_of(job).vocab == json.loads((found / "config.json").read_text())["vocab_size"]


def test_pretraining_draws_the_rows_of_new_tokens(tmp_path: Path) -> None:
    rows_with(tmp_path / "rows.jsonl", NEW)
    folder = trained(job_with(tmp_path, NEW, method="pretrain", training__steps=2))
    assert load_file(folder.export / SINGLE)["model.embed_tokens.weight"].shape[0] == Plan.read(folder.plan).model["vocab"]


def problems_of(job: Path) -> list[str]:
    with pytest.raises(InputError) as caught:
        planned(read_asked(job))
    assert all("model.new_tokens" in p.where for p in caught.value.problems)
    return [p.what for p in caught.value.problems]


def test_tokens_that_cannot_be_new(tmp_path: Path) -> None:
    def asked(*tokens: str) -> Path:
        return job_with(tmp_path, list(tokens))

    assert problems_of(asked("<|im_end|>", "<a>", "a")) == [
        "'<|im_end|>' is a token of this model already (id 2)",
        f"'a' is a token of this model already (id {tokenizer_of(tmp_path / 'model').convert_tokens_to_ids('a')})",
    ]
    assert problems_of(asked("<a>", "<b>", "<a>", " ")) == [
        "'<a>' is 2 times among new_tokens",
        "' ' is white space alone, which text would be split at",
    ]
    assert problems_of(asked("")) == ["new_tokens = [''] is not a list of text"]


@pytest.mark.parametrize(
    ("tied", "patterns", "said"),
    [
        (False, ["*norm*", "*embed*"], "*embed* freezes model.embed_tokens.weight,"),
        (False, ["lm_head.*"], "lm_head.* freezes lm_head.weight,"),
        (True, ["model.embed_tokens.*"], "model.embed_tokens.* freezes model.embed_tokens.weight and lm_head.weight,"),
    ],
)
def test_new_rows_that_are_frozen(tmp_path: Path, tied: bool, patterns: list[str], said: str) -> None:
    toy.model_folder(tmp_path / "model", tie_word_embeddings=tied)
    with pytest.raises(InputError) as caught:
        planned(read_asked(job_with(tmp_path, NEW, training__freeze=patterns)))
    (problem,) = caught.value.problems
    assert problem.what.startswith(said)
    assert problem.where == "training.freeze"
    assert "leave model.new_tokens out" in problem.hint
    planned(read_asked(job_with(tmp_path, [], training__freeze=patterns)))


def test_a_run_goes_on_with_the_tokens_that_it_began_with(tmp_path: Path) -> None:
    """In their order: rows would be of the same size, and ids of other texts."""
    rows_with(tmp_path / "rows.jsonl", NEW)
    trained(job_with(tmp_path, NEW, training__steps=4), Options(stop_at=2))
    for other in (NEW[::-1], ["<a>", NEW[1]]):
        with pytest.raises(InputError, match=re.escape(f"in their order ({NEW[0]!r}, {NEW[1]!r})")) as caught:
            trained(job_with(tmp_path, other, training__steps=4, training__freeze=["*norm*"]), Options(resume=True))
        assert [p.where for p in caught.value.problems] == ["training.freeze", "model.new_tokens"]
        assert all("pentamesh export" in p.hint for p in caught.value.problems)
    trained(job_with(tmp_path, NEW, training__steps=4), Options(resume=True))


def test_a_model_whose_tokenizer_is_elsewhere() -> None:
    job = read_job_text("model:\n  name: llama-3.1-8b\n  new_tokens: ['<a>']\n", "job.yaml")[0]
    model = model_of(job)
    assert model.vocab == 128257
    assert any("its tokenizer is not on this machine" in note for note in model.notes)


def test_the_preview_shows_them_whole(tmp_path: Path) -> None:
    from pentamesh.run.data.preview import collect

    rows_with(tmp_path / "rows.jsonl", NEW)
    job, plain = (read_job(job_with(tmp_path, tokens))[0] for tokens in (NEW, []))
    found = [collect(j, tokenizer_of(tmp_path / "model", new_tokens=j.model.new_tokens), tmp_path, 1).to_json()["num_tokens"] for j in (job, plain)]
    assert found[0] < found[1]
