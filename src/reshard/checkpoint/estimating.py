"""How long will a conversion take? A short probe of the disks says roughly."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from reshard.checkpoint.jobs import Job
from reshard.checkpoint.storage import Storage

__all__ = ["predicted_seconds"]

PROBE = 32 << 20
"""Bytes that are read and written to see how fast that goes."""


def predicted_seconds(job: Job, storage: Storage, beside: Path) -> float | None:
    """Seconds for all bytes, at the rate at which a few were copied; None where none can be."""
    largest = max(job.catalog.files, key=lambda file: file.size, default=None)
    folder = next((path for path in (beside, *beside.parents) if path.exists()), None)
    if largest is None or not largest.size or folder is None or not os.access(folder, os.W_OK):
        return None
    size = min(PROBE, largest.size)
    start = time.monotonic()
    data = storage.read(largest.path, largest.size - size, size)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    seconds = max(time.monotonic() - start, 1e-6)
    return (job.unique_bytes + job.copied_bytes) / size * seconds
