"""Reads safetensors files: headers, the index, whole tensors, and boxes of tensors.

``model.safetensors.index.json`` maps tensors to files; it must agree with the headers. Without an
index all files of the folder count, and names such as ``model-00002-of-00004.safetensors`` show
when one is missing.

Files of torch's distributed checkpoint hold boxes; the metadata of each file gives the offset of
its tensors in the global ones. Torch does not write the global shapes: a tensor then reaches as far
as its furthest box, and a missing last file is noticed only with the mesh that saved it. Files that
reshard writes have the shapes (``header.OwnMetadata``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from operator import add, attrgetter, gt
from typing import Any

from reshard.checkpoint.catalog import Catalog, StoredPiece, StoredTensor
from reshard.checkpoint.formats.checks import (
    Content,
    Findings,
    LocalTensor,
    Reading,
    checked_shape,
    rank_of,
    whole_tensors,
)
from reshard.checkpoint.formats.safetensors.header import (
    KEY,
    RESERVED,
    SHARDING,
    OwnMetadata,
    OwnTensor,
    header_length,
    parse_header,
    read_json,
)
from reshard.checkpoint.storage.local import Storage, StoredFile, check_path
from reshard.errors import CheckpointError, DamageError, UnsupportedError
from reshard.layout.box import Box
from reshard.text import and_more, quoted

FIRST_READ = 1 << 14
"""Bytes of each file that are read first; most headers fit."""
BATCH = 1000
MAX_INDEX = 1 << 28
INDEX = ".safetensors.index.json"


Contents = Mapping[StoredFile, Content]
Own = Mapping[StoredFile, OwnMetadata]
"""Reshard's metadata of each file that has some."""
_Source = tuple[Content, Mapping[str, OwnTensor]]
"""A file, and what it says of whole tensors."""


def read_headed(
    reading: Reading, named: Sequence[StoredFile]
) -> tuple[list[StoredFile], Contents, Own]:
    """The files of a checkpoint, and the content of those whose headers are sound.

    ``named`` are the safetensors files of the folder. Headers are compared with the index.
    """
    storage, findings = reading.storage, reading.findings
    index = find_index(reading.listed)
    mapped = {} if index is None else index_files(storage, index)
    files = _choose_files(reading, named, mapped)
    contents = read_headers(storage, files, findings)
    own = {}
    for file, one in contents.items():
        if KEY in one.described:
            with findings:
                own[file] = OwnMetadata.parse(one.described[KEY], one.where)
    if index is not None and mapped:
        _check_index(reading, storage.where(index.path), mapped, contents)
    return files, contents, own


def _choose_files(
    reading: Reading, files: Sequence[StoredFile], mapped: Mapping[str, str]
) -> list[StoredFile]:
    """The files of the index; without an index, those directly in the folder."""
    root = reading.storage.root
    if mapped:
        present = {file.path: file for file in reading.listed}
        counts = Counter(mapped.values())
        for path, count in counts.items():
            if path not in present:
                reading.findings.add_damage(
                    f"{root}/{path} is missing: the index puts {count} tensors there"
                )
        return [present[path] for path in sorted(counts) if path in present]
    here = [file for file in files if "/" not in file.path]
    if here:
        return here
    if not files:
        raise CheckpointError(f"{root} has an index of safetensors files and none of these")
    folders = sorted({file.path.rpartition("/")[0] for file in files})
    more = f" and in {len(folders) - 1} more" if len(folders) > 1 else ""
    raise CheckpointError(
        f"{root} has its safetensors files in the folder {quoted(folders[0])}{more}: name one "
        "folder, or give --rules and --mesh if they are of ranks"
    )


