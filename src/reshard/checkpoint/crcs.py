"""The CRC-32 that ``torch.save`` keeps of every storage: have these bytes changed since?

Torch writes it and never looks at it again, so a flipped bit of a ``.distcp`` is loaded as another
number. Where a checkpoint has no checksums of ours, ``verify`` compares these. They are of whole
storages: damage is found and its tensor named, and the range is as long as the storage.
"""

from __future__ import annotations

import zlib

from reshard.checkpoint.catalog import Crc
from reshard.checkpoint.checksums import Chunk
from reshard.checkpoint.examining import Examined, Problem, tensors_at
from reshard.checkpoint.reading import Budget, Source, in_order
from reshard.checkpoint.storage import Storage
from reshard.errors import CheckpointError, quoted

__all__ = ["check_crcs"]

STEP = 1 << 20
"""Bytes that one worker reads at a time: less than the window that it has memory for."""


def check_crcs(source: Source, budget: Budget, found: Examined) -> None:
    """Read every storage that has a CRC-32, and add those that changed to ``found``."""
    catalog = source.catalog
    step = min(STEP, budget.window)

    def work(crc: Crc, buffer: bytearray) -> int | CheckpointError:
        try:
            return _crc_of(source.storage, catalog.files[crc.file].path, crc, buffer)
        except CheckpointError as error:
            return error

    changed: list[tuple[str, Chunk, bytes]] = []
    for crc, result in in_order(work, catalog.crcs, budget.workers, lambda: bytearray(step)):
        path = catalog.files[crc.file].path
        if isinstance(result, CheckpointError):
            found.add(Problem("unreadable", str(result), file=path))
            continue
        found.checked_bytes += crc.size
        if result != crc.value:
            chunk = Chunk(crc.offset, crc.offset + crc.size, crc.value.to_bytes(4, "big"))
            changed.append((path, chunk, result.to_bytes(4, "big")))
    changed.sort(key=lambda each: (each[0], each[1].start))
    for (path, chunk, now), names in zip(changed, tensors_at(catalog, changed), strict=True):
        found.add(_problem(source.storage.root, path, chunk, now, names))


def _crc_of(storage: Storage, path: str, crc: Crc, buffer: bytearray) -> int:
    value, view = 0, memoryview(buffer)
    for at in range(0, crc.size, len(buffer)):
        part = view[: min(len(buffer), crc.size - at)]
        storage.read_into(path, crc.offset + at, part)
        value = zlib.crc32(part, value)
    return value


def _problem(root: str, path: str, chunk: Chunk, now: bytes, names: list[str]) -> Problem:
    where = ", ".join(map(quoted, names[:3])) + (" and more" if len(names) > 3 else "")
    message = (
        f"{root}/{path}: bytes {chunk.start} to {chunk.stop} changed since torch saved them: their "
        f"CRC-32 is {now.hex()} and was {chunk.sum.hex()}: restore the file from a copy"
        + (f" (tensor {where})" if names else "")
    )
    name = names[0] if names else None
    return Problem("damage", message, name, path, (chunk.start, chunk.stop))
