"""Entries of a ``.distcp`` that are no tensors: archives of ``torch.save``, often of plain values.

Formats that hold texts and no objects, such as safetensors, can keep a learning rate or a step.
What is no plain value is not looked into, and nothing is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.checkpoint.catalog import Catalog, StoredObject
from reshard.checkpoint.formats.torch.archive import archive_crcs, read_archives
from reshard.checkpoint.formats.torch.plain_values import Visits, as_json, is_plain
from reshard.checkpoint.formats.torch.tensors import allow_tensors
from reshard.checkpoint.formats.torch.unpickler import unpickle
from reshard.checkpoint.storage.base import Range, Storage
from reshard.errors import CheckpointError, DamageError

__all__ = ["object_texts"]

MAX_BYTES = 1 << 16
"""Bytes of an entry that is read; larger ones are left as they are."""
BATCH = 1024


def object_texts(storage: Storage, catalog: Catalog) -> Mapping[str, str]:
    """Those of the entries that are plain values, as JSON."""
    small = [entry for entry in catalog.objects.values() if entry.size <= MAX_BYTES]
    texts: dict[str, str] = {}
    for first in range(0, len(small), BATCH):
        texts |= _texts(storage, catalog, small[first : first + BATCH])
    return texts


def _texts(storage: Storage, catalog: Catalog, entries: Sequence[StoredObject]) -> dict[str, str]:
    """The texts of some entries; one by one where the archive of one cannot be read."""
    ranges = [(catalog.files[entry.file].path, entry.offset, entry.size) for entry in entries]
    texts: dict[str, str] = {}
    try:
        archives = read_archives(storage, ranges, MAX_BYTES)
        for entry, archive in zip(entries, archives, strict=True):
            value = unpickle(archive.pickle, allow_tensors, archive.where)
            text = as_json(value) if is_plain(value, Visits(len(archive.pickle))) else None
            if text is not None:
                texts[entry.name] = text
    except CheckpointError as error:
        if len(entries) == 1:
            if isinstance(error, DamageError) and _is_archive(storage, ranges[0]):
                raise
            return {}  # it is another kind of object
        for entry in entries:
            texts |= _texts(storage, catalog, [entry])
    return texts


def _is_archive(storage: Storage, place: Range) -> bool:
    """Whether a range of a file is an archive of ``torch.save``; no member of it is read."""
    try:
        archive_crcs(storage, place, 0)
    except CheckpointError:
        return False
    return True
