"""Small files that stand for gigabytes, or for years: all are refused at once, in one line."""

from __future__ import annotations

import io
import json
import pickle
import re
import struct
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from reshard import checkpoint
from reshard.checkpoint.formats.torch.tensors import EXPANDED, SMALL
from reshard.checkpoint.formats.torch.unpickler import unpickle
from reshard.errors import (
    CoverageError,
    ReshardError,
    UnsupportedError,
)
from reshard.layout.box import Box
from reshard.layout.coverage import missing_boxes, repeated_boxes
from tests.checkpoint.making import header
from tests.soak import within

SECONDS = 3.0
MEMORY = 160 << 20
"""What a reader may take for one of these files, of which the largest has 1.2 MB."""

MARK, LIST, TUPLE, DICT, SET_ITEMS, CALL, STOP = b"(", b"l", b"t", b"}", b"u", b"R", b"."


def number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def text(value: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value


def numbers(*values: int) -> bytes:
    return MARK + b"".join(map(number, values)) + TUPLE


def put(index: int) -> bytes:
    return b"r" + struct.pack("<I", index)


def get(index: int) -> bytes:
    return b"j" + struct.pack("<I", index)


def dict_of(*parts: bytes) -> bytes:
    return DICT + MARK + b"".join(parts) + SET_ITEMS


def tensor(start: int, size: bytes, stride: bytes, more: bytes = b"") -> bytes:
    """A float32 tensor in a storage of four elements."""
    named = text(b"storage") + b"ctorch\nFloatStorage\n" + text(b"0") + text(b"cpu") + number(4)
    hooks = b"\x89ccollections\nOrderedDict\n)R"
    storage = MARK + named + b"tQ"
    args = MARK + storage + number(start) + size + stride + hooks + more + TUPLE
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + args + CALL


def tensors(count: int, one: bytes) -> bytes:
    return dict_of(*(text(b"%d" % i) + one for i in range(count)))


def pt(content: bytes) -> dict[str, bytes]:
    """A `torch.save` file with this pickle and one storage of 16 bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x04" + content + STOP)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", np.arange(4, dtype=np.float32).tobytes())
    return {"a.pt": file.getvalue()}


def metadata(content: bytes) -> dict[str, bytes]:
    return {".metadata": b"\x80\x04" + content + STOP}


_DCP = b"ctorch.distributed.checkpoint."


def record(kind: bytes, *state: bytes) -> bytes:
    return _DCP + kind + b"\n)\x81" + dict_of(*state) + b"b"


def size_of(*values: int) -> bytes:
    return b"ctorch\nSize\n" + numbers(*values) + b"\x85R"


def distcp(count: int, path: bytes = b"a.distcp", chunks: int = 1, keys: int = 0) -> bytes:
    """Tensors that share one path, one list of so many chunks, and so many keys."""
    chunk = record(
        b"metadata\nChunkStorageMetadata", text(b"offsets"), size_of(0), text(b"sizes"), size_of(4)
    )
    shared = chunk + put(0) + b"0" + MARK + get(0) * chunks + LIST + put(1) + b"0"
    shared += text(path) + put(2) + b"0" + MARK + b"K\x01" * keys + TUPLE + put(3) + b"0"
    properties = _DCP + b"metadata\nTensorProperties\n)\x81" + MARK + b"ctorch\nfloat32\ntb"
    described = record(
        b"metadata\nTensorStorageMetadata",
        text(b"properties"), properties, text(b"size"), size_of(4), text(b"chunks"), get(1),
    )  # fmt: skip
    place = record(
        b"filesystem\n_StorageInfo",
        text(b"relative_path"), get(2), text(b"offset"), number(0), text(b"length"), number(9),
    )  # fmt: skip
    names = [text(b"%d" % i) for i in range(count)]
    stored = [
        record(b"metadata\nMetadataIndex", text(b"fqn"), name, text(b"offset"), size_of(0)) + place
        for name in names
    ]
    return shared + record(
        b"metadata\nMetadata",
        text(b"state_dict_metadata"), dict_of(*(name + described for name in names)),
        text(b"storage_data"), dict_of(*stored),
        text(b"planner_data"), dict_of(*(name + get(3) for name in names)),
    )  # fmt: skip


def doubling(levels: int) -> bytes:
    """{"a": d, "b": d} in {"a": d, "b": d}, and so on: two to the power of the levels."""
    found = dict_of(text(b"x") + b"N") + put(0)
    for level in range(levels):
        found += b"0" + dict_of(text(b"a"), get(level), text(b"b"), get(level)) + put(level + 1)
    return found


LONG = MARK + b"N" * 60_000 + TUPLE + put(0)
HOSTILE: dict[str, tuple[Callable[[], dict[str, bytes]], str]] = {
    "sizes of one list": (
        lambda: metadata(b"]" + put(0) + MARK + b"K\x01" * 60_000 + b"e" + b"ctorch\nSize\n"
                         + put(1) + MARK + (get(1) + get(0) + b"\x85R") * 9_000 + LIST),
        "it copies .* elements, at most",
    ),
    "names of one module": (
        lambda: pt(text(b"z" * 200_000) + put(0) + MARK + b"".join(
            get(0) + text(b"%05d" % i) + b"\x93" for i in range(20_000)) + LIST),
        "a name of 200000 characters",
    ),
    "a name without an end": (lambda: pt(b"c" + b"a" * 300_000), "a name without an end"),
    "calls with keywords": (
        lambda: pt(LONG + b"cfoo\nBar\n" + put(1) + MARK + (get(1) + get(0) + b"}\x92") * 9_000
                   + LIST),
        "it copies .* elements, at most",
    ),
    "one long key": (
        lambda: pt(LONG + DICT + (get(0) + b"Ns") * 12_000), "it copies .* elements, at most"
    ),
    "keys that collide": (
        lambda: pt(dict_of(*(number(i * ((1 << 61) - 1)) + b"N" for i in range(1, 30_000)))),
        "bits as the key of a dict",
    ),
    "tuples as keys": (
        lambda: pt(dict_of(*(numbers(i // 200, i % 200) + b"N" for i in range(20_000)))),
        "keys of dicts are tuples",
    ),
    "a long name": (
        lambda: pt(DICT + text(b"k" * 100_000) + MARK + b"N" * 60_000 + b"ls"),
        "a name of 100000 characters",
    ),
    "names of one key": (
        lambda: pt(DICT + text(b"k" * 4_000) + MARK + b"}" + b"N" * 100_000 + b"ls"),
        "its names and values have more than",
    ),
    "values of one text": (
        lambda: pt(text(b"\0" * 1_000) + put(0) + MARK + b"}" + get(0) * 100_000 + LIST),
        "its names and values have more than",
    ),
    "one list at many places": (
        lambda: pt(MARK + b"N" * 250 + LIST + put(0) + MARK + get(0) * 4_000 + LIST),
        "nests more than 32 deep or",
    ),
    "dicts of equal dicts": (lambda: pt(doubling(30)), "nests more than 32 deep or"),
    "a list of itself": (
        lambda: pt(b"]" + put(0) + MARK + get(0) * 200 + b"e"), "nests more than 32 deep or"
    ),
    "a defaultdict at many places": (
        lambda: pt(b"ccollections\ndefaultdict\n)R" + MARK + b"".join(
            text(b"%d" % i) + b"N" for i in range(5_000)) + b"u"
                   + put(0) + MARK + get(0) * 4_000 + LIST),
        "nests more than 32 deep or",
    ),
    "strides of one tuple": (
        lambda: pt(LONG + tensors(2_000, tensor(0, numbers(2), get(0)))), "do not fit the shape"
    ),
    "shapes of one tuple": (
        lambda: pt(LONG + tensors(2_000, tensor(0, get(0), get(0)))), "no tensor has that many dims"
    ),
    "an expanded tensor": (
        lambda: pt(tensors(1, tensor(0, numbers(1 << 22, 1 << 20), numbers(0, 0)))),
        r'tensor "0" has 16.0 TiB and its storage 16 B.*save it before expand\(\)',
    ),
    "many expanded tensors": (
        lambda: pt(tensors(2_000, tensor(0, numbers(250_000), numbers(0)))),
        "its 2000 tensors have 1.9 GiB and their storages 16 B",
    ),
    "chunks of one list": (
        lambda: metadata(distcp(1_500, chunks=5_000)), "chunks, and so many .* share one list"
    ),
    "one long path": (
        lambda: metadata(distcp(1_000, path=b"a/" * 200_000)), "a path of 400000 characters"
    ),
    "one long list of keys": (lambda: metadata(distcp(1_500, keys=200_000)), "a.distcp is missing"),
    "one range for all": (
        lambda: metadata(distcp(1_500)) | {"a.distcp": bytes(9)}, "two entries share bytes 0 to 9"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_small_file_takes_little(name: str, tmp_path: Path) -> None:
    make, expected = HOSTILE[name]
    for path, data in make().items():
        (tmp_path / path).write_bytes(data)
    began = time.process_time()
    report = checkpoint.inspect(tmp_path)
    assert time.process_time() - began < within(SECONDS)
    said = [*report.damage, *report.unsupported]
    assert re.search(expected, " / ".join(said))
    assert all(line.isprintable() and len(line) < 1000 for line in said)


@pytest.mark.parametrize("name", ["sizes of one list", "names of one key", "values of one text",
                                  "one list at many places", "names of one module"])  # fmt: skip
def test_a_small_file_takes_little_memory(name: str, tmp_path: Path) -> None:
    for path, data in HOSTILE[name][0]().items():
        (tmp_path / path).write_bytes(data)
    tracemalloc.start()
    try:
        checkpoint.inspect(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


def test_flags_of_one_dict_take_no_time(tmp_path: Path) -> None:
    flags = dict_of(*(number(i) + b"\x89" for i in range(20_000))) + put(0)
    content = pt(flags + tensors(5_000, tensor(0, numbers(2), numbers(1), get(0))))
    (tmp_path / "a.pt").write_bytes(content["a.pt"])
    began = time.process_time()
    assert "lazily conjugated" in checkpoint.inspect(tmp_path).unsupported[0]
    assert time.process_time() - began < within(SECONDS)


def test_objects_that_share_an_archive_are_not_each_looked_up(tmp_path: Path) -> None:
    """Their CRC-32 are in the archive's directory, which may be long."""
    with zipfile.ZipFile(tmp_path / "a.distcp", "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x04N.")
        for number in range(5_000):
            archive.writestr(f"archive/data/{number}", b"")
    size = (tmp_path / "a.distcp").stat().st_size
    names = [f"object {number}" for number in range(1_000)]
    found = Metadata(
        {name: BytesStorageMetadata() for name in names},
        storage_data={MetadataIndex(name): _StorageInfo("a.distcp", 0, size) for name in names},
    )
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
    began = time.process_time()
    report = checkpoint.verify(tmp_path)
    assert time.process_time() - began < within(SECONDS)
    assert f"two entries share bytes 0 to {size} (999 such pairs)" in str(report)


def test_an_index_of_many_tensors_in_many_files_takes_little(tmp_path: Path) -> None:
    mapped = {}
    for number in range(1_000):
        path = f"pytorch_model-{number + 1:05d}-of-01000.bin"
        torch.save({str(number): torch.ones(1)}, tmp_path / path)
        mapped |= {str(number): path}
    mapped |= {f"lost {number}": path for number in range(300_000)}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": mapped}))
    began = time.process_time()
    report = checkpoint.inspect(tmp_path)
    assert time.process_time() - began < within(1.0)
    assert f'puts tensor "lost 0" into {path}, which does not have it' in report.damage[0]


def test_many_names_of_a_module_share_it() -> None:
    """A record knows who would have made it, and not a text of its own."""
    content = text(b"z" * 1000) + put(0) + MARK
    content += b"".join(get(0) + text(b"%05d" % i) + b"\x93)R" for i in range(20_000)) + LIST
    tracemalloc.start()
    try:
        found = unpickle(b"\x80\x04" + content + STOP, "a.pkl")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert found[7].kind == "z" * 1000 + ".00007"


def test_what_is_usual_is_still_read() -> None:
    shared = {"a": [1, 2, 3]}
    value = {"x": shared, "y": [shared] * 100, 3: None, (1, "b"): 2.5, 1 << 40: "", True: ()}
    for protocol in (2, 4, 5):
        assert unpickle(pickle.dumps(value, protocol), "a.pkl") == value


def test_a_view_may_be_expanded_a_little(tmp_path: Path) -> None:
    mask = torch.arange(1000.0)
    state = {
        "positions": torch.arange(512).expand(1, -1),
        "one": torch.ones(1).expand(SMALL // 4),
        "mask": mask.expand(EXPANDED, 1000),
        "tied": [mask, mask, mask],
    }
    torch.save(state, tmp_path / "a.pt")
    assert checkpoint.verify(tmp_path / "a.pt").ok
    into = {
        "mask": torch.zeros(EXPANDED, 1000),
        "one": torch.zeros(SMALL // 4),
        "positions": torch.zeros(1, 512, dtype=torch.int64),
        "tied": [torch.zeros(1000) for _ in range(3)],
    }
    checkpoint.load(tmp_path / "a.pt", into=into)
    assert torch.equal(into["mask"], state["mask"])
    assert torch.equal(into["one"], state["one"])
    assert torch.equal(into["tied"][2], mask)


def test_an_expanded_tensor_is_refused_by_all(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1).expand(1 << 22, 1 << 20)}, tmp_path / "a.pt")
    report = checkpoint.verify(tmp_path / "a.pt")
    assert "16.0 TiB" in report.problems[0].message
    for refuse in (
        lambda: checkpoint.diff(tmp_path / "a.pt", tmp_path / "a.pt"),
        lambda: checkpoint.convert(tmp_path / "a.pt", tmp_path / "out"),
        lambda: checkpoint.load(tmp_path / "a.pt", into={"w": torch.zeros(1)}),
    ):
        with pytest.raises(UnsupportedError, match=r"16\.0 TiB and its storage 4 B"):
            refuse()


@pytest.mark.parametrize(
    ("start", "size", "stride", "found"),
    [
        (0, (1, 4), (10**30, 1), [[0.0, 1.0, 2.0, 3.0]]),
        (0, (1, 4), (1 << 62, 1), [[0.0, 1.0, 2.0, 3.0]]),
        (3, (1, 1), (10**30, 10**30), [[3.0]]),
        (10**30, (0, 4), (4, 1), []),
        (1 << 61, (0, 4), (1 << 62, 1 << 62), []),
        (0, (2, 2), (0, 1), [[0.0, 1.0], [0.0, 1.0]]),
    ],
)
def test_numbers_that_lead_to_no_element_do_no_harm(
    tmp_path: Path, start: int, size: tuple[int, ...], stride: tuple[int, ...], found: list
) -> None:
    content = pt(dict_of(text(b"w"), tensor(start, numbers(*size), numbers(*stride))))
    source = tmp_path / "a.pt"
    source.write_bytes(content["a.pt"])
    assert not checkpoint.inspect(source).damage
    assert checkpoint.verify(source).ok
    assert checkpoint.diff(source, source).equal
    checkpoint.convert(source, tmp_path / "out", format="full")
    into = {"w": torch.full(size, -1.0)}
    checkpoint.load(tmp_path / "out", into=into)
    assert into["w"].tolist() == found


def test_a_tensor_outside_of_its_storage_is_damage(tmp_path: Path) -> None:
    for number_, (start, size, stride) in enumerate(((10**30, (1,), (1,)), (0, (2,), (10**30,)))):
        content = pt(dict_of(text(b"w"), tensor(start, numbers(*size), numbers(*stride))))
        (tmp_path / str(number_)).mkdir()
        (tmp_path / str(number_) / "a.pt").write_bytes(content["a.pt"])
        [line] = checkpoint.inspect(tmp_path / str(number_)).damage
        assert "of a storage of 4 elements" in line


def halves(dims: int) -> list[Box]:
    """Of a (2, 2, ...) tensor the half with index 0, along each of its dims."""
    return [
        Box((0,) * dims, tuple(1 if other == dim else 2 for other in range(dims)))
        for dim in range(dims)
    ]


def test_halves_along_every_dim() -> None:
    began = time.process_time()
    assert missing_boxes(Box.whole((2,) * 24), halves(24)) == (Box((1,) * 24, (2,) * 24),)
    twice = repeated_boxes(Box.whole((2,) * 24), halves(24))
    assert sum(box.size for box in twice) == 2**24 - 1 - 24
    assert time.process_time() - began < within(1.0)


def test_sparse_shards_with_many_dims_are_inspected(tmp_path: Path) -> None:
    """Twenty-four files of 8 MiB each, of which nothing but the headers is on the disk."""
    for dim, box in enumerate(halves(24)):
        said = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": list(box.start)}})}
        entry = {"dtype": "U8", "shape": box.shape, "data_offsets": [0, box.size]}
        head = json.dumps({"__metadata__": said, "w": entry}).encode()
        path = tmp_path / f"shard-{dim + 1:05d}-model-00001-of-00001.safetensors"
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(head)) + head)
            file.truncate(8 + len(head) + box.size)
    began = time.process_time()
    [line] = checkpoint.inspect(tmp_path).damage
    assert time.process_time() - began < within(1.0)
    assert "no file holds [1:2, 1:2" in line
    for read in (checkpoint.convert, checkpoint.diff):
        with pytest.raises(ReshardError, match=r"no file holds|so irregularly"):
            read(tmp_path, tmp_path.with_name("other") if read is checkpoint.convert else tmp_path)
    assert time.process_time() - began < within(SECONDS)


