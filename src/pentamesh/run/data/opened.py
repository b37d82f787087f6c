"""Opened: a file of rows as bytes, whatever it is compressed by, and what is said of one that is torn."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

from pentamesh.errors import Problem, reason
from pentamesh.job.files import COMPRESSED, file_kind

__all__ = ["BOM", "CUT_SHORT", "TORN", "opened", "unreadable"]

BOM = b"\xef\xbb\xbf"
CUT_SHORT = "copy or download the file again: it may be cut short"
# What the readers of compressed files raise where the file is not what its name says, or ends too early.
TORN = (EOFError, OSError, zlib.error, lzma.LZMAError)


def opened(file: Path) -> BinaryIO:
    """The bytes of a file, decompressed as they are read. What is raised on the way is of TORN."""
    compression = file_kind(file.name)[1]
    if compression == ".zst":
        import pyarrow

        stream: Any = pyarrow.CompressedInputStream(pyarrow.OSFile(str(file)), "zstd")
        return io.BufferedReader(stream)
    if how := {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(compression):
        return cast("BinaryIO", how(file, "rb"))
    return file.open("rb")


def unreadable(error: Exception, file: str, num_rows: int) -> Problem:
    """What is said of a file that could be read for so many rows."""
    if isinstance(error, OSError) and error.strerror:  # of the system
        return Problem(f"the file cannot be read: {error.strerror}", file)
    kind = COMPRESSED.get(file_kind(file)[1])
    what = f"not a whole {kind} file" if kind else "the file cannot be read"
    return Problem(f"{what}: {reason(error)}", f"{file}, after {num_rows:,} rows", CUT_SHORT)
