"""Folders of ``torch.distributed.checkpoint``: one ``.metadata``, or one for each rank.

``.metadata`` lists every tensor with its boxes, and for each box the range of a ``.distcp`` file
that is one ``torch.save`` archive. Objects of unknown classes, such as Megatron's plans, become
records that are not interpreted.

With ``use_collectives=False`` each rank writes a ``__3.metadata`` that describes only its local
tensors. Where the ranks have different names, all of them together are one checkpoint; where they
share names, rules give the layouts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from operator import add, attrgetter, gt, itemgetter
from typing import NamedTuple

from reshard.checkpoint.catalog import Catalog, Crc, StoredObject, StoredPiece, StoredTensor
from reshard.checkpoint.formats.checks import (
    RANK_METADATA,
    Findings,
    LocalTensor,
    Reading,
    checked_shape,
    is_distcp,
    shown,
    whole_numbers,
)
from reshard.checkpoint.formats.torch.archive import each_archive
from reshard.checkpoint.formats.torch.tensors import (
    Visits,
    dtype_of,
    is_plain,
    is_tensor,
    tensor_of,
    within,
)
from reshard.checkpoint.formats.torch.unpickler import Record, unpickle
from reshard.checkpoint.storage.local import Range, Storage, check_path
from reshard.errors import CheckpointError, DamageError, UnsupportedError
from reshard.layout.box import Box
from reshard.text import quoted

METADATA = ".metadata"
MAX_METADATA = 1 << 29
MAX_PICKLE = 1 << 16
"""Bytes of the pickle of one tensor, which has a few hundred, and of its archive's directory."""
CHUNK_BYTES = 16
"""The least bytes of metadata per chunk, unless tensors share a list of chunks."""
MAX_PATH = 1 << 12
MAX_KEYS = 64  # of the path to an entry of a nested state dict
KNOWN_PICKLES = 1 << 12
EXTRAS = ("mcore_data",)

_METADATA = "torch.distributed.checkpoint.metadata."
_DATA = re.compile(r"__(\d{1,9})_\d{1,9}\.distcp\Z")

Tensors = Mapping[str, StoredTensor]
Placed = Mapping[tuple[str, tuple[int, ...] | None], Range]
"""The range of a file that is the archive of a box, by tensor and start of the box."""


class _Chunk(NamedTuple):
    """The range of a file that is the archive of a box, the box, and its tensor."""

    range: Range
    box: Box
    tensor: StoredTensor


def read_distcp_folder(reading: Reading) -> Catalog:
    rules, mesh, root = reading.rules, reading.mesh, reading.storage.root
    ranks = _metadata_of_ranks(reading)
    if ranks and rules is None and mesh is not None:
        raise CheckpointError(f"{root}: mesh {mesh} is for files of ranks: give --rules too")
    if not ranks and (rules is not None or mesh is not None):
        unneeded = "rules" if rules is not None else f"mesh {mesh}"
        raise CheckpointError(
            f"{root} is a .distcp folder, which records the layout of its tensors: leave out "
            f"{unneeded}"
        )
    catalog = Catalog(root, "distcp", (), {})
    by_rank: dict[int, Tensors] = {}
    for rank, path in (ranks or {0: METADATA}).items():
        catalog, by_rank[rank] = _with_metadata(catalog, reading, path)
    if ranks and rules is not None:
        from reshard.checkpoint.formats.ranks import join_by_rules

        catalog = join_by_rules(reading, catalog, by_rank, rules)
    home: dict[str, int] = {}
    for rank, name in ((rank, name) for rank, tensors in by_rank.items() for name in tensors):
        if rules is None and home.setdefault(name, rank) != rank:
            raise CheckpointError(
                f"{root} holds local tensors of {len(by_rank)} ranks that saved without each other "
                f"({quoted(name)} is on ranks {home[name]} and {rank}) and do not record their "
                "layout: give --rules and --mesh"
            )
    # Files of a .distcp that no metadata names were left by an earlier save on more ranks.
    used = {METADATA, *ranks.values(), *(file.path for file in catalog.files)}
    stale = [f.path for f in reading.listed if is_distcp(f.path) and f.path not in used]
    if stale:
        reading.findings.note(
            f"{quoted(stale[0])} is not named in {METADATA} ({len(stale)} such files)"
        )
    others = (f for f in reading.listed if f.path not in used and not is_distcp(f.path))
    return replace(catalog, others=tuple(others))


