"""Safetensors in all their shapes, written by their own library and by torch; and damaged ones."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save, save_file

from reshard.checkpoint import convert
from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.formats.reader import open_storage, read_catalog
from reshard.checkpoint.formats.safetensors.header import (
    DTYPES,
    KEY,
    SHARDING,
    OwnMetadata,
    OwnTensor,
    build_header,
    header_length,
    parse_header,
)
from reshard.checkpoint.inspection import inspect
from reshard.checkpoint.storage.local import COMMITTED, LocalStorage
from reshard.dtypes import itemsize
from reshard.errors import CheckpointError, DamageError, UnsupportedError
from tests.checkpoint.torch_writers import bytes_of, gathered, write_sharded_hf
from tests.soak import cases

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
TENSORS = st.dictionaries(NAMES, st.tuples(st.sampled_from([*DTYPES.values()]), SHAPES), max_size=6)
METADATA = st.dictionaries(NAMES, st.text(st.characters(codec="utf-8"), max_size=9), max_size=3)


def catalog_of(folder: Path) -> Catalog:
    with open_storage(folder) as storage:
        return read_catalog(storage)


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


@settings(max_examples=cases(35, 2000), deadline=None)
@given(TENSORS, METADATA)
def test_a_header_that_we_build_is_read_by_the_library(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    metadata: dict[str, str],
) -> None:
    built = build_header(tensors, metadata)
    path = tmp_path_factory.getbasetemp() / "built.safetensors"
    content = bytes(number % 251 for number in range(built.file_size - len(built.data)))
    path.write_bytes(built.data + content)
    assert len(built.data) % 8 == 0
    with safe_open(path, "pt") as found:
        assert (found.metadata() or {}) == metadata
        assert set(found.keys()) == set(tensors)
        for name, (dtype, shape) in tensors.items():
            tensor = found.get_tensor(name)
            assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{dtype}", shape)
            at = built.offsets[name] - len(built.data)
            assert bytes_of(tensor) == content[at : at + tensor.nbytes]


@settings(max_examples=cases(35, 2000), deadline=None)
@given(TENSORS, METADATA)
def test_a_header_of_the_library_is_read_by_us(
    tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    made = {}
    for number, (name, (dtype, shape)) in enumerate(tensors.items()):
        raw = torch.full((torch.Size(shape).numel() * itemsize(dtype),), number, dtype=torch.uint8)
        made[name] = raw.view(getattr(torch, dtype)).reshape(shape)
    data = save(made, metadata or None)  # of no tensors and no metadata {} it makes no JSON
    length = header_length(data[:8], len(data), "x")
    header = parse_header(data[8 : 8 + length], len(data), "x")
    assert header.metadata == metadata
    assert {name: (one.dtype, one.shape) for name, one in header.tensors.items()} == tensors
    for name, one in header.tensors.items():
        assert data[one.offset : one.offset + made[name].nbytes] == bytes_of(made[name])


def test_dtypes_that_safetensors_lacks() -> None:
    with pytest.raises(CheckpointError, match="safetensors has no complex128"):
        build_header({"w": ("complex128", (2,))})
    with pytest.raises(CheckpointError, match='dtype "F4", which is not supported'):
        parse_header(b'{"w":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}', 63, "x")


def one(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    ("header", "size", "says"),
    [
        ({"w": one()}, 7, r"truncated: its tensors, the last of them \"w\" end at byte"),
        ({"w": one()}, 9, "longer than its header says"),
        ({"w": one(data_offsets=[0, 4])}, 4, r"has 4 bytes and \(2,\) of float32 needs 8"),
        ({"w": one(data_offsets=[8, 0])}, 8, "is at bytes 8 to 0"),
        ({"w": one(data_offsets=[-8, 0])}, 8, "is at bytes -8 to 0"),
        ({"w": one(data_offsets=[4, 12])}, 12, "leaves a gap after the header"),
        ({"v": one(), "w": one(data_offsets=[4, 12])}, 12, '"w" begins at .* overlaps "v"'),
        ({"v": one(), "w": one()}, 8, '"w" begins at byte 0 of the data and overlaps "v"'),
        ({"w": one(shape=[-2])}, 8, "sizes are numbers from 0 on"),
        ({"w": one(shape=[2.0])}, 8, "sizes are numbers from 0 on"),
        ({"w": one(shape=[True, 2])}, 8, "sizes are numbers from 0 on"),
        ({"w": one(shape=[1 << 60, 1 << 60])}, 8, "no tensor has that many dims or elements"),
        ({"w": one(shape=[1 << 60, 0])}, 0, "no tensor has that many dims or elements"),
        ({"w": one(shape=[1] * 99)}, 4, "no tensor has that many dims or elements"),
        ({"w": one(shape=None)}, 8, "has no dtype, shape and two data_offsets"),
        ({"w": one(data_offsets=[0])}, 8, "has no dtype, shape and two data_offsets"),
        ({"w": []}, 0, "has no dtype, shape and two data_offsets"),
        ({"__metadata__": {"a": 1}}, 0, "__metadata__ is not an object of strings"),
        ([], 0, "its JSON is no object"),
    ],
)
def test_damaged_headers(tmp_path: Path, header: Any, size: int, says: str) -> None:
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    with pytest.raises(DamageError, match=says):
        catalog_of(tmp_path)
    assert len(inspect(tmp_path).damage) == 1


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "has 0 bytes"),
        (b"1234567", "has 7 bytes"),
        (b"\xff" * 8, "promise a header of 18446744073709551615 bytes and the file has 8"),
        ((99).to_bytes(8, "little") + b"{}", "promise a header of 99 bytes and the file has 10"),
        ((2).to_bytes(8, "little") + b"{,", "its JSON cannot be read"),
        ((2).to_bytes(8, "little") + b"\xff\xfe", "its JSON cannot be read"),
        ((9).to_bytes(8, "little") + b'{"a":1,"a', "its JSON cannot be read"),
        ((13).to_bytes(8, "little") + b'{"a":1,"a":1}', 'key "a" occurs twice'),
        ((10_000).to_bytes(8, "little") + b"[" * 10_000, "its JSON cannot be read"),
        ((5000).to_bytes(8, "little") + b'{"a":' + b"9" * 4995, "its JSON cannot be read"),
    ],
)
def test_files_that_are_none(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(DamageError, match=says):
        catalog_of(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two files and an index, as Hugging Face models come."""
    files = {
        "model-00001-of-00002.safetensors": {"a": values(3, 2), "b": torch.tensor(7.0)},
        "model-00002-of-00002.safetensors": {"c": values(4, dtype=torch.int64)},
    }
    for path, tensors in files.items():
        save_file(tensors, tmp_path / path, {"format": "pt"})
    mapped = {name: path for path, tensors in files.items() for name in tensors}
    index = {"metadata": {"total_size": 60}, "weight_map": mapped}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_folder_with_an_index(model: Path) -> None:
    with open_storage(model) as storage:
        catalog = read_catalog(storage)
        found = gathered(storage, catalog)
    assert found["b"] == bytes_of(torch.tensor(7.0))
    assert found["c"] == bytes_of(values(4, dtype=torch.int64))
    assert catalog.metadata == {"format": "pt"}
    assert [file.path for file in catalog.others] == ["config.json"]
    assert len(catalog.files) == 2


