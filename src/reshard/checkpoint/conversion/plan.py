"""A conversion as a plan: all that is to be done, known and checked before a byte moves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.conversion.companions import base_of, is_weights
from reshard.checkpoint.conversion.layouts import Cut, notes_of, uncast_note, wanted_of
from reshard.checkpoint.conversion.names import Outline, feeds_for, left_over, outlines_of
from reshard.checkpoint.formats.completeness import config_of
from reshard.checkpoint.formats.file_names import is_distcp
from reshard.checkpoint.formats.output import Output, count_tensor_files
from reshard.checkpoint.formats.torch.plain_values import object_texts
from reshard.checkpoint.formats.writer import FORMATS, plan_output, unknown_format
from reshard.checkpoint.integrity.checksums import SIDECAR
from reshard.checkpoint.storage.base import COMMITTED, TENSOR_FILES, Storage, StoredFile
from reshard.checkpoint.transfer.transfers import Transfer, feeding, transfer_of
from reshard.errors import CheckpointError, SizeError
from reshard.planning.names import Feed, Names
from reshard.planning.names.tables import names_of

__all__ = ["Job", "Stamp", "plan_job"]


@dataclass(frozen=True, slots=True)
class Stamp:
    """Which files of which source, as they are now."""

    text: str
    """A hash of where the source lies, and of the names, sizes and versions of its files."""
    is_sure: bool
    """Whether every file has a version, so that no change of it goes unseen."""

    @classmethod
    def of(cls, catalog: Catalog, storage: Storage) -> Stamp:
        """Ask for the stamp of a source."""
        root = str(Path(catalog.root).resolve()) if storage.is_local else catalog.root
        hasher = hashlib.blake2b(root.encode(), digest_size=16)
        files = (*catalog.files, *catalog.others)
        versions = storage.versions([file.path for file in files])
        for file, version in zip(files, versions, strict=True):
            hasher.update(json.dumps([file.path, file.size, version]).encode())
        return cls(hasher.hexdigest(), None not in versions)


@dataclass(frozen=True, eq=False, slots=True)
class Job:
    """What is read, what is written, and what goes where."""

    catalog: Catalog
    format: str
    output: Output
    """All files to be written, the other files of the source among them."""
    transfers: tuple[Transfer, ...]
    others: tuple[tuple[StoredFile, int], ...]
    """Files that are copied as they are, and their numbers in the output."""
    fingerprint: str
    """Changes with the source and with what is asked for."""
    stamp: Stamp
    """The source as it was planned from."""
    notes: tuple[str, ...] = ()
    """What the report says of the request and of the layouts."""
    renamed: frozenset[str] = frozenset()
    """Tensors of the output that are not the source tensor of the same name, as it is."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of all files to be written."""
        return tuple(file.path for file in self.output.files)

    @property
    def unique_bytes(self) -> int:
        """Bytes of the source that are needed, each element once."""
        return sum(transfer.source_bytes for transfer in self.transfers)

    @property
    def replica_bytes(self) -> int:
        """Bytes that the source holds a second time."""
        return sum(int(t.replicas.num_bytes.sum()) for t in self.transfers if len(t.replicas))

    @property
    def copied_bytes(self) -> int:
        """Bytes that are copied without being part of a tensor."""
        objects = sum(copy.source.size for copy in self.output.objects)
        return objects + sum(file.size for file, _ in self.others)

    @property
    def num_files(self) -> int:
        """Files of the output that hold tensors; files that are copied as they are do not count."""
        made = self.output.files[: len(self.output.files) - len(self.others)]
        return count_tensor_files(made)

    @property
    def casts(self) -> bool:
        """Whether any tensor changes its dtype."""
        return any(transfer.have != transfer.want for transfer in self.transfers)


