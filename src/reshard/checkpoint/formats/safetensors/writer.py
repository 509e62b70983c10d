"""Plans safetensors files: whole tensors as in Hugging Face's, boxes as in torch's, or per rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from reshard.checkpoint.catalog import StoredPiece
from reshard.checkpoint.formats.safetensors.header import (
    KEY,
    SHARDING,
    OwnMetadata,
    OwnTensor,
    build_header,
)
from reshard.checkpoint.output import Literal, Output, OutputTensor, Wanted, owned_boxes
from reshard.checkpoint.storage.local import StoredFile
from reshard.dtypes import itemsize
from reshard.errors import CheckpointError, LayoutError, TargetError
from reshard.layout.box import Box, Piece, row_major
from reshard.layout.layout import BoxLayout, Layout
from reshard.text import quoted

__all__ = ["full", "ranks", "sharded"]

MAX_BOXES = 64
"""Boxes of one tensor on one rank: each beyond the first needs another file."""


@dataclass(slots=True)
class _File:
    """A planned file: its tensors as (dtype, shape), their offsets and pieces."""

    path: str
    tensors: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    offsets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    pieces: dict[str, tuple[Piece, ...]] = field(default_factory=dict)
    rank: int | None = None

    def add_box(self, name: str, dtype: str, start: tuple[int, ...], stop: tuple[int, ...]) -> None:
        shape, pieces = _one_piece(start, stop)
        self.tensors[name] = (dtype, shape)
        self.offsets[name] = start
        self.pieces[name] = pieces


@lru_cache(maxsize=4096)
def _one_piece(
    start: tuple[int, ...], stop: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """The shape of a box, and the box as the only piece of its tensor in a file."""
    box = Box(start, stop)
    return box.shape, (Piece(box, 0, row_major(box.shape)),)


def full(
    tensors: Mapping[str, Wanted],
    metadata: Mapping[str, str],
    max_shard_size: int,
    base: str = "model",
) -> Output:
    """Whole tensors in one file, or in several with an index; file names begin with the base."""
    groups = list(_packed(tensors, max_shard_size))
    files = []
    for number, names in enumerate(groups, 1):
        several = f"{base}-{number:05d}-of-{len(groups):05d}.safetensors"
        file = _File(several if len(groups) > 1 else f"{base}.safetensors")
        for name in names:
            shape = tensors[name].shape
            file.add_box(name, tensors[name].dtype, (0,) * len(shape), shape)
        files.append(file)
    output = _assemble(files, tensors, metadata, own=None)
    if len(files) == 1:
        return output
    weight_map = {name: file.path for file in files for name in file.tensors}
    total = sum(wanted.num_bytes for wanted in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    data = (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
    return replace(
        output,
        files=(*output.files, StoredFile(f"{base}.safetensors.index.json", len(data))),
        literals=(*output.literals, Literal(len(files), 0, data)),
    )


def sharded(tensors: Mapping[str, Wanted], metadata: Mapping[str, str], mesh: str | None) -> Output:
    """Boxes as torch's ``HuggingFaceStorageWriter(save_distributed=True)`` writes them.

    A file holds one box of a tensor, so a rank with several boxes of a tensor has several files.
    """
    files: dict[tuple[int, int], _File] = {}
    for number, (name, wanted) in enumerate(tensors.items()):
        count: dict[int, int] = {}
        for start, stop, rank in owned_boxes(name, wanted, number):
            part = count[rank] = count.get(rank, -1) + 1
            if (rank, part) not in files:
                files[rank, part] = _File("")
            files[rank, part].add_box(name, wanted.dtype, start, stop)
        most = max(count.values()) + 1
        if most > MAX_BOXES:
            raise TargetError(
                f'tensor {quoted(name)}: layout "{wanted.layout}" gives a rank {most} separate '
                f"boxes, and each would be a file of its own (at most {MAX_BOXES}): "
                "use --format ranks or --format distcp"
            )
    position = {rank: at for at, rank in enumerate(sorted({rank for rank, _ in files}), 1)}
    parts = max((part for _, part in files), default=0) + 1
    for (rank, part), file in files.items():
        file.path = f"shard-{position[rank]:05d}-model-{part + 1:05d}-of-{parts:05d}.safetensors"
    return _assemble([files[key] for key in sorted(files)], tensors, metadata, own=mesh or "")


def ranks(tensors: Mapping[str, Wanted], metadata: Mapping[str, str]) -> Output:
    """The local tensors of every rank, in a file with the rank in its name."""
    layouts = [wanted.layout for wanted in tensors.values()]
    meshes = {str(layout.mesh) for layout in layouts if layout is not None}
    if len(meshes) != 1 or any(one is None or isinstance(one, BoxLayout) for one in layouts):
        raise LayoutError(
            "files of ranks need a layout on one mesh for every tensor, so that they can be read "
            f"again, and these have {len(meshes)} meshes: use --format sharded"
        )
    files: dict[int, _File] = {}
    known: dict[tuple[Layout, tuple[int, ...], int], tuple[tuple[int, ...], tuple[Piece, ...]]] = {}
    for number, (name, wanted) in enumerate(tensors.items()):
        owned_boxes(name, wanted, number)
        layout = wanted.layout
        assert layout is not None
        for rank in layout.ranks:
            if layout.holds(rank) is None:
                continue
            key = (layout, wanted.shape, rank)
            if key not in known:
                pieces = layout.pieces(rank, wanted.shape)
                known[key] = layout.local_shape(rank, wanted.shape), pieces
            file = files.setdefault(rank, _File(f"model-rank-{rank}-part-0.safetensors", rank=rank))
            shape, file.pieces[name] = known[key]
            file.tensors[name] = (wanted.dtype, shape)
    return _assemble([files[rank] for rank in sorted(files)], tensors, metadata, own=meshes.pop())


def _packed(tensors: Mapping[str, Wanted], limit: int) -> Iterable[list[str]]:
    """Names in order, grouped into files up to a size, at least one in each."""
    names: list[str] = []
    total = 0
    for name, wanted in tensors.items():
        if names and total + wanted.num_bytes > limit:
            yield names
            names, total = [], 0
        names.append(name)
        total += wanted.num_bytes
    yield names


def _assemble(
    files: list[_File], tensors: Mapping[str, Wanted], metadata: Mapping[str, str], own: str | None
) -> Output:
    """The headers of the files, and the place of every piece after them."""
    kept = {key: text for key, text in metadata.items() if key not in (KEY, SHARDING)}
    _check_texts(tensors, kept)
    pieces: dict[str, list[StoredPiece]] = {name: [] for name in tensors}
    stored, literals = [], []
    for number, file in enumerate(files):
        # Elements of 8 bytes first, then of 4, and so on, so that every tensor is aligned.
        order = sorted(file.tensors, key=lambda name: -itemsize(file.tensors[name][0]))
        extra = {}
        if own is not None:
            texts = {name: _layout_text(tensors[name].layout, own) for name in file.tensors}
            described = {name: OwnTensor(tensors[name].shape, text) for name, text in texts.items()}
            about = OwnMetadata(number + 1, len(files), own or None, file.rank, described)
            extra[KEY] = about.to_text()
            if file.rank is None:
                offsets = {name: {"saved_offsets": at} for name, at in file.offsets.items()}
                extra |= {SHARDING: json.dumps(offsets), "DCP_VERSION": "1.0"}
        built = build_header(
            {name: file.tensors[name] for name in order}, {"format": "pt", **kept, **extra}
        )
        literals.append(Literal(number, 0, built.data))
        stored.append(StoredFile(file.path, built.file_size))
        for name in order:
            size = itemsize(file.tensors[name][0])
            for piece in file.pieces[name]:
                offset = built.offsets[name] + piece.offset * size
                pieces[name].append(StoredPiece(piece.box, number, offset, piece.strides))
    placed = {
        name: OutputTensor(name, wanted.shape, wanted.dtype, tuple(pieces[name]))
        for name, wanted in tensors.items()
    }
    return Output(tuple(stored), placed, tuple(literals), metadata=kept)


def _check_texts(tensors: Mapping[str, Wanted], metadata: Mapping[str, str]) -> None:
    """Refuse a lone surrogate, which UTF-8, and so a header, cannot represent."""
    texts = ((f"metadata {quoted(key)}", key + text) for key, text in metadata.items())
    for what, text in (*((f"tensor {quoted(name)}", name) for name in tensors), *texts):
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise CheckpointError(
                f"{what} has a lone surrogate, which no safetensors file can hold: rename it, or "
                "write distcp"
            )


@lru_cache(maxsize=1024)
def _layout_text(layout: Layout | None, mesh: str) -> str | None:
    """The notation of a layout on a mesh; None if it is on another mesh or has none."""
    known = layout is not None and not isinstance(layout, BoxLayout) and str(layout.mesh) == mesh
    return str(layout) if known else None