def test_a_tensor_with_holes_everywhere_is_verified_soon(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for file in range(300):
        start, shape = rng.integers(0, 1000, 4).tolist(), rng.integers(1, 9, 4).tolist()
        said = json.dumps({"w": {"saved_offsets": start}})
        data = bytes(int(np.prod(shape)))
        first = header({"w": ("U8", tuple(shape), len(data))}, {"DCP_SHARDING_INFO": said})
        path = tmp_path / f"shard-{file + 1:05d}-model-00001-of-00001.safetensors"
        path.write_bytes(first + data)
    began = time.process_time()
    [problem] = checkpoint.verify(tmp_path).problems
    assert time.process_time() - began < within(SECONDS)
    assert problem.kind == "hole"
    assert "no file holds [0:" in problem.message
    with pytest.raises(CoverageError, match=r"no file holds \[0:"):
        checkpoint.convert(tmp_path, tmp_path.with_name("other"))
    assert time.process_time() - began < within(2 * SECONDS)


def test_thousands_of_disjoint_boxes_are_seen_to_be_all() -> None:
    rng = np.random.default_rng(1)
    boxes = [Box.whole((100_000, 100_000))]
    while len(boxes) < 3000:
        box = boxes.pop(int(rng.integers(len(boxes))))
        dim = int(rng.integers(2))
        middle = (box.start[dim] + box.stop[dim]) // 2
        boxes += [part for part in box.split(dim, middle) if part.size]
    began = time.process_time()
    whole = Box.whole((100_000, 100_000))
    assert missing_boxes(whole, boxes) == repeated_boxes(whole, boxes) == ()
    assert time.process_time() - began < within(2.0)
