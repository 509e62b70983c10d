"""Writes past the page cache put the same bytes in the same places, or let others do it."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.checkpoint.storage import output_files
from reshard.checkpoint.storage.local import StoredFile
from reshard.checkpoint.storage.output_files import BLOCK, OutputFiles, aligned, whole_blocks
from reshard.errors import UnfinishedError
from tests.soak import cases

SIZE = 40 * BLOCK + 123


def new_files(folder: Path) -> OutputFiles:
    files = OutputFiles(folder, [StoredFile("a.bin", SIZE)])
    files.allocate()
    return files


def written(files: OutputFiles) -> bytes:
    files.sync()
    files.close()
    return (files.folder / "a.bin").read_bytes()


def in_memory(data: bytes, shift: int) -> memoryview:
    """The bytes at an address that is so many bytes behind a multiple of a block."""
    memory = aligned(len(data) + BLOCK)[shift : shift + len(data)]
    memory[...] = np.frombuffer(data, np.uint8)
    return memory.data


@given(st.integers(0, 10**7), st.integers(0, 10**6))
def test_whole_blocks_are_all_there_are(offset: int, length: int) -> None:
    low, high = whole_blocks(offset, length)
    assert 0 <= low <= high <= length
    blocks = {at // BLOCK for at in range(-(-offset // BLOCK) * BLOCK, offset + length, BLOCK)}
    whole = {block for block in blocks if (block + 1) * BLOCK <= offset + length}
    assert high - low == len(whole) * BLOCK
    assert not whole or ((offset + low) % BLOCK, (offset + high) % BLOCK) == (0, 0)


@settings(max_examples=cases(25, 500), deadline=None)
@given(
    ends=st.lists(st.integers(1, SIZE - 1), max_size=6, unique=True),
    shift=st.one_of(st.none(), st.integers(0, BLOCK - 1)),
    seed=st.integers(0, 99),
    most_copied=st.sampled_from([BLOCK, 3 * BLOCK, 1 << 20]),
)
def test_ranges_in_any_order_make_the_file(
    tmp_path_factory: pytest.TempPathFactory,
    ends: list[int],
    shift: int | None,
    seed: int,
    most_copied: int,
) -> None:
    """In memory as in the file (None), or anywhere else; by several threads."""
    data, bounds = np.random.default_rng(seed).bytes(SIZE), [0, *sorted(ends), SIZE]
    ranges = list(pairwise(bounds))
    np.random.default_rng(seed).shuffle(ranges)
    files = new_files(tmp_path_factory.mktemp("direct"))

    def write(bounds: tuple[int, int]) -> None:
        start, stop = map(int, bounds)
        place = start % BLOCK if shift is None else shift
        files.write(0, start, in_memory(data[start:stop], place))

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setattr(output_files, "MIN_DIRECT", 1)
        patch.setattr(output_files, "MAX_COPY", most_copied)
        list(pool.map(write, ranges))
        assert written(files) == data


def test_what_is_large_goes_past_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = new_files(tmp_path)
    if output_files.open_direct(tmp_path / "a.bin") is None:
        pytest.skip("the file system of the temporary folder is neither ext4 nor xfs")
    sizes = list[int]()
    write = output_files.write_direct

    def counted(descriptor: int, offset: int, data: memoryview) -> int:
        sizes.append(write(descriptor, offset, data))
        return sizes[-1]

    monkeypatch.setattr(output_files, "write_direct", counted)
    monkeypatch.setattr(output_files, "MIN_DIRECT", 4 * BLOCK)
    data = os.urandom(SIZE)
    files.write(0, 0, memoryview(data)[:1000])
    files.write(0, 1000, memoryview(data)[1000:])
    assert sizes == [39 * BLOCK]
    assert written(files) == data


def fail_direct_writes(monkeypatch: pytest.MonkeyPatch, code: int, taken: int) -> list[int]:
    """Direct writes take so many bytes, or fail; the descriptors that they are written to."""
    direct, pwrite = list[int](), os.pwrite

    def open_direct(path: Path) -> int:
        direct.append(os.open(path, os.O_WRONLY))
        return direct[-1]

    def some(descriptor: int, data: memoryview, offset: int) -> int:
        if descriptor in direct and taken == 0:
            raise OSError(code, os.strerror(code))
        return pwrite(descriptor, data[:taken] if descriptor in direct else data, offset)

    monkeypatch.setattr(output_files, "open_direct", open_direct)
    monkeypatch.setattr(output_files.os, "pwrite", some)
    return direct


@pytest.mark.parametrize("taken", [0, 2 * BLOCK, 700])
def test_what_the_system_does_not_take_is_written_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    monkeypatch.setattr(output_files, "MIN_DIRECT", BLOCK)
    direct = fail_direct_writes(monkeypatch, errno.EINVAL, taken)
    files, data = new_files(tmp_path), os.urandom(SIZE)
    files.write(0, 0, memoryview(data))
    assert direct
    assert written(files) == data


def test_a_disk_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_files, "MIN_DIRECT", BLOCK)
    fail_direct_writes(monkeypatch, errno.EIO, 0)
    files = new_files(tmp_path)
    with pytest.raises(UnfinishedError, match=rf"a\.bin: bytes 0 to {SIZE} .*with --resume"):
        files.write(0, 0, memoryview(bytes(SIZE)))
    files.close()


def test_other_file_systems_are_left_to_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"a")
    monkeypatch.setattr(output_files, "FILE_SYSTEMS", frozenset())
    assert output_files.open_direct(tmp_path / "a") is None
