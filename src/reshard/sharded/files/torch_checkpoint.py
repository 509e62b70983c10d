"""Sharded tensors in ``torch.distributed.checkpoint``: the chunks that a rank writes and reads.

torch's planners ask a tensor for its chunks if it has the three methods of DTensor
(``__create_write_items__``, ``__create_chunk_list__``, ``__get_tensor_shard__``). torch writes a
chunk that several ranks have once, and identifies chunks by the name of the tensor and their
offsets. So all ranks must split a tensor into the same chunks:

    rank 0   [0:6)                 [0:4) of rank 0
    rank 1      [4:9)      ->      [4:6) of both, written by one of them
                                   [6:9) of rank 1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from reshard.errors import ArgumentError, OperationError
from reshard.layout.box import Box, Piece, row_major
from reshard.layout.boxlist import Listed, listed_of
from reshard.layout.layout import BoxLayout, Layout
from reshard.layout.words import Packed
from reshard.sharded.content import Content, ContentTensor, per_layout
from reshard.tensors.kinds import this_rank
from reshard.tensors.local import box_view, piece_view
from reshard.text import quoted

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["CheckpointTensor"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and the piece of this rank that contains it."""

    box: Box
    part: int
    """The number of this rank's part that contains it."""
    piece: Piece

    def view(self, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Its memory: writing there changes the tensor."""
        outer = piece_view(parts[self.part].detach(), self.piece)
        return outer if self.box == self.piece.box else box_view(outer, self.piece.box, self.box)


class CheckpointTensor(ContentTensor):
    """What torch's checkpoints ask of a tensor: the base class of ShardedTensor."""

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """The chunks that this rank can write."""
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
        )
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        content = self._content
        _check_saved(fqn, content)
        size, common = torch.Size(content.shape), TensorProperties.create_from_tensor(self)
        # A tensor without elements is written too, as one chunk: its name must not be missing.
        empty = [Box.whole(content.shape)] if 0 in content.shape else []
        boxes = [chunk.box for chunk in _chunks(content).values()] or empty
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(box.start)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape)), common, size
                ),
            )
            for box in boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The chunks that this rank reads."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        try:
            _check_values("loading it", self._content)
        except OperationError as error:
            # Not a ReshardError: torch takes a ValueError here for something else, and hides it.
            raise RuntimeError(str(error)) from error
        return [
            ChunkStorageMetadata(torch.Size(chunk.box.start), torch.Size(chunk.box.shape))
            for chunk in _chunks(self._content).values()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of the chunk that an index names, to be written to a file or read into."""
        content = self._content
        chunks = _chunks(content)
        if index.offset is None and len(chunks) > 1:
            raise ArgumentError(
                f"Cannot lookup {quoted(index.fqn)}: this rank has {len(chunks)} chunks of it, and "
                "no offset was provided: give the offset of one"
            )
        start = next(iter(chunks), ()) if index.offset is None else tuple(index.offset)
        if start in chunks:
            return chunks[start].view(content.parts)
        if 0 in content.shape and not any(start):
            return torch.empty(content.shape, dtype=content.dtype, device=content.device)
        boxes = ", ".join(str(chunk.box) for chunk in chunks.values()) or "none"
        raise ArgumentError(
            f"Could not find shard of {quoted(index.fqn)} at {list(start)}: rank {this_rank()} has "
            f"{boxes}; make a plan for the tensor as it is sharded now"
        )


def _check_saved(name: str, content: Content) -> None:
    """Refuse tensors without values of their own, or without all of them."""
    what = f"saving {quoted(name)}"
    _check_values(what, content)
    for part in content.parts:
        if part.is_meta or part.is_conj() or part.is_neg():
            kind = "on the meta device" if part.is_meta else "a lazy conjugate or negative"
            why = f"it is {kind}; give a tensor with memory of its own, such as a clone()"
            raise _refused(what, content, why)
    if dist.is_initialized():
        available = _num_elements(content.layout, content.shape)
    else:  # the elements of this process
        available = sum(chunk.box.size for chunk in _chunks(content).values())
    if available != prod(content.shape):
        raise _refused(
            what,
            content,
            f"its shards have {available} of {prod(content.shape)} elements, and the others would "
            "be missing; reshard the tensor so that every element is on some rank of a process "
            "group",
        )


def _check_values(what: str, content: Content) -> None:
    if content.layout.reduce is not None:
        raise _refused(
            what,
            content,
            f"a {content.layout.reduce[0]} over its ranks is pending, and a checkpoint holds "
            "values; reshard the tensor first",
        )


def _refused(what: str, content: Content, why: str) -> OperationError:
    return OperationError(
        f"{what} with torch.distributed.checkpoint is not supported for ShardedTensor of layout "
        f'"{content.layout}" and shape {list(content.shape)}: {why}'
    )


def _chunks(content: Content) -> Mapping[tuple[int, ...], Chunk]:
    """The chunks of this rank by offsets, which differ between the chunks of a tensor."""
    return _chunks_on(content.layout, content.shape, this_rank())


@per_layout
def _chunks_on(
    layout: Layout, shape: tuple[int, ...], rank: int
) -> Mapping[tuple[int, ...], Chunk]:
    if isinstance(layout, BoxLayout):
        parts = enumerate(layout.boxes.get(rank, ()))
        pieces = {
            box: (part, Piece(box, 0, row_major(box.shape))) for part, box in parts if box.size
        }
    else:
        pieces = {piece.box: (0, piece) for piece in layout.pieces(rank, shape)}
    flat = layout.words.flat
    # Ranges of a flattened tensor are equal or disjoint. Listing the boxes of all ranks would take
    # long then: there is no table of them.
    is_only_flat = (
        flat and not any(layout.words.dims) and not any(isinstance(cut, Packed) for cut in flat)
    )
    chunks = {}
    for box in pieces if is_only_flat else _boxes_on(listed_of(layout, shape), rank):
        # Boxes of other ranks split those of this one only if they overlap without being equal.
        outer = box if box in pieces else next(one for one in pieces if box in one)
        chunks[box.start] = Chunk(box, *pieces[outer])
    return chunks


def _boxes_on(listed: Listed, rank: int) -> Iterator[Box]:
    """The boxes of a list that a rank holds."""
    places = np.flatnonzero(listed.holders == rank)
    rows = np.searchsorted(listed.first, places, side="right") - 1
    starts, stops = listed.starts[rows].tolist(), listed.stops[rows].tolist()
    boxes = (Box(tuple(low), tuple(high)) for low, high in zip(starts, stops, strict=True))
    return (box for box in boxes if box.size)


@per_layout
def _num_elements(layout: Layout, shape: tuple[int, ...]) -> int:
    if not isinstance(layout, BoxLayout) and not layout.words.without:
        return prod(shape)
    listed = listed_of(layout, shape)
    return int((listed.stops - listed.starts).prod(axis=1).sum())
