"""A toy job on disk: a model folder with weights and tokenizer, rows, and a job file."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sees",
    "runs",
    "on",
    "under",
    "red",
    "blue",
    "big",
    "small",
    "house",
    "tree",
    "and",
    "then",
    "it",
    "was",
    "very",
    "quick",
]


def sentence(draw: random.Random, longest: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(2, longest)))


def rows(path: Path, num_rows: int, seed: int = 0) -> Path:
    """Chat rows of uneven length."""
    draw = random.Random(seed)
    lines = []
    for _ in range(num_rows):
        turns = [{"role": "user", "content": sentence(draw, 6)}, {"role": "assistant", "content": sentence(draw, 12)}]
        lines.append(json.dumps({"messages": turns * draw.randint(1, 2)}))
    path.write_text("\n".join(lines) + "\n")
    return path


def model_folder(path: Path, dtype: str = "float32", model_type: str = "llama", **config: Any) -> Path:
    """A model of a few thousand parameters, a Llama or of another family, with a byte-level tokenizer of its own and a ChatML template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    path.mkdir(parents=True, exist_ok=True)
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    built.train_from_iterator([" ".join(WORDS)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<|im_end|>", pad_token="<|im_end|>", bos_token="<|im_start|>")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(path)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(sizes | config)), dtype=getattr(torch, dtype))
    model.save_pretrained(path)
    return path


def job(folder: Path, **changes: Any) -> Path:
    """A job file in `folder` beside its model and rows; `changes` are dotted keys with `__` for the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    if "model" not in changes and not (folder / "model").exists():
        model_folder(folder / "model")
    if not (folder / "rows.jsonl").exists():
        rows(folder / "rows.jsonl", 40)
    written: dict[str, Any] = {
        "model": "model",
        "data": {"train": "rows.jsonl", "held_out": 0.2},
        "batch": {"seq_len": 128, "micro_batch": 2, "global_batch": 8},
        "optimizer": {"lr": 1e-2, "warmup_steps": 2},
        "training": {"steps": 6, "evaluate_every": 3},
        "precision": "fp32",
        "hardware": "2xCPU",
        "layout": {"shard": "parameters"},
        "checkpoint": {"every": 2},
    }
    for dotted, value in changes.items():
        place, parts = written, dotted.split("__")
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        place[parts[-1]] = value
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(written))
    return path
