"""Opens a checkpoint, recognises its format and reads it into a catalog.

.metadata                               torch's distributed checkpoint
__0.metadata, __1.metadata, ...         the same, written by ranks without collectives
*.safetensors                           whole tensors, boxes of tensors, or tensors of one rank
model-rank-3-part-0.safetensors, ...    tensors of one rank, sharded as rules say
*.pt *.pth *.bin *.ckpt                 torch.save: whole tensors, or tensors of one rank with rules
any other name                          one of the two above, recognised by its first bytes

Files in subfolders count only if none directly in the folder holds tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.formats.checks import Findings, Reading, is_distcp
from reshard.checkpoint.storage.local import (
    COMMITTED,
    TENSOR_FILES,
    LocalStorage,
    Storage,
    StoredFile,
    plain_path,
)
from reshard.checkpoint.storage.remote import RemoteStorage
from reshard.errors import CheckpointError, DamageError, MeshError, ReshardError, RulesError
from reshard.text import and_more, quoted

if TYPE_CHECKING:
    from reshard.layout.mesh import Mesh
    from reshard.rules import Rules


MAX_COMMITTED = 1 << 28
MAX_CONFIG = 1 << 20


def check_committed(storage: Storage, listed: Sequence[StoredFile], findings: Findings) -> None:
    """Note files that are missing or have another size than when they were uploaded.

    The file that ends an upload lists all others; it also shows that a local copy is complete.
    """
    present = {file.path: file.size for file in listed}
    if COMMITTED not in present:
        return
    where, length = storage.where(COMMITTED), present[COMMITTED]
    if length > MAX_COMMITTED:
        raise DamageError(f"{where} has {length} bytes, at most {MAX_COMMITTED} are read")
    files = (_json(storage, COMMITTED, length) or {}).get("files")
    if not isinstance(files, dict) or any(type(size) is not int for size in files.values()):
        raise DamageError(
            f"{where} is not what reshard writes: restore it from a copy, or delete it"
        )
    for path, size in files.items():
        has, where = present.get(path), storage.where(path)
        upload = f"{COMMITTED} says that it was uploaded with {size}"
        if has is None:
            findings.add_damage(f"{where} is missing: {upload} bytes")
        elif has != size:
            has_bytes = f"{has} byte{'s' * (has != 1)}"
            findings.add_damage(f"{where} has {has_bytes} and {upload}: restore it from a copy")


def _json(storage: Storage, path: str, length: int) -> dict[str, Any] | None:
    text = storage.read(path, 0, length)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def config_of(storage: Storage) -> Mapping[str, Any] | None:
    """The ``config.json`` of a folder; None if it is absent or cannot be read."""
    try:
        return _json(storage, "config.json", min(storage.size("config.json"), MAX_CONFIG))
    except ReshardError:
        return None


def check_expected(storage: Storage, catalog: Catalog, findings: Findings) -> None:
    """Note tensors that are shorter than config.json says.

    Torch's sharded files do not have the global shapes, so without its last shard a tensor looks
    like one of a smaller model. For known models the config has the shapes.
    """
    if not any(file.path == "config.json" for file in catalog.others):
        return
    from reshard.rules.models import tensors

    try:
        known = tensors(config_of(storage) or {})
    except ReshardError:  # an unknown model
        return
    for name, tensor in catalog.tensors.items():
        have, want = tensor.shape, known[name][0] if name in known else tensor.shape
        dims = enumerate(zip(have, want, strict=False))
        differ = [dim for dim, (length, expected) in dims if length != expected]
        if len(have) != len(want) or len(differ) != 1:
            continue
        [dim] = differ
        # Shorter in one dim, and split along that dim.
        if have[dim] < want[dim] and any(p.box.shape[dim] < have[dim] for p in tensor.pieces):
            findings.add_damage(
                f"{storage.root}: tensor {quoted(name)} reaches to {have} and config.json says "
                f"{tuple(want)}: the last shard is missing"
            )


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


HEAD = 64
MAX_OPENED = 256
"""Files of a folder whose first bytes are read where no name shows the format."""
TORCH_INDEX = "pytorch_model.bin.index.json"
LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of torch.save files before torch 1.6."""