def read_headers(
    storage: Storage, files: Sequence[StoredFile], findings: Findings
) -> dict[StoredFile, Content]:
    """The content of each file whose header is sound; damage is noted."""
    contents = {}
    for first in range(0, len(files), BATCH):
        batch = files[first : first + BATCH]
        starts = storage.read_many([(f.path, 0, min(f.size, FIRST_READ)) for f in batch])
        for file, data in zip(batch, starts, strict=True):
            where = storage.where(file.path)
            with findings:
                length = header_length(data, file.size, where)
                text = data[8 : 8 + length]
                if len(text) < length:
                    text += storage.read(file.path, len(data), 8 + length - len(data))
                contents[file] = one = parse_header(text, file.size, where)
                reserved = RESERVED & one.metadata.keys()
                one.described = {key: one.metadata.pop(key) for key in reserved}
    return contents


def find_index(listed: Iterable[StoredFile]) -> StoredFile | None:
    """The index of the folder's files, if there is exactly one."""
    indexes = [f for f in listed if f.path.endswith(INDEX) and "/" not in f.path]
    usual = [f for f in indexes if f.path == f"model{INDEX}"] or indexes
    return usual[0] if len(usual) == 1 else None


def index_files(storage: Storage, index: StoredFile) -> Mapping[str, str]:
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


def _check_index(
    reading: Reading, where: str, mapped: Mapping[str, str], contents: Contents
) -> None:
    listed: dict[str, set[str]] = {}
    for name, path in mapped.items():
        listed.setdefault(path, set()).add(name)
    for file, one in contents.items():
        path, stored = file.path, one.tensors.keys()
        if absent := sorted(listed[path] - stored):
            reading.findings.add_damage(
                f"{where} puts {_tensors(absent)} into {path}, whose header does not have it"
            )
        if extra := sorted(stored - listed[path]):
            reading.findings.add_damage(f"{one.where} holds {_tensors(extra)}, which {where} lacks")


def _tensors(names: Sequence[str]) -> str:
    return f"tensor {and_more([quoted(names[0]), *names[1:]])}"


def read_whole(reading: Reading, files: Sequence[StoredFile], contents: Contents) -> Catalog:
    index = find_index(reading.listed)
    if index is None:
        reading.check_parts(files)
    ranks = {file.path: rank_of(file.path, None) for file in contents}
    names = [name for one in contents.values() for name in one.tensors]
    if None not in ranks.values() and len(set(names)) < len(names):
        path, rank = next(iter(ranks.items()))
        raise CheckpointError(
            f"{reading.storage.root} holds files of {len(set(ranks.values()))} ranks ({path} is of "
            f"rank {rank}) that do not record their layout: give --rules and --mesh"
        )
    tensors = whole_tensors(
        contents.values(),
        reading.findings,
        "name one of the files, or give the rules and the mesh by which ranks wrote them",
    )
    return reading.catalog("safetensors", contents, tensors, index=index)


_SHARD = re.compile(r"shard-(\d{1,9})-", re.ASCII)


def check_counts(reading: Reading, files: Sequence[StoredFile], own: Own) -> None:
    """Note missing files: reshard writes their number, torch the number of each rank."""
    root, mesh, findings = reading.storage.root, reading.mesh, reading.findings
    counts = {one.files: file.path for file, one in own.items()}
    if len(counts) > 1:
        (one, first), (two, second), *_ = counts.items()
        findings.add_damage(f"{root}/{first} is one of {one} files and {second} one of {two}")
        return
    numbers = {one.file for one in own.values()}
    total = next(iter(counts), 0)
    if not own:
        numbers = {int(match[1]) for file in files if (match := _SHARD.match(file.path))}
        total = max(max(numbers), mesh.num_ranks if mesh else 0) if numbers else 0
    absent = [*islice((n for n in range(1, total + 1) if n not in numbers), 4)]
    if absent:
        text = f"shard {', '.join(map(str, absent))} of {total} is missing"
        findings.add_damage(f"{root}: {text} ({len(numbers)} of {total} are there)")


