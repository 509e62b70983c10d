"""Checksums find every changed byte, whichever way the bytes are written and read."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from reshard.checkpoint import convert, verify
from reshard.checkpoint.formats.reader import open_storage
from reshard.checkpoint.integrity import checksums
from reshard.checkpoint.integrity.checksums import (
    SIDECAR,
    Checker,
    Checksums,
    ChunkSum,
    FileSums,
    file_sums,
    sums_of,
)
from reshard.checkpoint.storage.local import StoredFile
from reshard.errors import CheckpointError, DamageError, UnsupportedError
from tests.soak import cases

DATA = bytes(range(200)) * 5


def ranges(size: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """A file of this size in consecutive ranges, in any order."""
    cuts = st.lists(st.integers(0, size), max_size=8, unique=True)
    whole = cuts.map(lambda at: sorted({0, size, *at}))
    return whole.map(lambda at: list(pairwise(at))).flatmap(st.permutations)


def recorded(data: bytes, parts: list[tuple[int, int]]) -> Checksums:
    sums = [one for start, stop in parts for one in sums_of(0, start, data[start:stop])]
    return Checksums(file_sums([StoredFile("f", len(data))], sums), {"w": "00ff"})


@settings(max_examples=cases(35, 2000), deadline=None)
@given(st.data())
def test_any_reads_of_any_writes_find_a_flipped_bit(data: st.DataObject) -> None:
    checks = recorded(DATA, data.draw(ranges(len(DATA))))
    raw = bytearray(DATA)
    reads = data.draw(ranges(len(DATA)))
    assert _read_all(checks, bytes(raw), reads) is None
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert "changed since they were written" in (_read_all(checks, bytes(raw), reads) or "")


class _Held:
    """A storage of one file."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.data[offset : offset + len(buffer)]


def _read_all(checks: Checksums, raw: bytes, reads: list[tuple[int, int]]) -> str | None:
    checker = Checker(checks, "ckpt")
    try:
        for start, stop in reads:
            checker.check("f", start, raw[start:stop])
        checker.finish(_Held(raw))  # type: ignore[arg-type]
    except DamageError as error:
        return str(error)
    return None


def test_reads_in_order_need_no_second_look() -> None:
    checker = Checker(recorded(DATA, [(0, 300), (300, 1000)]), "ckpt")
    for start in range(0, 1000, 70):
        checker.check("f", start, DATA[start : start + 70])
    assert checker.finish(_Held(b"")) == 0  # type: ignore[arg-type]


def test_a_chunk_seen_in_part_is_read_again() -> None:
    checker = Checker(recorded(DATA, [(0, 300), (300, 1000)]), "ckpt")
    checker.check("f", 100, DATA[100:350])
    assert checker.finish(_Held(DATA)) == 1000  # type: ignore[arg-type]


def test_long_writes_become_chunks() -> None:
    data = memoryview(bytes(2 * checksums.CHUNK + 5))
    ends = [stop for _, _, stop, _ in sums_of(0, 0, data)]
    assert ends == [checksums.CHUNK, 2 * checksums.CHUNK, len(data)]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([(0, 4), (6, 10)], "bytes 4 to 6 of 10 were written never"),
        ([(0, 4)], "bytes 4 to 10 of 10 were written never"),
        ([(0, 7), (5, 10)], "bytes 5 to 7 of 10 were written twice"),
        ([(0, 7), (7, 12)], "bytes 10 to 12 of 10 were written twice"),
    ],
)
def test_bytes_forgotten_or_written_twice_are_noticed(
    parts: list[tuple[int, int]], words: str
) -> None:
    sums = [one for start, stop in parts for one in sums_of(0, start, bytes(stop - start))]
    with pytest.raises(CheckpointError, match=words):
        file_sums([StoredFile("f", 10)], sums)


def test_writes_come_in_any_order() -> None:
    parts = [(0, 300), (300, 1000)]
    assert recorded(DATA, parts[::-1]) == recorded(DATA, parts)


def test_the_sidecar_survives_a_round_trip_and_no_other_change() -> None:
    checks = recorded(DATA, [(0, 300), (300, 1000)])
    text = checks.to_bytes()
    assert Checksums.from_bytes(text) == checks
    assert set(json.loads(text)) == {"reshard-checksums", "files", "digests", "checksum"}
    for at in range(len(text)):
        for bit in (0, 5):
            changed = bytearray(text)
            changed[at] ^= 1 << bit
            with pytest.raises(DamageError, match="without checksums"):
                Checksums.from_bytes(bytes(changed))
    for length in range(len(text)):
        with pytest.raises(DamageError):
            Checksums.from_bytes(text[:length])


def sealed(data: object) -> bytes:
    """A hostile sidecar: what it says makes no sense, and its own checksum is right."""
    body = json.dumps(data).encode()[:-1] + b",\n"
    return body + checksums._seal(body)


