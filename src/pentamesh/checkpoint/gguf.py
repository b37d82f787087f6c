"""From a GGUF file to a Hugging Face folder of weights: de-quantised by one process, tensor by tensor, a few rows at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pentamesh.checkpoint.disk import check_room, write_text
from pentamesh.checkpoint.headers import write_tensors
from pentamesh.checkpoint.weights import SINGLE
from pentamesh.errors import InputError, Problem
from pentamesh.model.config import canonical
from pentamesh.model.dims import TensorSpec
from pentamesh.model.families import describe
from pentamesh.model.gguf import FETCH, ROPE_FACTORS, Gguf, GgufTensor, gguf_config, gguf_name
from pentamesh.model.spec import ModelSpec

__all__ = ["dequantised_tensor", "write_dequantised"]

# Elements that are float32 at once, beside the tensor that they become.
CHUNK_ELEMENTS = 2**24


def write_dequantised(found: Gguf, folder: Path) -> None:
    """Write config.json, generation_config.json and the weights of a GGUF file to an existing folder; one tensor at a time is in memory.

    Raises InputError with every tensor that is missing, unexpected, of another shape or cut short, before anything is written.
    """
    config = gguf_config(found)
    model = describe(canonical(config), found.path.name)
    assert model is not None, config["model_type"]  # gguf_config refuses what is not described
    if problems := list(_faults(found, model)):
        raise InputError(*problems)
    dtype = getattr(torch, found.dtype)
    check_room(folder, model.num_parameters * dtype.itemsize)
    ids = {key: value for key, value in config.items() if key.endswith("_token_id")}
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    write_text(folder / "generation_config.json", json.dumps(ids, indent=2) + "\n")
    shapes = {tensor.name: (dtype, tensor.shape) for tensor in model.parameters}
    write_tensors(folder / SINGLE, shapes, (dequantised_tensor(found, tensor, model, dtype) for tensor in model.parameters))


def _faults(found: Gguf, model: ModelSpec) -> Iterator[Problem]:
    wanted = {gguf_name(tensor.name): tensor for tensor in model.parameters}
    size, where = found.path.stat().st_size, str(found.path)
    for name, tensor in wanted.items():
        if name not in found.tensors:
            yield Problem(f"{name} is missing, which is {tensor}", where, FETCH)
            continue
        stored = found.tensors[name]
        if stored.shape != tensor.shape:
            yield Problem(f"{name} should be {list(tensor.shape)} and is {list(stored.shape)}", where, FETCH)
        elif (num_bytes := _num_bytes(stored)) is None:
            yield Problem(f"{name} is quantised in a way that is not known (ggml's number {stored.kind})", where, "use a newer `gguf` package")
        elif stored.begin + num_bytes > size:
            yield Problem(f"{name} ends at byte {stored.begin + num_bytes:,}, and the file has {size:,}", where, FETCH)
    for name in sorted(found.tensors.keys() - wanted.keys() - {ROPE_FACTORS}):
        yield Problem(f"{name} is not part of {model.family}", where, "give the Hugging Face folder that the file was made from")


def _num_bytes(stored: GgufTensor) -> int | None:
    """Bytes of a tensor, or None for a kind that the `gguf` package does not know or that does not divide its rows."""
    from gguf.constants import GGML_QUANT_SIZES

    known: dict[int, tuple[int, int]] = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    block, block_bytes = known.get(stored.kind, (0, 0))
    return math.prod(stored.shape) // block * block_bytes if block and stored.shape[-1] % block == 0 else None


def dequantised_tensor(found: Gguf, tensor: TensorSpec, model: ModelSpec, dtype: torch.dtype) -> torch.Tensor:
    """One tensor as numbers again. Queries and keys of Llama come in llama.cpp's order of rotary pairs, and leave in that of transformers.

    Shapes: `tensor.shape`.
    """
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    stored = found.tensors[gguf_name(tensor.name)]
    rows, row_len = math.prod(stored.shape[:-1]), stored.shape[-1]
    raw: Any = np.memmap(found.path, np.uint8, "r", offset=stored.begin, shape=(rows, (_num_bytes(stored) or 0) // rows))
    whole, step = torch.empty((rows, row_len), dtype=dtype), max(1, CHUNK_ELEMENTS // row_len)
    for row in range(0, rows, step):
        numbers = dequantize(np.array(raw[row : row + step]), GGMLQuantizationType(stored.kind))
        whole[row : row + step] = torch.from_numpy(np.ascontiguousarray(numbers))
    return _in_order(whole.reshape(tensor.shape), tensor, model)


def _in_order(whole: torch.Tensor, tensor: TensorSpec, model: ModelSpec) -> torch.Tensor:
    """Source: llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute, which is undone here."""
    permuted = model.family == "llama" and tensor.name.rsplit(".", 2)[1] in ("q_proj", "k_proj")
    if not permuted:
        return whole
    return whole.unflatten(0, (-1, model.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
