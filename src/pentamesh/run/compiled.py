"""Compiled: blocks by torch.compile, one graph for all of them and for every length."""

from __future__ import annotations

import os
import shutil
import sysconfig
import warnings
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch._inductor import config as inductor
from torch.distributed._symmetric_memory import enable_symm_mem_for_group

from pentamesh.errors import InputError
from pentamesh.model.spec import ModelSpec

__all__ = ["check_compiler", "compile_blocks", "compiled_parts", "overlap_tensor_moves"]


def compiled_parts(model: ModelSpec) -> list[str]:
    """The paths of the modules that are compiled: every block; of a model with experts the attention and the dense MLPs of each.

    What comes to an expert has no size before the router has chosen, and what it has chosen is kept around the whole block.
    """
    blocks = [unit for unit in model.units if unit]
    if model.experts is None:
        return blocks
    feeding = dict.fromkeys(t.name.rpartition(".gate_proj.")[0] for t in model.tensors if ".gate_proj." in t.name)
    return [*(f"{unit}.self_attn" for unit in blocks), *feeding]


def compile_blocks(built: nn.Module, model: ModelSpec) -> None:
    """Compile every block in place, or its parts: names stay, and what is between them - gathering, reducing, checkpoints - stays as it is.

    Sizes are symbols from the start. Otherwise the first length would have kernels of its own, and a run that is resumed at another length others.
    """
    for path in compiled_parts(model):
        built.get_submodule(path).compile(dynamic=True)


def overlap_tensor_moves(group: dist.ProcessGroup) -> None:
    """Let blocks that are compiled from now on send the stream of `group` in parts beside the matmuls that use it, over symmetric memory.

    Source: torch._inductor.fx_passes.micro_pipeline_tp, which fuses only over groups that symmetric memory was enabled for.
    """
    inductor._micro_pipeline_tp = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # says that it need not be called, and the pass asks whether it was
        enable_symm_mem_for_group(group.group_name)


def check_compiler(where: str) -> None:
    """Raises InputError where torch.compile would find no C++ compiler, or no headers of Python to compile against."""
    hint = "install it, set CXX, or leave training.compile out"
    if not shutil.which(compiler := os.environ.get("CXX", "g++")):
        raise InputError(f"compile = true, and the C++ compiler {compiler} is not on PATH", where=f"{where} training.compile", hint=hint)
    if not (headers := Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        hint = "install Python's development files, or leave training.compile out"
        raise InputError(f"compile = true, and {headers} is not there", where=f"{where} training.compile", hint=hint)
