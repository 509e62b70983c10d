"""Small checkpoints with any cut, written without what is tested."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import save_file

from reshard.checkpoint.integrity.checksums import SIDECAR, Checksums, file_sums, sums_of
from reshard.checkpoint.integrity.digest import finish, part
from reshard.checkpoint.storage.local import StoredFile
from reshard.layout.box import Box

CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
}  # fmt: skip
"""The words of safetensors for dtypes."""


def raw(array: np.ndarray[Any, Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def cut(array: np.ndarray[Any, Any], box: Box) -> np.ndarray[Any, Any]:
    limits = zip(box.start, box.stop, strict=True)
    return array[(*(slice(low, high) for low, high in limits), ...)]


def header(entries: dict[str, tuple[str, tuple[int, ...], int]], metadata: dict[str, str]) -> bytes:
    """A safetensors header; entries are code, shape, bytes."""
    table: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, (code, shape, size) in entries.items():
        table[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_sharded(
    folder: Path,
    tensors: Mapping[str, tuple[str, np.ndarray[Any, Any]]],
    cuts: Mapping[str, Sequence[Box]],
    checksums: int | None = None,
) -> None:
    """Write sharded safetensors as torch does; piece i of each tensor goes to file i.

    With ``checksums`` the sidecar is written too, for chunks of so many bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count = max((len(boxes) for boxes in cuts.values()), default=1)
    files, sums = [], []
    for number in range(count):
        entries, offsets, data = {}, {}, b""
        for name, (dtype, array) in tensors.items():
            if number < len(cuts[name]):
                box = cuts[name][number]
                piece = raw(cut(array, box))
                entries[name] = (CODES[dtype], box.shape, len(piece))
                offsets[name] = {"saved_offsets": list(box.start)}
                data += piece
        own = {
            "version": 1,
            "file": number + 1,
            "files": count,
            "tensors": {name: {"shape": list(tensors[name][1].shape)} for name in entries},
        }
        metadata = {"reshard": json.dumps(own), "DCP_SHARDING_INFO": json.dumps(offsets)}
        content = header(entries, {"format": "pt", **metadata}) + data
        path = f"shard-{number + 1:05d}-model-00001-of-00001.safetensors"
        (folder / path).write_bytes(content)
        files.append(StoredFile(path, len(content)))
        for at in range(0, len(content), checksums or len(content)):
            sums += sums_of(number, at, content[at : at + (checksums or len(content))])
    if checksums is not None:
        digests = {
            name: finish(
                part(array, Box.whole(array.shape), array.shape, dtype), array.shape, dtype
            )
            for name, (dtype, array) in tensors.items()
        }
        sidecar = Checksums(file_sums(files, sums), digests)
        (folder / SIDECAR).write_bytes(sidecar.to_bytes())


def random_array(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    """Random bits, as unsigned integers of the size of the dtype."""
    from reshard.dtypes import itemsize

    width = itemsize(dtype)
    data = np.random.default_rng(seed).bytes(int(np.prod(shape)) * width)
    word = f"u{width}" if width <= 8 else "V16"
    return np.frombuffer(bytearray(data), dtype=word).reshape(shape)


@st.composite
def disjoint_boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Disjoint boxes that cover a tensor, in any order."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        boxes += box.split(dim, draw(st.integers(box.start[dim], box.stop[dim])))
    return draw(st.permutations(boxes))


@st.composite
def overlapping_boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that cover a tensor; some of it several times."""
    boxes = draw(disjoint_boxes(shape))
    for _ in range(draw(st.integers(0, 2))):
        start = tuple(draw(st.integers(0, size)) for size in shape)
        stop = tuple(draw(st.integers(low, size)) for low, size in zip(start, shape, strict=True))
        boxes.append(Box(start, stop))
    return draw(st.permutations(boxes))


def write_counting(
    folder: Path, *names: str, shape: tuple[int, ...] = (4, 2), dtype: str = "f4"
) -> Path:
    """A folder with one file of tensors of these names: numbers that count up, from others each."""
    folder.mkdir()
    count = int(np.prod(shape))
    arrays = {
        name: np.arange(count, dtype=dtype).reshape(shape) + at for at, name in enumerate(names)
    }
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
