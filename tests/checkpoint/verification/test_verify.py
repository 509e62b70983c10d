"""verify finds every flipped bit, names its place, and shows that two layouts are equal."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from reshard.checkpoint import convert
from reshard.checkpoint.formats.reader import open_storage, read_catalog
from reshard.checkpoint.integrity.checksums import SIDECAR
from reshard.checkpoint.soundness import VerifyReport, verify
from reshard.cli import run
from reshard.errors import CheckpointError, ReshardError
from reshard.layout.box import Box
from tests.checkpoint.making import (
    CODES,
    disjoint_boxes,
    header,
    overlapping_boxes,
    random_array,
    write_sharded,
)
from tests.checkpoint.torch_writers import write_distcp
from tests.soak import cases, soaking

Tensors = dict[str, tuple[str, np.ndarray[Any, Any]]]


def small() -> Tensors:
    return {
        "w": ("float32", random_array("float32", (4, 3), 1)),
        "b": ("bfloat16", random_array("bfloat16", (5,), 2)),
        "step": ("int64", random_array("int64", (), 3)),
        "none": ("bool", random_array("bool", (0, 2))),
    }


def whole(tensors: Tensors) -> dict[str, list[Box]]:
    return {name: [Box.whole(array.shape)] for name, (_, array) in tensors.items()}


def by_rows(tensors: Tensors, count: int) -> dict[str, list[Box]]:
    """Each tensor in up to so many slabs of dim 0."""
    cuts = whole(tensors)
    for name, (_, array) in tensors.items():
        for at in range(1, count) if array.ndim and array.shape[0] >= count else ():
            rest = cuts[name].pop()
            cuts[name] += rest.split(0, array.shape[0] * at // count)
    return cuts


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_sound_checkpoint(tmp_path: Path) -> None:
    write_sharded(tmp_path, small(), by_rows(small(), 2), checksums=64)
    report = verify(tmp_path)
    assert report.ok
    assert report
    assert report.num_tensors == 4
    assert report.num_bytes == 4 * 12 + 2 * 5 + 8
    size = sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    assert report.checked_bytes == size
    assert str(report).startswith("sound: 4 tensors, 66 B, digest ")
    assert json.loads(report.to_json())["ok"] is True


@pytest.mark.parametrize("chunk", [32, 1 << 20])
def test_every_flipped_bit_is_found_and_named(tmp_path: Path, chunk: int) -> None:
    """All bytes of all files of a checkpoint, one after the other, its checksums included."""
    tensors = {name: small()[name] for name in ("w", "b", "step")}
    write_sharded(tmp_path, tensors, by_rows(tensors, 2), checksums=chunk)
    for path in sorted(tmp_path.iterdir()):
        header_end = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        size = path.stat().st_size
        step = 1 if soaking() else (9 if chunk == 32 else 23)
        for byte in range(0, size, step):
            flip(path, 8 * byte + byte % 8)
            _check_found(verify(tmp_path, memory="1MiB"), path.name, byte, header_end)
            flip(path, 8 * byte + byte % 8)
    assert verify(tmp_path).ok


def _check_found(report: VerifyReport, name: str, byte: int, header_end: int) -> None:
    assert not report.ok
    if name == SIDECAR:
        assert report.problems[0].file == SIDECAR
        return
    (found,) = [p for p in report.problems if p.kind == "damage"]
    assert found.file == name
    assert found.bytes is not None
    assert found.bytes[0] <= byte < found.bytes[1]
    if byte >= header_end:
        assert {p.tensor for p in report.problems} == {found.tensor}
        assert f'"{found.tensor}"' in found.message
        assert found.tensor in ("w", "b", "step")


def test_the_right_tensor_is_named_where_a_chunk_holds_several(tmp_path: Path) -> None:
    write_sharded(tmp_path, small(), whole(small()), checksums=1 << 20)
    (path,) = tmp_path.glob("*.safetensors")
    flip(path, 8 * (path.stat().st_size - 3))
    (problem,) = verify(tmp_path).problems
    assert problem.tensor == "step"
    flip(path, 8 * (path.stat().st_size - 3))
    flip(path, 8 * (path.stat().st_size - 12))
    (problem,) = verify(tmp_path).problems
    assert problem.tensor == "b"


@settings(max_examples=cases(15, 500), deadline=None)
@given(st.data())
def test_any_two_cuts_are_equal_and_one_flipped_bit_is_not(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(CODES)))
    shape = data.draw(st.sampled_from([(), (9,), (6, 5), (4, 3, 5), (0, 3)]))
    tensors: Tensors = {"w": (dtype, random_array(dtype, shape)), "b": small()["b"]}
    with TemporaryDirectory() as folder:
        one, two = Path(folder, "one"), Path(folder, "two")
        for side, cuts in ((one, disjoint_boxes(shape)), (two, overlapping_boxes(shape))):
            boxes = [box for box in data.draw(cuts) if box.size or not all(shape)]
            checks = data.draw(st.sampled_from([None, 16, 1 << 20]))
            write_sharded(side, tensors, {"w": boxes, "b": [Box.whole((5,))]}, checks)
        report = verify(one, two, memory="1MiB")
        assert report.ok, str(report)
        assert report.digest == verify(two).digest
        if all(shape):
            _check_one_flip(data, one, two, tensors)


def _check_one_flip(data: st.DataObject, one: Path, two: Path, tensors: Tensors) -> None:
    dtype, array = tensors["w"]
    bit = data.draw(st.integers(0, 8 * array.nbytes - 1))
    raw = bytearray(array.tobytes())
    raw[bit // 8] ^= 1 << bit % 8
    changed = np.frombuffer(raw, array.dtype).reshape(array.shape)
    shutil.rmtree(one)
    write_sharded(one, {**tensors, "w": (dtype, changed)}, whole(tensors))
    (problem,) = verify(one, two, memory="1MiB").problems
    at = bit // 8 // array.itemsize
    index = tuple(map(int, np.unravel_index(at, array.shape))) if array.ndim else ()
    assert (problem.kind, problem.tensor) == ("values", "w")
    assert problem.box == Box(index, tuple(i + 1 for i in index))
    assert problem.bytes is not None
    assert problem.file is not None
    start = problem.bytes[0]
    content = (one / problem.file).read_bytes()
    assert content[start : start + array.itemsize] == raw[at * array.itemsize :][: array.itemsize]


@pytest.mark.parametrize("format", ["full", "sharded", "distcp", "ranks"])
def test_flipped_bits_of_every_format_that_is_written(tmp_path: Path, format: str) -> None:
    write_sharded(tmp_path / "src", small(), whole(small()))
    cut = {} if format == "full" else {"mesh": "tp=2", "layouts": {"w": "tp -", "*": "..."}}
    out = tmp_path / "out"
    convert(tmp_path / "src", out, format=format, **cut)
    assert verify(tmp_path / "src", out).ok
    chance = random.Random(format)
    for path in sorted(out.iterdir()):
        for _ in range(cases(8, 200)):
            bit = chance.randrange(8 * path.stat().st_size)
            flip(path, bit)
            problems = verify(out, memory="1MiB").problems
            flip(path, bit)
            assert problems
            ranges = [p.bytes for p in problems if p.file == path.name and p.bytes]
            assert path.name == SIDECAR or any(a <= bit // 8 < b for a, b in ranges)
    assert verify(out).ok


def test_files_of_ranks_against_whole_tensors(tmp_path: Path) -> None:
    """Rules give the layout of one side, and the other records it."""
    write_sharded(tmp_path / "src", small(), whole(small()))
    rules = tmp_path / "cut.toml"
    rules.write_text('axes = ["tp"]\n[tensors]\n"w" = "tp -"\n"b" = "tp"\n"*" = "..."\n')
    ranks, bare = tmp_path / "ranks", tmp_path / "bare"
    convert(tmp_path / "src", ranks, format="ranks", mesh="tp=2", rules=str(rules))
    bare.mkdir()
    for path in ranks.glob("*.safetensors"):  # as another program would have written them
        tensors = load_file(path)
        save_file(tensors, bare / path.name)
    words = ["--rules", str(rules), "--mesh", "tp=2"]
    assert run(["verify", str(bare), str(tmp_path / "src"), *words]) == 0
    words = ["--b-rules", str(rules), "--b-mesh", "tp=2"]
    assert run(["verify", str(tmp_path / "src"), str(bare), *words]) == 0
    assert run(["diff", str(tmp_path / "src"), str(bare), *words]) == 0


def test_digests_are_made_of_the_bytes_and_not_believed(tmp_path: Path) -> None:
    """Both sides carry the same sidecar, and one of them other values."""
    one, two = tmp_path / "one", tmp_path / "two"
    for side in (one, two):
        write_sharded(side, small(), whole(small()), checksums=64)
    (path,) = two.glob("*.safetensors")
    flip(path, 8 * (path.stat().st_size - 3))
    kinds = {problem.kind for problem in verify(one, two).problems}
    assert kinds == {"damage", "values"}


def test_names_shapes_and_dtypes_that_differ(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write_sharded(one, small(), whole(small()))
    other = small()
    del other["step"]
    other["more"] = ("float32", random_array("float32", (1,)))
    other["w"] = ("float32", other["w"][1].reshape(3, 4))
    other["b"] = ("float16", other["b"][1])
    write_sharded(two, other, whole(other))
    problems = verify(one, two).problems
    assert [(p.kind, p.tensor) for p in problems] == [
        ("absent", "step"),
        ("absent", "more"),
        ("shape", "w"),
        ("dtype", "b"),
    ]
    assert "shape (4, 3) in" in problems[2].message
    assert "and (3, 4) in" in problems[2].message


def test_a_lost_piece_a_lost_file_and_a_lost_tensor(tmp_path: Path) -> None:
    cuts = by_rows(small(), 4)
    write_sharded(tmp_path, small(), cuts, checksums=64)
    third = tmp_path / "shard-00003-model-00001-of-00001.safetensors"
    content = third.read_bytes()
    third.unlink()
    report = verify(tmp_path)
    assert {p.kind for p in report.problems} >= {"hole", "absent", "unreadable"}
    hole = next(p for p in report.problems if p.kind == "hole" and p.tensor == "w")
    assert hole.box == Box((2, 0), (3, 3))
    third.write_bytes(content[:-1])
    assert any("has" in p.message and "bytes and was written with" in p.message
               for p in verify(tmp_path).problems)  # fmt: skip
    third.write_bytes(content + b"x")
    assert not verify(tmp_path).ok


def test_a_sidecar_that_knows_more_tensors(tmp_path: Path) -> None:
    write_sharded(tmp_path, small(), whole(small()), checksums=64)
    fewer = {name: tensor for name, tensor in small().items() if name != "step"}
    sidecar = (tmp_path / SIDECAR).read_bytes()
    write_sharded(tmp_path, fewer, whole(fewer), checksums=64)
    (tmp_path / SIDECAR).write_bytes(sidecar)
    assert any(p.kind == "absent" and p.tensor == "step" for p in verify(tmp_path).problems)


def test_strange_names(tmp_path: Path) -> None:
    """Whatever JSON can say: half a character, a line break, a very long one."""
    names = ["\ud800", "a\nb", "x" * 5000, "", " "]
    tensors = {name: small()["b"] for name in names}
    for side in ("one", "two"):
        write_sharded(tmp_path / side, tensors, whole(tensors), checksums=64)
    report = verify(tmp_path / "one", tmp_path / "two")
    assert report.ok
    assert set(json.loads(report.to_json())["digests"]) == set(names)
    (path,) = (tmp_path / "two").glob("*.safetensors")
    flip(path, 8 * (path.stat().st_size - 1))
    assert run(["verify", str(tmp_path / "one"), str(tmp_path / "two")]) == 1


def test_without_checksums_it_says_so(tmp_path: Path) -> None:
    write_sharded(tmp_path, small(), whole(small()))
    report = verify(tmp_path)
    assert report.ok
    assert "no checksums" in str(report)


@pytest.mark.parametrize("kind", ["distcp", "torch"])
def test_any_flipped_bit_of_a_tensor_that_torch_saved_is_found(tmp_path: Path, kind: str) -> None:
    """Torch itself loads every one of these without a word."""
    saved = {"w": torch.arange(48.0).reshape(8, 6), "b": torch.ones(5, dtype=torch.bfloat16)}
    folder = tmp_path / "ckpt"
    if kind == "distcp":
        write_distcp(folder, 2, {"w": (saved["w"], 0), "b": (saved["b"], 0)})
    else:
        folder.mkdir()
        torch.save(saved, folder / "model.pt")
    report = verify(folder)
    assert report.ok
    assert report.checked_bytes == 48 * 4 + 5 * 2
    assert "CRC-32 of torch.save" in str(report)
    with open_storage(folder) as storage:
        catalog = read_catalog(storage)
    for tensor in catalog.tensors.values():
        for piece in tensor.pieces:
            file = folder / catalog.files[piece.file].path
            stop = piece.offset + piece.num_bytes(tensor.dtype)
            for byte in (piece.offset, (piece.offset + stop) // 2, stop - 1):
                flip(file, 8 * byte + 3)
                [problem] = verify(folder).problems
                assert (problem.kind, problem.tensor, problem.file) == (
                    "damage",
                    tensor.name,
                    file.name,
                )
                assert problem.bytes == (piece.offset, stop)
                assert "\n" not in problem.message
                flip(file, 8 * byte + 3)
    assert verify(folder).ok


def test_a_crc_of_zero_says_nothing(tmp_path: Path) -> None:
    """Torch writes 0 where it was told to compute none."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(6.0)}, tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    report = verify(tmp_path / "model.pt")
    assert report.ok
    assert report.checked_bytes == 0
    assert "would not be detected" in str(report)


