"""Make what lies beside this file: sums in words as training rows, and a model folder without weights (config and tokenizer) that reads them.

`python recipes/sample/make.py` writes the same rows every time; they are there so that a launch line runs before anyone has data.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()  # noqa: SIM905
TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()  # noqa: SIM905


def words(number: int) -> str:
    """A number below a hundred, in words."""
    tens, ones = divmod(number, 10)
    return ONES[number] if number < len(ONES) else TENS[tens] + (f"-{ONES[ones]}" if ones else "")


def rows(num_rows: int = 512) -> list[dict[str, str]]:
    draw = random.Random(0)
    sums = [(draw.randrange(1, 50), draw.randrange(1, 50)) for _ in range(num_rows)]
    return [{"text": f"{words(a)} and {words(b)} make {words(a + b)}.".capitalize()} for a, b in sums]


def tokenizer(folder: Path, texts: list[str]) -> int:
    """Train a small byte-level tokenizer into `folder` and return how many tokens it has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    built.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=320, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False))
    PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<|end|>", pad_token="<|end|>").save_pretrained(folder)
    return built.get_vocab_size()


def main() -> None:
    found = rows()
    (HERE / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer(HERE / "model", [row["text"] for row in found]),
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
    }
    (HERE / "model" / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
