"""What one rank does in one round, as blocks with addresses: lots, sorted by peer.

A lot is all blocks of one stack that go from one rank to another in one round. Both ends make the
same lots in the same order, each for itself, so that a message needs no table of contents. Where a
block sits is an offset and strides in a local tensor, on both ends: a rank can therefore read
straight from a neighbour's memory, or write into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from reshard.columns import Ints, distinct
from reshard.dtypes import itemsize
from reshard.planning.plan import Plan
from reshard.planning.rank import Rows, Steps
from reshard.planning.stacks import Stack
from reshard.run.live.blocks import blocks_of
from reshard.run.live.places import places_of
from reshard.run.live.ways import Way, way_of
from reshard.spec import TensorSpec

__all__ = ["HAVE", "WANT", "End", "Lot", "Program", "Round"]

HAVE, WANT = 0, 1
"""The two sides of a move: source tensors and destination tensors."""

MAX_KEPT_BLOCKS = 1 << 20
"""Blocks that a program keeps between calls; rounds beyond are worked out anew in each."""

MOST_LENT = 32 << 20
"""Bytes that may stay packed over all rounds of a call."""

CALLS_LENT = 3
"""Calls whose messages may lie packed at a time: that a peer has read one, the next tells."""

MAX_KEPT_OBJECTS = 1 << 17
"""Arrays and calls that are kept with them: a few hundred bytes each."""


@dataclass(frozen=True, eq=False, slots=True)
class End:
    """Where the blocks of a lot sit on one rank, in elements of its local tensors."""

    side: int
    """`HAVE` or `WANT`; what is passed on is read from destination tensors."""
    dtype: str
    tensor: Ints
    """Numbers of tensors in the plan's order of names."""
    offset: Ints
    strides: Ints
    """One row per block, one column per dim."""


@dataclass(frozen=True, eq=False)
class Lot:
    """Blocks of one stack that travel from one rank to another in one round."""

    stack: Stack
    hop: int
    addend: int
    """Which addend of a pending reduction the blocks carry; -1 where nothing is added up."""
    part: Ints
    """The row that each block is of: a part has the same number in the lots of all addends."""
    stacked: Ints
    """Which tensor of the stack each block is of."""
    width: Ints
    source: End
    target: End
    kept: dict[str, tuple[object, Any]] = field(default_factory=dict)
    """What transports have worked out for it, and for which addresses."""

    @cached_property
    def dtype(self) -> str:
        """The dtype that travels."""
        return self.stack.dtype_at(self.hop)

    @cached_property
    def itemsize(self) -> int:
        """Bytes of one element that travels."""
        return itemsize(self.dtype)

    @property
    def name(self) -> str:
        """The first tensor in it, for messages."""
        return self.stack.names[int(self.stacked[0])][1]

    @cached_property
    def sizes(self) -> Ints:
        """Elements of each block."""
        found: Ints = np.prod(self.width, axis=1, dtype=np.int64)
        return found

    @cached_property
    def at(self) -> Ints:
        """How many elements of the lot come before each block."""
        found: Ints = np.cumsum(self.sizes) - self.sizes
        return found

    @cached_property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return int(self.sizes.sum()) * self.itemsize

    @cached_property
    def as_is(self) -> bool:
        """Whether bytes go from the one tensor into the other unchanged."""
        return self.addend < 0 and self.source.dtype == self.dtype == self.target.dtype

    @cached_property
    def way(self) -> Way:
        """How neighbours on one host exchange it; both ends work out the same."""
        if not self.as_is:
            return Way.PACKED
        return way_of(self.width, self.source.strides, self.target.strides, self.itemsize)


@dataclass(frozen=True, eq=False)
class Round:
    """What one rank does in one round, by peer."""

    copies: Sequence[Lot]
    """From its own tensors into its own."""
    sends: dict[int, list[Lot]]
    receives: dict[int, list[Lot]]
    kept: dict[str, Any] = field(default_factory=dict)
    """What transports have worked out for it."""

    @cached_property
    def num_blocks(self) -> int:
        """Blocks of all lots."""
        messages = [self.copies, *self.sends.values(), *self.receives.values()]
        return sum(len(lot.width) for lots in messages for lot in lots)


