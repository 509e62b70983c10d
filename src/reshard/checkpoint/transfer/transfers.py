"""The stored pieces that make up each output tensor, and the windows in which they are copied.

A *window* is a box of a tensor that fits into a worker's buffer. Its elements are read from all
source pieces that overlap it, and written to all output pieces that overlap it: each byte is read
once, whatever the two layouts. Windows are whole rows, because the rows of a piece are one run of
bytes however the piece is sharded:

    source: by rows              output: by columns           a window
    +-----------------+          +-----+-----+-----+          +=================+  one run of 0
    |        0        |          |     |     |     |          |        0        |  one run of 1
    +-----------------+    ->    |  0  |  1  |  2  |          +-----------------+  and one run
    |        1        |          |     |     |     |          |        1        |  of each output
    +-----------------+          +-----+-----+-----+          +=================+

Nothing here opens a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from operator import itemgetter

import numpy as np

from reshard.checkpoint.catalog import StoredTensor
from reshard.checkpoint.output import OutputTensor
from reshard.checkpoint.piece_table import PieceTable, joined
from reshard.checkpoint.transfer.packing import SMALL, batches, is_small, tiles
from reshard.dtypes import itemsize
from reshard.errors import CheckpointError, CoverageError, DamageError
from reshard.layout.box import Box
from reshard.layout.coverage import missing_boxes, overlapping_pairs
from reshard.planning.names import Feed
from reshard.text import quoted

Tensors = Mapping[str, StoredTensor]

MOST_PARTS = 4096
"""The most parts into which overlaps with earlier boxes may split a stored box; one is usual."""


@dataclass(frozen=True, eq=False, slots=True)
class Transfer:
    """One output tensor: where its elements are stored, and where they are written."""

    name: str
    shape: tuple[int, ...]
    have: str
    """The dtype in the source."""
    want: str
    """The dtype in the output."""
    stored: PieceTable | StoredTensor
    """Every element once, in the coordinates of the output tensor."""
    replicas: PieceTable | None
    """Elements that the source holds a second time, if any; they must be equal."""
    written: PieceTable | OutputTensor
    """Where the elements are written."""
    zeros: Sequence[Box] = ()
    """Boxes of elements that have no source."""
    is_unchanged: bool = False
    """Whether it is the source tensor of its name, in the same dtype: digests are comparable."""

    @classmethod
    def of_read(cls, tensor: StoredTensor, want: str, with_replicas: bool = True) -> Transfer:
        """A stored tensor that is only read, into memory; CoverageError if a part is missing."""
        name, shape, zeros = tensor.name, tensor.shape, tensor.zeros
        source, replicas = source_of(name, shape, [Feed(name)], {name: tensor}, zeros)
        replicas = replicas if with_replicas else None
        return cls(name, shape, tensor.dtype, want, source, replicas, source[:0], zeros)

    @property
    def source(self) -> PieceTable:
        """Where the elements are stored, as a table."""
        return _table(self.stored)

    @property
    def destination(self) -> PieceTable:
        """Where the elements are written, as a table."""
        return _table(self.written)

    @property
    def source_bytes(self) -> int:
        """Bytes that are read, each element once."""
        num_elements = prod(self.shape) - sum(box.size for box in self.zeros)
        return num_elements * itemsize(self.have)

    def is_packed(self, num_bytes: int) -> bool:
        """Whether the tensor is copied in a pack of this many bytes: see ``packing``."""
        is_small = isinstance(self.stored, StoredTensor)
        return is_small and (num_bytes >= SMALL or self.most_bytes <= num_bytes)

    @property
    def most_bytes(self) -> int:
        """Bytes of the whole tensor in the wider of both dtypes."""
        return prod(self.shape) * max(itemsize(self.have), itemsize(self.want))

    def windows(self, num_bytes: int) -> Iterable[Box]:
        """The windows, of at most this many bytes in either dtype."""
        widest = max(itemsize(self.have), itemsize(self.want))
        return _whole(self.shape).slabs(max(num_bytes // widest, 1))


_whole = lru_cache(maxsize=1024)(Box.whole)


def _table(pieces: PieceTable | StoredTensor) -> PieceTable:
    if isinstance(pieces, PieceTable):
        return pieces
    return PieceTable.of(pieces.pieces, len(pieces.shape), itemsize(pieces.dtype))


@dataclass(frozen=True, slots=True)
class CopyChunk:
    """Windows that one worker copies at a time, and that are one record of the journal."""

    number: int
    windows: tuple[tuple[int, Box], ...]
    """The number of the transfer, and the box of its tensor."""


def chunks_of(transfers: Iterable[Transfer], num_bytes: int) -> Iterator[CopyChunk]:
    """All windows in order, small ones of neighbouring tensors together in one chunk."""
    windows = (
        (which, window, window.size * itemsize(transfer.want))
        for which, transfer in enumerate(transfers)
        for window in transfer.windows(num_bytes)
    )
    for number, some in enumerate(batches(windows, itemgetter(2), num_bytes)):
        yield CopyChunk(number, tuple((which, window) for which, window, _ in some))


def transfer_of(
    tensor: OutputTensor, feeds: Sequence[Feed], stored: Tensors, zeros: Sequence[Box] = ()
) -> Transfer:
    """Check that the source holds every element of an output tensor, and plan its windows."""
    name, shape, want, first = tensor.name, tensor.shape, tensor.dtype, stored[feeds[0].name]
    have = first.dtype
    is_unchanged = have == want and not zeros and [*feeds] == [Feed(name)]
    fits = _is_whole(shape, feeds, stored) and tensor.num_bytes <= SMALL and is_small(first)
    # Boxes whose rows alternate in a file are not written from a pack, but row by row.
    if fits and all(piece.is_contiguous for piece in tensor.pieces):
        return Transfer(name, shape, have, want, first, None, tensor, (), is_unchanged)
    source, replicas = source_of(name, shape, feeds, stored, zeros)
    written = _table(tensor)
    return Transfer(name, shape, have, want, source, replicas, written, zeros, is_unchanged)


def source_of(
    name: str,
    shape: tuple[int, ...],
    feeds: Sequence[Feed],
    stored: Tensors,
    zeros: Sequence[Box] = (),
) -> tuple[PieceTable, PieceTable | None]:
    """Pieces that hold each element once, and any that hold elements a second time."""
    first = stored[feeds[0].name]
    if prod(shape) and _is_whole(shape, feeds, stored) and tiles(shape, first.pieces):
        return _table(first), None
    source, replicas = _without_replicas(pieces_of(feeds, stored), prod(shape))
    missing = prod(shape) - sum(box.size for box in zeros) - int(source.shapes.prod(axis=1).sum())
    if missing:
        holes = missing_boxes(Box.whole(shape), [*source.boxes(), *zeros])
        raise CoverageError(
            f"tensor {quoted(name)} of shape {shape}: no file holds {holes[0]}, {missing} of its "
            f"{prod(shape)} elements are missing: is a file of the checkpoint missing?"
        )
    return source, replicas


def pieces_of(feeds: Sequence[Feed], stored: Tensors) -> PieceTable:
    """The pieces of the sources of an output tensor, in the coordinates of that tensor."""
    return joined([_placed(stored[feed.name], feed) for feed in feeds])


def _is_whole(shape: tuple[int, ...], feeds: Sequence[Feed], stored: Tensors) -> bool:
    """Whether an output tensor is one stored tensor unchanged."""
    return len(feeds) == 1 and not feeds[0].moves and stored[feeds[0].name].shape == shape


def _without_replicas(pieces: PieceTable, num_elements: int) -> tuple[PieceTable, PieceTable]:
    """Pieces that do not overlap, and what they leave of the others."""
    if not (pieces.shapes > 0).all():
        pieces = pieces[np.flatnonzero(pieces.num_bytes > 0)]
    chosen, replicas = pieces, pieces[:0]
    if pieces.num_bytes.sum() > num_elements * pieces.itemsize:  # equal boxes first: cheaper
        first, again = pieces.distinct()
        chosen, replicas = pieces[first], pieces[again]
    left, right = overlapping_pairs(chosen.starts, chosen.stops, chosen.starts, chosen.stops)
    if len(left) == len(chosen):
        return chosen, replicas
    # Pieces that partly overlap are split: each keeps what no earlier one holds.
    before: dict[int, list[int]] = {}
    for row, other in zip(left.tolist(), right.tolist(), strict=True):
        if other < row:
            before.setdefault(row, []).append(other)
    alone = [row for row in range(len(chosen)) if row not in before]
    kept, doubled = [chosen[np.array(alone, dtype=np.int64)]], [replicas]
    for row, others in before.items():
        box = chosen.box(row)
        new, piece = _rest(box, [chosen.box(other) for other in others]), chosen[row : row + 1]
        kept += [piece.within(part) for part in new]
        doubled += [piece.within(part) for part in _rest(box, new)]
    return joined(kept), joined(doubled)


def _rest(box: Box, covers: Sequence[Box]) -> list[Box]:
    """What is left of a box, as disjoint boxes; raises if these are too many."""
    rest = [box]
    for cover in covers:
        rest = [part for left in rest for part in left - cover]
        if len(rest) > MOST_PARTS:
            raise CheckpointError(
                f"{box} is overlapped by {len(covers)} boxes so irregularly that more than "
                f"{MOST_PARTS} parts of it are left: save it again with disjoint boxes"
            )
    return rest


def _placed(tensor: StoredTensor, feed: Feed) -> PieceTable:
    """The pieces of a source tensor in the coordinates of the output tensor."""
    pieces = PieceTable.of(tensor.pieces, len(tensor.shape), itemsize(tensor.dtype))
    outside = np.flatnonzero((pieces.stops > np.array(tensor.shape, np.int64)).any(axis=1))
    if len(outside):
        raise DamageError(
            f"tensor {quoted(tensor.name)} has shape {tensor.shape} and a piece at "
            f"{pieces.box(int(outside[0]))}: the files disagree about its shape"
        )
    if not feed.moves:
        return pieces
    columns = {"starts": 0, "stops": 1, "strides": 0}  # of a dim that is inserted
    for dim in feed.have_insert:
        wider = {n: np.insert(getattr(pieces, n), dim, at, axis=1) for n, at in columns.items()}
        pieces = replace(pieces, **wider)
    for dim, segments in enumerate(feed.moves):
        moved = [_moved(pieces, dim, *segment) for segment in segments]
        pieces = joined(moved) if moved else pieces[:0]
    if not feed.want_insert:
        return pieces
    narrower = {n: np.delete(getattr(pieces, n), feed.want_insert, axis=1) for n in columns}
    return replace(pieces, **narrower)


def _moved(pieces: PieceTable, dim: int, start: int, to: int, length: int) -> PieceTable:
    """The part in a range of one dim, shifted to another place."""
    low = np.maximum(pieces.starts[:, dim], start)
    high = np.minimum(pieces.stops[:, dim], start + length)
    rows = np.flatnonzero(low < high)
    starts, stops = pieces.starts[rows].copy(), pieces.stops[rows].copy()
    starts[:, dim], stops[:, dim] = low[rows], high[rows]
    part = pieces.clipped(rows, starts, stops)
    shift = np.zeros(starts.shape[1], dtype=np.int64)
    shift[dim] = to - start
    return replace(part, starts=starts + shift, stops=stops + shift)
