"""Open geometry: a rank's cells follow from its own regions, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from reshard.layout.grid import Grid, Ints, grids_of
from reshard.planning.cells import Cells, GridPair, insert_dims, meet_dim
from reshard.planning.geometry import Lined, Relays, concatenate_cells
from reshard.planning.lines import LineSet
from reshard.planning.stacks import Stack

__all__ = ["OpenGeometry", "open_geometry", "pairs_of"]


def pairs_of(stack: Stack) -> list[GridPair] | None:
    """Every grid of the source met with every grid of the destination; None if either is listed."""
    have = grids_of(stack.have.layout, stack.have.shape)
    want = grids_of(stack.want.layout, stack.want.shape)
    if have is None or want is None:
        return None
    feed = stack.feed
    sources = [insert_dims(grid, feed.have_insert) for grid in have]
    targets = [insert_dims(grid, feed.want_insert) for grid in want]
    return [_pair(one, other, feed.moves) for one, other in product(sources, targets)]


def _pair(have: Grid, want: Grid, moves: Sequence[object]) -> GridPair:
    segments = moves or [None] * len(have.dims)
    met = [meet_dim(*dims) for dims in zip(have.dims, want.dims, segments, strict=True)]  # type: ignore[arg-type]
    return GridPair(have, want, tuple(met))


def open_geometry(stack: Stack) -> OpenGeometry | None:
    """The open geometry of a stack, or None if its cells must be listed."""
    if stack.have.layout.reduce or stack.want.layout.reduce:
        return None
    pairs = pairs_of(stack)
    if pairs is None or not all(map(_is_open, pairs)):
        return None
    return OpenGeometry.of(pairs)


def _is_open(pair: GridPair) -> bool:
    """No rank holds a region and shares a wanted one with ranks that lack it."""
    if len(pair.have.free) == 1 and len(pair.want.free) == 1:
        return True
    have, want = pair.have.mesh.ranks, pair.want.mesh.ranks
    if max(have) < min(want) or max(want) < min(have):
        return True
    return set(have).isdisjoint(want)


@dataclass(frozen=True, eq=False, slots=True)
class OpenGeometry:
    """Pairs of grids; the lines of a pair are the regions of its two grids."""

    pairs: list[GridPair]
    senders: LineSet
    receivers: LineSet
    send_base: list[int]
    receive_base: list[int]
    relays: Relays | None = None
    num_addends: int = 1
    listed: bool = False
    addends: tuple[int, ...] = ()

    @classmethod
    def of(cls, pairs: list[GridPair]) -> OpenGeometry:
        """Number the regions of all pairs one after the other."""
        senders = [_lines(pair.have, pair.wanted) for pair in pairs]
        receivers = [_lines(pair.want, pair.provided) for pair in pairs]
        return cls(pairs, _chain(senders), _chain(receivers), _bases(senders), _bases(receivers))

    @property
    def wanting(self) -> LineSet:
        """All replicas of a region lack it, so those that share the receiving are all that want."""
        return self.receivers

    @property
    def covered(self) -> bool:
        """Whether the source has all that the destination wants."""
        provided: dict[int, Ints] = {}
        needed: dict[int, Ints] = {}
        for pair in self.pairs:
            provided[id(pair.want)] = provided.get(id(pair.want), 0) + pair.provided
            needed[id(pair.want)] = pair.needed
        return all(bool((provided[key] == needed[key]).all()) for key in needed)

    def cells_per_rank(self) -> tuple[int, int]:
        """The most cells of any source region and of any destination region."""
        return (
            sum(_most([np.diff(dim.have.first) for dim in pair.dims]) for pair in self.pairs),
            sum(_most([np.diff(dim.want.first) for dim in pair.dims]) for pair in self.pairs),
        )

    def sent_by(self, rank: int) -> Lined:
        """The cells of the regions a rank holds."""
        found = [(n, pair.have.region_of(rank)) for n, pair in enumerate(self.pairs)]
        return self._lined(
            {n: self.pairs[n].cells(have_region=r) for n, r in found if r is not None}
        )

    def wanted_by(self, rank: int) -> Lined:
        """The cells of the regions a rank wants."""
        found = [(n, pair.want.region_of(rank)) for n, pair in enumerate(self.pairs)]
        return self._lined(
            {n: self.pairs[n].cells(want_region=r) for n, r in found if r is not None}
        )

    def all(self) -> Lined:
        """All cells of all pairs."""
        return self._lined({n: pair.cells() for n, pair in enumerate(self.pairs)})

    def copied_by(self, rank: int) -> Cells:
        """None: where a rank may send to itself, the transfer is a copy."""
        empty = np.zeros(0, dtype=np.int64)
        flat = np.zeros((0, len(self.pairs[0].dims)), dtype=np.int64)
        return Cells(empty, empty, flat, flat, flat, empty, empty, empty)

    def copied_elements(self) -> int:
        """Elements of one tensor that ranks both hold and want."""
        return sum(int(elements.sum()) for _, elements in self.copies_per_rank())

    def copies_per_rank(self) -> list[tuple[Ints, Ints]]:
        """Ranks of both sides, and how much of one tensor each both holds and wants."""
        return [pair.common_elements() for pair in self.pairs]

    def addend_senders(self, cells: Ints, receivers: Ints, addend: int) -> Ints:
        """Nothing is added up here."""
        raise AssertionError("an open geometry has no addends")

    def _lined(self, found: dict[int, Cells]) -> Lined:
        if not found:
            found = {0: self.copied_by(-1)}
        numbered = [
            replace(
                cells,
                have_region=cells.have_region + self.send_base[n],
                want_region=cells.want_region + self.receive_base[n],
            )
            for n, cells in found.items()
        ]
        cells = concatenate_cells(numbered)
        return Lined(cells, cells.have_region, cells.have_at, cells.want_region, cells.want_at)


def _most(per_dim: list[Ints]) -> int:
    return int(np.prod([int(counts.max(initial=0)) for counts in per_dim], dtype=np.int64))


def _lines(grid: Grid, amounts: Ints) -> LineSet:
    """One line per region; members in rising order, whatever the order of the mesh."""
    members = grid.holders(np.arange(grid.num_regions))
    return LineSet.regular(amounts, np.sort(members, axis=1))


def _chain(lines: list[LineSet]) -> LineSet:
    if len(lines) == 1:
        return lines[0]
    ends = np.cumsum([0] + [len(line.members) for line in lines])
    first = [line.first[:-1] + at for line, at in zip(lines, ends, strict=False)]
    return LineSet(
        np.concatenate([line.amounts for line in lines]),
        np.concatenate([*first, ends[-1:]]),
        np.concatenate([line.members for line in lines]),
    )


def _bases(lines: list[LineSet]) -> list[int]:
    counts = [len(line.amounts) for line in lines]
    return [sum(counts[:n]) for n in range(len(counts))]