class Program:
    """One rank's part of a plan with addresses, round by round; made once, run many times."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.rank = rank
        self.part = plan.for_rank(rank)
        self.num_rounds = plan.num_rounds
        self.names = (list(plan.have), list(plan.want))
        numbers = [{name: n for n, name in enumerate(names)} for names in self.names]
        self._numbers = {
            id(stack): tuple(
                np.array([numbers[side][names[side]] for names in stack.names], np.int64)
                for side in (HAVE, WANT)
            )
            for stack in plan.stacks
        }
        self.peak_bytes = plan.schedule.peak_bytes
        """The most that any rank stages in a round."""
        packed = self.num_rounds * self.peak_bytes
        self.lends = packed <= MOST_LENT and packed * CALLS_LENT <= plan.memory
        """Whether all that is packed in all rounds fits together, so that none is waited for."""
        self.rooms: dict[frozenset[int], int] = {}
        """The bytes of messages in the largest round, by who of the peers gets unpacked ones."""
        self._kept: dict[int, Round] = {}
        self._num_kept = self._weight = 0
        """Blocks and objects that are kept, nearly: several calls may be in flight, in threads."""

    def round(self, number: int) -> Round:
        """What happens in a round."""
        found = self._kept.get(number)
        if found is not None:
            return found
        made = self._make(number)
        if self._num_kept + made.num_blocks >= MAX_KEPT_BLOCKS:
            return made
        found = self._kept.setdefault(number, made)
        self._num_kept += made.num_blocks if found is made else 0
        return found

    def recall(self, lot: Lot, what: str, stamp: object) -> Any:
        """What was worked out for a lot, if it is still true: that is, of the same stamp."""
        known, value = lot.kept.get(what, (None, None))
        return value if known == stamp else None

    def remember(self, lot: Lot, what: str, stamp: object, value: Any, weight: int) -> None:
        """Keep something with a lot for the next call, unless too much is kept already."""
        if what in lot.kept or self._weight + weight <= MAX_KEPT_OBJECTS:
            self._weight += 0 if what in lot.kept else weight
            lot.kept[what] = (stamp, value)

    def forget(self) -> None:
        """Free what is kept between calls."""
        self._kept.clear()
        self._num_kept = self._weight = 0

    @cached_property
    def num_bytes(self) -> int:
        """Bytes that this rank receives or copies."""
        return self.part.receives.num_bytes + self.part.copies.num_bytes

    @cached_property
    def peers(self) -> tuple[frozenset[int], frozenset[int]]:
        """The ranks it sends to, and those it receives from, in any round."""
        to = [rows.transfers.destination for rows in self.part.sends.rows]
        by = [rows.transfers.source for rows in self.part.receives.rows]
        return _ranks(to), _ranks(by)

    def numbers_of(self, stack: Stack, side: int) -> Ints:
        """The numbers of a stack's tensors among the names of a side."""
        return self._numbers[id(stack)][side]

    def _make(self, number: int) -> Round:
        copies = [lot for _, lot in self._lots(self.part.copies, number)]
        sends: dict[int, list[Lot]] = {}
        receives: dict[int, list[Lot]] = {}
        for steps, by_peer in ((self.part.sends, sends), (self.part.receives, receives)):
            for peer, lot in self._lots(steps, number):
                by_peer.setdefault(peer, []).append(lot)
        for lots in (*sends.values(), *receives.values()):
            # Wide elements first, so that each is aligned in a message without padding.
            lots.sort(key=lambda lot: -lot.itemsize)
        return Round(copies, sends, receives)

    def _lots(self, steps: Steps, number: int) -> Iterator[tuple[int, Lot]]:
        for rows in steps.rows:
            if number in rows.rounds():
                yield from self._lots_of(rows, number)

    def _lots_of(self, rows: Rows, number: int) -> Iterator[tuple[int, Lot]]:
        """The lots of one flow in one round, by peer."""
        row, start, stop = rows.of_round(number)
        moved, stack = rows.transfers, rows.flow.stack
        ends = (moved.source[row], moved.destination[row])
        peers = ends[0] if (ends[1] == self.rank).all() else ends[1]
        for peer in distinct(peers):
            mine = np.flatnonzero(peers == peer)
            cell = moved.runs.cell[row[mine]]
            width = moved.cells.width[cell]
            blocks = blocks_of(width, len(stack.names), start[mine], stop[mine])
            of = cell[blocks.row]
            lows = (moved.cells.have_low[of] + blocks.low, moved.cells.want_low[of] + blocks.low)
            sides = (HAVE if moved.hop == 0 else WANT, WANT)
            source, target = (
                self._end(stack, side, int(ranks[mine[0]]), blocks.tensor, lows[side])
                for side, ranks in zip(sides, ends, strict=True)
            )
            part = moved.part[row[mine]][blocks.row]
            yield (
                int(peer),
                Lot(
                    stack,
                    moved.hop,
                    moved.addend,
                    part,
                    blocks.tensor,
                    blocks.width,
                    source,
                    target,
                ),
            )

    def _end(self, stack: Stack, side: int, rank: int, stacked: Ints, low: Ints) -> End:
        spec = (stack.have, stack.want)[side]
        insert = (stack.feed.have_insert, stack.feed.want_insert)[side]
        offset, strides = _found(spec, rank, low, insert)
        return End(side, spec.dtype, self.numbers_of(stack, side)[stacked], offset, strides)


def _found(spec: TensorSpec, rank: int, low: Ints, insert: Sequence[int]) -> tuple[Ints, Ints]:
    """Offsets and strides of blocks; dims that only the other side has get stride 0."""
    kept = [dim for dim in range(low.shape[1]) if dim not in insert]
    offset, strides = places_of(spec.layout, spec.shape, rank).find(low[:, kept])
    if not insert:
        return offset, strides
    full = np.zeros_like(low)
    full[:, kept] = strides
    return offset, full


def _ranks(columns: Sequence[Ints]) -> frozenset[int]:
    return frozenset(map(int, distinct(np.concatenate(columns)))) if columns else frozenset()
