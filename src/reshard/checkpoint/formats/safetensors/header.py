"""The header of a safetensors file: names, dtypes, shapes and byte ranges of its tensors.

    8 bytes     length of the header, little-endian
    header      JSON: {"name": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, ...}
    data        the tensors without gaps, offsets counted from here

Everything in a header is checked: lengths against the size of the file, ranges against each other,
names for duplicates.

>>> built = build_header({"w": ("float32", (2, 2)), "b": ("bfloat16", (2,))}, {"format": "pt"})
>>> built.offsets, built.file_size - len(built.data)
({'w': 152, 'b': 168}, 20)
>>> header = parse_header(built.data[8:], built.file_size, "a.safetensors")
>>> header.tensors["w"]
LocalTensor(dtype='float32', shape=(2, 2), strides=(2, 1), offset=152, storage='', length=0)

A file that reshard writes as one of several has the key ``reshard`` in ``__metadata__``, with JSON:

    {"version": 1,                  readers refuse a version they do not know
     "file": 3, "files": 4,         this file's number, from 1, and how many there are
     "mesh": "tp=4",                the mesh that the tensors are sharded over; absent: unknown
     "rank": 2,                     the rank whose tensors these are; absent: of no single rank
     "tensors": {                   every tensor of this file
       "w": {"shape": [8, 4],       its global shape
             "layout": "tp -"}}}    its layout on that mesh; absent: unknown

Torch's readers ignore it. The offset of a tensor in the global one is in torch's own key
``DCP_SHARDING_INFO`` (``{"w": {"saved_offsets": [4, 0]}}``); in a file without that key it
follows from rank, mesh and layout, which also covers local tensors joined from several boxes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

from reshard.checkpoint.formats.checks import Content, LocalTensor, checked_shape, shown
from reshard.dtypes import itemsize
from reshard.errors import CheckpointError, DamageError, UnsupportedError
from reshard.layout.box import row_major
from reshard.text import quoted

MAX_HEADER = 100_000_000  # the limit of the safetensors library

DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32",
    "U32": "uint32", "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class BuiltHeader(NamedTuple):
    """The bytes of a file before its tensors, the byte at which each begins, the size of all."""

    data: bytes
    offsets: Mapping[str, int]
    file_size: int


def header_length(first: bytes, file_size: int, where: str) -> int:
    if len(first) < 8:
        raise DamageError(f"{where} has {file_size} bytes: a safetensors file has at least 8")
    length = int.from_bytes(first[:8], "little")
    if length > file_size - 8:
        raise DamageError(
            f"{where}: bytes 0 to 8 promise a header of {length} bytes and the file has "
            f"{file_size}: it is truncated or is no safetensors file"
        )
    if length > MAX_HEADER:
        raise DamageError(f"{where}: a header of {length} bytes, at most {MAX_HEADER} are read")
    return length


_strides = lru_cache(maxsize=4096)(row_major)  # one object per shape: many tensors have the same


def parse_header(data: bytes, file_size: int, where: str) -> Content:
    """Read the JSON of a header: the tensors in the order of their bytes, and the metadata."""
    raw = read_json(data, where)
    data_start = 8 + len(data)
    metadata = raw.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise DamageError(f"{where}: __metadata__ is not an object of strings")
    entries = [(*_entry(name, value, where), name) for name, value in raw.items()]
    tensors, end, before = dict[str, LocalTensor](), 0, ""
    for start, stop, dtype, shape, name in sorted(entries, key=itemgetter(0, 1)):
        if start != end:
            what = "overlaps" if start < end else "leaves a gap after"
            what = f"begins at byte {start} of the data and {what} {before or 'the header'}"
            raise _damaged(name, where, f"{what}, which ends at {end}")
        tensors[name] = LocalTensor(dtype, shape, _strides(shape), data_start + start)
        end, before = stop, quoted(name)
    if end != file_size - data_start:
        what = "truncated" if end > file_size - data_start else "longer than its header says"
        last = f", the last of them {before}" if before else ""
        raise DamageError(
            f"{where} is {what}: its tensors{last} end at byte {data_start + end} and it has "
            f"{file_size} bytes"
        )
    return Content(where, tensors, metadata)


def build_header(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> BuiltHeader:
    """The header of a file that holds these tensors, (dtype, shape) by name, in this order."""
    start, starts = 0, {}
    entries: dict[str, Any] = {}
    if metadata:
        entries["__metadata__"] = dict(sorted(metadata.items()))
    for name, (dtype, shape) in tensors.items():
        stop = start + prod(shape) * itemsize(dtype)
        if name == "__metadata__":
            raise CheckpointError('a tensor called "__metadata__" cannot be written as safetensors')
        if dtype not in NAMES:
            raise CheckpointError(
                f"safetensors has no {dtype}: convert to one of {' '.join(DTYPES.values())}"
            )
        entries[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": (start, stop)}
        starts[name], start = start, stop
    content = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    content = content.ljust(len(content) + -len(content) % 8)
    if (length := len(content)) > MAX_HEADER:
        raise CheckpointError(
            f"a header of {length} bytes for {len(tensors)} tensors: readers take at most "
            f"{MAX_HEADER}; write more and smaller files"
        )
    offsets = {name: 8 + length + at for name, at in starts.items()}
    return BuiltHeader(length.to_bytes(8, "little") + content, offsets, 8 + length + start)


def read_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object without duplicate keys."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        if len(keys) != len(pairs):
            [(double, _)] = Counter(key for key, _ in pairs).most_common(1)
            raise DamageError(f"{where}: the key {quoted(double)} occurs twice")
        return keys

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except DamageError:
        raise
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise DamageError(f"{where}: its JSON cannot be read: {reason[:200]}") from None
    if not isinstance(value, dict):
        raise DamageError(f"{where}: its JSON is no object")
    return value


def _entry(name: str, value: object, where: str) -> tuple[int, int, str, tuple[int, ...]]:
    """The byte range of a tensor, relative to the start of the data, its dtype and its shape."""
    match value:
        case {"dtype": str(kind), "shape": list(sizes), "data_offsets": [int(start), int(stop)]}:
            pass
        case _:
            raise _damaged(name, where, "has no dtype, shape and two data_offsets")
    dtype = DTYPES.get(kind)
    if dtype is None:
        raise UnsupportedError(
            f"{where}: tensor {quoted(name)} has the dtype {quoted(kind)}, which is not supported: "
            f"known are {' '.join(DTYPES)}"
        )
    shape = checked_shape(sizes, where, name)
    if not 0 <= start <= stop or isinstance(start, bool) or isinstance(stop, bool):
        raise _damaged(name, where, f"is at bytes {start} to {stop} of the data")
    size, needed = stop - start, prod(shape) * itemsize(dtype)
    if size != needed:
        raise _damaged(name, where, f"has {size} bytes and {shape} of {dtype} needs {needed}")
    return start, stop, dtype, shape


def _damaged(name: str, where: str, what: str) -> DamageError:
    return DamageError(f"{where}: tensor {quoted(name)} {what}: the header is damaged")


KEY = "reshard"
SHARDING = "DCP_SHARDING_INFO"
"""Torch's key for the offsets of a file's tensors."""
RESERVED = frozenset((KEY, SHARDING, "DCP_VERSION"))
"""Keys of the metadata that describe a file; no value of the checkpoint can have one."""
VERSION = 1


class OwnTensor(NamedTuple):
    shape: tuple[int, ...]
    layout: str | None = None


@dataclass(frozen=True, slots=True)
class OwnMetadata:
    """The metadata of one file of a set; its fields are those of the JSON."""

    file: int
    files: int
    mesh: str | None = None
    rank: int | None = None
    tensors: Mapping[str, OwnTensor] = field(default_factory=dict)

    def to_text(self) -> str:
        data: dict[str, Any] = {"version": VERSION, "file": self.file, "files": self.files}
        data |= {"mesh": self.mesh, "rank": self.rank}
        data["tensors"] = {
            name: _known({"shape": shape, "layout": layout})
            for name, (shape, layout) in self.tensors.items()
        }
        return json.dumps(_known(data), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str, where: str) -> OwnMetadata:
        where = f'{where}: "{KEY}" of its __metadata__'
        raw = read_json(text.encode("utf-8", "surrogatepass"), where)
        if raw.get("version") != VERSION:
            raise UnsupportedError(
                f"{where} has version {shown(raw.get('version'))} and this reshard reads "
                f"{VERSION}: use a newer reshard"
            )
        match raw:
            case {"file": int(file), "files": int(files), "tensors": dict(tensors)}:
                pass
            case _:
                raise DamageError(f"{where} lacks file, files or tensors")
        mesh, rank = raw.get("mesh"), raw.get("rank")
        if not (mesh is None or isinstance(mesh, str)) or not (rank is None or type(rank) is int):
            raise DamageError(f"{where}: mesh is a text and rank a number")
        if not 1 <= file <= files:
            raise DamageError(f"{where} is about file {file} of {files}")
        described = {}
        for name, value in tensors.items():
            if not isinstance(value, dict):
                raise DamageError(f"{where}: tensor {quoted(name)} is not described by an object")
            layout = value.get("layout")
            if not (layout is None or isinstance(layout, str)):
                raise DamageError(f"{where}: the layout of tensor {quoted(name)} is no text")
            described[name] = OwnTensor(checked_shape(value.get("shape"), where, name), layout)
        return cls(file, files, mesh, rank, described)


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}