def read_sharded(reading: Reading, contents: Contents, own: Own) -> Catalog:
    """The catalog of files whose metadata places their tensors."""
    findings = reading.findings
    pieces: dict[str, list[StoredPiece]] = {}
    sources: list[_Source] = []
    for number, (file, one) in enumerate(contents.items()):
        sources.append((one, own[file].tensors if file in own else {}))
        with findings:
            offsets: dict[str, Any] | None = None  # of a file that holds whole tensors
            if (text := one.described.get(SHARDING)) is not None:
                data = text.encode("utf-8", "surrogatepass")
                offsets = read_json(data, f"{one.where}: {SHARDING}")
            for name, local in one.tensors.items():
                with findings:
                    start = _start(name, local, one.where, offsets)
                    stop = checked_shape(tuple(map(add, start, local.shape)), one.where, name)
                    piece = StoredPiece(Box(start, stop), number, local.offset, local.strides)
                    pieces.setdefault(name, []).append(piece)
    tensors = {}
    for name, some in pieces.items():
        with findings:
            tensors[name] = _joined(name, some, sources, findings)
    have_shapes = all(
        any(name in sources[piece.file][1] for piece in some) for name, some in pieces.items()
    )
    if reading.mesh is None and not have_shapes:
        findings.note(
            "the files do not say how large their tensors are: shapes reach as far as the boxes "
            "found, so a last shard that is missing would not be noticed; it is with the mesh that "
            "saved them (--mesh, in convert --from-mesh)"
        )
    mesh = next((one.mesh for one in own.values() if one.mesh is not None), None)
    each = (item for _, described in sources for item in described.items())
    layouts = {name: tensor.layout for name, tensor in each if mesh and tensor.layout}
    return reading.catalog("sharded-safetensors", contents, tensors, mesh=mesh, layouts=layouts)


def _start(
    name: str, local: LocalTensor, where: str, offsets: Mapping[str, Any] | None
) -> tuple[int, ...]:
    if offsets is None:
        return (0,) * len(local.shape)
    place, named = offsets.get(name), f"{where}: tensor {quoted(name)}"
    if not isinstance(place, dict) or "saved_offsets" not in place:
        raise DamageError(f"{named} has no saved_offsets in {SHARDING}")
    start = checked_shape(place["saved_offsets"], f"{where}: saved_offsets", name)
    if len(start) != len(local.shape):
        raise DamageError(f"{named} has the shape {local.shape} and the offsets {start}")
    return start


def _joined(
    name: str, pieces: Sequence[StoredPiece], sources: Sequence[_Source], findings: Findings
) -> StoredTensor:
    """The global tensor; pieces that do not fit the first one are noted and left out."""
    first, shape = sources[pieces[0].file][0], None
    dtype, num_dims = first.tensors[name].dtype, len(pieces[0].strides)
    fitting = list[StoredPiece]()
    for piece in pieces:
        one, described = sources[piece.file]
        kind, dims, own = one.tensors[name].dtype, len(piece.strides), described.get(name)
        with findings:
            named = f"{one.where}: tensor {quoted(name)}"
            if (kind, dims) != (dtype, num_dims):
                raise DamageError(
                    f"{named} is {kind} of {dims} dims and {dtype} of {num_dims} in "
                    f"{first.where}: one of them is not of this checkpoint"
                )
            if own is not None and shape not in (None, own.shape):
                raise DamageError(
                    f"{named} is part of {own.shape}, and of {shape} in {first.where}"
                )
            shape = shape if own is None else own.shape
            fitting.append(piece)
    reach = tuple(map(max, zip(*(piece.box.stop for piece in fitting), strict=True)))
    shape = checked_shape(reach, first.where, name) if shape is None else shape
    if len(reach) != len(shape) or any(map(gt, reach, shape)):
        raise DamageError(
            f"{first.where}: tensor {quoted(name)} has a box that reaches to {reach}, outside of "
            f"its shape {shape}"
        )
    return StoredTensor(name, shape, dtype, tuple(sorted(fitting, key=attrgetter("box"))))
