"""What a folder's ``config.json`` says about its tensors: is one of them too short?

Torch's sharded files do not say how large a tensor is, so a last shard that is missing looks like
a smaller model. The config of a known model tells.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from reshard.checkpoint.catalog import Catalog, StoredTensor
from reshard.checkpoint.formats.findings import Findings
from reshard.checkpoint.storage.base import Storage
from reshard.errors import ReshardError
from reshard.text import quoted

__all__ = ["check_expected", "config_of"]

MAX_CONFIG = 1 << 20


def config_of(storage: Storage) -> Mapping[str, Any] | None:
    """The ``config.json`` of a folder, if there is one that can be read."""
    try:
        size = storage.size("config.json")
        config = json.loads(storage.read("config.json", 0, min(size, MAX_CONFIG)))
    except (ReshardError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def check_expected(storage: Storage, catalog: Catalog, findings: Findings) -> None:
    """Note tensors that end before the config says, where their last box is."""
    if not any(file.path == "config.json" for file in catalog.others):
        return
    from reshard.rules.models import tensors

    try:
        known = tensors(config_of(storage) or {})
    except ReshardError:  # a model that we do not know
        return
    for name, tensor in catalog.tensors.items():
        shape = known[name][0] if name in known else tensor.shape
        if len(shape) == len(tensor.shape) and _is_cut_off(tensor, shape):
            findings.found(
                f"{storage.root}: tensor {quoted(name)} reaches to {tensor.shape} and config.json "
                f"says {tuple(shape)}: the last shard is missing"
            )


def _is_cut_off(tensor: StoredTensor, shape: tuple[int, ...]) -> bool:
    """Whether it is shorter in one dim, and that is a dim in which its boxes differ."""
    differ = [dim for dim, size in enumerate(shape) if size != tensor.shape[dim]]
    if len(differ) != 1 or shape[differ[0]] < tensor.shape[differ[0]]:
        return False
    whole = tensor.shape[differ[0]]
    return any(piece.box.shape[differ[0]] < whole for piece in tensor.pieces)
