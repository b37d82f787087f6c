"""Files of rows, by their names: what ends like one is read, and is no data set of the hub."""

from __future__ import annotations

__all__ = ["COMPRESSED", "KINDS", "TABLES", "TEXTS", "file_kind"]

# Texts may be compressed; tables compress themselves.
TEXTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
TABLES = (".parquet", ".arrow", ".feather")
COMPRESSED = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "Zstandard"}
KINDS = f"{', '.join((*TEXTS, *TABLES))}; of text also {', '.join(f'{TEXTS[0]}{suffix}' for suffix in COMPRESSED)}"


def file_kind(name: str) -> tuple[str, str]:
    """The suffix of a file of rows and of its compression: `.csv` and `.gz` of `a.csv.gz`. Both are empty for another file."""
    lowered = name.lower()
    compression = next((suffix for suffix in COMPRESSED if lowered.endswith(suffix)), "")
    readable = TEXTS if compression else (*TEXTS, *TABLES)
    kind = next((suffix for suffix in readable if lowered.removesuffix(compression).endswith(suffix)), "")
    return (kind, compression) if kind else ("", "")
