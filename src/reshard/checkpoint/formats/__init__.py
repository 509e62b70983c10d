"""Every format is read into one catalog: what kind of checkpoint is this, and what does it hold?

.metadata                               torch's distributed checkpoint
*.safetensors                           whole tensors, boxes of them, or one rank's
model-rank-3-part-0.safetensors, ...    one rank's, cut as rules say
*.pt *.pth *.bin                        torch.save: whole tensors, or one rank's with rules
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.checkpoint.catalog import Catalog, StoredFile
from reshard.checkpoint.formats.committed import check_committed
from reshard.checkpoint.formats.findings import Findings
from reshard.checkpoint.storage import TENSOR_FILES, Storage
from reshard.errors import CheckpointError, quoted

if TYPE_CHECKING:
    from reshard.mesh import Mesh
    from reshard.rules import Rules

__all__ = ["read", "survey"]


def read(storage: Storage, rules: Rules | None = None, mesh: Mesh | None = None) -> Catalog:
    """What a checkpoint holds; DamageError where any of its files is not what it should be.

    Rules and a mesh are for files that hold local tensors of ranks and do not say how they were
    cut. Whether the tensors are complete is another question: see ``checkpoint.coverage``.
    """
    catalog, findings = survey(storage, rules, mesh)
    findings.check(storage.root)
    return catalog


def survey(
    storage: Storage, rules: Rules | None = None, mesh: Mesh | None = None
) -> tuple[Catalog, Findings]:
    """What a checkpoint holds as far as it can be read, and all that is wrong with it."""
    listed = storage.list()
    findings = Findings()
    catalog = Catalog(storage.root, _kind(storage.root, listed), (), {}, others=listed)
    with findings.noting():
        catalog = _read(storage, listed, findings, rules, mesh)
        _note_unread(catalog, findings)
        if not storage.is_file:
            check_committed(storage, listed, findings)
    return replace(catalog, notes=(*catalog.notes, *findings.notes)), findings


def _note_unread(catalog: Catalog, findings: Findings) -> None:
    """Name files that are like those with tensors and yet are none of this checkpoint."""
    unread = [file.path for file in catalog.others if file.path.endswith(TENSOR_FILES)]
    if unread:
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        findings.note(f"{quoted(unread[0])}{more}: its tensors were not read")


def _kind(root: str, listed: Sequence[StoredFile]) -> str:
    """The word for what a folder holds, from the names of its files alone."""
    paths = [file.path for file in listed]
    here = [path for path in paths if "/" not in path]
    if any(path == ".metadata" or path.endswith(".distcp") for path in here):
        return "distcp"
    if any(path.endswith((".safetensors", ".safetensors.index.json")) for path in paths):
        return "safetensors"
    if any(path.endswith(TENSOR_FILES) for path in paths):
        return "torch"
    inside = next((path for path in paths if path.endswith("/.metadata")), None)
    if inside is not None:
        folder = inside.removesuffix("/.metadata")
        raise CheckpointError(f"{root} is no checkpoint, but {root}/{folder} may be: name that one")
    shown = ", ".join(quoted(path) for path in paths[:3]) or "nothing"
    more = f" and {len(paths) - 3} more files" if len(paths) > 3 else ""
    raise CheckpointError(
        f"{root} is no checkpoint: it holds {shown}{more}, and no .safetensors, .metadata with "
        ".distcp, .pt, .pth or .bin"
    )


def _read(
    storage: Storage,
    listed: Sequence[StoredFile],
    findings: Findings,
    rules: Rules | None,
    mesh: Mesh | None,
) -> Catalog:
    kind = _kind(storage.root, listed)
    if kind == "distcp":
        if storage.is_file:
            raise CheckpointError(
                f"{storage.root} is one file of a .distcp folder: name the folder"
            )
        if rules is not None or mesh is not None:
            given = "rules" if rules is not None else f"mesh {mesh}"
            raise CheckpointError(
                f"{storage.root} is a .distcp folder, which says itself how its tensors are cut: "
                f"leave out {given}"
            )
        from reshard.checkpoint.formats.distcp import read_distcp

        return read_distcp(storage, listed, findings)
    if rules is not None:
        from reshard.checkpoint.formats.by_rules import read_by_rules

        return read_by_rules(storage, listed, findings, rules, mesh)
    if kind == "torch" and mesh is not None:
        raise CheckpointError(
            f"{storage.root}: mesh {mesh} is for files of ranks: give --rules too"
        )
    if kind == "torch":
        from reshard.checkpoint.formats.torch_whole import read_torch

        return read_torch(storage, listed, findings)
    from reshard.checkpoint.formats.safetensors_kinds import read_safetensors

    catalog = read_safetensors(storage, listed, findings, mesh)
    if mesh is not None:
        _check_mesh(catalog, mesh)
    return catalog


def _check_mesh(catalog: Catalog, mesh: Mesh) -> None:
    """Raise if a mesh was given for whole tensors, or one of other ranks than the files name."""
    if catalog.format == "safetensors":
        raise CheckpointError(f"{catalog.root} holds whole tensors: leave out mesh {mesh}")
    from reshard.mesh import Mesh

    if catalog.mesh is not None and Mesh.parse(catalog.mesh).ranks != mesh.ranks:
        raise CheckpointError(
            f"{catalog.root} was written for mesh {catalog.mesh}, and mesh {mesh} was given: leave "
            "it out"
        )
