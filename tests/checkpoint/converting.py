"""Random conversions for tests: tensors of all dtypes, layouts of all words, small windows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from unittest.mock import patch

import numpy as np
from safetensors import safe_open

from reshard.checkpoint.transfer.windows import Budget
from reshard.layout.box import Box
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from tests import generate
from tests.checkpoint.making import random_array, write_sharded
from tests.checkpoint.making import raw as raw_bytes

DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
    "float64", "complex64", "float8_e4m3fn",
)  # fmt: skip

Tensors = dict[str, tuple[str, np.ndarray]]


def random_tensors(rng: Random, at_most: int = 4) -> Tensors:
    found: Tensors = {}
    for number in range(rng.randint(1, at_most)):
        dtype, shape = rng.choice(DTYPES), generate.shape(rng)
        array = random_array(dtype, shape, rng.randrange(1 << 30))
        found[f"layer.{number}.w"] = dtype, array % 2 if dtype == "bool" else array
    return found


def random_layouts(rng: Random, tensors: Tensors) -> dict[str, Layout]:
    """A layout for every tensor, all on one mesh."""
    on = generate.mesh(rng)
    mesh = Mesh.parse(str(on))
    return {
        name: Layout(mesh, generate.layout(rng, on, array.shape))
        for name, (_, array) in tensors.items()
    }


def write_source(folder: Path, tensors: Tensors, rng: Random, checksums: int | None = None) -> None:
    """Sharded safetensors, cut at random along random dims."""
    cuts = {name: random_cuts(rng, array.shape) for name, (_, array) in tensors.items()}
    write_sharded(folder, tensors, cuts, checksums)


def random_cuts(rng: Random, shape: tuple[int, ...]) -> list[Box]:
    boxes = [Box.whole(shape)]
    for _ in range(rng.randint(0, 3) if shape and 0 not in shape else 0):
        box = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        parts = box.split(dim, rng.randint(box.start[dim], box.stop[dim]))
        boxes += [part for part in parts if part.size]
    rng.shuffle(boxes)
    return boxes


@contextmanager
def small_windows(window: int, workers: int = 2) -> Iterator[None]:
    """Conversions within copy in windows of so many bytes."""
    budget = Budget(workers, window)
    with patch.object(Budget, "of", classmethod(lambda cls, *_: budget)):
        yield


def read_full(folder: Path) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """All tensors of whole safetensors files, by the safetensors library's own header reader."""
    found = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        with safe_open(path, "np") as file:
            names = list(file.keys())
        header = json.loads(data[8:start])
        for name in names:
            low, high = header[name]["data_offsets"]
            found[name] = tuple(header[name]["shape"]), data[start + low : start + high]
    return found


def assert_equal(folder: Path, tensors: Mapping[str, tuple[str, np.ndarray]]) -> None:
    found = read_full(folder)
    assert set(found) == set(tensors)
    for name, (_, array) in tensors.items():
        assert found[name] == (array.shape, raw_bytes(array)), name