@pytest.mark.parametrize(
    "data",
    [
        {"reshard-checksums": 2},
        {"reshard-checksums": 2, "files": [], "digests": {}},
        {"reshard-checksums": 2, "files": {"f": 3}, "digests": {}},
        {"reshard-checksums": 2, "files": {"f": {"ends": [3], "sums": ""}}, "digests": {}},
        {
            "reshard-checksums": 2,
            "files": {"f": {"ends": [3, 3], "sums": "00" * 32}},
            "digests": {},
        },
        {"reshard-checksums": 2, "files": {"f": {"ends": [-3], "sums": "00" * 16}}, "digests": {}},
        {"reshard-checksums": 2, "files": {"f": {"ends": [1.5], "sums": "00" * 16}}, "digests": {}},
        {"reshard-checksums": 2, "files": {"f": {"ends": "3", "sums": "00" * 16}}, "digests": {}},
        {"reshard-checksums": 2, "files": {"f": {"ends": [3], "sums": "zz" * 16}}, "digests": {}},
        {"reshard-checksums": 2, "files": {"f": {"ends": [3], "sums": 7}}, "digests": {}},
        {"reshard-checksums": 2, "files": {"../f": {"ends": [], "sums": ""}}, "digests": {}},
        {"reshard-checksums": 2, "files": {"/f": {"ends": [], "sums": ""}}, "digests": {}},
        {"reshard-checksums": 2, "files": {}, "digests": {"w": 3}},
        {"reshard-checksums": 2, "files": {}, "digests": {"w": [[[]]]}},
    ],
)
def test_a_hostile_sidecar_is_refused(data: object) -> None:
    with pytest.raises(DamageError, match=r"is not what reshard writes .* restore it from a copy"):
        Checksums.from_bytes(sealed(data))


@pytest.mark.parametrize("version", [3, 1, None, "x", [2]])
def test_a_sidecar_of_another_version_is_not_damaged(version: object) -> None:
    """A newer reshard wrote it: a copy from a backup would not help."""
    with pytest.raises(UnsupportedError, match=r"is of version .* and this reshard reads 2: use"):
        Checksums.from_bytes(sealed({"reshard-checksums": version, "files": {}, "digests": {}}))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@settings(max_examples=cases(60, 10_000), deadline=None)
@given(
    st.fixed_dictionaries(
        {"reshard-checksums": st.just(1) | json_values},
        optional={
            "files": json_values
            | st.dictionaries(
                st.text("ab/.", max_size=5),
                st.fixed_dictionaries(
                    {"ends": json_values | st.lists(st.integers(-2, 9)), "sums": json_values}
                ),
            ),
            "digests": json_values,
        },
    )
)
def test_any_sealed_json_is_read_or_refused(data: object) -> None:
    with suppress(DamageError, UnsupportedError):
        found = Checksums.from_bytes(sealed(data))
        assert Checksums.from_bytes(found.to_bytes()) == found


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a": ' + b"9" * 5000, b"\xff\xfe{", b"[1"])
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(DamageError):
        Checksums.from_bytes(body + checksums._seal(body))


@pytest.mark.parametrize("form", ["full", "sharded", "distcp", "ranks"])
@pytest.mark.parametrize("shape", [(), (16, 3)])
def test_whatever_is_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, shape: tuple[int, ...]
) -> None:
    """Many small boxes, with names that are longer as JSON than in the header of a file."""
    monkeypatch.setattr(checksums, "ROOM", 0)
    tensors = {f"weight.\u00e9.{i}": np.full(shape, i, np.int8) for i in range(40)}
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    layouts = {"*": "x ..." if shape else "..."}
    cut = {} if form == "full" else {"mesh": "x=4", "layouts": layouts}
    convert(tmp_path / "in", tmp_path / "out", format=form, **cut)
    assert verify(tmp_path / "in", tmp_path / "out").ok
    convert(tmp_path / "out", tmp_path / "back", format="full")
    assert verify(tmp_path / "in", tmp_path / "back").ok
    one = next(iter(sorted((tmp_path / "back").glob("*.safetensors"))))
    assert verify(one).ok


def test_a_sidecar_of_holes_takes_no_memory(tmp_path: Path) -> None:
    """Sparse files cost nothing, however long they are."""
    for name in (SIDECAR, "model.safetensors"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 1 << 40)
    with open_storage(tmp_path) as storage, pytest.raises(DamageError, match="zero bytes"):
        checksums.load_checksums(storage)


def test_a_sidecar_without_end_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    with (tmp_path / SIDECAR).open("wb") as file:
        file.truncate(1 << 40)
    with open_storage(tmp_path) as storage, pytest.raises(DamageError, match="at most"):
        checksums.load_checksums(storage)


def test_load(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(DATA)
    with open_storage(tmp_path) as storage:
        assert checksums.load_checksums(storage) is None
    checks = recorded(DATA, [(0, 1000)])
    (tmp_path / SIDECAR).write_bytes(checks.to_bytes())
    for root in (tmp_path, tmp_path / "f"):
        with open_storage(root) as storage:
            assert checksums.load_checksums(storage) == checks


def test_chunks_that_a_range_touches() -> None:
    sums = FileSums((10, 20, 30), bytes(48))
    assert sums.size == 30
    assert sums.chunk(1) == ChunkSum(10, 20, bytes(16))
    assert list(sums.touching(0, 10)) == [0]
    assert list(sums.touching(9, 11)) == [0, 1]
    assert list(sums.touching(10, 30)) == [1, 2]
    assert list(sums.touching(25, 99)) == [2]
    assert list(sums.touching(30, 99)) == []
    assert list(sums.touching(5, 5)) == []
    assert FileSums((), b"").size == 0


def test_the_documents_show_a_sidecar_of_this_version() -> None:
    text = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    shown = json.loads(text.partition("```json\n")[2].partition("```")[0])
    written = json.loads(Checksums({}, {}, shown["request"]).to_bytes())
    assert shown["reshard-checksums"] == written["reshard-checksums"]
    assert shown.keys() == written.keys()
