"""Folders of ``torch.distributed.checkpoint``: one ``.metadata``, or one for each rank.

With ``use_collectives=False`` each rank writes a ``__3.metadata`` that describes only its local
tensors. Where the ranks have different names, all of them together are one checkpoint; where they
share names, rules give the layouts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.checkpoint.catalog import Catalog, StoredObject
from reshard.checkpoint.formats.checks import RANK_METADATA, Findings
from reshard.checkpoint.formats.torch.archive import archive_crcs, read_archives
from reshard.checkpoint.formats.torch.distcp_metadata import METADATA, read_metadata
from reshard.checkpoint.formats.torch.tensors import allow_tensors
from reshard.checkpoint.formats.torch.unpickler import Visits, as_json, is_plain, unpickle
from reshard.checkpoint.storage import Range, Storage, StoredFile
from reshard.errors import CheckpointError, DamageError
from reshard.text import quoted

if TYPE_CHECKING:
    from reshard.layout.mesh import Mesh
    from reshard.rules import Rules

__all__ = ["object_texts", "read_distcp_folder"]

_DATA = re.compile(r"__(\d{1,9})_\d{1,9}\.distcp\Z")


def read_distcp_folder(
    storage: Storage,
    listed: Sequence[StoredFile],
    findings: Findings,
    rules: Rules | None = None,
    mesh: Mesh | None = None,
) -> Catalog:
    """The catalog of a folder with a ``.metadata``, or with one for each rank."""
    ranks = _metadata_of_ranks(storage, listed, findings)
    _check_needed(storage.root, bool(ranks), rules, mesh)
    paths = [*ranks.values()] or [METADATA]
    catalogs = [read_metadata(storage, listed, path, findings) for path in paths]
    catalog = _joined(catalogs)
    if ranks and rules is not None:
        from reshard.checkpoint.formats.ranks import join_by_rules

        by_rank = dict(zip(ranks, catalogs, strict=True))
        catalog = join_by_rules(catalog, by_rank, rules, mesh or rules.mesh, findings)
    elif len(catalogs) > 1:
        _check_names_apart(storage.root, catalogs, [*ranks])
    named = {file.path for file in catalog.files}
    return replace(catalog, others=_others(listed, named, paths, findings))


def _check_needed(root: str, is_of_ranks: bool, rules: Rules | None, mesh: Mesh | None) -> None:
    """Refuse rules or a mesh that would have no effect."""
    if is_of_ranks and rules is None and mesh is not None:
        raise CheckpointError(f"{root}: mesh {mesh} is for files of ranks: give --rules too")
    if not is_of_ranks and (rules is not None or mesh is not None):
        given = "rules" if rules is not None else f"mesh {mesh}"
        raise CheckpointError(
            f"{root} is a .distcp folder, which records the layout of its tensors: leave out "
            f"{given}"
        )


def _metadata_of_ranks(
    storage: Storage, listed: Sequence[StoredFile], findings: Findings
) -> dict[int, str]:
    """The metadata of each rank, if there is no common one; a rank without one is damage."""
    paths = [file.path for file in listed]
    if METADATA in paths:
        return {}
    found = {int(match[1]): path for path in paths if (match := RANK_METADATA.match(path))}
    if not found:
        return {}
    writers = {int(match[1]) for path in paths if (match := _DATA.match(path))}
    for rank in sorted(({0} | writers) - found.keys()):
        findings.found(f"{storage.where(f'__{rank}.metadata')} is missing: other ranks have one")
    return dict(sorted(found.items()))


def _joined(catalogs: Sequence[Catalog]) -> Catalog:
    """All catalogs as one; the first wins for names that several have."""
    if len(catalogs) == 1:
        return catalogs[0]
    joined = Catalog(catalogs[0].root, catalogs[0].format, (), {})
    for one in catalogs:
        moved = _renumbered(one, len(joined.files))
        joined = replace(
            joined,
            files=(*joined.files, *moved.files),
            tensors={**moved.tensors, **joined.tensors},
            objects={**moved.objects, **joined.objects},
            nesting={**moved.nesting, **joined.nesting},
            extras={**moved.extras, **joined.extras},
            crcs=(*joined.crcs, *moved.crcs),
        )
    return joined


def _renumbered(catalog: Catalog, first: int) -> Catalog:
    """The same catalog, with its files numbered from ``first``."""
    tensors = {
        name: replace(t, pieces=tuple(replace(p, file=p.file + first) for p in t.pieces))
        for name, t in catalog.tensors.items()
    }
    objects = {name: replace(o, file=o.file + first) for name, o in catalog.objects.items()}
    crcs = tuple(crc._replace(file=crc.file + first) for crc in catalog.crcs)
    return replace(catalog, tensors=tensors, objects=objects, crcs=crcs)


def _check_names_apart(root: str, catalogs: Sequence[Catalog], ranks: Sequence[int]) -> None:
    """Refuse names that several ranks have: only rules say how their tensors belong together."""
    home: dict[str, int] = {}
    for rank, catalog in zip(ranks, catalogs, strict=True):
        for name in catalog.tensors:
            if name in home:
                raise CheckpointError(
                    f"{root} holds local tensors of {len(ranks)} ranks that saved without each "
                    f"other ({quoted(name)} is on ranks {home[name]} and {rank}) and do not "
                    "record their layout: give --rules and --mesh"
                )
            home[name] = rank


def _others(
    listed: Sequence[StoredFile],
    named: Collection[str],
    metadata: Collection[str],
    findings: Findings,
) -> tuple[StoredFile, ...]:
    """Other files of the folder, without those that an earlier save on more ranks left."""
    rest = [file for file in listed if file.path not in metadata and file.path not in named]
    stale = [file.path for file in rest if _is_stale(file.path)]
    if stale:
        findings.note(f"{quoted(stale[0])} is not named in {METADATA} ({len(stale)} such files)")
    return tuple(file for file in rest if not _is_stale(file.path))


def _is_stale(path: str) -> bool:
    return path.endswith(".distcp") or RANK_METADATA.match(path) is not None


MAX_OBJECT = 1 << 16
"""Bytes of an object that is read; larger ones are copied unread."""

OBJECTS = 1024


def object_texts(storage: Storage, catalog: Catalog) -> Mapping[str, str]:
    """The objects of a ``.distcp`` that are plain values, as JSON.

    Formats such as safetensors hold strings only, so they keep a step or a learning rate as text.
    """
    small = [entry for entry in catalog.objects.values() if entry.size <= MAX_OBJECT]
    texts: dict[str, str] = {}
    for first in range(0, len(small), OBJECTS):
        texts |= _texts(storage, catalog, small[first : first + OBJECTS])
    return texts


def _texts(storage: Storage, catalog: Catalog, entries: Sequence[StoredObject]) -> dict[str, str]:
    """The texts of a batch of objects; one by one if an archive among them cannot be read."""
    ranges = [(catalog.files[entry.file].path, entry.offset, entry.size) for entry in entries]
    texts: dict[str, str] = {}
    try:
        archives = read_archives(storage, ranges, MAX_OBJECT)
        for entry, archive in zip(entries, archives, strict=True):
            value = unpickle(archive.pickle, allow_tensors, archive.where)
            text = as_json(value) if is_plain(value, Visits(len(archive.pickle))) else None
            if text is not None:
                texts[entry.name] = text
    except CheckpointError as error:
        if len(entries) == 1:
            if isinstance(error, DamageError) and _is_archive(storage, ranges[0]):
                raise
            return {}  # not a plain value
        for entry in entries:
            texts |= _texts(storage, catalog, [entry])
    return texts


def _is_archive(storage: Storage, place: Range) -> bool:
    """Whether a range of a file is an archive of ``torch.save``; no member is read."""
    try:
        archive_crcs(storage, place, 0)
    except CheckpointError:
        return False
    return True
