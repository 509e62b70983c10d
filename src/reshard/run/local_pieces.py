"""Where in a rank's local tensor does a box sit?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reshard.box import Box
from reshard.layout import Piece

__all__ = ["LocalPieces"]


class LocalPieces:
    """The pieces of one tensor on one rank, ready to be searched.

    >>> pieces = [Piece(Box((2, 0), (4, 8)), 0, (8, 1)), Piece(Box((6, 0), (8, 8)), 16, (8, 1))]
    >>> LocalPieces(pieces, 2).find(Box((7, 3), (8, 5)))
    (27, (8, 1))
    """

    def __init__(self, pieces: Sequence[Piece], num_dims: int) -> None:
        self.pieces = pieces
        table = (len(pieces), num_dims)
        self.starts = np.array([p.box.start for p in pieces], np.int64).reshape(table)
        self.stops = np.array([p.box.stop for p in pieces], np.int64).reshape(table)

    def find(self, box: Box) -> tuple[int, tuple[int, ...]] | None:
        """The offset and the strides of a box, in elements; None if no piece contains it."""
        if len(self.pieces) == 1:
            piece = self.pieces[0] if box in self.pieces[0].box else None
        else:
            inside = (self.starts <= box.start).all(axis=1) & (self.stops >= box.stop).all(axis=1)
            piece = self.pieces[int(inside.argmax())] if inside.any() else None
        if piece is None:
            return None
        steps = zip(box.start, piece.box.start, piece.strides, strict=True)
        return piece.offset + sum((at - low) * by for at, low, by in steps), piece.strides
