"""Files of ranks: rules give the layouts, or the files themselves if reshard wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.formats.file_names import rank_of
from reshard.checkpoint.formats.findings import Findings
from reshard.checkpoint.formats.ranks.joining import LocalFile, check_blocks, join_ranks
from reshard.checkpoint.formats.safetensors.own_metadata import OwnMetadata
from reshard.checkpoint.formats.safetensors.reader import HeadedFile, common_metadata, read_headers
from reshard.checkpoint.formats.torch.state_dict import Content, catalog_fields, read_torch_file
from reshard.checkpoint.formats.torch.tensors import LocalTensor
from reshard.checkpoint.formats.torch.zero import check_no_zero_files
from reshard.checkpoint.storage.base import TENSOR_FILES, Storage, StoredFile
from reshard.errors import CheckpointError, DamageError, ReshardError, UnsupportedError
from reshard.layout.box import row_major
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.rules import Rules
from reshard.text import quoted

__all__ = ["join_by_rules", "read_by_rules", "read_own_ranks"]


def read_by_rules(
    storage: Storage,
    listed: Sequence[StoredFile],
    findings: Findings,
    rules: Rules,
    mesh: Mesh | None,
) -> Catalog:
    """The catalog of files whose names have the rank and whose layouts come from rules."""
    mesh = mesh or rules.mesh
    if mesh is None:
        raise CheckpointError(f"rules need a mesh to read {storage.root}: give --mesh")
    files, ranks = _files_of_ranks(storage.root, listed, mesh)
    contents = _contents(storage, files, findings)
    local = []
    for number, file in enumerate(files):
        if file.path in contents:
            tensors = _without_rng(contents[file.path].tensors, file, findings)
            local.append(LocalFile(ranks[number], number, storage.where(file.path), tensors))
    examples = {name: tensor.shape for file in local for name, tensor in file.tensors.items()}
    layouts = rules.fit(examples).layouts(examples, mesh)
    return Catalog(
        storage.root,
        "per-rank",
        tuple(files),
        join_ranks(local, layouts, {}, findings),
        others=_others(listed, files),
        mesh=str(mesh),
        layouts={n: str(layout) for n, layout in layouts.items() if layout.mesh == mesh},
        **catalog_fields(contents.values()),
    )


def join_by_rules(
    catalog: Catalog,
    by_rank: Mapping[int, Catalog],
    rules: Rules,
    mesh: Mesh | None,
    findings: Findings,
) -> Catalog:
    """The catalog of ranks that saved without collectives; rules give the layouts."""
    if mesh is None:
        raise CheckpointError(f"rules need a mesh to read {catalog.root}: give --mesh")
    local: list[LocalFile] = []
    first = 0
    for rank, one in by_rank.items():
        local += _local_files(rank, one, first)
        first += len(one.files)
    shapes = {name: tensor.shape for file in local for name, tensor in file.tensors.items()}
    layouts = rules.fit(shapes).layouts(shapes, mesh)
    return replace(
        catalog,
        tensors=join_ranks(local, layouts, {}, findings),
        mesh=str(mesh),
        layouts={n: str(layout) for n, layout in layouts.items() if layout.mesh == mesh},
    )


def _local_files(rank: int, catalog: Catalog, first: int) -> Iterator[LocalFile]:
    """The tensors of a rank, file by file."""
    held: dict[int, dict[str, LocalTensor]] = {}
    for name, tensor in catalog.tensors.items():
        if len(tensor.pieces) != 1:
            raise UnsupportedError(
                f"{catalog.root}: tensor {quoted(name)} of rank {rank} is stored in "
                f"{len(tensor.pieces)} parts, and by rules only whole local tensors are read"
            )
        [piece] = tensor.pieces
        local = LocalTensor(tensor.dtype, tensor.shape, piece.strides, piece.offset)
        held.setdefault(piece.file, {})[name] = local
    for number, tensors in held.items():
        where = f"{catalog.root}/{catalog.files[number].path}"
        yield LocalFile(rank, first + number, where, tensors)


def read_own_ranks(
    storage: Storage,
    listed: Sequence[StoredFile],
    headed: Sequence[HeadedFile],
    findings: Findings,
) -> Catalog:
    """The catalog of per-rank files that reshard wrote, which describe their layouts."""
    mesh = next(one.own.mesh for one in headed if one.own and one.own.mesh is not None)
    layouts: dict[str, Layout] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    local: list[LocalFile] = []
    for number, one in enumerate(headed):
        with findings.noting():
            own = one.own
            if own is None or own.rank is None or own.mesh != mesh:
                raise DamageError(f"{one.where} is not of a rank of mesh {mesh}, as others are")
            tensors = _headed_tensors(one)
            for name in tensors:
                _record_layout(name, own, one.where, layouts, shapes)
            local.append(LocalFile(own.rank, number, one.where, tensors))
    files = [one.file for one in headed]
    return Catalog(
        storage.root,
        "per-rank",
        tuple(files),
        join_ranks(local, layouts, shapes, findings),
        metadata=common_metadata(headed),
        others=_others(listed, files),
        mesh=mesh,
        layouts={name: str(layout) for name, layout in layouts.items()},
    )


def _record_layout(
    name: str,
    own: OwnMetadata,
    where: str,
    layouts: dict[str, Layout],
    shapes: dict[str, tuple[int, ...]],
) -> None:
    """Take the layout of a tensor from a file; it must agree with the other files."""
    tensor = own.tensors.get(name)
    if tensor is None or tensor.layout is None or own.mesh is None:
        raise DamageError(f"{where}: tensor {quoted(name)} has no layout in the file's metadata")
    known = layouts.get(name)
    if known is None:
        try:
            layout = Layout(Mesh.parse(own.mesh), tensor.layout)
            check_blocks(name, layout, tensor.shape, where)
        except CheckpointError:
            raise
        except ReshardError as error:
            raise DamageError(f"{where}: tensor {quoted(name)}: {error}") from None
        layouts[name], shapes[name] = layout, tensor.shape
    elif str(known) != tensor.layout or shapes[name] != tensor.shape:
        raise DamageError(
            f'{where}: tensor {quoted(name)} is "{tensor.layout}" of {tensor.shape}, and '
            f'"{known}" of {shapes[name]} in another file'
        )


def _files_of_ranks(
    root: str, listed: Sequence[StoredFile], mesh: Mesh
) -> tuple[list[StoredFile], list[int]]:
    files, ranks = [], []
    for file in listed:
        rank = rank_of(file.path, mesh) if file.path.endswith(TENSOR_FILES) else None
        if rank is not None:
            files.append(file)
            ranks.append(rank)
    if not files:
        check_no_zero_files(root, listed)
        raise CheckpointError(
            f"{root}: no file has a rank in its name, such as model-rank-0-part-0.safetensors or "
            "mp_rank_00/model_optim_rng.pt: rules and a mesh are for files of ranks"
        )
    return files, ranks


def _contents(
    storage: Storage, files: Sequence[StoredFile], findings: Findings
) -> dict[str, Content]:
    """The content of each file that can be read, by path."""
    tensors = [file for file in files if file.path.endswith(".safetensors")]
    headed = read_headers(storage, tensors, findings)
    contents = {one.file.path: Content(_headed_tensors(one)) for one in headed}
    for number, file in enumerate(files):
        if not file.path.endswith(".safetensors"):
            with findings.noting():
                contents[file.path] = read_torch_file(storage, file, findings, number)
    for first in [*contents.values()][:1]:
        first.texts = {**common_metadata(headed), **first.texts}
    return contents


def _headed_tensors(one: HeadedFile) -> dict[str, LocalTensor]:
    return {
        entry.name: LocalTensor(entry.dtype, entry.shape, row_major(entry.shape), entry.offset)
        for entry in one.header.entries
    }


def _without_rng(
    tensors: Mapping[str, LocalTensor], file: StoredFile, findings: Findings
) -> dict[str, LocalTensor]:
    """Leave out states of random generators: each rank has its own, not part of a global tensor."""
    own = [name for name in tensors if any("rng" in part for part in name.split("."))]
    if own:
        findings.note(f"{file.path}: {len(own)} states of random generators are left out")
    return {name: tensor for name, tensor in tensors.items() if name not in own}


def _others(listed: Iterable[StoredFile], files: Iterable[StoredFile]) -> tuple[StoredFile, ...]:
    used = {file.path for file in files}
    return tuple(file for file in listed if file.path not in used)
