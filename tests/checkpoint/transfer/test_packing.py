"""Small tensors are read, digested and written together, with the same result as one by one."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import reshard as rs
from reshard import checkpoint
from reshard.checkpoint.catalog import StoredPiece, StoredTensor
from reshard.checkpoint.integrity import digest
from reshard.checkpoint.integrity.checksums import SIDECAR
from reshard.checkpoint.transfer.packing import CELLS, Pack, Write, joined_writes, tiles
from reshard.dtypes import itemsize
from reshard.layout.box import Box, row_major
from tests.checkpoint.making import cut, disjoint_boxes, header, overlapping_boxes
from tests.soak import cases, soaking

SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


class Files:
    """Files in memory, and how often they were read."""

    def __init__(self, count: int) -> None:
        self.contents = [bytearray(os.urandom(7)) for _ in range(count)]
        self.num_reads = 0

    def put(self, file: int, gap: int, data: bytes) -> int:
        content = self.contents[file]
        content += os.urandom(gap)
        content += data
        return len(content) - len(data)

    def read_into(self, file: int, offset: int, buffer: memoryview) -> None:
        data = self.contents[file][offset : offset + len(buffer)]
        assert len(data) == len(buffer)
        buffer[:] = data
        self.num_reads += 1


def put(data: st.DataObject, array: np.ndarray[Any, Any], files: Files) -> list[StoredPiece]:
    """Store an array in disjoint boxes, some of them column by column."""
    pieces = []
    for box in data.draw(disjoint_boxes(array.shape)):
        part = cut(array, box)
        turned = part.ndim > 1 and data.draw(st.booleans())
        stored = part.T if turned else part
        strides = row_major(box.shape[::-1])[::-1] if turned else row_major(box.shape)
        gap = data.draw(st.sampled_from([0, 0, 3, 5000]))
        file = data.draw(st.integers(0, len(files.contents) - 1))
        pieces.append(StoredPiece(box, file, files.put(file, gap, stored.tobytes()), strides))
    return pieces


@settings(max_examples=cases(35, 3000), deadline=None)
@given(st.data())
def test_a_pack_holds_its_tensors_one_after_the_other(data: st.DataObject) -> None:
    files, arrays, tensors = Files(2), [], []
    for shape in data.draw(st.lists(SHAPES, min_size=1, max_size=6)):
        dtype = data.draw(st.sampled_from(["uint8", "bfloat16", "float32", "int64", "complex128"]))
        width = itemsize(dtype)
        size = int(np.prod(shape, dtype=int)) * width
        array = np.frombuffer(os.urandom(size), dtype=CELLS[width]).reshape(shape)
        arrays.append(array)
        tensors.append(StoredTensor("w", shape, dtype, tuple(put(data, array, files))))
    total = sum(tensor.num_bytes for tensor in tensors)
    pack = Pack(tensors, np.empty(total + 9, dtype=np.uint8))
    pack.read(np.empty(total + 20_000, dtype=np.uint8), files.read_into)
    assert pack.buffer[:total].tobytes() == b"".join(array.tobytes() for array in arrays)
    numbers = [int.from_bytes(array.tobytes(), "little") for array in arrays]
    assert pack.digests() == [number % digest.MODULUS for number in numbers]
    for number, array in enumerate(arrays):
        for box in data.draw(disjoint_boxes(array.shape)):
            assert bytes(pack.bytes_of(number, box)) == cut(array, box).tobytes()


def test_a_pack_is_read_in_little_memory() -> None:
    """What a tensor takes while it is read, besides its bytes, as a pack may have 100,000."""
    count, files = 4096, Files(1)
    files.contents[0] += bytes(64 * count)
    pieces = [StoredPiece(Box((0,), (64,)), 0, 64 * n, (1,)) for n in range(count)]
    tensors = [StoredTensor(f"w{n}", (64,), "uint8", (piece,)) for n, piece in enumerate(pieces)]
    pack, scratch = (np.empty(64 * count, np.uint8) for _ in range(2))
    tracemalloc.start()
    try:
        Pack(tensors, pack).read(scratch, files.read_into)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert files.num_reads == 1
    assert most / count < 350


@settings(max_examples=cases(60, 5000), deadline=None)
@given(st.data())
def test_what_is_seen_to_be_whole_is_whole(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    drawn = data.draw(st.one_of(disjoint_boxes(shape), overlapping_boxes(shape)))
    boxes = data.draw(st.lists(st.sampled_from(drawn), unique=True)) if drawn else []
    boxes = data.draw(st.sampled_from([boxes, drawn]))
    count = np.zeros(shape, dtype=int)
    for box in boxes:
        cut(count, box)[...] += 1
    pieces = [StoredPiece(box, 0, 0, row_major(box.shape)) for box in boxes]
    if tiles(shape, pieces):
        assert (count == 1).all()
    if len(boxes) == 1 and (count == 1).all():
        assert tiles(shape, pieces)


def test_ranges_that_follow_each_other_are_written_as_one() -> None:
    writes: list[Write] = [(0, 8, b"x"), (0, 10, b"y"), (1, 0, b"abcd"), (1, 4, b"ef")]
    assert list(joined_writes(writes)) == [(0, 8, b"x"), (0, 10, b"y"), (1, 0, b"abcdef")]


def write_many(folder: Path, count: int) -> None:
    """A Hugging Face folder of tiny tensors: 120 bytes each, as a mixture of experts has them."""
    folder.mkdir()
    shapes = [(4, 8), (24,), (4, 8), (8, 4)]
    entries = {
        f"layers.{n // 400}.experts.{n % 400 // 4}.{'abcd'[n % 4]}.weight": (
            "F32",
            shapes[n % 4],
            4 * int(np.prod(shapes[n % 4])),
        )
        for n in range(count)
    }
    total = sum(size for _, _, size in entries.values())
    content = header(entries, {"format": "pt"}) + np.random.default_rng(0).bytes(total)
    (folder / "model.safetensors").write_bytes(content)


TARGETS: dict[str, dict[str, Any]] = {
    "sharded": {"mesh": "tp=2", "layouts": {"*": "tp ..."}},
    "distcp": {"format": "distcp"},
    "full": {"format": "full", "dtype": "bfloat16"},
}


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Calls of Python and C functions in all threads, and system calls that read and write."""
    counts = {"calls": 0, "preadv": 0, "pread": 0, "pwrite": 0}

    def note(frame: object, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            counts["calls"] += 1

    def counted(name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def one(*given: Any) -> Any:
            counts[name] += 1
            return call(*given)

        return one

    patches = [patch.object(os, name, counted(name)) for name in ("preadv", "pread", "pwrite")]
    for each in patches:
        each.start()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield counts
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        for each in patches:
            each.stop()


@pytest.mark.parametrize("target", TARGETS)
def test_many_tensors_cost_little_each(target: str, tmp_path: Path) -> None:
    """What a further tensor costs, counted, so that it is the same on any machine."""
    found = []
    for count in (4, 60, 260):  # the first imports what is needed
        source, made = tmp_path / f"{count}", tmp_path / f"{count}-made"
        write_many(source, count)
        with counting() as converting:
            checkpoint.convert(source, made, **TARGETS[target])
        with counting() as verifying:
            report = checkpoint.verify(made)
        assert report.ok
        assert report.num_tensors == count
        found.append((converting, verifying))
    for least, most, limit in zip(*found[1:], (700, 1000), strict=True):
        assert (most["calls"] - least["calls"]) / 200 < limit
        assert most["preadv"] + most["pwrite"] < least["preadv"] + least["pwrite"] + 20
    sizes = json.loads((tmp_path / "260-made" / SIDECAR).read_text())["files"]
    assert sum(len(entry["ends"]) for entry in sizes.values()) < 20


SCRIPT = """
import resource, sys
import reshard as rs
from reshard import checkpoint
source, target, what = sys.argv[1:]
if what == "verify":
    assert checkpoint.verify(target).ok
elif what == "compare":
    assert checkpoint.verify(source, target).ok
else:
    options = {"sharded": {"mesh": "tp=2", "layouts": {"*": "tp ..."}},
               "distcp": {"format": "distcp"}, "full": {"format": "full"}}[what]
    checkpoint.convert(source, target, **options)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.skipif(not soaking(), reason="a minute; make soak runs it")
@pytest.mark.parametrize("target", ["sharded", "distcp", "full"])
def test_a_hundred_thousand_tensors(target: str, tmp_path: Path) -> None:
    write_many(tmp_path / "source", 100_000)
    for what, seconds in ((target, 10), ("verify", 20), ("compare", 20)):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        words = [str(tmp_path / "source"), str(tmp_path / "target"), what]
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert spent < seconds, what
        assert int(done.stdout) < 400 << 10, what


@pytest.mark.parametrize("words", ["- x:4", "- x{8,6}", "- x~"])
def test_boxes_between_each_others_rows(tmp_path: Path, words: str) -> None:
    """Blocks, segments and zig-zag halves of columns lie row by row in a rank's file."""
    tensor = np.arange(2 * 14, dtype=np.int32).reshape(2, 14)
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    save_file({"w": tensor}, source / "model.safetensors")
    layout = rs.Layout(rs.Mesh(x=2), words)
    checkpoint.convert(source, target, layouts={"w": layout}, format="ranks")
    assert checkpoint.verify(source, target).ok


def test_a_small_view_of_a_large_storage_is_not_packed(tmp_path: Path) -> None:
    """A column of a matrix: 4 kB of elements that span 16 MB of their file."""
    torch = pytest.importorskip("torch")
    matrix = torch.arange(1000 * 4000, dtype=torch.float32).reshape(1000, 4000)
    (tmp_path / "source").mkdir()
    torch.save({"w": matrix[:, 5], "b": torch.ones(4)}, tmp_path / "source" / "model.pt")
    checkpoint.convert(tmp_path / "source", tmp_path / "target")
    assert (
        load_file(tmp_path / "target" / "model.safetensors")["w"].tolist() == matrix[:, 5].tolist()
    )
    assert checkpoint.verify(tmp_path / "source", tmp_path / "target").ok