def test_one_file_of_a_checkpoint(tmp_path: Path) -> None:
    """A file alone is compared with its checksums, and its parts of tensors with no digest."""
    write_sharded(tmp_path, small(), whole(small()), checksums=64)
    (path,) = tmp_path.glob("*.safetensors")
    assert verify(path).ok
    flip(path, 8 * (path.stat().st_size - 3))
    assert verify(path).problems[0].kind == "damage"


def test_in_an_object_store(tmp_path: Path) -> None:
    """Read by ranges through fsspec, and as sound or damaged as a local one."""
    fsspec = pytest.importorskip("fsspec")
    write_sharded(tmp_path, small(), by_rows(small(), 2), checksums=64)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path), "/verify-test", recursive=True)
    try:
        assert verify("memory://verify-test").ok
        assert verify("memory://verify-test", tmp_path).ok
        path = next(p for p in memory.ls("/verify-test", detail=False) if p.endswith("tensors"))
        content = bytearray(memory.cat(path))
        content[-1] ^= 128
        memory.pipe(path, bytes(content))
        report = verify("memory://verify-test", tmp_path)
        assert {problem.kind for problem in report.problems} == {"damage", "values"}
    finally:
        memory.rm("/verify-test", recursive=True)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    for bad in (tmp_path / "absent", tmp_path):
        with pytest.raises(CheckpointError):
            verify(bad)
    write_sharded(tmp_path, small(), whole(small()))
    with pytest.raises(ReshardError, match="too little"):
        verify(tmp_path, memory="1k")


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write_sharded(one, small(), whole(small()), checksums=64)
    write_sharded(two, small(), by_rows(small(), 2), checksums=64)
    assert run(["verify", str(one)]) == 0
    assert run(["verify", str(one), str(two), "--json"]) == 0
    data = json.loads(capsys.readouterr().out.split("\n", 2)[2])
    assert (data["verify"], data["ok"], data["problems"]) == (1, True, [])
    (path,) = one.glob("*.safetensors")
    flip(path, 8 * (path.stat().st_size - 3))
    assert run(["verify", str(one)]) == 1
    assert 'tensor "step"' in capsys.readouterr().out
    assert run(["verify", str(one), str(two)]) == 1
    assert run(["verify", str(tmp_path / "absent")]) == 2
    assert run(["verify", str(one), "--memory", "1k"]) == 2