def _metadata_of_ranks(reading: Reading) -> dict[int, str]:
    """The metadata of each rank, if there is no common one; a rank without one is damage."""
    paths = [file.path for file in reading.listed]
    ranks = {int(match[1]): path for path in paths if (match := RANK_METADATA.match(path))}
    if METADATA in paths or not ranks:
        return {}
    writers = {int(match[1]) for path in paths if (match := _DATA.match(path))}
    for rank in sorted(({0} | writers) - ranks.keys()):
        where = reading.storage.where(f"__{rank}.metadata")
        reading.findings.add_damage(f"{where} is missing: other ranks have one")
    return dict(sorted(ranks.items()))


def _with_metadata(catalog: Catalog, reading: Reading, path: str) -> tuple[Catalog, Tensors]:
    """A catalog with what one more ``.metadata`` describes, and the tensors of that.

    For names that several have, the first counts.
    """
    storage, listed, findings = reading.storage, reading.listed, reading.findings
    where, most = storage.where(path), storage.size(path) // CHUNK_BYTES
    metadata = _metadata(storage, path)
    placed = _placed(metadata.field("storage_data"), where)
    sizes = {file.path: file.size for file in listed}
    readable = _readable(storage.root, placed.values(), sizes, findings)
    named = {path for path, _, _ in placed.values()}
    files = dict.fromkeys([*catalog.files, *(file for file in listed if file.path in named)])
    numbers = {file.path: number for number, file in enumerate(files)}
    described = metadata.field("state_dict_metadata")
    tensors, ranges, chunks = _described(described, placed, most, where, findings)
    for name, _ in placed:
        if name not in tensors and name not in ranges and not findings.any:
            findings.add_damage(f"{where}: {quoted(name)} is stored and not described")
    objects = {
        name: StoredObject(name, numbers[place[0]], *place[1:])
        for name, place in ranges.items()
        if place in readable
    }
    chunks = [chunk for chunk in chunks if chunk.range in readable]
    pieces, crcs = _pieces(storage, chunks, numbers, findings)
    whole = {name: replace(t, pieces=(*pieces.get(name, ()),)) for name, t in tensors.items()}
    joined = replace(
        catalog,
        files=(*files,),
        tensors={**whole, **catalog.tensors},
        objects={**objects, **catalog.objects},
        nesting={**_paths(metadata.field("planner_data")), **catalog.nesting},
        extras={**_extras(metadata, most, where, findings), **catalog.extras},
        crcs=(*catalog.crcs, *crcs),
    )
    return joined, whole


def _metadata(storage: Storage, path: str) -> Record:
    """The object in a ``.metadata``, of torch's class or of a subclass, as Megatron's is."""
    where, size = storage.where(path), storage.size(path)
    if size > MAX_METADATA:
        raise UnsupportedError(f"{where} has {size} bytes, at most {MAX_METADATA} are read")
    metadata = unpickle(storage.read(path, 0, size), where)
    if isinstance(metadata, Record) and isinstance(metadata.field("state_dict_metadata"), dict):
        return metadata
    raise UnsupportedError(
        f"{where} is a pickle of something else than the metadata of a checkpoint"
    )


