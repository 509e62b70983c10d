"""Rules and meshes as callers give them: objects, or the texts of a command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from reshard.checkpoint.formats.expected import config_of
from reshard.checkpoint.storage import Storage

if TYPE_CHECKING:
    from reshard.mesh import Mesh
    from reshard.rules import Rules

__all__ = ["as_mesh", "as_rules"]


def as_mesh(mesh: Mesh | str | None) -> Mesh | None:
    """A mesh, or its text such as ``tp=4``."""
    if not isinstance(mesh, str):
        return mesh
    from reshard.mesh import Mesh

    return Mesh.parse(mesh)


def as_rules(rules: Rules | str | Path | None, storage: Storage) -> Rules | None:
    """Rules, or the name of a family or a file; the checkpoint's config.json fills in numbers."""
    if rules is None or not isinstance(rules, str | Path):
        return rules
    from reshard.errors import RulesError
    from reshard.models import numbers_of
    from reshard.rules import Rules

    loaded = Rules.load(rules)
    config = config_of(storage)
    try:
        numbers = numbers_of(config or {})
    except RulesError:  # no config, or that of something else
        return loaded
    known = {key: number for key, number in numbers.items() if key in loaded.numbers}
    return Rules.load(rules, fsdp=None, **known)