def plan_job(
    catalog: Catalog,
    storage: Storage,
    cut: Cut,
    *,
    format: str | None = None,
    names: Names | None = None,
    drop: Sequence[str] = (),
    max_shard_size: int = 5 * 10**9,
) -> Job:
    """Plan a conversion; holes, misfits and unknown names are errors here."""
    format = format or ("sharded" if cut.has_mesh else "full")
    if format not in FORMATS:
        raise CheckpointError(unknown_format(format))
    if max_shard_size < 1:
        raise SizeError(
            f"max_shard_size is {max_shard_size} bytes: give the most bytes of one file, such as "
            "5GB"
        )
    is_whole = format == "full" or (format == "distcp" and not cut.has_mesh)
    if is_whole:
        cut.check_whole(format)
    else:
        cut = cut.with_config(storage)
    have = {name: Outline(found.shape, found.dtype) for name, found in catalog.tensors.items()}
    if not have and not catalog.objects:
        raise CheckpointError(f"{catalog.root} holds no tensors: there is nothing to convert")
    if names is None:
        names = names_of(cut.rules.names) if cut.rules is not None else {}
    outlines = outlines_of(have, names, drop)
    if not outlines and not catalog.objects:
        raise CheckpointError(
            f"all tensors of {catalog.root} are dropped: nothing is left to write"
        )
    wanted = wanted_of(outlines, cut, is_whole)
    texts = {} if format == "distcp" else object_texts(storage, catalog)
    output = plan_output(
        format,
        wanted,
        metadata={**catalog.metadata, **texts},
        objects=[entry for name, entry in catalog.objects.items() if name not in texts],
        nesting=catalog.nesting,
        values=catalog.values,
        extras=catalog.extras,
        mesh=next((str(w.layout.mesh) for w in wanted.values() if w.layout), None),
        max_shard_size=max_shard_size,
        base=_base(catalog, storage),
    )
    renamed = set[str]()
    transfers = tuple(_transfers(catalog, output, have, names, renamed))
    output, others = _with_others(output, catalog, format)
    output = replace(
        output, left_out=(*output.left_out, *catalog.left_out, *left_over(have, names, drop))
    )
    stamp = Stamp.of(catalog, storage)
    fingerprint = _fingerprint(stamp.text, output, names, transfers)
    notes = (*notes_of(wanted, cut), *uncast_note(outlines, cut))
    return Job(
        catalog, format, output, transfers, others, fingerprint, stamp, notes, frozenset(renamed)
    )


def _base(catalog: Catalog, storage: Storage) -> str:
    """How the names of files of whole tensors begin, so that they are found where they were."""
    files, others = ([file.path for file in some] for some in (catalog.files, catalog.others))
    return base_of(files, others, config_of(storage) if "config.json" in others else None)


def _transfers(
    catalog: Catalog,
    output: Output,
    have: Mapping[str, Outline],
    names: Names,
    renamed: set[str],
) -> list[Transfer]:
    """One transfer for each output tensor; names of those that names changes are added."""
    shapes = {name: tensor.shape for name, tensor in output.tensors.items()}
    found = []
    for name, feeds, zeros in feeds_for(shapes, have, names):
        tensor = output.tensors[name]
        if zeros or feeds != [Feed(name)]:
            renamed.add(name)
        fed = feeding(catalog, feeds)
        found.append(transfer_of(name, tensor.shape, tensor.dtype, fed, tensor.pieces, zeros))
    return found


def _with_others(
    output: Output, catalog: Catalog, format: str
) -> tuple[Output, tuple[tuple[StoredFile, int], ...]]:
    """The output with the files of the source that hold no tensors.

    Files of tensors that are no part of the source might be taken for a part of the output, and
    weights in another format would be stale beside it.
    """
    misleading = TENSOR_FILES if format == "ranks" else (".safetensors",)
    ours = {file.path for file in output.files} | {SIDECAR, COMMITTED}
    strays = tuple(
        file.path
        for file in catalog.others
        if _is_one_of(misleading, file.path) or is_weights(file.path)
    )
    kept = [file for file in catalog.others if file.path not in ours.union(strays)]
    first = len(output.files)
    files = (*output.files, *(StoredFile(file.path, file.size) for file in kept))
    copied = tuple(zip(kept, range(first, len(files)), strict=True))
    return replace(output, files=files, left_out=(*output.left_out, *strays)), copied


def _is_one_of(endings: tuple[str, ...], path: str) -> bool:
    """Whether a file of tensors, or an index of such files, ends so, or is of a .distcp folder.

    >>> [_is_one_of((".bin",), path) for path in ("a/b.bin", "b.bin.index.json", ".metadata", "c")]
    [True, True, True, False]
    """
    indexes = tuple(f"{ending}.index.json" for ending in endings)
    return path.endswith((*endings, *indexes)) or is_distcp(path.rpartition("/")[2])


def _fingerprint(stamp: str, output: Output, names: Names, transfers: Sequence[Transfer]) -> str:
    """A hash of the source's stamp, of what is read from where, and of all files to be written."""
    hasher = hashlib.blake2b(stamp.encode(), digest_size=16)
    hasher.update(repr(sorted(names.items(), key=lambda item: item[0])).encode())
    for transfer in transfers:
        hasher.update(repr((transfer.name, transfer.shape, transfer.have, transfer.want)).encode())
        for side in (transfer.stored, transfer.written):
            hasher.update(side.fingerprint())
    for made in output.files:
        hasher.update(json.dumps([made.path, made.size]).encode())
    for literal in output.literals:
        hasher.update(json.dumps([literal.file, literal.offset]).encode() + literal.data)
    return hasher.hexdigest()
