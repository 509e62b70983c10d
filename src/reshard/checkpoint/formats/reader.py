"""Every format is read into one catalog: what kind of checkpoint is this, and what does it hold?

.metadata                               torch's distributed checkpoint
__0.metadata, __1.metadata, ...         the same, of ranks that saved without each other
*.safetensors                           whole tensors, boxes of them, or one rank's
model-rank-3-part-0.safetensors, ...    one rank's, cut as rules say
*.pt *.pth *.bin *.ckpt                 torch.save: whole tensors, or one rank's with rules
any other name                          one of the two above, if its first bytes say so
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.formats.committed import check_committed
from reshard.checkpoint.formats.findings import Findings
from reshard.checkpoint.formats.recognition import Recognised, recognise
from reshard.checkpoint.storage.base import TENSOR_FILES, Storage, StoredFile
from reshard.errors import CheckpointError
from reshard.text import quoted

if TYPE_CHECKING:
    from reshard.layout.mesh import Mesh
    from reshard.rules import Rules

__all__ = ["read_catalog", "survey_catalog"]


def read_catalog(storage: Storage, rules: Rules | None = None, mesh: Mesh | None = None) -> Catalog:
    """What a checkpoint holds; DamageError where any of its files is not what it should be, and
    UnsupportedError where one is sound and not read.

    Rules and a mesh are for files that hold local tensors of ranks and do not say how they were
    cut. Whether the tensors are complete is another question: see ``checkpoint.coverage``.
    """
    catalog, findings = survey_catalog(storage, rules, mesh)
    findings.check(storage.root)
    return catalog


def survey_catalog(
    storage: Storage, rules: Rules | None = None, mesh: Mesh | None = None
) -> tuple[Catalog, Findings]:
    """What a checkpoint holds as far as it can be read, and all that is wrong with it."""
    listed = storage.list()
    findings = Findings()
    catalog = Catalog(storage.root, "unreadable", (), {}, others=listed)
    with findings.noting():
        recognised = recognise(storage, listed)
        catalog = replace(catalog, format=recognised.kind)
        catalog = _read(storage, listed, recognised, findings, rules, mesh)
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


def _read(
    storage: Storage,
    listed: Sequence[StoredFile],
    recognised: Recognised,
    findings: Findings,
    rules: Rules | None,
    mesh: Mesh | None,
) -> Catalog:
    kind, files = recognised.kind, recognised.files
    if kind == "distcp":
        if storage.is_file:
            raise CheckpointError(
                f"{storage.root} is one file of a .distcp folder: name the folder"
            )
        from reshard.checkpoint.formats.torch.distcp import read_distcp_folder

        return read_distcp_folder(storage, listed, findings, rules, mesh)
    if rules is not None:
        from reshard.checkpoint.formats.ranks.by_rules import read_by_rules

        return read_by_rules(storage, listed, findings, rules, mesh)
    if kind == "torch" and mesh is not None:
        raise CheckpointError(
            f"{storage.root}: mesh {mesh} is for files of ranks: give --rules too"
        )
    if kind == "torch":
        from reshard.checkpoint.formats.torch.files import read_torch

        return read_torch(storage, listed, files, findings)
    from reshard.checkpoint.formats.safetensors.reader import read_safetensors

    catalog = read_safetensors(storage, listed, files, findings, mesh)
    if mesh is not None:
        _check_mesh(catalog, mesh)
    return catalog


def _check_mesh(catalog: Catalog, mesh: Mesh) -> None:
    """Raise if a mesh was given for whole tensors, or one of other ranks than the files name."""
    if catalog.format == "safetensors":
        raise CheckpointError(f"{catalog.root} holds whole tensors: leave out mesh {mesh}")
    from reshard.layout.mesh import Mesh

    if catalog.mesh is not None and Mesh.parse(catalog.mesh).ranks != mesh.ranks:
        raise CheckpointError(
            f"{catalog.root} was written for mesh {catalog.mesh}, and mesh {mesh} was given: leave "
            "it out"
        )