def read_catalog(storage: Storage, rules: Rules | None = None, mesh: Mesh | None = None) -> Catalog:
    """The catalog of a checkpoint; raises the first of its problems.

    Rules and a mesh are for files of ranks that do not describe their layout. Whether the tensors
    are complete is checked separately: see ``StoredTensor.missing``.
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
    with findings:
        kind, files = _recognise(storage, listed)
        catalog = replace(catalog, format=kind)
        catalog = _read(kind, files, Reading(storage, listed, findings, rules, mesh))
        unread = [quoted(f.path) for f in catalog.others if f.path.endswith(TENSOR_FILES)]
        if unread:
            findings.note(f"{and_more(unread)}: its tensors were not read")
        if not storage.is_file:
            check_committed(storage, listed, findings)
    return replace(catalog, notes=(*catalog.notes, *findings.notes)), findings


def _read(kind: str, files: Sequence[StoredFile], reading: Reading) -> Catalog:
    root, mesh = reading.storage.root, reading.mesh
    # Each format is imported when it is needed: imports take longer than most headers.
    if kind == "distcp":
        if reading.storage.is_file:
            raise CheckpointError(f"{root} is one file of a .distcp folder: name the folder")
        from reshard.checkpoint.formats.distcp import read_distcp_folder

        return read_distcp_folder(reading)
    if reading.rules is not None:
        from reshard.checkpoint.formats.ranks import read_by_rules

        return read_by_rules(reading, reading.rules)
    if kind == "torch" and mesh is not None:
        raise CheckpointError(f"{root}: mesh {mesh} is for files of ranks: give --rules too")
    if kind == "torch":
        from reshard.checkpoint.formats.torch.state_dict import read_torch

        catalog = read_torch(reading, files)
        _check_torch_index(reading, catalog)
        files = [file for file in reading.listed if file.path.endswith(".safetensors")]
        if catalog.tensors or reading.findings.any or not files:
            return catalog
    catalog = _read_safetensors(reading, files)
    if mesh is not None and catalog.format == "safetensors":
        raise CheckpointError(f"{catalog.root} holds whole tensors: leave out mesh {mesh}")
    if mesh is not None and catalog.mesh is not None:
        from reshard.layout.mesh import Mesh

        if Mesh.parse(catalog.mesh).ranks != mesh.ranks:
            raise CheckpointError(
                f"{catalog.root} was written for mesh {catalog.mesh}, and mesh {mesh} was given: "
                "leave it out"
            )
    return catalog


def _check_torch_index(reading: Reading, catalog: Catalog) -> None:
    """Note absent files and tensors that the index of a folder of torch.save files names."""
    findings, where = reading.findings, reading.storage.where
    listed = {file.path: file for file in reading.listed}
    if TORCH_INDEX not in listed or not catalog.tensors or findings.any:
        return
    from reshard.checkpoint.formats.safetensors.reader import index_files

    mapped, index = index_files(reading.storage, listed[TORCH_INDEX]), where(TORCH_INDEX)
    for path in sorted({*mapped.values()} - listed.keys()):
        findings.add_damage(f"{where(path)} is missing: {index} names it")
    read = {file.path for file in catalog.files}
    for name, path in mapped.items():
        if path in read and name not in catalog.tensors:
            findings.add_damage(
                f"{index} puts tensor {quoted(name)} into {path}, which does not have it: restore "
                "the file from a copy"
            )


def _read_safetensors(reading: Reading, named: Sequence[StoredFile]) -> Catalog:
    from reshard.checkpoint.formats.safetensors.header import SHARDING
    from reshard.checkpoint.formats.safetensors.reader import (
        check_counts,
        read_headed,
        read_sharded,
        read_whole,
    )

    files, contents, own = read_headed(reading, named)
    check_counts(reading, files, own)
    if any(file.rank is not None and file.mesh is not None for file in own.values()):
        from reshard.checkpoint.formats.ranks import read_own_ranks

        return read_own_ranks(reading, contents, own)
    if any(SHARDING in one.described for one in contents.values()):
        catalog = read_sharded(reading, contents, own)
        if not own:
            check_expected(reading.storage, catalog, reading.findings)
        return catalog
    return read_whole(reading, files, contents)


def _recognise(
    storage: Storage, listed: Sequence[StoredFile]
) -> tuple[str, tuple[StoredFile, ...]]:
    """The kind of a checkpoint (distcp, safetensors or torch), and files that may hold tensors."""
    here = [file for file in listed if "/" not in file.path]
    if any(is_distcp(file.path) for file in here):
        return "distcp", ()
    if storage.is_file and (recognised := _by_content(storage, listed)):
        return recognised
    named = tuple(file for file in listed if file.path.endswith(TENSOR_FILES))
    safe = tuple(file for file in named if file.path.endswith(".safetensors"))
    # Files directly in the folder decide, if there are any.
    for some in (here, listed):
        if any(f.path.endswith((".safetensors", ".safetensors.index.json")) for f in some):
            return "safetensors", safe
        if any(file.path.endswith(TENSOR_FILES) for file in some):
            return "torch", tuple(f for f in named if not f.path.endswith(".safetensors"))
    if recognised := _by_content(storage, here):
        return recognised
    paths, root = [file.path for file in listed], storage.root
    inside = next((path for path in paths if path.endswith("/.metadata")), None)
    if inside is not None:
        folder = inside.removesuffix("/.metadata")
        raise CheckpointError(f"{root} is no checkpoint, but {root}/{folder} may be: name that one")
    content = and_more([quoted(path) for path in paths], 3, "files") or "nothing"
    raise CheckpointError(
        f"{root} is no checkpoint: it holds {content}, and no .safetensors, .metadata with "
        ".distcp, .pt, .pth, .bin or .ckpt"
    )


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


def open_storage(root: str | Path) -> Storage:
    """A folder, a single file, or the address of either, to be read by byte ranges.

    What has no ``://`` is local. Raises if the root does not exist; no file is opened yet.
    """
    text = plain_path(root)
    return RemoteStorage(text) if "://" in text else LocalStorage(text)
