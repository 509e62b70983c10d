"""Safetensors files say themselves what they hold: whole tensors, boxes, or one rank's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.formats.expected_shapes import check_expected
from reshard.checkpoint.formats.findings import Findings
from reshard.checkpoint.formats.ranks.names import rank_of
from reshard.checkpoint.formats.safetensors.files import (
    HeadedFile,
    check_index,
    find_index,
    index_files,
    missing_parts,
    read_headers,
    read_whole,
)
from reshard.checkpoint.formats.safetensors.own_metadata import SHARDING
from reshard.checkpoint.formats.safetensors.sharded import check_counts, own_of, read_sharded
from reshard.checkpoint.storage.base import Storage, StoredFile
from reshard.errors import CheckpointError
from reshard.layout.mesh import Mesh
from reshard.text import quoted

__all__ = ["read_safetensors"]


def read_safetensors(
    storage: Storage,
    listed: Sequence[StoredFile],
    named: Sequence[StoredFile],
    findings: Findings,
    mesh: Mesh | None = None,
) -> Catalog:
    """The catalog of a folder of safetensors files, or of one such file; ``named`` are such."""
    index = find_index(listed)
    mapped = {} if index is None else index_files(storage, index)
    files = _chosen(storage.root, listed, named, mapped, findings)
    headed = read_headers(storage, files, findings)
    if index is not None:
        check_index(storage, index, headed, findings)
    own = own_of(headed, findings)
    check_counts(storage.root, files, own, mesh, findings)
    if any(said.rank is not None and said.mesh is not None for said in own.values()):
        from reshard.checkpoint.formats.ranks.by_rules import read_own_ranks

        return read_own_ranks(storage, listed, headed, own, findings)
    if any(SHARDING in one.header.metadata for one in headed):
        catalog = read_sharded(storage, listed, headed, own, mesh, findings)
        if not own:
            check_expected(storage, catalog, findings)
        return catalog
    for path in missing_parts(files) if index is None else ():
        if storage.is_file:
            findings.note(f"{path} and others belong to it and were not asked for")
            break
        findings.found(f"{storage.where(path)} is missing: the names of the others count it")
    _check_no_ranks(storage.root, headed)
    return read_whole(storage, listed, headed, findings)


def _chosen(
    root: str,
    listed: Sequence[StoredFile],
    files: Sequence[StoredFile],
    mapped: Mapping[str, str],
    findings: Findings,
) -> list[StoredFile]:
    """The files of the index; without one, those of the folder itself."""
    sizes = {file.path: file for file in listed}
    if mapped:
        names: dict[str, int] = {}
        for path in mapped.values():
            names[path] = names.get(path, 0) + 1
        for path, count in names.items():
            if path not in sizes:
                findings.found(f"{root}/{path} is missing: the index puts {count} tensors there")
        return [sizes[path] for path in sorted(names) if path in sizes]
    here = [file for file in files if "/" not in file.path]
    if here:
        return here
    if not files:
        raise CheckpointError(f"{root} has an index of safetensors files and none of these")
    folders = sorted({file.path.rpartition("/")[0] for file in files})
    more = f" and in {len(folders) - 1} more" if len(folders) > 1 else ""
    raise CheckpointError(
        f"{root} has its safetensors files in the folder {quoted(folders[0])}{more}: name one "
        "folder, or give --rules and --mesh if they are of ranks"
    )


def _check_no_ranks(root: str, headed: Sequence[HeadedFile]) -> None:
    """Files of several ranks that share names need rules; without them nothing can be joined."""
    ranks = {one.file.path: rank_of(one.file.path, None) for one in headed}
    names = [entry.name for one in headed for entry in one.header.entries]
    if None not in ranks.values() and len(set(names)) < len(names):
        path, rank = next(iter(ranks.items()))
        raise CheckpointError(
            f"{root} holds files of {len(set(ranks.values()))} ranks ({path} is of rank {rank}) "
            "that do not say how they were cut: give --rules and --mesh"
        )
