"""Recognises the format of a checkpoint and reads it into a catalog.

.metadata                               torch's distributed checkpoint
__0.metadata, __1.metadata, ...         the same, written by ranks without collectives
*.safetensors                           whole tensors, boxes of tensors, or tensors of one rank
model-rank-3-part-0.safetensors, ...    tensors of one rank, sharded as rules say
*.pt *.pth *.bin *.ckpt                 torch.save: whole tensors, or tensors of one rank with rules
any other name                          one of the two above, recognised by its first bytes

>>> kind_of(b"PK\\3\\4" + bytes(22) + b"\\x10\\0\\0\\0archive/data.pkl", 1000)
'torch'
>>> kind_of(b"\\x40\\0\\0\\0\\0\\0\\0\\0{", 1000)
'safetensors'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.formats.completeness import check_committed, check_expected
from reshard.checkpoint.formats.file_names import is_distcp
from reshard.checkpoint.formats.findings import Findings
from reshard.checkpoint.storage.base import TENSOR_FILES, Storage, StoredFile
from reshard.errors import CheckpointError
from reshard.text import and_more, quoted

if TYPE_CHECKING:
    from reshard.layout.mesh import Mesh
    from reshard.rules import Rules

__all__ = ["read_catalog", "survey_catalog"]

HEAD = 64
MAX_OPENED = 256
"""Files of a folder whose first bytes are read where no name shows the format."""
LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of torch.save files before torch 1.6."""


def read_catalog(storage: Storage, rules: Rules | None = None, mesh: Mesh | None = None) -> Catalog:
    """The catalog of a checkpoint; raises DamageError if a file is damaged, and UnsupportedError if
    one is sound but cannot be read.

    Rules and a mesh are for files of ranks that do not describe their layout. Whether the tensors
    are complete is checked separately: see ``checkpoint.coverage``.
    """
    catalog, findings = survey_catalog(storage, rules, mesh)
    findings.check(storage.root)
    return catalog


def survey_catalog(
    storage: Storage, rules: Rules | None = None, mesh: Mesh | None = None
) -> tuple[Catalog, Findings]:
    """The catalog of a checkpoint as far as it can be read, and all problems found."""
    listed = storage.list()
    findings = Findings()
    catalog = Catalog(storage.root, "unreadable", (), {}, others=listed)
    with findings.noting():
        kind, files = _recognise(storage, listed)
        catalog = replace(catalog, format=kind)
        catalog = _read(kind, storage, listed, files, findings, rules, mesh)
        unread = [quoted(f.path) for f in catalog.others if f.path.endswith(TENSOR_FILES)]
        if unread:
            findings.note(f"{and_more(unread)}: its tensors were not read")
        if not storage.is_file:
            check_committed(storage, listed, findings)
    return replace(catalog, notes=(*catalog.notes, *findings.notes)), findings


def _read(
    kind: str,
    storage: Storage,
    listed: Sequence[StoredFile],
    files: Sequence[StoredFile],
    findings: Findings,
    rules: Rules | None,
    mesh: Mesh | None,
) -> Catalog:
    # Each format is imported when it is needed: imports take longer than most headers.
    if kind == "distcp":
        if storage.is_file:
            raise CheckpointError(
                f"{storage.root} is one file of a .distcp folder: name the folder"
            )
        from reshard.checkpoint.formats.ranks.distcp import read_distcp_folder

        return read_distcp_folder(storage, listed, findings, rules, mesh)
    if rules is not None:
        from reshard.checkpoint.formats.ranks.by_rules import read_by_rules

        return read_by_rules(storage, listed, findings, rules, mesh)
    if kind == "torch" and mesh is not None:
        raise CheckpointError(
            f"{storage.root}: mesh {mesh} is for files of ranks: give --rules too"
        )
    if kind == "torch":
        from reshard.checkpoint.formats.torch.state_dict import read_torch

        return read_torch(storage, listed, files, findings)
    catalog = _read_safetensors(storage, listed, files, findings, mesh)
    if mesh is not None:
        _check_mesh(catalog, mesh)
    return catalog


