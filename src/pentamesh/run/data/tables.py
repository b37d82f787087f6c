"""Tables: rows in Parquet and Arrow files, read in batches of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentamesh.errors import Problem, reason
from pentamesh.run.data.lines import Row
from pentamesh.run.data.opened import CUT_SHORT

if TYPE_CHECKING:
    import pyarrow

__all__ = ["arrow", "parquet", "without_nulls"]

ROWS_AT_ONCE = 256
# What an Arrow file begins with; without it the same messages follow each other as a stream. Source: Arrow, columnar format, IPC file format.
FILE_MAGIC = b"ARROW1"


def parquet(file: Path) -> Iterator[Row | Problem]:
    """The rows of a Parquet file."""
    from pyarrow.parquet import ParquetFile

    def batches() -> Iterator[pyarrow.RecordBatch]:
        with ParquetFile(file) as opened:
            yield from opened.iter_batches(batch_size=ROWS_AT_ONCE)

    return _rows("Parquet", file, batches())


def arrow(file: Path) -> Iterator[Row | Problem]:
    """The rows of an Arrow file or stream, which is what Feather files and those of `datasets` are. Its batches are mapped, not read."""
    from pyarrow import ipc, memory_map

    def batches() -> Iterator[pyarrow.RecordBatch]:
        with file.open("rb") as opened:
            is_file = opened.read(len(FILE_MAGIC)) == FILE_MAGIC
        with memory_map(str(file)) as mapped:
            if is_file:
                with ipc.open_file(mapped) as whole:
                    yield from map(whole.get_batch, range(whole.num_record_batches))
            else:
                with ipc.open_stream(mapped) as stream:
                    yield from stream

    return _rows("Arrow", file, batches())


def _rows(kind: str, file: Path, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[Row | Problem]:
    from pyarrow import ArrowException

    try:
        for index, value in enumerate(_values(batches)):
            yield Row(f"{file}[{index}]", value)
    except (ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.strerror:  # of the system, not of Arrow
            raise
        said = "".join(c for c in reason(error) if c.isprintable())
        yield Problem(f"not a whole {kind} file: {said}", str(file), CUT_SHORT)


def _values(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[dict[str, Any]]:
    """The rows of columns; a key that is null inside a column is left out, since only there it cannot be absent."""
    for batch in batches:
        batch.validate(full=True)  # offsets that lie would be followed to anywhere in memory
        for start in range(0, batch.num_rows, ROWS_AT_ONCE):
            for value in _listed(batch.slice(start, ROWS_AT_ONCE)):
                yield {key: without_nulls(inner) for key, inner in value.items()}


def _listed(batch: pyarrow.RecordBatch) -> list[dict[str, Any]]:
    from pyarrow import ArrowException

    names = batch.schema.names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"several columns are called {', '.join(twice)}")
    try:
        return batch.to_pylist()
    except (ArrowException, KeyError) as error:  # a time zone that nobody knows
        raise ValueError(reason(error)) from error


def without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return value
