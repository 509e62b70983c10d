"""The CRC-32 that torch writes is compared by every reader, without reading a byte twice."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard import checkpoint
from reshard.checkpoint.catalog import Crc
from reshard.checkpoint.formats.reader import as_mesh, as_rules, open_storage, read_catalog
from reshard.checkpoint.integrity.crcs import Crcs, combine
from reshard.checkpoint.publish.journal import Team
from reshard.errors import CheckpointError, DamageError
from tests.checkpoint.converting import small_windows
from tests.soak import within

torch = pytest.importorskip("torch")
write_distcp = pytest.importorskip("tests.checkpoint.torch_writers").write_distcp

RULES = 'axes = ["tp"]\n[tensors]\n"w" = "tp -"\n"b" = "-"\n'


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_combining(left: bytes, right: bytes) -> None:
    assert combine(crc32(left), crc32(right), len(right)) == crc32(left + right)


def test_combining_what_is_long() -> None:
    data = Random(0).randbytes(3 << 20)
    for at in (1, 4096, (2 << 20) + 5):
        assert combine(crc32(data[:at]), crc32(data[at:]), len(data) - at) == crc32(data)


@given(st.data())
def test_any_reads_give_the_same(data: st.DataObject) -> None:
    """Ranges that overlap, touch several records or leave gaps; only what is left is read."""
    content = data.draw(st.binary(min_size=30, max_size=60))
    cuts = sorted({0, len(content), *data.draw(st.lists(st.integers(0, len(content)), max_size=3))})
    spans = [(low, high) for low, high in itertools.pairwise(cuts) if high - low > 1]
    records = [Crc(3, low, high - low, crc32(content[low:high])) for low, high in spans]
    crcs, seen = Crcs(records), set[int]()
    for _ in range(data.draw(st.integers(0, 5))):
        low = data.draw(st.integers(0, len(content)))
        high = data.draw(st.integers(low, len(content)))
        crcs.add(crcs.parts(3, low, content[low:high]))
        seen |= set(range(low, high))

    def unread(file: int, start: int, stop: int) -> int:
        assert file == 3
        assert start < stop
        return crc32(content[start:stop])

    found = list(crcs.values(unread))
    assert all(crc.value == now for crc, now in found)
    assert {crc for crc, _ in found} >= {c for c in records if c.offset in seen}
    assert not list(crcs.values(unread))
    assert crcs.parts(2, 0, content) == []


def made(folder: Path, kind: str) -> Path:
    """Tensors as torch saves them: one file, a .distcp folder, or a file of each rank."""
    folder.mkdir()
    state = {"w": torch.arange(4096.0).reshape(64, 64), "b": torch.ones(5, dtype=torch.bfloat16)}
    if kind == "torch":
        torch.save({**state, "step": 7}, folder / "model.pt")
    elif kind == "distcp":
        write_distcp(folder, 2, {"w": (state["w"], 0), "b": (state["b"], None), "step": 7})
    else:
        for rank in range(2):
            part = {"w": state["w"].chunk(2)[rank].clone(), "b": state["b"]}
            torch.save(part, folder / f"model-rank-{rank}-part-0.pt")
        (folder.parent / "cut.toml").write_text(RULES)
    return folder


def how(folder: Path, kind: str) -> dict[str, Any]:
    return {"rules": folder.parent / "cut.toml", "mesh": "tp=2"} if kind == "ranks" else {}


def readers(here: Path, kind: str, out: Path) -> dict[str, Callable[[], object]]:
    """Everything that reads a checkpoint; each is given a new target."""
    given = how(here, kind)
    of_source = {f"source_{key}": value for key, value in given.items()}

    def convert(name: str, **options: Any) -> None:
        with small_windows(4096):
            checkpoint.convert(here, out / name, **of_source, **options)

    def equal(*others: Path) -> None:
        report = checkpoint.verify(here, *others, **given)
        if not report.ok:
            raise DamageError(report.problems[0].message)

    def load() -> None:
        into = {"w": torch.zeros(64, 64), "b": torch.zeros(5, dtype=torch.bfloat16)}
        checkpoint.load(here, into=into, **given)

    return {
        "full": lambda: convert("full"),
        "cast": lambda: convert("cast", dtype="float16"),
        "columns": lambda: convert("columns", mesh="x=3", layouts={"w": "- x", "b": "-"}),
        "load": load,
        "verify": equal,
        "verify two": lambda: equal(out / "copy"),
        "diff": lambda: checkpoint.diff(here, out / "copy", **given),
    }


@pytest.mark.parametrize("kind", ["torch", "distcp", "ranks"])
def test_every_reader_notices_a_flipped_bit(tmp_path: Path, kind: str) -> None:
    """A conversion would bless it with new checksums."""
    here, out = made(tmp_path / "here", kind), tmp_path / "out"
    of_source = {f"source_{key}": value for key, value in how(here, kind).items()}
    checkpoint.convert(here, out / "copy", **of_source)
    for name, read in readers(here, kind, out / "sound").items():
        if name in ("verify two", "diff"):
            continue
        read()
    with open_storage(here) as storage:
        rules = how(here, kind)
        loaded = as_rules(rules.get("rules"), storage)
        catalog = read_catalog(storage, loaded, as_mesh(rules.get("mesh")))
    piece = catalog.tensors["w"].pieces[-1]
    path = here / catalog.files[piece.file].path
    data = bytearray(path.read_bytes())
    data[piece.offset + 1001] ^= 16
    path.write_bytes(data)
    for name, read in readers(here, kind, out).items():
        with pytest.raises(CheckpointError, match=r'changed since torch saved them.*\(tensor "w"'):
            read()
        assert not (out / name).exists()
    checkpoint.convert(here, out / "unchecked", checksums=False, **of_source)
    into = {"w": torch.zeros(64, 64)}
    checkpoint.load(here, into=into, check=False, strict=False, **how(here, kind))


@pytest.mark.parametrize("kind", ["torch", "distcp"])
@pytest.mark.parametrize("what", ["pickle", "entry"])
def test_what_is_no_tensor_is_compared_too(tmp_path: Path, kind: str, what: str) -> None:
    """A changed pickle may give tensors other names; a changed entry another step."""
    here = made(tmp_path / "here", kind)
    step = b"K\x07u" if kind == "torch" else b"K\x07."
    old, new = (b"_utils", b"_utilt") if what == "pickle" else (step, b"K\x08" + step[2:])
    paths = [*here.glob("*.pt"), *here.glob("*.distcp")]
    path = next(path for path in paths if old in path.read_bytes())
    path.write_bytes(path.read_bytes().replace(old, new))
    assert not checkpoint.verify(here).ok
    for form in ("distcp", "full"):
        with pytest.raises(CheckpointError, match="changed since torch saved"):
            checkpoint.convert(here, tmp_path / form, format=form)


@pytest.mark.parametrize("end", ["head", "tail"])
def test_an_entry_whose_archive_is_damaged_is_damage(tmp_path: Path, end: str) -> None:
    """It is no entry of another kind, which would be left out."""
    here = made(tmp_path / "here", "distcp")
    with open_storage(here) as storage:
        catalog = read_catalog(storage)
    entry = catalog.objects["step"]
    path = here / catalog.files[entry.file].path
    data = bytearray(path.read_bytes())
    data[entry.offset if end == "head" else entry.offset + entry.size - 22] ^= 4
    path.write_bytes(data)
    report = checkpoint.verify(here)
    assert [problem.kind for problem in report.problems] == ["damage"]
    assert set(report.digests) == {"w", "b"}
    for form in ("distcp", "full"):
        with pytest.raises(DamageError, match=r'\(entry "step" cannot be read\): restore'):
            checkpoint.convert(here, tmp_path / form, format=form)
    assert [*tmp_path.iterdir()] == [here]


def test_no_byte_is_read_twice(tmp_path: Path) -> None:
    """Of a storage that is only used in part the rest is read, once."""
    here = made(tmp_path / "here", "torch")
    with small_windows(1024):
        report = checkpoint.convert(here, tmp_path / "out", mesh="x=3", layouts={"*": "x ..."})
    assert report.bytes_read == report.unique_bytes == 64 * 64 * 4 + 5 * 2
    (tmp_path / "views").mkdir()
    whole = torch.arange(1000.0)
    torch.save({"a": whole[:100], "b": whole[50:200]}, tmp_path / "views" / "model.pt")
    report = checkpoint.convert(tmp_path / "views", tmp_path / "parts")
    assert report.bytes_read == 1000 * 4  # both views together, and then the rest
    report = checkpoint.load(tmp_path / "views", into={"a": torch.zeros(100)}, strict=False)
    assert report.bytes_read == 1000 * 4


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_resumed_conversion_compares_what_was_read_before(tmp_path: Path, when: str) -> None:
    here = made(tmp_path / "here", "torch")
    data = bytearray((here / "model.pt").read_bytes())
    at = data.index(torch.arange(4096.0)[64:128].numpy().tobytes())
    data[at] ^= when == "before"
    (here / "model.pt").write_bytes(data)

    def stop(done: int, total: int) -> None:
        if done > 6000:
            raise KeyboardInterrupt

    with small_windows(1024, workers=1), pytest.raises(KeyboardInterrupt):
        checkpoint.convert(here, tmp_path / "out", progress=stop)
    if when == "before":
        with pytest.raises(DamageError, match="changed since torch saved them"):
            checkpoint.convert(here, tmp_path / "out", resume=True)
        return
    report = checkpoint.convert(here, tmp_path / "out", resume=True)
    assert report.bytes_read + report.bytes_resumed == report.unique_bytes
    assert report.bytes_resumed > 6000


def test_ranks_that_convert_together_compare_what_each_has_read(tmp_path: Path) -> None:
    here = made(tmp_path / "here", "torch")
    results: dict[Any, Any] = {}

    def work(name: str, rank: int) -> None:
        try:
            team = Team(rank, 3, 20)
            results[name, rank] = checkpoint.convert(here, tmp_path / name, team=team)
        except CheckpointError as error:
            results[name, rank] = error

    for name in ("sound", "damaged"):
        if name == "damaged":
            data = bytearray((here / "model.pt").read_bytes())
            data[data.index(torch.arange(4096.0)[64:128].numpy().tobytes())] ^= 1
            (here / "model.pt").write_bytes(data)
        with small_windows(1024, workers=1):
            threads = [threading.Thread(target=work, args=(name, rank)) for rank in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    reports = [results["sound", rank] for rank in range(3)]
    assert sum(report.bytes_read for report in reports) == reports[0].unique_bytes
    assert isinstance(results["damaged", 0], DamageError)
    assert all(isinstance(results["damaged", rank], CheckpointError) for rank in range(3))
    assert not (tmp_path / "damaged").exists()


def test_a_file_in_which_everything_changed_is_verified_in_time(tmp_path: Path) -> None:
    """The tensors of all changed records are looked up together."""
    torch.save({f"w{number}": torch.zeros(8) for number in range(8000)}, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(data.replace(bytes(32), b"\1" * 32))
    began = time.process_time()
    report = checkpoint.verify(tmp_path)
    assert time.process_time() - began < within(8)
    assert len(report.problems) == 1000
    assert re.search(r"CRC-32 is .* \(tensor \"w0\"\)", report.problems[0].message)
    assert {problem.tensor for problem in report.problems} < {f"w{n}" for n in range(8000)}
