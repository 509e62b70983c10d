"""A checkpoint as it is after renaming: the tensors that ``names`` makes, in the same files.

A conversion with names is proved by this: the tensors of the source under their new names must be
equal to those of the target, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reshard.checkpoint.catalog import Catalog, StoredPiece, StoredTensor
from reshard.checkpoint.conversion.names import Outline, feeds_for, outlines_of
from reshard.checkpoint.piece_table import Located
from reshard.checkpoint.transfer.transfers import feeding, one_dtype, pieces_of
from reshard.planning.names import Names

__all__ = ["renamed"]


def renamed(catalog: Catalog, names: Names, drop: Sequence[str] = ()) -> Catalog:
    """The catalog with tensors renamed, joined, stacked, taken apart and dropped."""
    have = {name: Outline(found.shape, found.dtype) for name, found in catalog.tensors.items()}
    outlines = outlines_of(have, names, drop)
    shapes = {name: outline.shape for name, outline in outlines.items()}
    tensors = {}
    for name, feeds, zeros in feeds_for(shapes, have, names):
        fed = feeding(catalog, feeds)
        if len(fed) == 1 and not fed[0].feed.moves and not zeros:
            tensors[name] = replace(fed[0].tensor, name=name)
            continue
        dtype = one_dtype(name, fed, outlines[name].dtype)
        pieces = _stored(pieces_of(fed, len(shapes[name])))
        tensors[name] = StoredTensor(name, shapes[name], dtype, pieces, zeros)
    return replace(catalog, tensors=tensors)


def _stored(pieces: Located) -> tuple[StoredPiece, ...]:
    strides = pieces.strides // pieces.itemsize
    rows = zip(pieces.files.tolist(), pieces.offsets.tolist(), strides.tolist(), strict=True)
    return tuple(
        StoredPiece(box, file, offset, tuple(steps))
        for box, (file, offset, steps) in zip(pieces.boxes(), rows, strict=True)
    )
