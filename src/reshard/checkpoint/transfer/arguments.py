"""Rules and meshes as callers pass them: objects, or text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from reshard.checkpoint.formats.completeness import config_of
from reshard.checkpoint.storage.base import Storage
from reshard.errors import MeshError, RulesError

if TYPE_CHECKING:
    from reshard.layout.mesh import Mesh
    from reshard.rules import Rules

__all__ = ["as_mesh", "as_rules"]


def as_mesh(mesh: Mesh | str | None) -> Mesh | None:
    """A mesh, or its text such as ``tp=4``."""
    if mesh is None:
        return None
    from reshard.layout.mesh import Mesh

    if isinstance(mesh, str):
        return Mesh.parse(mesh)
    if not isinstance(mesh, Mesh):
        raise MeshError(f'mesh is {mesh!r:.60}: give a Mesh, or a text such as "dp=2 tp=4"')
    return mesh


def as_rules(
    rules: Rules | str | Path | None,
    storage: Storage,
    *,
    fsdp: str | None = None,
    replicate: str | None = None,
    by_config: bool = False,
) -> Rules | None:
    """Rules, or the name of a family or file; sizes they lack come from the config.json.

    Without rules, ``by_config`` takes those of the family in the config.json.
    """
    if rules is None and not by_config:
        return None
    from reshard.rules import Rules

    config = config_of(storage)
    if isinstance(rules, Rules):
        return rules.given(config=config, fsdp=fsdp, replicate=replicate)
    if rules is not None and not isinstance(rules, str | Path):
        raise RulesError(f"rules is {rules!r:.60}: give Rules, a family such as llama, or a file")
    if rules is None and config is None:
        raise RulesError(
            f"{storage.root} has no config.json that names its model: give --rules (rules=) with a "
            "family such as llama or a TOML file, or layouts"
        )
    return Rules.load(rules, config=config, fsdp=fsdp, replicate=replicate)
