"""Files and tensors that a checkpoint should have: from the list of an upload, and config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.checkpoint.catalog import Catalog, StoredTensor
from reshard.checkpoint.formats.findings import Findings
from reshard.checkpoint.storage.base import COMMITTED, Storage, StoredFile
from reshard.errors import DamageError, ReshardError
from reshard.text import quoted

__all__ = ["check_committed", "check_expected", "config_of"]

MAX_COMMITTED = 1 << 28
MAX_CONFIG = 1 << 20


def check_committed(storage: Storage, listed: Sequence[StoredFile], findings: Findings) -> None:
    """Note files that are missing or have another size than when they were uploaded.

    The file that ends an upload lists all others; it also shows that a local copy is complete.
    """
    present = {file.path: file.size for file in listed}
    if COMMITTED not in present:
        return
    for path, size in _uploaded_sizes(storage, present[COMMITTED]).items():
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


def _uploaded_sizes(storage: Storage, size: int) -> dict[str, int]:
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


def config_of(storage: Storage) -> Mapping[str, Any] | None:
    """The ``config.json`` of a folder; None if it is absent or cannot be read."""
    try:
        size = storage.size("config.json")
        config = json.loads(storage.read("config.json", 0, min(size, MAX_CONFIG)))
    except (ReshardError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def check_expected(storage: Storage, catalog: Catalog, findings: Findings) -> None:
    """Note tensors that are shorter than config.json says.

    Torch's sharded files do not have the global shapes, so without its last shard a tensor looks
    like one of a smaller model. For known models the config has the shapes.
    """
    if not any(file.path == "config.json" for file in catalog.others):
        return
    from reshard.rules.models import tensors

    try:
        known = tensors(config_of(storage) or {})
    except ReshardError:  # an unknown model
        return
    for name, tensor in catalog.tensors.items():
        shape = known[name][0] if name in known else tensor.shape
        if len(shape) == len(tensor.shape) and _is_cut_off(tensor, shape):
            findings.found(
                f"{storage.root}: tensor {quoted(name)} reaches to {tensor.shape} and config.json "
                f"says {tuple(shape)}: the last shard is missing"
            )


def _is_cut_off(tensor: StoredTensor, shape: tuple[int, ...]) -> bool:
    """Whether the tensor is shorter in exactly one dim, and is split along that dim."""
    differ = [dim for dim, size in enumerate(shape) if size != tensor.shape[dim]]
    if len(differ) != 1 or shape[differ[0]] < tensor.shape[differ[0]]:
        return False
    whole = tensor.shape[differ[0]]
    return any(piece.box.shape[differ[0]] < whole for piece in tensor.pieces)
