"""The file that ends an upload lists all files with their sizes: are they all there?

It also tells that a copy of an address on this machine is complete.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from reshard.checkpoint.formats.findings import Findings
from reshard.checkpoint.storage.base import COMMITTED, Storage, StoredFile
from reshard.errors import DamageError

__all__ = ["check_committed"]

MAX_COMMITTED = 1 << 28


def check_committed(storage: Storage, listed: Sequence[StoredFile], findings: Findings) -> None:
    """Note files that are missing or have another size than when they were uploaded."""
    present = {file.path: file.size for file in listed}
    if COMMITTED not in present:
        return
    for path, size in _sizes(storage, present[COMMITTED]).items():
        found = present.get(path)
        if found is None:
            findings.found(
                f"{storage.where(path)} is missing: {COMMITTED} says that it was uploaded with "
                f"{size} bytes"
            )
        elif found != size:
            findings.found(
                f"{storage.where(path)} has {found} byte{'s' * (found != 1)} and {COMMITTED} says "
                f"that it was uploaded with {size}: restore it from a copy"
            )


def _sizes(storage: Storage, size: int) -> dict[str, int]:
    where = storage.where(COMMITTED)
    if size > MAX_COMMITTED:
        raise DamageError(f"{where} has {size} bytes, at most {MAX_COMMITTED} are read")
    try:
        data = json.loads(storage.read(COMMITTED, 0, size))
    except (ValueError, RecursionError):
        data = None
    files = data.get("files") if isinstance(data, dict) else None
    if not isinstance(files, dict) or any(type(one) is not int for one in files.values()):
        raise DamageError(
            f"{where} is not what reshard writes: restore it from a copy, or delete it"
        )
    return files
