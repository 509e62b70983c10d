"""`.distcp` folders that torch wrote, read without torch; and damaged or hostile ones."""

from __future__ import annotations

import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.formats.reader import open_storage, read_catalog
from reshard.checkpoint.formats.torch.unpickler import unpickle
from reshard.checkpoint.inspection import inspect
from reshard.errors import CheckpointError, DamageError, UnsupportedError
from tests.checkpoint.storage.test_reading_files import serving
from tests.checkpoint.torch_writers import bytes_of, gathered, write_distcp

DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8,
    torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint16, torch.uint32,
    torch.uint64,
]  # fmt: skip


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(shape).numel()
    size = torch.empty((), dtype=dtype).element_size()
    if dtype is torch.bool:
        return (torch.arange(count) % 3 == 0).reshape(shape)
    raw = torch.arange(count * size, dtype=torch.int64).mul(7).remainder(251).to(torch.uint8)
    return raw.view(dtype).reshape(shape)


FULL: dict[str, Any] = {
    "rows": (numbered(10, 4), 0),
    "columns": (numbered(6, 7, dtype=torch.bfloat16), 1),
    "few": (numbered(2, 3), 0),
    "norm": (numbered(5), None),
    "scalar": (torch.tensor(7.0), None),
    "step": 3,
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distcp") / "ckpt"
    write_distcp(folder, 4, FULL)
    return folder


@pytest.fixture
def ckpt(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "ckpt")


def catalog_of(folder: Path) -> Catalog:
    with open_storage(folder) as storage:
        return read_catalog(storage)


def test_boxes_of_four_ranks(written: Path) -> None:
    with open_storage(written) as storage:
        catalog = read_catalog(storage)
        found = gathered(storage, catalog)
    tensors = {name: value[0] for name, value in FULL.items() if isinstance(value, tuple)}
    assert found == {name: bytes_of(tensor) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        assert catalog.tensors[name].shape == tuple(tensor.shape)
        assert catalog.tensors[name].dtype == str(tensor.dtype).removeprefix("torch.")
        assert catalog.tensors[name].missing() == ()
    assert len(catalog.tensors["rows"].pieces) == 4
    assert [*catalog.objects] == ["step"]


def test_an_object_is_the_bytes_that_torch_saved(written: Path) -> None:
    with open_storage(written) as storage:
        catalog = read_catalog(storage)
        found = catalog.objects["step"]
        path = catalog.files[found.file].path
        data = storage.read(path, found.offset, found.size)
    (written.parent / "object.pt").write_bytes(data)
    assert torch.load(written.parent / "object.pt") == 3


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_dtype_views_and_nested_names(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "model": {
            str(dtype).removeprefix("torch."): numbered(3, 2, dtype=dtype) for dtype in DTYPES
        },
        "view": numbered(6, 4).t(),
        "middle": numbered(6, 4)[2:4, 1:3],
        "empty": torch.empty(0, 3),
        "optimizer": [{"exp_avg": numbered(2)}, {"lr": 0.1}],
        "parameter": torch.nn.Parameter(numbered(3)),
    }
    dcp.save(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    with open_storage(tmp_path / "ckpt") as storage:
        catalog = read_catalog(storage)
        found = gathered(storage, catalog)
    flat = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    flat |= {name: state[name] for name in ("view", "middle", "empty", "parameter")}
    flat["optimizer.0.exp_avg"] = state["optimizer"][0]["exp_avg"]
    assert found == {name: bytes_of(tensor) for name, tensor in flat.items()}
    assert catalog.nesting["optimizer.0.exp_avg"] == ("optimizer", 0, "exp_avg")
    assert "optimizer.1.lr" in catalog.objects


def test_the_same_from_memory_and_over_http(written: Path) -> None:
    pytest.importorskip("aiohttp")
    here = catalog_of(written)
    memory = fsspec.filesystem("memory")
    memory.put(str(written), "/distcp", recursive=True)
    with serving(written) as (address, _):
        for root in ("memory://distcp", address):
            with open_storage(root) as storage:
                there = read_catalog(storage)
            assert replace(there, root=here.root) == here


def test_a_missing_file_is_named(ckpt: Path) -> None:
    (ckpt / "__3_0.distcp").unlink()
    with pytest.raises(DamageError, match=r"__3_0\.distcp is missing: \.metadata puts 4 entries"):
        catalog_of(ckpt)
    report = inspect(ckpt)
    assert any("no file holds [9:10, 0:4]" in line for line in report.damage)
    assert not report.ok


def test_a_file_that_the_metadata_does_not_name(ckpt: Path) -> None:
    shutil.copy(ckpt / "__0_0.distcp", ckpt / "__9_0.distcp")
    (ckpt / "config.json").write_text("{}")
    catalog = catalog_of(ckpt)
    assert catalog.notes == ('"__9_0.distcp" is not named in .metadata (1 such files)',)
    assert [file.path for file in catalog.others] == ["config.json"]


def test_one_file_of_a_folder(ckpt: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is one file of a \.distcp folder: name the"):
        catalog_of(ckpt / "__0_0.distcp")


def test_a_missing_metadata_is_named(ckpt: Path) -> None:
    (ckpt / ".metadata").unlink()
    with pytest.raises(DamageError, match=r"\.metadata is missing: the checkpoint is not complete"):
        catalog_of(ckpt)


def test_a_file_that_is_cut_short(ckpt: Path) -> None:
    path = ckpt / "__1_0.distcp"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(DamageError, match=r"__1_0\.distcp has \d+ bytes and \.metadata expects"):
        catalog_of(ckpt)


@pytest.mark.parametrize("keep", [0, 1, 40, 0.5, -1])
def test_metadata_that_is_cut_short(ckpt: Path, keep: float) -> None:
    path = ckpt / ".metadata"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(DamageError, match=r"truncated|is malformed"):
        catalog_of(ckpt)
    assert inspect(ckpt).damage


class Hostile:
    """Runs a command when unpickled by Python."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("function", "arguments", "named"),
    [
        (os.system, ("touch owned",), "posix.system"),
        (eval, ("open('owned', 'w')",), "eval"),
        (subprocess.Popen, (["touch", "owned"],), "Popen"),
        (torch.load, ("owned",), "torch.serialization.load"),
        (getattr, ({}, "pop"), "getattr"),
    ],
)
def test_a_hostile_metadata_runs_nothing(
    ckpt: Path, function: Any, arguments: Any, named: str, protocol: int
) -> None:
    hostile = pickle.dumps({"x": Hostile(function, *arguments)}, protocol)
    (ckpt / ".metadata").write_bytes(hostile)
    with pytest.raises(
        UnsupportedError, match=rf"names \S*{named}, which is not read|something else"
    ):
        catalog_of(ckpt)
    assert not Path("owned").exists()
    assert inspect(ckpt).unsupported


def test_a_hostile_archive_runs_nothing(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "x": Hostile(os.system, "touch owned")}, tmp_path / "a.pt")
    with pytest.raises(UnsupportedError, match=r"names posix\.system, which is not read"):
        catalog_of(tmp_path)
    assert not Path("owned").exists()


def test_names_that_would_take_for_ever_to_hash() -> None:
    """Tuples within tuples, each twice the one before: Python would hash 2**60 of them."""
    body = b"\x80\x02}" + b")" + b"2\x86" * 60 + b"K\x01s."
    with pytest.raises(DamageError, match="a tuple as the key"):
        unpickle(body, "x")


DEEP = b")" + b"2\x86" * 60
"""Tuples within tuples, each twice the one before: to print or to hash them has no end."""


@pytest.mark.parametrize("name", ["size", "chunks", "properties"])
def test_values_that_would_take_for_ever_to_print(ckpt: Path, name: str) -> None:
    data = (ckpt / ".metadata").read_bytes()
    word = bytes([0x8C, len(name)]) + name.encode() + b"\x94"
    assert data.count(word) == 1
    at = data.index(word) + len(word)
    (ckpt / ".metadata").write_bytes(data[:at] + DEEP + b"0" + data[at:])  # made and dropped
    assert catalog_of(ckpt).tensors
    (ckpt / ".metadata").write_bytes(data[:at] + DEEP + b"s(" + data[at:])  # in place of the value
    with pytest.raises(CheckpointError):
        catalog_of(ckpt)
    assert inspect(ckpt).damage


def test_records_within_records_without_end() -> None:
    body = b"\x80\x02cx\ny\nq\x00" + b"0h\x00)R" + b"h\x002\x85R" * 3 + b"."
    assert repr(unpickle(body, "x")) == "<x.y>"
    many = b"\x80\x02cx\ny\nq\x000)" + b"q\x010h\x00h\x01\x85R" * 60_000 + b"."
    assert unpickle(many, "x").kind == "x.y"


def test_a_directory_as_large_as_the_file(ckpt: Path, tmp_path: Path) -> None:
    """It would be read as a whole; the file is a hole of 64 GiB."""
    path = tmp_path / "model.pt"
    size = 1 << 36
    with path.open("wb") as file:
        file.write(b"PK\x03\x04")
        file.seek(size - 98)
        file.write(struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 0, 0, 0, 0, 7, 7, size - 200, 0))
        file.write(struct.pack("<4sIQI", b"PK\x06\x07", 0, size - 98, 1))
        file.write(struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 7, 7, 2**32 - 1, 2**32 - 1, 0))
    with pytest.raises(DamageError, match=r"a directory of 7 members and 68719476536 bytes"):
        catalog_of(path)


def test_lengths_that_are_lies_allocate_nothing() -> None:
    for start in (b"\x80\x04\x8e", b"\x80\x04\x8d", b"\x80\x04\x96"):
        with pytest.raises(DamageError, match="truncated"):
            unpickle(start + (1 << 60).to_bytes(8, "little") + b"x", "x")
    assert unpickle(b"\x80\x02K\x07r\xff\xff\xff\xff.", "x") == 7


def edited(ckpt: Path, change: Any) -> None:
    """Change the metadata with Python's own pickle."""
    path = ckpt / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def first_info(metadata: Any, name: str = "rows") -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("relative_path", "../secret", "leaves its checkpoint"),
        ("relative_path", "/etc/passwd", "leaves its checkpoint"),
        ("relative_path", "a/../../b", "leaves its checkpoint"),
        ("offset", -1, "in no range of a file"),
        ("offset", 1 << 70, "truncated"),
        ("length", 1 << 70, "truncated"),
        ("length", 5, "5 bytes are no archive"),
        ("offset", "0", "in no range of a file"),
        ("offset", 1, "share bytes"),
    ],
)
def test_absurd_ranges(ckpt: Path, field: str, value: Any, says: str) -> None:
    edited(ckpt, lambda metadata: setattr(first_info(metadata), field, value))
    with pytest.raises((DamageError, UnsupportedError), match=says):
        catalog_of(ckpt)
    assert not inspect(ckpt).ok


def test_chunks_outside_of_the_tensor_or_stored_nowhere(ckpt: Path) -> None:
    def smaller(metadata: Any) -> None:
        metadata.state_dict_metadata["rows"].size = torch.Size([9, 4])

    edited(ckpt, smaller)
    with pytest.raises(DamageError, match=r'"rows" has a chunk at \(9, 0\) .*outside of \(9, 4\)'):
        catalog_of(ckpt)


def test_a_chunk_that_is_stored_nowhere(ckpt: Path) -> None:
    def forget(metadata: Any) -> None:
        gone = next(index for index in metadata.storage_data if index.fqn == "rows")
        del metadata.storage_data[gone]

    edited(ckpt, forget)
    with pytest.raises(DamageError, match=r'"rows": its chunk at .* is stored in no file'):
        catalog_of(ckpt)


def test_a_tensor_of_another_dtype_than_the_metadata_says(ckpt: Path) -> None:
    def other(metadata: Any) -> None:
        metadata.state_dict_metadata["norm"].properties.dtype = torch.int32

    edited(ckpt, other)
    with pytest.raises(DamageError, match=r"is \(5,\) of float32 and .metadata says .* int32"):
        catalog_of(ckpt)


def test_a_shard_that_the_metadata_forgot_is_a_hole(ckpt: Path) -> None:
    def forget(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["rows"]
        gone = entry.chunks.pop(1)
        index = next(
            i for i in metadata.storage_data if i.fqn == "rows" and i.offset == gone.offsets
        )
        del metadata.storage_data[index]

    edited(ckpt, forget)
    assert [str(hole) for hole in catalog_of(ckpt).tensors["rows"].missing()] == ["[3:6, 0:4]"]
    assert any("no file holds [3:6, 0:4]" in line for line in inspect(ckpt).damage)


def test_compressed_members_and_lazy_conjugates_are_refused(tmp_path: Path) -> None:
    torch.save(torch.zeros(2, dtype=torch.complex64).conj(), tmp_path / "a.pt")
    with pytest.raises(UnsupportedError, match="lazily conjugated"):
        catalog_of(tmp_path)
    torch.save(torch.zeros(100), tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as source:
        members = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in members.items():
            packed.writestr(name, data)
    with pytest.raises(UnsupportedError, match="compressed"):
        catalog_of(tmp_path)


def test_reading_loads_neither_torch_nor_numpy(written: Path) -> None:
    code = (
        "import sys; from reshard.checkpoint.inspection import inspect;"
        f"r = inspect({str(written)!r});"
        "str(r), r.tree(), r.to_json();"
        "print(r.ok, sorted({'torch', 'numpy', 'fsspec', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n"
