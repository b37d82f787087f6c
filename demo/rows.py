"""The demo's rows: the English conversations of the package `chatterbot-corpus` as messages, cleaned, each said once, and split.

wheel --conversations--> (topic, turns) --cleaned--> pairs and counts --split--> train, held out
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

__all__ = ["LEFT_OUT_TOPICS", "Cleaned", "Pair", "cleaned", "conversations", "split", "write_jsonl"]

FOLDER = "chatterbot_corpus/data/english/"
# Topics that are left out whole, and why.
LEFT_OUT_TOPICS = {
    "coding": "programs that lost their list indices on the way (`pivot = arr`), so they do not run",
    "psychology": "insults, and a bot that agrees with them",
    "politics": "opinions on guns and parties",
    "gossip": "hearsay about people by first name",
}
# Words of the few rows elsewhere that are lewd, that are about killing and dying, drink and drugs, or that take a side in a war.
UNFIT = re.compile(
    r"\b(die|dies|kill\w*|shot dead|murder\w*|suicide|assassinat\w*|hitler|mussolini|stupid|bend over|mate|mating|sex\w*|pleasure bot|testicles|"
    r"drunk|intoxicated|sinsemillia|the south was right)\b",
    re.IGNORECASE,
)
# An e-mail address, a web address, or seven digits and more in a row as of a telephone number.
PERSONAL = re.compile(r"\S+@\w+\.\w+|https?://|\+?\d(?:[ ().-]?\d){6,}")


@dataclass(frozen=True)
class Pair:
    """A question and its answer."""

    question: str
    answer: str

    def row(self) -> dict[str, Any]:
        """The pair as a row of messages."""
        return {"messages": [{"role": "user", "content": self.question}, {"role": "assistant", "content": self.answer}]}


@dataclass(frozen=True)
class Cleaned:
    """The pairs that are left, and how many conversations were read and left out, by reason."""

    pairs: tuple[Pair, ...]
    num_read: int
    left_out: dict[str, int]


def conversations(wheel: Path) -> Iterator[tuple[str, Any]]:
    """Every English conversation with its topic (the name of its file), as the package has it."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(name for name in archive.namelist() if name.startswith(FOLDER) and name.endswith(".yml")):
            topic = name.removeprefix(FOLDER).removesuffix(".yml")
            yield from ((topic, turns) for turns in yaml.safe_load(archive.read(name))["conversations"])


def cleaned(found: Iterable[tuple[str, Any]]) -> Cleaned:
    """One pair a conversation, its first two turns: later ones are at times a dialogue, at times other answers, and nothing says which.

    What is malformed or unfit goes first; then every pair whose question or whose answer was there before, in whatever case and punctuation.
    """
    pairs, left_out, num_read = [], Counter[str](), 0
    questions, answers = set[str](), set[str]()
    for topic, turns in found:
        num_read += 1
        pair, reason = _pair(turns), ""
        if pair is None:
            reason = "malformed"
        elif unfit := _unfit(topic, pair):
            reason = unfit
        elif _same(pair.question) in questions:
            reason = "question seen before"
        elif _same(pair.answer) in answers:
            reason = "answer seen before"
        else:
            pairs.append(pair)
            questions.add(_same(pair.question))
            answers.add(_same(pair.answer))
        if reason:
            left_out[reason] += 1
    return Cleaned(tuple(pairs), num_read, dict(left_out))


def _pair(turns: Any) -> Pair | None:
    """The first two turns, or None where they are not two sentences."""
    if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(turn, str) and turn.strip() for turn in turns[:2]):
        return None
    question, answer = (" ".join(turn.split()) for turn in turns[:2])
    return Pair(question, answer)


def _unfit(topic: str, pair: Pair) -> str:
    if topic in LEFT_OUT_TOPICS:
        return f"topic {topic}"
    text = f"{pair.question}\n{pair.answer}"
    if PERSONAL.search(text):
        return "e-mail, web address or telephone number"
    return "unfit words" if UNFIT.search(text) else ""


def _same(text: str) -> str:
    """What two texts have in common that differ only in case, punctuation and spaces."""
    return " ".join(re.findall(r"\w+", text.casefold())) or text


def split(pairs: Iterable[Pair], num_held_out: int) -> tuple[list[Pair], list[Pair]]:
    """Training pairs in a drawn order, and `num_held_out` others. The draw is a hash of the question: it changes with nothing else."""
    drawn = sorted(pairs, key=lambda pair: hashlib.sha256(pair.question.encode()).digest())
    return drawn[num_held_out:], drawn[:num_held_out]


def write_jsonl(path: Path, pairs: Iterable[Pair]) -> None:
    """Write one row of messages a line. A file that says the same already is left alone, so that data prepared from it stays good."""
    text = "".join(json.dumps(pair.row(), ensure_ascii=False) + "\n" for pair in pairs)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
