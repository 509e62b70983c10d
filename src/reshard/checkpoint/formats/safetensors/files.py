"""Safetensors files that hold whole tensors: one, several, or several with an index.

``model.safetensors.index.json`` says which tensor is in which file; what it says and what the
files' headers say must agree. Without an index all files of the folder count, and names such as
``model-00002-of-00004.safetensors`` tell when one is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from reshard.checkpoint.catalog import Catalog, StoredPiece, StoredTensor
from reshard.checkpoint.formats.findings import Findings
from reshard.checkpoint.formats.safetensors.header import (
    Header,
    header_length,
    parse_header,
    read_json,
)
from reshard.checkpoint.formats.safetensors.own_metadata import KEY, SHARDING
from reshard.checkpoint.storage.base import Storage, StoredFile, check_path
from reshard.errors import DamageError, UnsupportedError
from reshard.layout.box import Box, row_major
from reshard.text import quoted

__all__ = [
    "HeadedFile", "common_metadata", "find_index", "missing_parts", "read_headers", "read_whole",
]  # fmt: skip

FIRST_READ = 1 << 14
"""Bytes of each file that are read at once; most headers fit."""
BATCH = 1000
MAX_INDEX = 1 << 28
INDEX = ".safetensors.index.json"

_PART = re.compile(r"(.*?)(\d{1,9})-of-(\d{1,9}\.(?:safetensors|bin|pt|pth|ckpt))\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class HeadedFile:
    """A safetensors file and its header."""

    file: StoredFile
    header: Header
    where: str
    """What errors call it."""


def read_headers(
    storage: Storage, files: Sequence[StoredFile], findings: Findings
) -> list[HeadedFile]:
    """The headers of files; those of damaged files are left out and noted."""
    headed = []
    for file, data in _beginnings(storage, files):
        where = storage.where(file.path)
        with findings.noting():
            length = header_length(data, file.size, where)
            text = data[8 : 8 + length]
            if len(text) < length:
                text += storage.read(file.path, len(data), 8 + length - len(data))
            headed.append(HeadedFile(file, parse_header(text, file.size, where), where))
    return headed


def _beginnings(
    storage: Storage, files: Sequence[StoredFile]
) -> Iterator[tuple[StoredFile, bytes]]:
    """The first bytes of each file, of a thousand files at a time."""
    for at in range(0, len(files), BATCH):
        batch = files[at : at + BATCH]
        data = storage.read_many([(f.path, 0, min(f.size, FIRST_READ)) for f in batch])
        yield from zip(batch, data, strict=True)


def find_index(listed: Iterable[StoredFile]) -> StoredFile | None:
    """The index of the folder's files, if there is exactly one."""
    found = [f for f in listed if f.path.endswith(INDEX) and "/" not in f.path]
    usual = [f for f in found if f.path == f"model{INDEX}"]
    return (usual or found)[0] if usual or len(found) == 1 else None


def read_whole(
    storage: Storage,
    listed: Sequence[StoredFile],
    headed: Sequence[HeadedFile],
    findings: Findings,
) -> Catalog:
    """The catalog of files that hold every tensor whole."""
    files = tuple(one.file for one in headed)
    tensors: dict[str, StoredTensor] = {}
    home: dict[str, str] = {}
    doubled: dict[tuple[str, str], list[str]] = {}
    for number, one in enumerate(headed):
        for entry in one.header.entries:
            if entry.name in home:
                doubled.setdefault((home[entry.name], one.where), []).append(entry.name)
                continue
            home[entry.name] = one.where
            piece = StoredPiece(_whole(entry.shape), number, entry.offset, _strides(entry.shape))
            tensors[entry.name] = StoredTensor(entry.name, entry.shape, entry.dtype, (piece,))
    findings.refuse_doubled(
        doubled, "name one of the files, or give the rules and the mesh by which ranks wrote them"
    )
    used = {file.path for file in files}
    index = find_index(listed)
    if index is not None:
        used.add(index.path)
    others = tuple(file for file in listed if file.path not in used)
    return Catalog(
        storage.root, "safetensors", files, tensors, metadata=common_metadata(headed), others=others
    )


# One object for each shape: many tensors have the same.
_whole = lru_cache(maxsize=4096)(Box.whole)
_strides = lru_cache(maxsize=4096)(row_major)


def check_index(
    storage: Storage,
    index: StoredFile,
    headed: Sequence[HeadedFile],
    findings: Findings,
) -> None:
    """Compare what the index says with what the headers say."""
    where = storage.where(index.path)
    mapped = index_files(storage, index)
    found = {one.file.path: {entry.name for entry in one.header.entries} for one in headed}
    listed: dict[str, set[str]] = {}
    for name, path in mapped.items():
        listed.setdefault(path, set()).add(name)
    for path, names in listed.items():
        if path not in found:
            continue
        absent = sorted(names - found[path])
        extra = sorted(found[path] - names)
        if absent:
            findings.found(
                f"{where} puts {_some(absent)} into {path}, whose header does not have it"
            )
        if extra:
            findings.found(f"{storage.where(path)} holds {_some(extra)}, which {where} lacks")


def index_files(storage: Storage, index: StoredFile) -> Mapping[str, str]:
    """Which file each tensor is in, as the index says."""
    where = storage.where(index.path)
    if index.size > MAX_INDEX:
        raise DamageError(f"{where} has {index.size} bytes, at most {MAX_INDEX} are read")
    mapped = read_json(storage.read(index.path, 0, index.size), where).get("weight_map")
    if not isinstance(mapped, dict) or not all(isinstance(p, str) for p in mapped.values()):
        raise DamageError(f"{where} has no weight_map from names to files")
    for path in dict.fromkeys(mapped.values()):
        try:
            check_path(path)
        except UnsupportedError as error:
            raise UnsupportedError(f"{where}: {error}") from None
    return mapped


def missing_parts(files: Iterable[StoredFile]) -> Iterator[str]:
    """What names such as ``model-00002-of-00004`` promise and the folder lacks.

    >>> [*missing_parts([StoredFile("model-00001-of-00002.safetensors", 9)])]
    ['model-00002-of-00002.safetensors']
    """
    groups: dict[tuple[str, str], tuple[int, set[int]]] = {}
    for file in files:
        match = _PART.match(file.path)
        if match:
            width, have = groups.setdefault((match[1], match[3]), (len(match[2]), set()))
            have.add(int(match[2]))
    for (stem, ending), (width, have) in groups.items():
        total = int(ending.partition(".")[0])
        absent = (number for number in range(1, total + 1) if number not in have)
        for number in islice(absent, 16):
            yield f"{stem}{number:0{width}d}-of-{ending}"


def common_metadata(headed: Iterable[HeadedFile]) -> dict[str, str]:
    """What the files say beside their tensors; the first file's word where they differ."""
    merged: dict[str, str] = {}
    for one in headed:
        for key, text in one.header.metadata.items():
            merged.setdefault(key, text)
    ours = (KEY, SHARDING, "DCP_VERSION")
    return {key: text for key, text in merged.items() if key not in ours}


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"tensor {quoted(names[0])}{more}"
