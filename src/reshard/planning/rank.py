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

__all__ = ["RankPlan", "RankRound", "Rows", "Step", "Steps"]


@dataclass(frozen=True, slots=True)
class Step:
    """A box of one tensor that goes from one rank to another in one round."""

    round: int
    name: str
    """The destination tensor."""
    box: Box
    """The box in the destination tensor."""
    source: int
    destination: int
    num_bytes: int
    """Bytes on the wire."""
    dtype: str
    """The dtype on the wire."""
    hop: int
    """0: read from the source tensor; 1 or more: from the destination tensor of the sender."""
    addend: int
    """Which addend of a pending reduction it carries; -1 where nothing is added up."""
    have_name: str
    """The source tensor."""
    have_box: Box
    """The same box in the source tensor."""
    again: bool
    """Whether its sender has the same box for another rank too, so that this is no first copy."""


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
        """The rounds in which these rows may move."""
        return range(self.slot.first, self.slot.first + self.slot.num_rounds)

    def of_round(self, number: int) -> tuple[Ints, Ints, Ints]:
        """The rows that move in a round, and where the run of each starts and stops."""
        turn = self.slot.turn(number, self.transfers.hop)
        if turn is None:
            none = np.zeros(0, dtype=np.int64)
            return none, none, none
        runs, slot, (phase, part), units = self.transfers.runs, self.slot, turn, self.units
        low = slice_edges(runs.start, runs.stop, units, slot.slices, part)
        high = slice_edges(runs.start, runs.stop, units, slot.slices, part + 1)
        kept = np.flatnonzero((low < high) & (self.transfers.part % slot.phases == phase))
        return kept, low[kept], high[kept]

    def steps(self, number: int) -> Iterator[Step]:
        """The steps of one round, in the order they have in a message."""
        for row, low, high in zip(*self.of_round(number), strict=True):
            yield from self._steps(number, int(row), int(low), int(high))

    def _steps(self, number: int, row: int, low: int, high: int) -> Iterator[Step]:
        rows, stack = self.transfers, self.flow.stack
        cell = rows.runs.cell[row]
        width = tuple(map(int, rows.cells.width[cell]))
        size = int(rows.cells.size[cell])
        have_low, want_low = rows.cells.have_low[cell].tolist(), rows.cells.want_low[cell].tolist()
        for tensor in range(low // size, -(-high // size)):
            at = tensor * size
            for part in flat_range(width, max(low - at, 0), min(high - at, size)):
                have_name, name = stack.names[tensor]
                yield Step(
                    number,
                    name,
                    _without(part.shift(want_low), stack.feed.want_insert),
                    int(rows.source[row]),
                    int(rows.destination[row]),
                    part.size * stack.itemsize_at(rows.hop),
                    stack.dtype_at(rows.hop),
                    rows.hop,
                    rows.addend,
                    have_name,
                    _without(part.shift(have_low), stack.feed.have_insert),
                    rows.again,
                )


def _without(box: Box, dims: Sequence[int]) -> Box:
    """The box without inserted dims."""
    if not dims:
        return box
    kept = [dim for dim in range(len(box.start)) if dim not in dims]
    return Box(tuple(box.start[d] for d in kept), tuple(box.stop[d] for d in kept))


class Steps(Sequence[Step]):
    """Steps that are made on access; ``num_rows`` is the number of rows behind them."""

    def __init__(self, rows: Sequence[Rows]) -> None:
        self.rows = [one for one in rows if len(one.transfers)]

    @property
    def num_rows(self) -> int:
        """Rows of the plan; each may be several steps."""
        return sum(len(one.transfers) for one in self.rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of all steps."""
        return sum(int(one.num_bytes.sum()) for one in self.rows)

    def of_round(self, number: int) -> list[Step]:
        """The steps of one round."""
        return [step for one in self.rows for step in one.steps(number)]

    def __iter__(self) -> Iterator[Step]:
        rounds = sorted({number for one in self.rows for number in one.rounds()})
        return (step for number in rounds for step in self.of_round(number))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return list(self)[index]


@dataclass(frozen=True, slots=True)
class RankRound:
    """What one rank does in one round."""

    sends: list[Step]
    receives: list[Step]
    copies: list[Step]


@dataclass(frozen=True, eq=False)
class RankPlan:
    """What one rank does; derived without the other ranks."""

    rank: int
    sends: Steps
    """What it sends, to others."""
    receives: Steps
    """What it receives from others."""
    copies: Steps
    """What it copies from its own source tensor, and addends it holds itself."""
    fills: tuple[Fill, ...]
    """Boxes of its destination tensors that become zeros."""

    @classmethod
    def of(
        cls, rank: int, flows: Sequence[Flow], slots: Sequence[Slot], fills: Sequence[Fill]
    ) -> RankPlan:
        """Collect the rows of a rank from all flows."""
        sends: list[Rows] = []
        receives: list[Rows] = []
        copies: list[Rows] = []
        for flow, slot in zip(flows, slots, strict=True):
            for transfers in flow.for_rank(rank):
                if not len(transfers):
                    continue
                role = 2 * (transfers.source == rank) + (transfers.destination == rank)
                for kind, number in ((sends, 2), (receives, 1), (copies, 3)):
                    rows = np.flatnonzero(role == number)
                    if len(rows):
                        whole = len(rows) == len(transfers)
                        kind.append(Rows(flow, slot, transfers if whole else transfers.take(rows)))
        here = tuple(fill for fill in fills if fill.spec.layout.holds(rank) is not None)
        return cls(rank, Steps(sends), Steps(receives), Steps(copies), here)

    def round(self, number: int) -> RankRound:
        """What the rank does in one round."""
        return RankRound(
            self.sends.of_round(number),
            self.receives.of_round(number),
            self.copies.of_round(number),
        )
