"""Files that hold the local tensors of one rank each, joined to global tensors.

Rules give the layouts, or the files themselves if reshard wrote them. The layout of a tensor gives
the boxes of each local tensor. The global shape follows from the local shapes, and every local
shape is then checked against it:

    rank 0  (3, 4) \\
    rank 1  (3, 4)  >  "tp -" on tp=3  ->  (8, 4)
    rank 2  (2, 4) /
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from operator import mul
from typing import Any, NamedTuple

from reshard.checkpoint.catalog import Catalog, StoredPiece, StoredTensor
from reshard.checkpoint.formats.checks import Content, Findings, LocalTensor, Reading, rank_of
from reshard.checkpoint.formats.safetensors.header import OwnTensor
from reshard.checkpoint.formats.safetensors.reader import Contents, Own, read_headers
from reshard.checkpoint.formats.torch.state_dict import check_no_zero_files, read_torch_file
from reshard.checkpoint.storage.local import TENSOR_FILES
from reshard.dtypes import itemsize
from reshard.errors import CheckpointError, DamageError, ReshardError, UnsupportedError
from reshard.layout.box import Piece, row_major
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.layout.words import Cuts, Cyclic, Packed, Ragged, axes_of
from reshard.rules import Rules
from reshard.text import quoted

Shape = tuple[int, ...]
MAX_BLOCKS = 1 << 18
MAX_PIECES = 1 << 22
"""Pieces of all tensors; each takes a few hundred bytes of memory."""


class _Local(NamedTuple):
    """A tensor of one rank, and the number and name of its file."""

    tensor: LocalTensor
    file: int
    where: str


class _Ranks:
    """The local tensors of all ranks, which layouts join to global ones."""

    def __init__(self) -> None:
        self.locals: dict[str, dict[int, _Local]] = {}
        self.files: dict[int, str] = {}
        """A file of each rank, for errors."""
        self.doubled: dict[tuple[str, str], list[str]] = {}

    def add(self, rank: int, file: int, where: str, tensors: Mapping[str, LocalTensor]) -> None:
        self.files[rank] = where
        for name, tensor in tensors.items():
            by_rank = self.locals.setdefault(name, {})
            if rank in by_rank:
                self.doubled.setdefault((by_rank[rank].where, where), []).append(name)
            by_rank[rank] = _Local(tensor, file, where)

    def joined(
        self, layouts: Mapping[str, Layout], shapes: Mapping[str, Shape], findings: Findings
    ) -> dict[str, StoredTensor]:
        """The global tensors; missing global shapes are derived."""
        findings.refuse_doubled(self.doubled, "keep one file of each rank for each tensor")
        joined: dict[str, StoredTensor] = {}
        count = 0
        for name in self.locals:
            with findings:
                joined[name] = self._joined(name, layouts[name], shapes.get(name))
                count += len(joined[name].pieces)
                if count > MAX_PIECES:
                    raise UnsupportedError(
                        f"the layouts shard {len(joined)} of {len(self.locals)} tensors into "
                        f"{count} pieces, at most {MAX_PIECES} are read: use larger blocks"
                    )
        return joined

    def by_rules(self, reading: Reading, rules: Rules) -> dict[str, Any]:
        """The global tensors, the mesh, and the layouts on it: fields of a catalog."""
        mesh = _mesh_of(reading, rules)
        last = {name: [*by_rank.values()][-1] for name, by_rank in self.locals.items()}
        shapes = {name: local.tensor.shape for name, local in last.items()}
        layouts = rules.fit(shapes).layouts(shapes, mesh)
        texts = {name: str(layout) for name, layout in layouts.items() if layout.mesh == mesh}
        tensors = self.joined(layouts, {}, reading.findings)
        return {"tensors": tensors, "mesh": str(mesh), "layouts": texts}

    def _joined(self, name: str, layout: Layout, shape: Shape | None) -> StoredTensor:
        """The global tensor; without a shape it follows from the local shapes."""
        mesh, by_rank = layout.mesh, self.locals[name]
        if layout.reduce is not None:
            raise CheckpointError(
                f'tensor {quoted(name)} has the layout "{layout}", of sums that are pending: give '
                "the layout of values"
            )
        first, *rest = by_rank.values()
        example = first.tensor
        for one in rest:
            if (one.tensor.dtype, len(one.tensor.shape)) != (example.dtype, len(example.shape)):
                raise DamageError(
                    f"tensor {quoted(name)} is {example.dtype} of {example.shape} in "
                    f"{first.where} and {one.tensor.dtype} of {one.tensor.shape} in {one.where}"
                )
        holders = [rank for rank in self.files if layout.holds(rank) is not None]
        if shape is None:
            shape = self._global_shape(name, layout, example.shape, holders)
        expected = {rank: layout.local_shape(rank, shape) for rank in holders}
        self._check_present(name, layout, expected)
        pieces: list[StoredPiece] = []
        for rank, one in by_rank.items():
            if rank not in expected:
                raise DamageError(
                    f'{one.where} holds tensor {quoted(name)}, which the layout "{layout}" on '
                    f"mesh {mesh} keeps off rank {rank}"
                )
            if one.tensor.shape != expected[rank]:
                raise DamageError(
                    f"{one.where}: tensor {quoted(name)} has the shape {one.tensor.shape} and "
                    f'"{layout}" on mesh {mesh} shards {shape} to {expected[rank]} for rank '
                    f"{rank}: are these the rules and the mesh that wrote it?"
                )
            pieces += _stored(one, layout.pieces(rank, shape))
        return StoredTensor(name, shape, example.dtype, tuple(sorted(pieces, key=lambda p: p.box)))

    def _check_present(self, name: str, layout: Layout, expected: Mapping[int, Shape]) -> None:
        """Refuse a rank without its part; it may lack an empty one if all other ranks match."""
        by_rank = self.locals[name]
        match = all(expected.get(rank) == one.tensor.shape for rank, one in by_rank.items())
        for rank, shape in expected.items():
            if rank not in by_rank and not (match and 0 in shape):
                raise DamageError(
                    f'{self.files[rank]} has no tensor {quoted(name)}, which "{layout}" on mesh '
                    f"{layout.mesh} puts on rank {rank} too"
                )

    def _global_shape(
        self, name: str, layout: Layout, example: Shape, holders: Sequence[int]
    ) -> Shape:
        if layout.words.flat:
            raise UnsupportedError(
                f'tensor {quoted(name)} has the layout "{layout}": files of flattened tensors do '
                "not say their shape and cannot be read"
            )
        try:
            dims = layout.dims(example)
        except ReshardError as error:
            raise CheckpointError(f"tensor {quoted(name)}: {error}") from None
        return tuple(
            self._length(name, layout, dim, cuts, holders) for dim, cuts in enumerate(dims)
        )

    def _length(self, name: str, layout: Layout, dim: int, cuts: Cuts, ranks: Sequence[int]) -> int:
        """The length of a dim: the sum of its parts over the coordinates of the first axis.

        ``ranks`` are those at one place of the axes to the left; each part is found the same way.
        """
        match cuts[:1]:
            case ():
                parts = self.locals[name]
                return next((parts[rank].tensor.shape[dim] for rank in ranks if rank in parts), 0)
            case (Packed(segments=segments),):
                return sum(segment.size for segment in segments)
            case (Ragged(sizes=sizes),):
                return sum(sizes)
        (axis,), mesh = axes_of(cuts[:1]), layout.mesh
        total = 0
        for at in range(mesh.axes[axis]):
            part = [rank for rank in ranks if mesh.coords(rank)[axis] == at]
            if not part:
                raise DamageError(
                    f'tensor {quoted(name)} is sharded by "{layout}" on mesh {mesh}, and no file '
                    f"holds its part at {axis}={at} of dim {dim}: a rank's file is missing"
                )
            total += self._length(name, layout, dim, cuts[1:], part)
        return total


def _stored(local: _Local, pieces: Sequence[Piece]) -> Iterator[StoredPiece]:
    tensor = local.tensor
    size, ideal = itemsize(tensor.dtype), row_major(tensor.shape)
    for piece in pieces:
        at, strides = piece.offset, piece.strides
        if tensor.strides != ideal and strides == ideal:  # saved as a view, such as a transpose
            index = [at // ideal[dim] % length for dim, length in enumerate(tensor.shape)]
            at, strides = sum(map(mul, index, tensor.strides)), tensor.strides
        elif tensor.strides != ideal:
            raise UnsupportedError(
                f"{local.where}: a flattened tensor with the strides {tensor.strides} is not read"
            )
        yield StoredPiece(piece.box, local.file, tensor.offset + at * size, strides)


def read_by_rules(reading: Reading, rules: Rules) -> Catalog:
    """The catalog of files whose names have the rank and whose layouts come from rules."""
    storage, findings = reading.storage, reading.findings
    mesh = _mesh_of(reading, rules)
    files = (file for file in reading.listed if file.path.endswith(TENSOR_FILES))
    rank_files = {file: rank for file in files if (rank := rank_of(file.path, mesh)) is not None}
    if not rank_files:
        check_no_zero_files(storage.root, reading.listed)
        raise CheckpointError(
            f"{storage.root}: no file has a rank in its name, such as "
            "model-rank-0-part-0.safetensors or mp_rank_00/model_optim_rng.pt: rules and a mesh "
            "are for files of ranks"
        )
    safe = [file for file in rank_files if file.path.endswith(".safetensors")]
    contents = read_headers(storage, safe, findings)
    ranks = _Ranks()
    for number, (file, rank) in enumerate(rank_files.items()):
        if not file.path.endswith(".safetensors"):
            with findings:
                contents[file] = read_torch_file(storage, file, findings, number)
        if file not in contents:  # it cannot be read
            contents[file] = Content(storage.where(file.path))
            continue
        # States of random generators: each rank has its own, not part of a global tensor.
        tensors = contents[file].tensors
        kept = {
            name: tensor
            for name, tensor in tensors.items()
            if not any("rng" in part for part in name.split("."))
        }
        if left_out := len(tensors) - len(kept):
            findings.note(f"{file.path}: {left_out} states of random generators are left out")
        ranks.add(rank, number, contents[file].where, kept)
    contents = {file: contents[file] for file in rank_files}
    return reading.catalog("per-rank", contents, **ranks.by_rules(reading, rules))


def _mesh_of(reading: Reading, rules: Rules) -> Mesh:
    mesh = reading.mesh or rules.mesh
    if mesh is None:
        raise CheckpointError(
            f"rules need a mesh to read {reading.storage.root}: give --mesh, or in convert "
            "--from-mesh"
        )
    return mesh


def join_by_rules(
    reading: Reading,
    catalog: Catalog,
    by_rank: Mapping[int, Mapping[str, StoredTensor]],
    rules: Rules,
) -> Catalog:
    """The catalog of ranks that saved without collectives; rules give the layouts."""
    ranks = _Ranks()
    for rank, tensors in by_rank.items():
        for name, tensor in tensors.items():
            if len(tensor.pieces) != 1:
                raise UnsupportedError(
                    f"{catalog.root}: tensor {quoted(name)} of rank {rank} is stored in "
                    f"{len(tensor.pieces)} parts, and by rules only whole local tensors are read"
                )
            [piece] = tensor.pieces
            local = LocalTensor(tensor.dtype, tensor.shape, piece.strides, piece.offset)
            where = f"{catalog.root}/{catalog.files[piece.file].path}"
            ranks.add(rank, piece.file, where, {name: local})
    return replace(catalog, **ranks.by_rules(reading, rules))


def read_own_ranks(reading: Reading, contents: Contents, own: Own) -> Catalog:
    """The catalog of per-rank files that reshard wrote, which describe their layouts."""
    mesh = next(one.mesh for one in own.values() if one.mesh is not None)
    known: dict[str, OwnTensor] = {}
    layouts: dict[str, Layout] = {}
    ranks = _Ranks()
    for number, (file, one) in enumerate(contents.items()):
        with reading.findings:
            described = own.get(file)
            if described is None or described.rank is None or described.mesh != mesh:
                raise DamageError(f"{one.where} is not of a rank of mesh {mesh}, as others are")
            for name in one.tensors:
                tensor, where = described.tensors.get(name), f"{one.where}: tensor {quoted(name)}"
                if tensor is None or tensor.layout is None:
                    raise DamageError(f"{where} has no layout in the file's metadata")
                if name not in layouts:
                    layouts[name] = _layout(mesh, tensor.layout, tensor.shape, where)
                first = known.setdefault(name, tensor)
                if first != tensor:
                    raise DamageError(
                        f'{where} is "{tensor.layout}" of {tensor.shape}, and "{first.layout}" of '
                        f"{first.shape} in another file"
                    )
            ranks.add(described.rank, number, one.where, one.tensors)
    shapes = {name: tensor.shape for name, tensor in known.items()}
    return reading.catalog(
        "per-rank",
        contents,
        ranks.joined(layouts, shapes, reading.findings),
        mesh=mesh,
        layouts={name: str(layout) for name, layout in layouts.items()},
    )


def _layout(mesh: str, notation: str, shape: Shape, where: str) -> Layout:
    """The layout that a file records; one with too many blocks is refused."""
    try:
        layout = Layout(Mesh.parse(mesh), notation)
        dims = zip(layout.dims(shape), shape, strict=True)
        blocks = prod(max((n // b for b in _blocks(cuts)), default=1) or 1 for cuts, n in dims)
    except ReshardError as error:
        raise DamageError(f"{where}: {error}") from None
    if blocks > MAX_BLOCKS:
        raise UnsupportedError(
            f'{where} is sharded by "{layout}" into {blocks} blocks, at most {MAX_BLOCKS} are read'
        )
    return layout


def _blocks(cuts: Cuts) -> Iterator[int]:
    for cut in cuts:
        match cut:
            case Cyclic(block=block):
                yield block
            case Packed(segments=segments):
                for segment in segments:
                    yield from _blocks(segment.cuts)
