"""The plan of a conversion: all that is done, checked before a byte is copied.

>>> base_of(["adapter_model.safetensors"], ()), base_of(["shard-1-model.safetensors"], ())
('adapter_model', 'model')
>>> is_stray("a/pytorch_model-00001-of-00002.bin", ()), is_stray("training_args.bin", ())
(True, False)
>>> [is_stray(path, (".bin",)) for path in ("a/b.bin", "b.bin.index.json", ".metadata", "c")]
[True, True, True, False]
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.conversion.names import left_over, outlines_of
from reshard.checkpoint.conversion.request import Request, notes_of, wanted_of
from reshard.checkpoint.formats.checks import is_distcp
from reshard.checkpoint.formats.reader import config_of
from reshard.checkpoint.formats.safetensors.header import RESERVED
from reshard.checkpoint.formats.safetensors.writer import full, ranks, sharded
from reshard.checkpoint.integrity.checksums import SIDECAR
from reshard.checkpoint.output import Output, Wanted
from reshard.checkpoint.storage.local import COMMITTED, TENSOR_FILES, Storage, StoredFile
from reshard.checkpoint.transfer.transfers import Transfer, transfer_of
from reshard.errors import CheckpointError, SizeError
from reshard.planning.names import Names, names_of
from reshard.text import parse_bytes, quoted

FORMATS = ("full", "sharded", "distcp", "ranks")


def stamp_of(catalog: Catalog, storage: Storage) -> tuple[str, bool]:
    """The present state of a source: a hash of its path and of the names, sizes and versions of
    its files; and whether every file has a version, so that every change of it shows."""
    root = str(Path(catalog.root).resolve()) if storage.is_local else catalog.root
    # A path need not be valid UTF-8.
    hasher = hashlib.blake2b(root.encode(errors="surrogateescape"), digest_size=16)
    files = (*catalog.files, *catalog.others)
    versions = storage.versions([file.path for file in files])
    for file, version in zip(files, versions, strict=True):
        hasher.update(json.dumps([file.path, file.size, version]).encode())
    return hasher.hexdigest(), None not in versions


_NAME = re.compile(
    r"(adapter_model|diffusion_pytorch_model|(?:pytorch_)?model)(\.[A-Za-z]\w*)?(-\d+-of-\d+)?"
    r"\.(safetensors|bin)"
)
"""Names of files of PEFT, diffusers and transformers."""
_WEIGHTS = re.compile(
    r"((pytorch_model|adapter_model|diffusion_pytorch_model|consolidated)[^/]*\.(bin|pt|pth)"
    r"|tf_model[^/]*\.h5|flax_model[^/]*\.msgpack)(\.index\.json)?"
)
"""Names of weights in other formats, and of indexes of such files."""


@dataclass(frozen=True, eq=False, slots=True)
class ConversionPlan:
    """What is read, what is written, and what is copied where."""

    catalog: Catalog
    format: str
    output: Output
    """All files to be written, including the other files of the source."""
    transfers: tuple[Transfer, ...]
    others: tuple[StoredFile, ...]
    """The last files of the output, which are copied unchanged."""
    fingerprint: str
    """A hash of the source and the request."""
    stamp: tuple[str, bool]
    """The state of the source when the plan was made: see ``stamp_of``."""
    notes: tuple[str, ...] = ()
    """Remarks on the request and the layouts, for the report."""

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(file.path for file in self.output.files)

    @property
    def casts(self) -> bool:
        return any(transfer.have != transfer.want for transfer in self.transfers)


def plan_conversion(request: Request, catalog: Catalog, storage: Storage) -> ConversionPlan:
    """Plan a conversion; missing parts, misfits and unknown names raise errors here."""
    format, is_whole = _format_of(request)
    if is_whole:
        request.check_whole(format)
    else:
        request = request.with_config(storage)
    stored = catalog.tensors
    if not stored and not catalog.objects:
        raise CheckpointError(f"{catalog.root} holds no tensors: there is nothing to convert")
    names = request.names
    if names is None:
        names = names_of(request.rules.names) if request.rules is not None else {}
    outlines = outlines_of(stored, names, request.drop)
    if not outlines and not catalog.objects:
        raise CheckpointError(
            f"all tensors of {catalog.root} are dropped: nothing is left to write"
        )
    wanted = wanted_of(outlines, request, is_whole)
    output = _output(request, format, wanted, catalog, storage)
    transfers = tuple(
        transfer_of(output.tensors[name], outline.feeds, stored, outline.zeros)
        for name, outline in outlines.items()
    )
    others, strays = _others(output, catalog, format)
    rest = left_over(stored, outlines, request.drop)
    output = replace(
        output,
        files=(*output.files, *others),
        left_out=(*output.left_out, *strays, *catalog.left_out, *rest),
    )
    stamp = stamp_of(catalog, storage)
    return ConversionPlan(
        catalog,
        format,
        output,
        transfers,
        others,
        _fingerprint(stamp[0], output, names, transfers),
        stamp,
        notes_of(wanted, outlines, request),
    )


def _format_of(request: Request) -> tuple[str, bool]:
    """The format of the output, and whether it holds whole tensors."""
    format = request.format or ("sharded" if request.has_mesh else "full")
    if format not in FORMATS:
        raise CheckpointError(f"{quoted(format)} is no format: use {', '.join(FORMATS)}")
    return format, format == "full" or (format == "distcp" and not request.has_mesh)


def _output(
    request: Request, format: str, wanted: Mapping[str, Wanted], catalog: Catalog, storage: Storage
) -> Output:
    """The files of the output that hold tensors and entries."""
    size = parse_bytes(request.max_shard_size)
    if size < 1:
        raise SizeError(
            f"max_shard_size is {size} bytes: give the most bytes of one file, such as 5GB"
        )
    if format == "distcp":
        return _distcp(wanted, catalog)
    texts: Mapping[str, str] = {}
    if catalog.objects:
        from reshard.checkpoint.formats.torch.tensors import object_texts

        texts = object_texts(storage, catalog)
    values = (*catalog.objects, *catalog.values)
    metadata = {**catalog.metadata, **texts}
    for name in {*RESERVED, "format"}.intersection(values):
        metadata.pop(name, None)
    match format:
        case "full":
            files, others = ([file.path for file in n] for n in (catalog.files, catalog.others))
            config = config_of(storage) if "config.json" in others else None
            output = full(wanted, metadata, size, base_of(files, others, config))
        case "sharded":
            meshes = (str(one.layout.mesh) for one in wanted.values() if one.layout)
            output = sharded(wanted, metadata, next(meshes, None))
        case _:
            output = ranks(wanted, metadata)
    lost = [name for name in values if name not in metadata]
    return replace(output, left_out=(*lost, *catalog.extras))


def _distcp(wanted: Mapping[str, Wanted], catalog: Catalog) -> Output:
    """The files of a .distcp; it has no place for metadata that are strings."""
    from reshard.checkpoint.formats.distcp_writer import distcp

    extras = {
        key: {name: one for name, one in extra.items() if name in wanted}
        for key, extra in catalog.extras.items()
    }
    output = distcp(wanted, [*catalog.objects.values()], catalog.nesting, catalog.values, extras)
    lost = [
        key
        for key, text in catalog.metadata.items()  # "format: pt" is written again from a .distcp
        if key not in catalog.values and (key, text) != ("format", "pt")
    ]
    lost += [
        f"{key} of {name}"
        for key, extra in catalog.extras.items()
        for name, one in extra.items()
        if one and name not in wanted
    ]
    return replace(output, left_out=tuple(lost))


def base_of(
    files: Collection[str], others: Collection[str], config: Mapping[str, Any] | None = None
) -> str:
    """The name that Hugging Face libraries expect for the files of whole tensors in a folder.

    The names of the source files decide, if all of them are known; else the config of an adapter
    or of a diffusers model in the folder.
    """
    names = {match[1] if (match := _NAME.fullmatch(path)) else None for path in files}
    if len(names) == 1 and (name := names.pop()) is not None:
        return name.removeprefix("pytorch_")
    if "adapter_config.json" in others and "config.json" not in others:
        return "adapter_model"
    return "diffusion_pytorch_model" if "_diffusers_version" in (config or {}) else "model"


def _others(
    output: Output, catalog: Catalog, format: str
) -> tuple[tuple[StoredFile, ...], tuple[str, ...]]:
    """The other files of the source that are copied, and the paths of strays, which are not."""
    misleading = TENSOR_FILES if format == "ranks" else (".safetensors",)
    strays = tuple(file.path for file in catalog.others if is_stray(file.path, misleading))
    ours = {*(file.path for file in output.files), SIDECAR, COMMITTED, *strays}
    return tuple(file for file in catalog.others if file.path not in ours), strays


def is_stray(path: str, endings: tuple[str, ...]) -> bool:
    """Whether a file is left out: it holds tensors and is not part of the source.

    Readers might take files with these endings, indexes of such files, or those of a .distcp folder
    for a part of the output. Weights in other formats would be stale.
    """
    name = path.rpartition("/")[2]
    is_other = is_distcp(name) or _WEIGHTS.fullmatch(name) is not None
    return is_other or path.removesuffix(".index.json").endswith(endings)


def _fingerprint(stamp: str, output: Output, names: Names, transfers: Sequence[Transfer]) -> str:
    """A hash of the source's state, of all reads and writes, and of all files to be written."""
    hasher = hashlib.blake2b(stamp.encode(), digest_size=16)
    hasher.update(repr(sorted(names.items(), key=lambda item: item[0])).encode())
    for transfer in transfers:
        hasher.update(repr((transfer.name, transfer.shape, transfer.have, transfer.want)).encode())
        for side in (transfer.stored, transfer.written):
            hasher.update(side.fingerprint())
    for file in output.files:
        hasher.update(json.dumps([file.path, file.size]).encode())
    for literal in output.literals:
        hasher.update(json.dumps([literal.file, literal.offset]).encode() + literal.data)
    return hasher.hexdigest()
