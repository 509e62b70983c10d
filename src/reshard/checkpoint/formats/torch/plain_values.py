"""Plain values of pickles: numbers, strings, bytes, and lists, tuples and dicts of them.

Values that nest without end, or that refer to one list in thousands of places, are not plain: each
visit of a value is counted, so that its text and its pickle are bounded by the size of the file.

>>> is_plain([0.9, (1, None)], Visits(100)), is_plain([object()], Visits(100))
(True, False)
>>> as_json((0.9, 0.999)), as_json(b"raw")
('[0.9, 0.999]', None)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.checkpoint.catalog import Catalog, StoredObject
from reshard.checkpoint.formats.torch.archive import archive_crcs, read_archives
from reshard.checkpoint.formats.torch.tensors import allow_tensors
from reshard.checkpoint.formats.torch.unpickler import unpickle
from reshard.checkpoint.storage.base import Range, Storage
from reshard.errors import CheckpointError, DamageError

__all__ = ["Visits", "as_json", "is_plain", "object_texts"]

MAX_DEPTH = 32
MAX_TEXT = 1 << 20
"""Characters and bytes of all strings of one value."""
MAX_OBJECT = 1 << 16
"""Bytes of an object that is read; larger ones are copied unread."""
BATCH = 1024

_PLAIN = (str, bytes, int, float, type(None))  # bool is an int


class Visits:
    """The number of values that may still be visited."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


def is_plain(value: Any, visits: Visits) -> bool:
    """Whether a value is plain and within the limits of one value."""
    pending, text = [(value, 0)], 0
    while pending:
        found, depth = pending.pop()
        visits.left -= 1
        if isinstance(found, str | bytes):
            text += len(found)
        elif isinstance(found, list | tuple | dict):
            inside = [*found, *found.values()] if isinstance(found, dict) else found
            if depth >= MAX_DEPTH or len(inside) > visits.left:
                return False
            pending += [(one, depth + 1) for one in inside]
        elif not isinstance(found, _PLAIN):
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


def object_texts(storage: Storage, catalog: Catalog) -> Mapping[str, str]:
    """The objects of a ``.distcp`` that are plain values, as JSON.

    Formats such as safetensors hold strings only, so they keep a step or a learning rate as text.
    """
    small = [entry for entry in catalog.objects.values() if entry.size <= MAX_OBJECT]
    texts: dict[str, str] = {}
    for first in range(0, len(small), BATCH):
        texts |= _texts(storage, catalog, small[first : first + BATCH])
    return texts


def _texts(storage: Storage, catalog: Catalog, entries: Sequence[StoredObject]) -> dict[str, str]:
    """The texts of a batch of objects; one by one if an archive among them cannot be read."""
    ranges = [(catalog.files[entry.file].path, entry.offset, entry.size) for entry in entries]
    texts: dict[str, str] = {}
    try:
        archives = read_archives(storage, ranges, MAX_OBJECT)
        for entry, archive in zip(entries, archives, strict=True):
            value = unpickle(archive.pickle, allow_tensors, archive.where)
            text = as_json(value) if is_plain(value, Visits(len(archive.pickle))) else None
            if text is not None:
                texts[entry.name] = text
    except CheckpointError as error:
        if len(entries) == 1:
            if isinstance(error, DamageError) and _is_archive(storage, ranges[0]):
                raise
            return {}  # not a plain value
        for entry in entries:
            texts |= _texts(storage, catalog, [entry])
    return texts


def _is_archive(storage: Storage, place: Range) -> bool:
    """Whether a range of a file is an archive of ``torch.save``; no member is read."""
    try:
        archive_crcs(storage, place, 0)
    except CheckpointError:
        return False
    return True
