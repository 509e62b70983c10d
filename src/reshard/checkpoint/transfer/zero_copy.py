"""Runs of bytes that the system copies from file to file, without passing through our memory."""

from __future__ import annotations

import os

import numpy as np

from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.storage.base import Storage
from reshard.checkpoint.storage.local import LocalStorage
from reshard.checkpoint.storage.output_files import OutputFiles
from reshard.checkpoint.transfer.transfers import Transfer
from reshard.layout.box import Box
from reshard.layout.coverage import overlapping_pairs

__all__ = ["zero_copy"]

WORTH_A_CALL = 1 << 16
"""Runs that are shorter on average are copied faster through memory."""


def zero_copy(
    transfer: Transfer, window: Box, storage: Storage, catalog: Catalog, target: OutputFiles
) -> int:
    """Copy a window where both sides have it in long runs; 0 if that cannot be, else the bytes."""
    usable = isinstance(storage, LocalStorage) and hasattr(os, "copy_file_range")
    if not usable or transfer.have != transfer.want or transfer.is_padded:
        return 0
    source, drains = transfer.source.within(window), transfer.destination.within(window)
    mine, others = overlapping_pairs(source.starts, source.stops, drains.starts, drains.stops)
    starts = np.maximum(source.starts[mine], drains.starts[others])
    stops = np.minimum(source.stops[mine], drains.stops[others])
    reads, writes = source.clipped(mine, starts, stops), drains.clipped(others, starts, stops)
    if not (reads.is_run.all() and writes.is_run.all()) or reads.num_bytes.mean() < WORTH_A_CALL:
        return 0
    assert isinstance(storage, LocalStorage)
    for row in range(len(reads)):
        path = catalog.files[int(reads.files[row])].path
        with storage.using(path) as have, target.using(int(writes.files[row])) as want:
            places = int(reads.offsets[row]), int(writes.offsets[row])
            if not _copy(have.descriptor, want, places, int(reads.num_bytes[row])):
                return 0
    return int(reads.num_bytes.sum())


def _copy(have: int, want: int, places: tuple[int, int], length: int) -> bool:
    """Copy a run; False where the system does not do that between these files."""
    source, target = places
    while length:
        try:
            count = os.copy_file_range(have, want, length, source, target)
        except OSError:
            return False
        if count == 0:
            return False
        source, target, length = source + count, target + count, length - count
    return True