def test_progress_reaches_its_end(tmp_path: Path) -> None:
    write_sharded(tmp_path, small(), whole(small()))
    told: list[tuple[int, int]] = []
    verify(tmp_path, tmp_path, progress=lambda *each: told.append(each))
    assert told[-1] == (132, 132)


# The peak of getrusage is that of the process which started this one, if that was larger.
MEASURE = """
import sys
def status(field):
    return int(next(line for line in open("/proc/self/status") if field in line).split()[1])
import numpy, xxhash
from reshard.checkpoint.soundness import verify
import reshard.checkpoint.formats.safetensors.reader
before = status("VmRSS")
report = verify(*sys.argv[2:], memory=sys.argv[1])
assert report.ok, str(report)
print(status("VmHWM") - before)
"""


def test_memory_stays_under_the_cap(tmp_path: Path) -> None:
    """One tensor of 384 MiB, of holes of a sparse file, under a cap of 64 MiB."""
    shape = (49_152, 4096)
    num_bytes = 2 * shape[0] * shape[1]
    for side, columns in (("one", 4096), ("two", 1024)):
        (tmp_path / side).mkdir()
        for number in range(4096 // columns):
            size = num_bytes * columns // 4096
            entries = {"w": ("BF16", (shape[0], columns), size)}
            at = json.dumps({"w": {"saved_offsets": [0, number * columns]}})
            head = header(entries, {"DCP_SHARDING_INFO": at})
            path = tmp_path / side / f"shard-{number + 1:05d}-model-00001-of-00001.safetensors"
            with path.open("wb") as file:
                file.write(head)
                file.truncate(len(head) + size)
    command = [sys.executable, "-c", MEASURE, "64MiB", str(tmp_path / "one"), str(tmp_path / "two")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert 1024 < int(done.stdout) < 64 * 1024
