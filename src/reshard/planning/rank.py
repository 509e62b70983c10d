"""One rank's part of a plan: what it sends, receives and copies, round by round.

Rows are kept as integer columns; a `Step`, one row of one round and one tensor, is made on access.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard.layout.box import Box, flat_range
from reshard.layout.columns import Ints
from reshard.planning.cells.transfers import Transfers
from reshard.planning.classes import Fill
from reshard.planning.flows import Flow
from reshard.planning.rounds import Slot, slice_edges


@dataclass(frozen=True, slots=True)
class Step:
    """A box of one tensor that goes from one rank to another in one round."""

    round: int
    name: str  # the destination tensor
    box: Box  # the box in the destination tensor
    source: int
    destination: int
    num_bytes: int  # bytes on the wire
    dtype: str  # the dtype on the wire
    hop: int  # 0: read from the source tensor; 1 or more: from the destination tensor of the sender
    addend: int  # which addend of a pending reduction it carries; -1 where nothing is added up
    have_name: str  # the source tensor
    have_box: Box  # the same box in the source tensor
    again: bool  # whether its sender has sent the same box to another rank: this is no first copy


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of one flow, and when that flow moves."""

    flow: Flow
    slot: Slot
    transfers: Transfers

    @property
    def num_bytes(self) -> Ints:
        """Bytes of each row, once."""
        return self.transfers.sizes * self.flow.stack.itemsize_at(self.transfers.hop)

    @cached_property
    def units(self) -> Ints:
        """Slices of each row end between whole parts of this many elements."""
        return self.transfers.cells.units(self.slot.unit)[self.transfers.runs.cell]

    def rounds(self) -> range:
        return range(self.slot.first, self.slot.first + self.slot.num_rounds)

    def of_round(self, number: int) -> tuple[Ints, Ints, Ints]:
        """The rows that move in a round, and where the run of each starts and stops."""
        runs, slot = self.transfers.runs, self.slot
        turn = slot.turn(number, self.transfers.hop)
        if turn is None:
            none = np.zeros(0, dtype=np.int64)
            return none, none, none
        phase, part = turn
        low = slice_edges(runs.start, runs.stop, self.units, slot.slices, part)
        high = slice_edges(runs.start, runs.stop, self.units, slot.slices, part + 1)
        kept = np.flatnonzero((low < high) & (self.transfers.part % slot.phases == phase))
        return kept, low[kept], high[kept]

    def steps(self, number: int) -> Iterator[Step]:
        """The steps of one round, in the order they have in a message."""
        rows, stack = self.transfers, self.flow.stack
        dtype, itemsize = stack.dtype_at(rows.hop), stack.itemsize_at(rows.hop)
        for row, start, stop in zip(*self.of_round(number), strict=True):
            cell = rows.runs.cell[row]
            width, size = rows.cells.width[cell].tolist(), int(rows.cells.size[cell])
            have_low, want_low = rows.cells.have_low[cell], rows.cells.want_low[cell]
            for tensor in range(int(start) // size, -(-int(stop) // size)):
                low, high = max(int(start) - tensor * size, 0), min(int(stop) - tensor * size, size)
                have_name, name = stack.names[tensor]
                for part in flat_range(width, low, high):
                    yield Step(
                        number,
                        name,
                        _without(part.shift(want_low.tolist()), stack.feed.want_insert),
                        int(rows.source[row]),
                        int(rows.destination[row]),
                        part.size * itemsize,
                        dtype,
                        rows.hop,
                        rows.addend,
                        have_name,
                        _without(part.shift(have_low.tolist()), stack.feed.have_insert),
                        rows.again,
                    )


def _without(box: Box, dims: Sequence[int]) -> Box:
    if not dims:
        return box
    kept = [dim for dim in range(len(box.start)) if dim not in dims]
    return Box(tuple(box.start[d] for d in kept), tuple(box.stop[d] for d in kept))


class Steps(Sequence[Step]):
    """Steps that are made on access, in the order of rounds."""

    def __init__(self, rows: Sequence[Rows]) -> None:
        self.rows = rows

    @property
    def num_rows(self) -> int:
        """Rows of the plan; each may be several steps."""
        return sum(len(one.transfers) for one in self.rows)

    @property
    def num_bytes(self) -> int:
        return sum(int(one.num_bytes.sum()) for one in self.rows)

    def of_round(self, number: int) -> list[Step]:
        return [step for one in self.rows for step in one.steps(number)]

    def __iter__(self) -> Iterator[Step]:
        rounds = sorted({number for one in self.rows for number in one.rounds()})
        return (step for number in rounds for step in self.of_round(number))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return list(self)[index]


@dataclass(frozen=True, eq=False)
class RankPlan:
    """What one rank does; derived without the other ranks."""

    rank: int
    sends: Steps
    receives: Steps
    copies: Steps  # what it copies from its own source tensor, and addends it holds itself
    fills: tuple[Fill, ...]  # boxes of its destination tensors that become zeros

    @classmethod
    def of(
        cls, rank: int, flows: Sequence[Flow], slots: Sequence[Slot], fills: Sequence[Fill]
    ) -> RankPlan:
        rows: list[list[Rows]] = [[], [], [], []]
        for flow, slot in zip(flows, slots, strict=True):
            for transfers in flow.for_rank(rank):
                role = 2 * (transfers.source == rank) + (transfers.destination == rank)
                for kind in (1, 2, 3):
                    some = np.flatnonzero(role == kind)
                    if len(some):
                        rows[kind].append(Rows(flow, slot, transfers.take(some)))
        here = tuple(fill for fill in fills if fill.spec.layout.holds(rank) is not None)
        _, receives, sends, copies = map(Steps, rows)
        return cls(rank, sends, receives, copies, here)
