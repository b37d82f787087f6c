"""The chat template and the system turn of a job: read at the start or refused with the line, used everywhere, and in the export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pentamesh.errors import InputError
from pentamesh.job.precision import PRECISIONS
from pentamesh.job.read import read_job
from pentamesh.run.asked import located, planned, read_asked
from pentamesh.run.data.preview import collect
from pentamesh.run.data.samples import open_prepared
from pentamesh.run.evaluate import evaluate
from pentamesh.run.source import tokenizer_of
from pentamesh.run.template import read_template
from tests.run import toy
from tests.run.test_loop import trained

OWN = """{# ours #}
{% for m in messages %}
<|im_start|>{{ {'user': 'Q', 'assistant': 'A', 'system': 'S'}[m.role] }}: {{ m.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>A: {% endif %}
"""
TALK = [{"role": "user", "content": "the cat"}]
RENDERED = "<|im_start|>Q: the cat<|im_end|>\n<|im_start|>A: "


def test_a_file_or_its_text_is_the_template(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("\ufeff" + OWN)
    assert (
        read_template("own.jinja", tmp_path) == read_template(str(tmp_path / "own.jinja"), Path("elsewhere")) == read_template(OWN, tmp_path) == OWN
    )


def test_marks_and_loop_controls_are_jinja_here(tmp_path: Path) -> None:
    text = "{% for m in messages %}{%- generation -%}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert read_template(text, tmp_path) == text


# What is written into the file or given as the text, the place that is named, and what is said of it.
WRONG = {
    "a block without an end": (
        "{% for m in messages %}\n{{ m.content }}\n",
        "own.jinja:2",
        "the chat template is not Jinja: Unexpected end of template",
    ),
    "an end without a block": ("{{ messages }}\n{% endfor %}", "own.jinja:2", "Encountered unknown tag 'endfor'"),
    "a filter that is none": ("{# x #}\n\n{{ messages | trimm }}", "own.jinja:3", "No filter named 'trimm'"),
    "a mark without an end": ("{% generation %}{{ messages }}", "own.jinja:1", "Unexpected end of template"),
    "no template": ("messages", "data.chat_template", "holds no template: it shows no message"),
    "an empty file": ("", "data.chat_template", "holds no template"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_template_is_named_by_its_line(tmp_path: Path, case: str) -> None:
    text, where, what = WRONG[case]
    (tmp_path / "own.jinja").write_text(text)
    with pytest.raises(InputError) as error:
        read_template("own.jinja", tmp_path)
    assert what in str(error.value)
    assert where in str(error.value)


def nested(opening: str, closing: str, times: int) -> str:
    return opening * times + "{{ messages }}" + closing * times


@pytest.mark.parametrize(
    "text",
    [
        nested("{% if true %}", "{% endif %}", 1000),
        nested("{% if true %}", "{% endif %}", 110),
        nested("{% for m in messages %}", "{% endfor %}", 25),
        f"{{{{ {'(' * 3000}1{')' * 3000} }}}}",
    ],
    ids=["a thousand blocks", "more than Python indents", "more than Python loops", "brackets"],
)
def test_what_is_nested_too_deeply_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"nested too deeply(.|\n)*where  data\.chat_template"):
        read_template(text, tmp_path)
    (tmp_path / "own.jinja").write_text(text)
    with pytest.raises(InputError, match=r"nested too deeply(.|\n)*where  .*own\.jinja\nhint: "):
        read_template("own.jinja", tmp_path)


def test_a_fault_in_the_text_of_a_job_is_named_by_its_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"unknown tag 'endfor'.*\n.*line 2 of data\.chat_template"):
        read_template("{{ messages }}\n{% endfor %}", tmp_path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_bytes(b"{{ messages }}\xff")
    (tmp_path / "folder").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model/chat_template.jinja").write_text(OWN)
    for asked, what in (
        ("own.jinja", "cannot be read"),
        ("folder", "folder is a folder, not a chat template\\n.*\\n.*give a Jinja file"),
        ("model", "model is a folder, not a chat template\\n.*\\n.*did you mean .*model/chat_template.jinja?"),
        ("one.jinja", "did you mean own.jinja"),
        ("x", "the text of the"),
    ):
        with pytest.raises(InputError, match=what):
            read_template(asked, tmp_path)


def test_the_start_of_a_run_names_a_fault(tmp_path: Path) -> None:
    path = toy.job(tmp_path, data__chat_template="own.jinja")
    (tmp_path / "own.jinja").write_text("{{ messages }")
    with pytest.raises(InputError, match=r"own\.jinja:1"):
        planned(read_asked(path))
    assert not (tmp_path / "runs").exists()


def test_a_run_renders_by_it_and_its_export_does(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(OWN)
    path = toy.job(tmp_path, data__chat_template="own.jinja", data__system="be kind", training__steps=2)
    job = located(read_job(path)[0], tmp_path, "job")
    shown = collect(job, tokenizer_of(tmp_path / "model", job.data.chat_template), Path(), num_rows=1).rows[0]
    assert shown.pieces[0].text.startswith("<|im_start|>S: be kind<|im_end|>\n<|im_start|>Q: ")
    assert shown.pieces[0].text.endswith("<|im_start|>A:")
    run = trained(path)
    (tmp_path / "own.jinja").unlink()  # the run knows it by heart
    tokenizer = AutoTokenizer.from_pretrained(run.export)
    assert tokenizer.chat_template == OWN
    assert tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True) == RENDERED
    ids, _ = open_prepared(run.data).train.sample(0)
    assert str(tokenizer.decode(ids)).startswith("<|im_start|>S: be kind<|im_end|>\n<|im_start|>Q: ")
    last = [json.loads(line) for line in run.metrics.read_text().splitlines()][-1]
    assert evaluate(job, run.export, PRECISIONS["fp32"]).loss == pytest.approx(last["held_out_loss"], rel=1e-5)
