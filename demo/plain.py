"""The model as its users load it: plain transformers, in fp32, one row at a time. Nothing here comes from pentamesh, so that it can contradict it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer

__all__ = ["HeldOut", "Model"]

# Rows are short: a second thread gains little, and where cores are shared it makes every operation wait for a core (ten times slower was seen).
torch.set_num_threads(1)

END_OF_TURN = "<|im_end|>"


@dataclass(frozen=True)
class HeldOut:
    """Mean loss per answered token over `num_tokens` of them."""

    loss: float
    num_tokens: int


class Model:
    """A Hugging Face folder, loaded; raises ValueError where its weights do not cover the model."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        self.model, report = loaded
        if report["missing_keys"] or report["unexpected_keys"]:
            raise ValueError(f"{folder} has missing or unexpected weights: {report}")
        self.model.eval()

    @torch.no_grad()
    def held_out(self, rows: Path) -> HeldOut:
        """How surprised the model is by the answers of `rows`: minus the log-probability of their tokens and of the end of the turn."""
        total, num_tokens = 0.0, 0
        for line in rows.read_text(encoding="utf-8").splitlines():
            question, answer = json.loads(line)["messages"]
            prompt = self._prompt(question["content"])
            ids = self._ids(prompt + answer["content"] + END_OF_TURN)
            first = self._ids(prompt).shape[1]
            # Summed in float64: over 49,152 words torch's float32 sum is 3e-5 off on a CPU without AVX-512.
            scores = log_softmax(self.model(ids).logits[0, first - 1 : -1].double(), dim=-1)
            total -= float(scores.gather(1, ids[0, first:, None]).sum())
            num_tokens += ids.shape[1] - first
        return HeldOut(total / num_tokens, num_tokens)

    @torch.no_grad()
    def answer(self, question: str) -> str:
        """The likeliest answer, word by word (greedy), of at most 60 tokens."""
        prompt = self._ids(self._prompt(question))
        found = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=60, do_sample=False)
        return " ".join(self.tokenizer.decode(found[0, prompt.shape[1] :], skip_special_tokens=True).split())

    def _prompt(self, question: str) -> str:
        return self.tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False)

    def _ids(self, text: str) -> torch.Tensor:
        return self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