def _read_safetensors(
    storage: Storage,
    listed: Sequence[StoredFile],
    named: Sequence[StoredFile],
    findings: Findings,
    mesh: Mesh | None,
) -> Catalog:
    """The catalog of safetensors files, whose metadata shows which kind they are."""
    from reshard.checkpoint.formats.safetensors.own_metadata import SHARDING
    from reshard.checkpoint.formats.safetensors.reader import read_headed, read_whole
    from reshard.checkpoint.formats.safetensors.sharded import check_counts, read_sharded

    files, headed = read_headed(storage, listed, named, findings)
    check_counts(storage.root, files, headed, mesh, findings)
    own = [one.own for one in headed if one.own is not None]
    if any(file.rank is not None and file.mesh is not None for file in own):
        from reshard.checkpoint.formats.ranks.by_rules import read_own_ranks

        return read_own_ranks(storage, listed, headed, findings)
    if any(SHARDING in one.header.metadata for one in headed):
        catalog = read_sharded(storage, listed, headed, mesh, findings)
        if not own:
            check_expected(storage, catalog, findings)
        return catalog
    return read_whole(storage, listed, files, headed, findings)


def _check_mesh(catalog: Catalog, mesh: Mesh) -> None:
    """Refuse a mesh for whole tensors, or one whose ranks differ from those of the files."""
    if catalog.format == "safetensors":
        raise CheckpointError(f"{catalog.root} holds whole tensors: leave out mesh {mesh}")
    from reshard.layout.mesh import Mesh

    if catalog.mesh is not None and Mesh.parse(catalog.mesh).ranks != mesh.ranks:
        raise CheckpointError(
            f"{catalog.root} was written for mesh {catalog.mesh}, and mesh {mesh} was given: leave "
            "it out"
        )


def _recognise(
    storage: Storage, listed: Sequence[StoredFile]
) -> tuple[str, tuple[StoredFile, ...]]:
    """The kind of a checkpoint (distcp, safetensors or torch), and files that may hold tensors."""
    here = [file for file in listed if "/" not in file.path]
    if any(is_distcp(file.path) for file in here):
        return "distcp", ()
    if storage.is_file:
        found = _by_content(storage, listed)
        if found is not None:
            return found
    named = tuple(file for file in listed if file.path.endswith(TENSOR_FILES))
    safe = tuple(file for file in named if file.path.endswith(".safetensors"))
    if safe or any(file.path.endswith(".safetensors.index.json") for file in listed):
        return "safetensors", safe
    if named:
        return "torch", named
    found = _by_content(storage, here)
    if found is None:
        raise _no_checkpoint(storage.root, [file.path for file in listed])
    return found


def _by_content(
    storage: Storage, files: Sequence[StoredFile]
) -> tuple[str, tuple[StoredFile, ...]] | None:
    """The kind that the first bytes of files show; safetensors first, as with names."""
    some = files[:MAX_OPENED]
    heads = storage.read_many([(file.path, 0, min(HEAD, file.size)) for file in some])
    kinds = [kind_of(head, file.size) for file, head in zip(some, heads, strict=True)]
    for kind in ("safetensors", "torch"):
        if kind in kinds:
            return kind, tuple(f for f, one in zip(some, kinds, strict=True) if one == kind)
    return None


def kind_of(head: bytes, size: int) -> str | None:
    """The kind of a file that starts with these bytes; None if they show nothing."""
    if head.startswith(b"PK\x03\x04"):
        name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
        return "torch" if name.endswith(b"/data.pkl") else None
    if head.startswith(LEGACY):
        return "torch"
    length = int.from_bytes(head[:8], "little")
    return "safetensors" if head[8:9] == b"{" and 2 <= length <= size - 8 else None


def _no_checkpoint(root: str, paths: Sequence[str]) -> CheckpointError:
    inside = next((path for path in paths if path.endswith("/.metadata")), None)
    if inside is not None:
        folder = inside.removesuffix("/.metadata")
        return CheckpointError(
            f"{root} is no checkpoint, but {root}/{folder} may be: name that one"
        )
    shown = and_more([quoted(path) for path in paths], 3, "files") or "nothing"
    return CheckpointError(
        f"{root} is no checkpoint: it holds {shown}, and no .safetensors, .metadata with "
        ".distcp, .pt, .pth, .bin or .ckpt"
    )
