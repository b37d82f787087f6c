"""Compiled: blocks by torch.compile, one graph for all of them and for every length."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from torch import nn

from pentamesh.errors import InputError
from pentamesh.model.spec import ModelSpec

__all__ = ["check_compiler", "compile_blocks"]


def compile_blocks(built: nn.Module, model: ModelSpec) -> None:
    """Compile every block in place: names stay, and what is between blocks - gathering, reducing, checkpoints - stays as it is.

    Sizes are symbols from the start. Otherwise the first length would have kernels of its own, and a run that is resumed at another length others.
    """
    for unit in model.units:
        if unit:
            built.get_submodule(unit).compile(dynamic=True)


def check_compiler(where: str) -> None:
    """Raises InputError where torch.compile would find no C++ compiler, or no headers of Python to compile against."""
    hint = "install it, set CXX, or leave training.compile out"
    if not shutil.which(compiler := os.environ.get("CXX", "g++")):
        raise InputError(f"compile = true, and the C++ compiler {compiler} is not on PATH", where=f"{where} training.compile", hint=hint)
    if not (headers := Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        hint = "install Python's development files, or leave training.compile out"
        raise InputError(f"compile = true, and {headers} is not there", where=f"{where} training.compile", hint=hint)
