"""Any rectangle of a stored tensor comes back bit for bit, and pieces make a whole or are refused."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import pytest
import torch

from pentamesh.checkpoint import parts as reading
from pentamesh.checkpoint.headers import DTYPES, Entry, read_header, write_tensors
from pentamesh.checkpoint.parts import Part, parts, read_box, unfilled, whole
from pentamesh.errors import InputError

SHAPES = [(), (7,), (1, 5), (6, 10), (3, 4, 2), (2, 3, 4, 5), (0, 3), (5, 0)]


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values of which every byte differs from its neighbours' and which may be NaN as a float: bits count."""
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return (torch.arange(count) % 3 == 0).reshape(shape)
    return torch.arange(1, count * dtype.itemsize + 1, dtype=torch.int64).mul(37).to(torch.uint8).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def stored(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Entry]:
    write_tensors(path, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}, tensors.values())
    return read_header(path).entries


def boxes(shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every rectangle of a shape, or a hundred of many."""
    each = [[(low, length) for low in range(end + 1) for length in range(end - low + 1)] for end in shape]
    found = [(tuple(low for low, _ in box), tuple(length for _, length in box)) for box in itertools.product(*each)]
    return found if len(found) <= 100 else random.Random(3).sample(found, 100)


@pytest.mark.parametrize("sizes", [(2**24, 2**16), (24, 2**16), (24, 1), (1, 1)], ids=["ordinary", "small blocks", "long runs", "byte by byte"])
def test_any_box_of_any_dtype_is_read_bit_for_bit(tmp_path: Path, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", sizes[0])
    monkeypatch.setattr(reading, "RUN_BYTES", sizes[1])
    tensors = {f"{dtype}.{shape}": values(shape, dtype) for dtype in DTYPES.values() for shape in SHAPES}
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    path = tmp_path / "all.safetensors"
    for name, entry in stored(path, tensors).items():
        for offset, size in boxes(entry.shape):
            found = read_box(path, entry, offset, size)
            wanted = tensors[name][tuple(slice(low, low + length) for low, length in zip(offset, size, strict=True))]
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            assert bits(found) == bits(wanted), (name, offset, size)


def test_a_column_of_a_wide_matrix_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 4096)
    matrix = torch.randn(1000, 64)
    path = tmp_path / "m.safetensors"
    entry = stored(path, {"m": matrix})["m"]
    longest, real = [0], reading._read_into
    monkeypatch.setattr(reading, "_read_into", lambda target, file: (longest.append(len(target)), real(target, file)))
    assert torch.equal(read_box(path, entry, (3, 5), (990, 7)), matrix[3:993, 5:12])
    assert 1024 < max(longest) <= 4096


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    entry = stored(path, {"m": torch.ones(8, 8)})["m"]
    os.truncate(path, path.stat().st_size - 5)
    with pytest.raises(InputError, match=r"cut\.safetensors is truncated: it ends before byte"):
        read_box(path, entry, (0, 0), (8, 8))
    assert torch.equal(read_box(path, entry, (0, 0), (7, 8)), torch.ones(7, 8))
    path.unlink()
    with pytest.raises(InputError, match=r"cut\.safetensors cannot be read: No such file"):
        read_box(path, entry, (0, 0), (8, 8))


@pytest.mark.parametrize(("offset", "size"), [((0,), (2,)), ((0, 0), (3, 1)), ((-1, 0), (1, 1)), ((2, 0), (1, 1)), ((0, 0, 0), (1, 1, 1))])
def test_a_box_outside_of_the_tensor_is_refused(tmp_path: Path, offset: tuple[int, ...], size: tuple[int, ...]) -> None:
    path = tmp_path / "m.safetensors"
    entry = stored(path, {"m": torch.ones(2, 2)})["m"]
    with pytest.raises(ValueError, match="is not in a tensor"):
        read_box(path, entry, offset, size)


def pieces(folder: Path, matrix: torch.Tensor, *places: tuple[int, int, int, int]) -> list[Part]:
    """Rectangles (row, column, rows, columns) of a matrix, each in a file of its own."""
    found = []
    for number, (row, column, rows, columns) in enumerate(places):
        path = folder / f"{number}.safetensors"
        entry = stored(path, {"m": matrix[row : row + rows, column : column + columns].contiguous()})["m"]
        found.append(Part(path, Entry(entry.dtype, entry.shape, entry.begin, entry.end, (row, column))))
    return found


@pytest.mark.parametrize("block_bytes", [2**24, 40, 1])
def test_pieces_make_the_whole_in_another_dtype_too(tmp_path: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", block_bytes)
    matrix = torch.randn(5, 6)
    found = pieces(tmp_path, matrix, (0, 0, 2, 4), (0, 4, 2, 2), (2, 0, 3, 6))
    assert list(unfilled("m", (5, 6), found)) == []
    assert torch.equal(whole(found, (5, 6), torch.float32), matrix)
    assert torch.equal(whole(found, (5, 6), torch.bfloat16), matrix.bfloat16())
    one = Part(tmp_path / "one", stored(tmp_path / "one", {"m": torch.tensor(0.1)})["m"])
    assert torch.equal(whole([one], (), torch.float64), torch.tensor(0.1).double())


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ([(0, 0, 2, 6)], "m has 30 values, 12 are in the checkpoint"),
        ([], "m has 30 values, 0 are in the checkpoint"),
        ([(0, 0, 3, 6), (1, 0, 2, 6)], "two parts of m hold the same values"),
        ([(0, 0, 5, 3), (1, 2, 3, 3), (0, 5, 5, 1), (0, 0, 1, 1)], "two parts of m hold the same values"),
    ],
)
def test_pieces_that_are_not_the_whole_are_refused(tmp_path: Path, places: list[tuple[int, int, int, int]], said: str) -> None:
    assert said in "\n".join(str(problem) for problem in unfilled("m", (5, 6), pieces(tmp_path, torch.randn(5, 6), *places)))


def test_a_piece_outside_of_the_whole_or_of_another_dtype_is_refused(tmp_path: Path) -> None:
    found = pieces(tmp_path, torch.randn(5, 6), (0, 0, 2, 6), (2, 0, 3, 6))
    (problem,) = unfilled("m", (4, 6), [found[1], pieces(tmp_path, torch.randn(5, 6), (0, 0, 1, 6))[0]])
    assert "[3, 6] at [2, 0], does not lie in [4, 6]" in problem.what
    narrow = Entry("F16", (2, 6), 0, 24, (0, 0))
    (problem,) = unfilled("m", (5, 6), [Part(found[0].path, narrow), found[1]])
    assert "parts of m are F16 and F32" in problem.what


def test_pieces_are_found_by_name_over_files(tmp_path: Path) -> None:
    stored(tmp_path / "1.safetensors", {"m": torch.ones(2, 2), "none": torch.zeros(0, 3)})
    stored(tmp_path / "2.safetensors", {"m": torch.ones(3, 2)})
    found = parts(sorted(tmp_path.iterdir()))
    assert {name: [part.path.name for part in here] for name, here in found.items()} == {"m": ["1.safetensors", "2.safetensors"], "none": []}
    assert whole(found["none"], (0, 3), torch.float32).shape == (0, 3)