def _described(
    described: Mapping[object, object], placed: Placed, most: int, where: str, findings: Findings
) -> tuple[Tensors, Mapping[str, Range], Sequence[_Chunk]]:
    """Tensors without their pieces, the ranges of objects, and the chunks of all tensors."""
    tensors: dict[str, StoredTensor] = {}
    ranges: dict[str, Range] = {}
    chunks: list[_Chunk] = []
    count = 0
    for name, entry in described.items():
        with findings:
            if not isinstance(name, str) or not isinstance(entry, Record):
                raise DamageError(f"{where}: an entry {shown(name)} is no tensor and no object")
            named = f"{where}: {quoted(name)}"
            if entry.kind == f"{_METADATA}BytesStorageMetadata":
                if (name, None) not in placed:
                    raise DamageError(f"{named} is stored in no file")
                ranges[name] = placed[name, None]
                continue
            tensors[name] = tensor = _tensor(name, entry, named)
            boxes = entry.field("chunks")
            boxes = boxes if isinstance(boxes, list) else []
            count += len(boxes)
            if count > most:
                raise UnsupportedError(
                    f"{where}: up to {quoted(name)} its tensors have {count} chunks, and so many "
                    f"bytes have at most {most}: many share one list"
                )
            chunks += _chunks(tensor, boxes, placed, named)
    return tensors, ranges, chunks


def _tensor(name: str, entry: Record, where: str) -> StoredTensor:
    if entry.kind != f"{_METADATA}TensorStorageMetadata":
        raise UnsupportedError(f"{where} is a {entry.kind}, which is not read")
    properties = entry.field("properties")
    state = properties.state if isinstance(properties, Record) else None
    fields = state if isinstance(state, tuple) else ()
    dtype = state.get("dtype") if isinstance(state, dict) else next(iter(fields), None)
    return StoredTensor(name, checked_shape(entry.field("size"), where), dtype_of(dtype, where), ())


def _extras(metadata: Record, most: int, where: str, findings: Findings) -> Mapping[str, object]:
    extras, visits = {}, Visits(most + MAX_KEYS)
    for name in EXTRAS:
        value = metadata.field(name)
        if isinstance(value, dict) and is_plain(value, visits):
            extras[name] = value
        elif value is not None:
            findings.note(f"{where}: {name} is not of plain values and is left out")
    return extras


def _placed(storage_data: object, where: str) -> Placed:
    if not isinstance(storage_data, dict):
        raise DamageError(f"{where}: its storage_data is no dict")
    placed: dict[tuple[str, tuple[int, ...] | None], Range] = {}
    for index, info in storage_data.items():
        name = index.field("fqn") if isinstance(index, Record) else None
        if not isinstance(name, str) or not isinstance(info, Record):
            raise DamageError(f"{where}: an entry of storage_data is not about a tensor")
        named, start = f"{where}: {quoted(name)}", index.field("offset")
        start = start if start is None else checked_shape(start, named)
        if (name, start) in placed:
            raise DamageError(f"{named} at {start} is stored twice")
        path, offset, length = map(info.field, ("relative_path", "offset", "length"))
        if not isinstance(path, str) or whole_numbers((offset, length)) is None:
            raise DamageError(f"{named} is stored in no range of a file")
        if len(path) > MAX_PATH:
            raise UnsupportedError(
                f"{named}: a path of {len(path)} characters, at most {MAX_PATH} are read"
            )
        if info.field("transform_descriptors"):
            raise UnsupportedError(f"{named} is stored compressed or transformed: not supported")
        placed[name, start] = check_path(path), offset, length
    return placed