def test_a_single_file(model: Path) -> None:
    catalog = catalog_of(model / "model-00002-of-00002.safetensors")
    assert [*catalog.tensors] == ["c"]
    assert "model-00001-of-00002.safetensors and other files of the same set" in catalog.notes[0]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("indexed", [True, False])
def test_a_missing_file_is_named(model: Path, number: int, indexed: bool) -> None:
    (model / f"model-0000{number}-of-00002.safetensors").unlink()
    if not indexed:
        (model / "model.safetensors.index.json").unlink()
    with pytest.raises(DamageError, match=rf"model-0000{number}-of-00002\.safetensors is missing"):
        catalog_of(model)


def reindexed(model: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = model / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"c": "../x.safetensors"}, r"index\.json: the path .* leaves its checkpoint"),
        ({"c": "/etc/passwd"}, r"index\.json: the path .* leaves its checkpoint"),
        ({"c": FIRST}, rf'puts tensor "c" into {FIRST}, whose header does not have it'),
        ({"z": SECOND}, rf'puts tensor "z" into {SECOND}, whose header does not have it'),
        ({"c": 3}, "no weight_map from names to files"),
        ({"c": "other.safetensors"}, r"other\.safetensors is missing: the index puts 1 tensors"),
    ],
)
def test_an_index_that_is_wrong(model: Path, change: dict[str, Any], says: str) -> None:
    reindexed(model, lambda mapped: mapped.update(change))
    kind = UnsupportedError if "leaves" in says else DamageError
    with pytest.raises(kind, match=says):
        catalog_of(model)


