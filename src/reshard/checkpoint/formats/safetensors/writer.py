"""Plans safetensors files: whole tensors as in Hugging Face's, boxes as in torch's, or per rank."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

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

MAX_BOXES = 64
"""Boxes of one tensor on one rank: each beyond the first needs another file."""


class _Entry(NamedTuple):
    """A tensor of a file: what the header says, where it begins in the global one, its pieces."""

    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    pieces: tuple[Piece, ...]


File = dict[str, _Entry]


@lru_cache(maxsize=4096)
def _box(dtype: str, start: tuple[int, ...], stop: tuple[int, ...]) -> _Entry:
    """A box that is one tensor of a file; the same for many tensors."""
    box = Box(start, stop)
    return _Entry(dtype, box.shape, start, (Piece(box, 0, row_major(box.shape)),))


def full(
    tensors: Mapping[str, Wanted],
    metadata: Mapping[str, str],
    max_shard_size: int,
    base: str = "model",
) -> Output:
    """Whole tensors in one file, or in several with an index; file names begin with the base."""
    groups = [File()]
    size = 0
    for name, wanted in tensors.items():
        if groups[-1] and size + wanted.num_bytes > max_shard_size:
            groups.append(File())
            size = 0
        groups[-1][name] = _box(wanted.dtype, (0,) * len(wanted.shape), wanted.shape)
        size += wanted.num_bytes
    files = {f"{base}.safetensors": groups[0]}
    if len(groups) > 1:
        end = f"of-{len(groups):05d}.safetensors"
        files = {f"{base}-{number:05d}-{end}": file for number, file in enumerate(groups, 1)}
    output = _assemble(files, tensors, metadata, own=None)
    if len(files) == 1:
        return output
    weight_map = {name: path for path, file in files.items() for name in file}
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
    files: dict[tuple[int, int], File] = {}
    for number, (name, wanted) in enumerate(tensors.items()):
        count = Counter[int]()
        for start, stop, rank in owned_boxes(name, wanted, number):
            files.setdefault((rank, count[rank]), {})[name] = _box(wanted.dtype, start, stop)
            count[rank] += 1
        most = max(count.values())
        if most > MAX_BOXES:
            raise TargetError(
                f'tensor {quoted(name)}: layout "{wanted.layout}" gives a rank {most} separate '
                f"boxes, and each would be a file of its own (at most {MAX_BOXES}): "
                "use --format ranks or --format distcp"
            )
    position = {rank: at for at, rank in enumerate(sorted({rank for rank, _ in files}), 1)}
    parts = max((part for _, part in files), default=0) + 1
    named = {
        f"shard-{position[rank]:05d}-model-{part + 1:05d}-of-{parts:05d}.safetensors": file
        for (rank, part), file in sorted(files.items())
    }
    return _assemble(named, tensors, metadata, own=mesh or "")


def ranks(tensors: Mapping[str, Wanted], metadata: Mapping[str, str]) -> Output:
    """The local tensors of every rank, in a file with the rank in its name."""
    layouts = [wanted.layout for wanted in tensors.values()]
    meshes = {str(layout.mesh) for layout in layouts if layout is not None}
    if len(meshes) != 1 or any(one is None or isinstance(one, BoxLayout) for one in layouts):
        raise LayoutError(
            "files of ranks need a layout on one mesh for every tensor, so that they can be read "
            f"again, and these have {len(meshes)} meshes: use --format sharded"
        )
    files: dict[int, File] = {}

    @cache
    def local(layout: Layout, shape: tuple[int, ...], dtype: str, rank: int) -> _Entry:
        pieces = layout.pieces(rank, shape)
        return _Entry(dtype, layout.local_shape(rank, shape), (), tuple(pieces))

    for number, (name, wanted) in enumerate(tensors.items()):
        owned_boxes(name, wanted, number)  # an error if elements would be lost
        layout = wanted.layout
        assert layout is not None
        for rank in layout.ranks:
            if layout.holds(rank) is not None:
                entry = local(layout, wanted.shape, wanted.dtype, rank)
                files.setdefault(rank, {})[name] = entry
    named = {f"model-rank-{rank}-part-0.safetensors": files[rank] for rank in sorted(files)}
    return _assemble(named, tensors, metadata, meshes.pop(), sorted(files))


def _assemble(
    files: Mapping[str, File],
    tensors: Mapping[str, Wanted],
    metadata: Mapping[str, str],
    own: str | None,
    ranks: Sequence[int] = (),
) -> Output:
    """The headers of the files, and the place of every piece after them."""
    kept = {key: text for key, text in metadata.items() if key not in (KEY, SHARDING)}
    _check_texts(tensors, kept)
    described = {
        name: OwnTensor(wanted.shape, _layout_text(wanted.layout, own or ""))
        for name, wanted in tensors.items()
    }
    pieces: dict[str, list[StoredPiece]] = {name: [] for name in tensors}
    stored, literals = [], []
    for number, (path, file) in enumerate(files.items()):
        # Elements of 8 bytes first, then of 4, and so on, so that every tensor is aligned.
        order = sorted(file, key=lambda name: -itemsize(file[name].dtype))
        texts = {"format": "pt", **kept}
        if own is not None:
            rank = ranks[number] if ranks else None
            inside = {name: described[name] for name in file}
            texts[KEY] = OwnMetadata(number + 1, len(files), own or None, rank, inside).to_text()
        if own is not None and not ranks:
            offsets = {name: {"saved_offsets": entry.start} for name, entry in file.items()}
            texts |= {SHARDING: json.dumps(offsets), "DCP_VERSION": "1.0"}
        built = build_header({name: file[name][:2] for name in order}, texts)
        literals.append(Literal(number, 0, built.data))
        stored.append(StoredFile(path, built.file_size))
        for name in order:
            dtype, _, _, parts = file[name]
            for piece in parts:
                offset = built.offsets[name] + piece.offset * itemsize(dtype)
                pieces[name].append(StoredPiece(piece.box, number, offset, piece.strides))
    placed = {
        name: OutputTensor(name, wanted.shape, wanted.dtype, tuple(pieces[name]))
        for name, wanted in tensors.items()
    }
    return Output(tuple(stored), placed, tuple(literals))


def _check_texts(tensors: Mapping[str, Wanted], metadata: Mapping[str, str]) -> None:
    """Refuse a lone surrogate, which UTF-8, and so a header, cannot represent."""
    texts = (("metadata", key, key + text) for key, text in metadata.items())
    for kind, name, text in (*(("tensor", name, name) for name in tensors), *texts):
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise CheckpointError(
                f"{kind} {quoted(name)} has a lone surrogate, which no safetensors file can hold: "
                "rename it, or write distcp"
            )


@lru_cache(maxsize=1024)
def _layout_text(layout: Layout | None, mesh: str) -> str | None:
    """The notation of a layout on a mesh; None if it is on another mesh or has none."""
    known = layout is not None and not isinstance(layout, BoxLayout) and str(layout.mesh) == mesh
    return str(layout) if known else None