def _readable(
    root: str, ranges: Iterable[Range], sizes: Mapping[str, int], findings: Findings
) -> set[Range]:
    """The ranges that are inside of their files and overlap no other; others are noted.

    A range that thousands of entries share would be read as often.
    """
    readable: set[Range] = set()
    for path, some in groupby(sorted(ranges), key=itemgetter(0)):
        entries = [*some]
        end, size = max(start + length for _, start, length in entries), sizes.get(path)
        if size is None:
            findings.add_damage(
                f"{root}/{path} is missing: {METADATA} puts {len(entries)} entries there, {end} "
                "bytes"
            )
            continue
        inside = [entry for entry in entries if entry[1] + entry[2] <= size]
        if len(inside) < len(entries):
            findings.add_damage(
                f"{root}/{path} has {size} bytes and {METADATA} expects {end}: it is truncated, "
                f"{len(entries) - len(inside)} of {len(entries)} entries are lost"
            )
        pairs = [pair for pair in pairwise(entries) if pair[1][1] < pair[0][1] + pair[0][2]]
        if pairs:
            (_, first, length), (_, start, _) = pairs[0]
            more = f" ({len(pairs)} such pairs)" if len(pairs) > 1 else ""
            findings.add_damage(
                f"{root}/{path}: two entries share bytes {start} to {first + length}{more}"
            )
        readable.update(inside)
        readable.difference_update(*pairs)
    return readable


def _chunks(
    tensor: StoredTensor, chunks: Sequence[object], placed: Placed, where: str
) -> Iterator[_Chunk]:
    """The distinct chunks of a tensor; empty ones of several ranks are listed repeatedly."""
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for chunk in chunks:
        if not isinstance(chunk, Record):
            raise DamageError(f"{where} has a malformed chunk")
        start = checked_shape(chunk.field("offsets"), where)
        shape = checked_shape(chunk.field("sizes"), where)
        stop = tuple(map(add, start, shape))
        if not len(start) == len(shape) == len(tensor.shape) or any(map(gt, stop, tensor.shape)):
            raise DamageError(
                f"{where} has a chunk at {start} of shape {shape}, outside of {tensor.shape}"
            )
        if (tensor.name, start) not in placed:
            raise DamageError(f"{where}: its chunk at {start} is stored in no file")
        if (start, stop) not in seen:
            seen.add((start, stop))
            yield _Chunk(placed[tensor.name, start], Box(start, stop), tensor)


def _pieces(
    storage: Storage, chunks: Sequence[_Chunk], numbers: Mapping[str, int], findings: Findings
) -> tuple[dict[str, list[StoredPiece]], list[Crc]]:
    """The pieces of every tensor, read archive by archive in the order of the files."""
    pieces: dict[str, list[StoredPiece]] = {}
    crcs: list[Crc] = []
    known: dict[bytes, LocalTensor] = {}
    order = sorted(chunks, key=itemgetter(0))
    archives = each_archive(storage, [place for place, _, _ in order], MAX_PICKLE)
    for ((path, _, _), box, tensor), archive in zip(order, archives, strict=True):
        with findings:
            if isinstance(archive, CheckpointError):
                raise type(archive)(f"{archive}; it holds {box} of {quoted(tensor.name)}")
            where, local = f"{archive.where}: {quoted(tensor.name)}", known.get(archive.pickle)
            if local is None:  # archives of one shape have the same pickle
                record = unpickle(archive.pickle, where)
                if not is_tensor(record):
                    raise DamageError(f"{where} is no tensor")
                local = tensor_of(record, where)
                if len(known) < KNOWN_PICKLES:
                    known[archive.pickle] = local
            local = within(archive, local, where)
            if (local.shape, local.dtype) != (box.shape, tensor.dtype):
                raise DamageError(
                    f"{where} is {local.shape} of {local.dtype} and {METADATA} says {box.shape} of "
                    f"{tensor.dtype}"
                )
            piece = StoredPiece(box, numbers[path], local.offset, local.strides)
            pieces.setdefault(tensor.name, []).append(piece)
            crcs += archive.crcs(numbers[path])
    for some in pieces.values():
        some.sort(key=attrgetter("box"))
    return pieces, crcs


def _paths(planner_data: object) -> dict[str, tuple[str | int, ...]]:
    paths = {}
    for name, path in planner_data.items() if isinstance(planner_data, dict) else ():
        is_path = isinstance(name, str) and isinstance(path, tuple) and len(path) <= MAX_KEYS
        if is_path and all(type(part) in (str, int) for part in path):
            paths[name] = path
    return paths