def test_an_index_that_lacks_a_tensor(model: Path) -> None:
    reindexed(model, lambda mapped: mapped.pop("a"))
    with pytest.raises(DamageError, match=r'00001-of-00002\.safetensors holds tensor "a", which'):
        catalog_of(model)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    for name in "ab":
        save_file({"w": values(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(
        UnsupportedError, match=r'"w" is in .*a\.safetensors and in .*b\.safetensors'
    ):
        catalog_of(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": []}', '{"a": 1, "a": 2}', "\udcff"])
def test_an_index_that_is_none(model: Path, index: str) -> None:
    data = index.encode("utf-8", "surrogateescape")
    (model / "model.safetensors.index.json").write_bytes(data)
    with pytest.raises(DamageError, match=r"index\.json"):
        catalog_of(model)


FULL: dict[str, Any] = {
    "rows": (values(8, 4), 0),
    "columns": (values(3, 9, dtype=torch.bfloat16), 1),
    "norm": (values(5), None),
    "scale": (torch.tensor(7.0), None),
    "flags": (values(6, dtype=torch.bool), 0),
    "ids": (values(7, 2, dtype=torch.int64), 0),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded") / "ckpt"
    write_sharded_hf(folder, 4, FULL)
    return folder


@pytest.fixture
def sharded(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "ckpt")


def test_shards_that_torch_wrote(written: Path) -> None:
    with open_storage(written) as storage:
        catalog = read_catalog(storage)
        found = gathered(storage, catalog)
    assert found == {name: bytes_of(tensor) for name, (tensor, _) in FULL.items()}
    assert {n: t.shape for n, t in catalog.tensors.items()} == {
        name: tuple(tensor.shape) for name, (tensor, _) in FULL.items()
    }
    assert catalog.metadata == {"format": "pt"}
    assert any("a last shard that is missing" in note for note in catalog.notes)


def test_a_middle_shard_that_is_missing(sharded: Path) -> None:
    (sharded / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(DamageError, match=r"shard 2 of 4 is missing \(3 of 4 are there\)"):
        catalog_of(sharded)
    damage = inspect(sharded).damage
    assert any("no file holds [2:4, 0:4] of tensor" in line for line in damage)


def test_a_last_shard_that_is_missing_with_a_mesh(sharded: Path, tmp_path: Path) -> None:
    """Torch's files do not count themselves; who says on how many ranks they were saved does."""
    mesh = "x=4"
    assert inspect(sharded, mesh=mesh).ok
    assert not inspect(sharded, mesh=mesh).notes
    last = sorted(sharded.glob("shard-*.safetensors"))[-1]
    last.unlink()
    [line] = inspect(sharded, mesh=mesh).damage
    assert "shard 4 of 4 is missing (3 of 4 are there)" in line
    with pytest.raises(DamageError, match="shard 4 of 4 is missing"):
        convert(sharded, tmp_path / "out", source_mesh=mesh)
    assert not (tmp_path / "out").exists()


def test_a_last_shard_that_is_missing_with_a_config(sharded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    config = {
        "model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "vocab_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    }  # fmt: skip
    write_sharded_hf(folder, 4, {"model.embed_tokens.weight": (values(32, 8), 0)})
    (folder / "config.json").write_text(json.dumps(config))
    assert catalog_of(folder).tensors["model.embed_tokens.weight"].shape == (32, 8)
    (folder / "shard-00004-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(DamageError, match=r"reaches to \(24, 8\) and config.json says \(32, 8\)"):
        catalog_of(folder)


def own_files(folder: Path, count: int = 3) -> None:
    """Shards of ours: they say how many there are and how large tensors are."""
    full = values(6, 2)
    for number in range(count):
        own = OwnMetadata(number + 1, count, f"tp={count}", None, {"w": OwnTensor((6, 2), "tp -")})
        step = 6 // count
        metadata = {
            KEY: own.to_text(),
            SHARDING: json.dumps({"w": {"saved_offsets": [number * step, 0]}}),
            "format": "pt",
        }
        part = full[number * step : (number + 1) * step].contiguous()
        name = f"shard-{number + 1:05d}-model-00001-of-00001.safetensors"
        save_file({"w": part}, folder / name, metadata)


def test_our_own_shards_say_all(tmp_path: Path) -> None:
    own_files(tmp_path)
    with open_storage(tmp_path) as storage:
        catalog = read_catalog(storage)
        assert gathered(storage, catalog) == {"w": bytes_of(values(6, 2))}
    assert (catalog.mesh, catalog.layouts, catalog.notes) == ("tp=3", {"w": "tp -"}, ())
    assert catalog.metadata == {"format": "pt"}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_any_shard_of_ours_that_is_missing(tmp_path: Path, number: int) -> None:
    own_files(tmp_path)
    (tmp_path / f"shard-0000{number}-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(DamageError, match=rf"shard {number} of 3 is missing \(2 of 3 are there\)"):
        catalog_of(tmp_path)
    report = inspect(tmp_path)
    assert report.tensors[0].shape == (6, 2)
    assert not report.tensors[0].complete


def rewritten(path: Path, change: Callable[[dict[str, str]], Any], tensors: Any = None) -> None:
    with safe_open(path, "pt") as found:
        metadata = found.metadata()
        held = {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118
    change(metadata)
    save_file({**held, **(tensors or {})}, path, metadata)


@pytest.mark.parametrize(
    ("offsets", "says"),
    [
        ({"w": {"saved_offsets": [5, 0]}}, r"reaches to \(7, 2\), outside of its shape \(6, 2\)"),
        ({"w": {"saved_offsets": [-1, 0]}}, "sizes are numbers from 0 on"),
        ({"w": {"saved_offsets": [1 << 62, 0]}}, "no tensor has that many"),
        ({"w": {"saved_offsets": [0]}}, r"has the shape \(2, 2\) and the offsets \(0,\)"),
        ({"w": {"saved_offsets": "00"}}, "sizes are numbers from 0 on"),
        ({"w": 3}, "has no saved_offsets"),
        ({}, "has no saved_offsets"),
        ([], "its JSON is no object"),
    ],
)
def test_offsets_that_are_wrong(tmp_path: Path, offsets: Any, says: str) -> None:
    own_files(tmp_path)
    path = tmp_path / "shard-00002-model-00001-of-00001.safetensors"
    rewritten(path, lambda metadata: metadata.update({SHARDING: json.dumps(offsets)}))
    with pytest.raises(DamageError, match=says):
        catalog_of(tmp_path)
    assert inspect(tmp_path).damage


def test_shards_that_disagree(tmp_path: Path) -> None:
    own_files(tmp_path)
    path = tmp_path / "shard-00002-model-00001-of-00001.safetensors"
    rewritten(path, lambda _: None, {"w": values(2, 2, dtype=torch.int32)})
    with pytest.raises(DamageError, match=r"is int32 of 2 dims and float32 of 2 in .*shard-00001"):
        catalog_of(tmp_path)
    own_files(tmp_path)
    other = OwnMetadata(2, 3, "tp=3", None, {"w": OwnTensor((9, 2), "tp -")})
    rewritten(path, lambda metadata: metadata.update({KEY: other.to_text()}))
    with pytest.raises(DamageError, match=r"is part of \(9, 2\), and of \(6, 2\) in"):
        catalog_of(tmp_path)


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ('{"version": 2}', CheckpointError, "version 2 and this reshard reads 1"),
        ("{", DamageError, "its JSON cannot be read"),
        ('{"version": 1}', DamageError, "lacks file, files or tensors"),
        ('{"version":1,"file":4,"files":3,"tensors":{}}', DamageError, "about file 4 of 3"),
        ('{"version":1,"file":1,"files":3,"tensors":{"w":1}}', DamageError, "not described"),
        ('{"version":1,"file":1,"files":1,"rank":"0","tensors":{}}', DamageError, "rank a number"),
    ],
)
def test_own_metadata_that_is_wrong(
    tmp_path: Path, text: str, error: type[Exception], says: str
) -> None:
    save_file({"w": values(2)}, tmp_path / "a.safetensors", {KEY: text})
    with pytest.raises(error, match=says):
        catalog_of(tmp_path)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no checkpoint: it holds nothing, and no"):
        catalog_of(tmp_path)
    (tmp_path / "README.md").write_text("hello")
    with pytest.raises(CheckpointError, match=r'is no checkpoint: it holds "README\.md"'):
        catalog_of(tmp_path)
    (tmp_path / "inner").mkdir()
    own_files(tmp_path / "inner")
    with pytest.raises(CheckpointError, match=r'in the folder "inner": name one folder'):
        catalog_of(tmp_path)


def test_many_tensors_make_a_long_header(tmp_path: Path) -> None:
    tensors = {f"layer.{number}.weight": values(1) for number in range(2000)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert catalog_of(tmp_path).tensors.keys() == tensors.keys()
    os.truncate(tmp_path / "model.safetensors", 100_000)
    with pytest.raises(DamageError, match="promise a header of"):
        catalog_of(tmp_path)


def test_a_disk_that_fails_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / COMMITTED).write_text("{}")
    read = LocalStorage.read

    def failing(storage: LocalStorage, path: str, offset: int, length: int) -> bytes:
        if path == COMMITTED:
            raise CheckpointError("Input/output error")
        return read(storage, path, offset, length)

    with pytest.raises(DamageError, match="is not what reshard writes"):
        catalog_of(tmp_path)
    monkeypatch.setattr(LocalStorage, "read", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        catalog_of(tmp_path)
