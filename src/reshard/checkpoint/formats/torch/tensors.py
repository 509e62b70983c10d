"""Tensors and plain values in the pickles of ``torch.save`` archives.

Plain values are numbers, strings, bytes, and lists, tuples and dicts of them. Values that nest
without end, or that refer to one list in thousands of places, are not plain: each visit of a value
is counted, so that its text and its pickle are bounded by the size of the file.

>>> is_plain([0.9, (1, None)], Visits(100)), is_plain([object()], Visits(100))
(True, False)
>>> as_json((0.9, 0.999)), as_json(b"raw")
('[0.9, 0.999]', None)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.formats.checks import LocalTensor, checked_shape, shown, whole_numbers
from reshard.checkpoint.formats.torch.archive import Archive, archive_crcs, each_archive
from reshard.checkpoint.formats.torch.unpickler import Global, Record, unpickle
from reshard.checkpoint.storage.local import Storage
from reshard.dtypes import ITEMSIZE, itemsize
from reshard.errors import CheckpointError, DamageError, UnsupportedError
from reshard.layout.box import row_major
from reshard.text import format_bytes

STORAGE_DTYPES = {
    "BoolStorage": "bool", "ByteStorage": "uint8", "CharStorage": "int8", "ShortStorage": "int16",
    "IntStorage": "int32", "LongStorage": "int64", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "FloatStorage": "float32", "DoubleStorage": "float64",
    "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
}  # fmt: skip
_REBUILD = "torch._utils._rebuild_tensor"
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
_TENSORS = ("torch._utils._rebuild", "torch._tensor._rebuild")
"""Prefixes of all functions that build tensors, also of kinds that are not supported."""

MAX_WRAPPED = 8
MAX_ARGS = 16
"""Arguments of a call that builds a tensor, and flags of a tensor; torch has at most eight."""
EXPANDED = 64
SMALL = 1 << 20
"""A tensor may be 64 times larger than its storage (expanded along a dim), or have 1 MiB: enough
for masks and positions, too little for a small file to stand for terabytes."""


def is_tensor(value: object) -> bool:
    """Whether a record is a tensor, also of a kind that ``tensor_of`` refuses."""
    return isinstance(value, Record) and value.kind.startswith(_TENSORS)


def dtype_of(value: object, where: str) -> str:
    if isinstance(value, Global) and value.module == "torch" and value.name in ITEMSIZE:
        return value.name
    kind = value.path if isinstance(value, Global) else shown(value)
    raise UnsupportedError(f"{where} has the dtype {kind}, which is not supported")


def tensor_of(record: Record, where: str) -> LocalTensor:
    """The tensor that a record describes, at its offset in its storage.

    Thousands of archives may share it, so the archive is not needed: see ``within``.
    """
    record = _plain(record, where)
    dtype: str | None = None
    match record.kind.removeprefix(_REBUILD), record.args[:MAX_ARGS]:
        case "_v2", (storage, start, size, stride, _, _, *extra):
            pass
        case "_v3", (storage, start, size, stride, _, _, kind, *extra):
            dtype = dtype_of(kind, where)
        case _:
            raise UnsupportedError(f"{where}: a tensor made by {record.kind} is not supported")
    flags = extra[0] if extra else None
    if isinstance(flags, Mapping) and (len(flags) > MAX_ARGS or any(flags.values())):
        raise UnsupportedError(  # its bytes are not its values
            f"{where}: a lazily conjugated or negated tensor is not supported: "
            "save x.resolve_conj().resolve_neg()"
        )
    key, dtype, length = _storage(storage, dtype, where)
    shape = checked_shape(size, where)
    start, strides = _view(start, stride, shape, where)
    last = start + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    count, size = length // itemsize(dtype), prod(shape) * itemsize(dtype)
    if last >= count and size:
        raise DamageError(
            f"{where}: its last element is number {last} of a storage of {count} elements"
        )
    if size > max(SMALL, EXPANDED * length):
        raise UnsupportedError(
            f"{where} has {format_bytes(size)} and its storage {format_bytes(length)}: it is "
            f"expanded by more than {EXPANDED} times, which is not read: save it before expand()"
        )
    return LocalTensor(dtype, shape, strides, start * itemsize(dtype), key, length)


def _view(
    start: Any, stride: Any, shape: tuple[int, ...], where: str
) -> tuple[int, tuple[int, ...]]:
    """Start and strides, with usual values where they lead to no element and may be any number."""
    fits = isinstance(stride, list | tuple) and len(stride) == len(shape)
    strides = whole_numbers(stride) if fits else None
    if strides is None or whole_numbers((start,)) is None:
        raise DamageError(f"{where}: strides {shown(stride)} do not fit the shape {shape}")
    usual = row_major(shape)
    if 0 in shape:
        return 0, usual
    dims = zip(shape, strides, usual, strict=True)
    return start, tuple(least if length == 1 else stride for length, stride, least in dims)


def within(archive: Archive, tensor: LocalTensor, where: str) -> LocalTensor:
    """A tensor of ``tensor_of`` at its offset in the file of an archive that has its record."""
    member = archive.members.get(f"data/{tensor.storage}")
    if member is None and tensor.length:
        raise DamageError(f"{where}: the archive has no storage {tensor.storage}")
    if member is not None and member.size != tensor.length:
        raise DamageError(
            f"{where}: storage {tensor.storage} has {member.size} bytes instead of {tensor.length}"
        )
    return tensor._replace(offset=tensor.offset + (member.offset if member else 0))


def _plain(record: Record, where: str) -> Record:
    """The tensor inside a parameter or an instance of a subclass."""
    for _ in range(MAX_WRAPPED):
        match record:
            case Record(kind=kind, args=(Record() as inner, *_)) if kind in _PARAMETERS:
                record = inner
            case Record(kind=kind, args=(Global() as make, _, tuple(args), _)) if kind == _SUBCLASS:
                record = Record(make, args)
            case _:
                return record
    raise DamageError(f"{where}: a tensor wrapped without end")


def _storage(storage: Any, dtype: str | None, where: str) -> tuple[str, str, int]:
    """The member of a storage, the dtype of its elements, and its size in bytes."""
    match storage:
        case Record(
            kind="persistent", args=(("storage", Global(name=kind), str(key), str(), int(count)),)
        ):
            if kind == "UntypedStorage":
                if dtype is None:
                    raise DamageError(f"{where}: a tensor without a dtype")
                return key, dtype, count
            if kind not in STORAGE_DTYPES:
                raise UnsupportedError(f"{where}: a {kind} is not supported")
            own = STORAGE_DTYPES[kind]
            return key, dtype or own, count * itemsize(own)
    raise DamageError(f"{where}: a tensor without a storage")


MAX_DEPTH = 32
MAX_TEXT = 1 << 20  # of all strings of one value
_NUMBERS = (int, float, type(None))  # bool is an int


@dataclass(slots=True)
class Visits:
    """The number of values that may still be visited."""

    left: int


def is_plain(value: Any, visits: Visits) -> bool:
    """Whether a value is plain and within the limits of one value."""
    pending, text = [(value, 0)], 0
    while pending:
        part, depth = pending.pop()
        visits.left -= 1
        if isinstance(part, str | bytes):
            text += len(part)
        elif isinstance(part, list | tuple | dict):
            inside = [*part, *part.values()] if isinstance(part, dict) else part
            if depth >= MAX_DEPTH or len(inside) > visits.left:
                return False
            pending += [(one, depth + 1) for one in inside]
        elif not isinstance(part, _NUMBERS):
            return False
        if text > MAX_TEXT or visits.left < 0:
            return False
    return True


def as_json(value: Any) -> str | None:
    """A plain value as JSON; None if JSON cannot represent it, as with bytes or infinity."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return None


MAX_OBJECT = 1 << 16
"""Bytes of an object that is read; larger ones are copied unread."""


def object_texts(storage: Storage, catalog: Catalog) -> Mapping[str, str]:
    """The objects of a ``.distcp`` that are plain values, as JSON.

    Formats such as safetensors hold strings only, so they keep a step or a learning rate as text.
    """
    small = [entry for entry in catalog.objects.values() if entry.size <= MAX_OBJECT]
    ranges = [(catalog.files[entry.file].path, entry.offset, entry.size) for entry in small]
    texts: dict[str, str] = {}
    archives = each_archive(storage, ranges, MAX_OBJECT)
    for entry, place, archive in zip(small, ranges, archives, strict=True):
        try:
            if isinstance(archive, CheckpointError):
                raise archive
            value = unpickle(archive.pickle, archive.where)
        except UnsupportedError:
            continue
        except DamageError:
            try:
                archive_crcs(storage, place, 0)
            except CheckpointError:
                continue  # no archive of torch.save, so not a plain value
            raise
        text = as_json(value) if is_plain(value, Visits(len(archive.pickle))) else None
        if text is not None:
            texts[entry.name] = text
    return texts
