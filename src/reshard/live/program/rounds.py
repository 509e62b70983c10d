"""One rank's part of a plan with addresses: transfers by round and peer.

A transfer is all blocks of one stack that go from one rank to another in one round. Both ends
derive the same transfers in the same order, so a message needs no header. Both also know where each
block is on the other rank: on one host a rank can read from, or write to, the other's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from reshard.dtypes import itemsize
from reshard.layout.columns import Ints, distinct
from reshard.live.program.blocks import FindOffsets, Place, blocks_of, local_offsets
from reshard.planning.classes import Stack
from reshard.planning.plans import Plan
from reshard.planning.rank import Rows

HAVE, WANT = 0, 1  # the two sides of a move: source tensors and destination tensors

MAX_KEPT_BYTES = 128 << 20
"""What a program keeps between calls; further rounds are compiled in every call."""

BLOCK_BYTES = 512  # approximate size of a block with everything that is compiled for it

MAX_DEFERRED_BYTES = 32 << 20
"""Bytes of eager messages in all rounds of a call whose sender does not wait for their release."""

DEFERRED_CALLS = 3
"""Calls whose eager messages may be unread at a time: a peer's next Hello releases them."""

Strides = Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]
"""Shape and strides of this rank's tensors that are not contiguous, by their base number."""


@dataclass(frozen=True, eq=False)
class Transfer:
    """Blocks of one stack that go from one rank to another in one round."""

    stack: Stack
    hop: int  # 0: read from source tensors; 1 or more: from destination tensors of the sender
    addend: int  # which addend of a pending reduction the blocks carry; -1 without a reduction
    part: Ints  # the row of each block: a part has the same number in the transfers of all addends
    stacked: Ints  # the tensor of the stack that each block belongs to
    width: Ints
    source: Place
    destination: Place
    strides: tuple[Ints, Ints]
    """Of source and destination, if all tensors were contiguous: modes depend on these."""

    @cached_property
    def dtype(self) -> str:
        return self.stack.dtype_at(self.hop)

    @cached_property
    def itemsize(self) -> int:
        """Bytes of one element that travels."""
        return itemsize(self.dtype)

    @property
    def name(self) -> str:
        """The first tensor in it, for errors."""
        return self.stack.names[int(self.stacked[0])][1]

    @cached_property
    def sizes(self) -> Ints:
        """Elements of each block."""
        sizes: Ints = np.prod(self.width, axis=1, dtype=np.int64)
        return sizes

    @cached_property
    def at(self) -> Ints:
        """The number of elements of the transfer before each block."""
        return np.cumsum(self.sizes) - self.sizes

    @cached_property
    def num_bytes(self) -> int:
        return int(self.sizes.sum()) * self.itemsize

    @cached_property
    def as_is(self) -> bool:
        """Whether bytes are copied from one tensor to the other unchanged."""
        return self.addend < 0 and self.source.dtype == self.dtype == self.destination.dtype

    @property
    def content(self) -> tuple[object, ...]:
        """What travels: equal for transfers of the same blocks, whoever receives them."""
        columns = (self.width, self.source.base, self.source.offset, self.source.strides)
        return self.dtype, *(column.tobytes() for column in columns)

    def in_message(self, offset: int, base: int) -> Place:
        """Where its blocks are in a message, in which it begins at an offset."""
        return Place.in_message(self.width, offset + self.at * self.itemsize, base, self.dtype)


@dataclass(frozen=True, eq=False)
class Round:
    """What one rank sends, receives and copies in one round."""

    number: int
    copies: Sequence[Transfer]  # from its own tensors into its own
    sends: dict[int, list[Transfer]]  # by peer
    receives: dict[int, list[Transfer]]
    kept: dict[object, Any] = field(default_factory=dict)
    """What transports and sums have compiled for it."""

    @cached_property
    def sides(self) -> tuple[list[Transfer], ...]:
        """All transfers that are sent, received and copied on the rank."""
        both = ([*chain(*side.values())] for side in (self.sends, self.receives))
        return (*both, list(self.copies))

    @cached_property
    def bytes(self) -> tuple[int, ...]:
        """Bytes that are sent, received and copied on the rank."""
        return tuple(sum(one.num_bytes for one in side) for side in self.sides)

    @cached_property
    def num_kept_bytes(self) -> int:
        """Bytes that are received or copied on the rank."""
        return self.bytes[1] + self.bytes[2]


class Program:
    """One rank's part of a plan, round by round, for tensors of certain strides."""

    def __init__(self, plan: Plan, rank: int, strides: Strides) -> None:
        self.rank = rank
        self.strides = strides
        self.part = plan.for_rank(rank)
        self.num_rounds = plan.num_rounds
        self.names = (list(plan.have), list(plan.want))
        self.num_have = len(self.names[HAVE])
        self.staging = self.num_have + len(self.names[WANT])
        """The number of the staging buffer in the table of base addresses."""
        firsts = zip(self.names, (0, self.num_have), strict=True)
        numbers = [{name: n for n, name in enumerate(side, first)} for side, first in firsts]
        self._numbers = {
            (id(stack), side): np.array([numbers[side][one[side]] for one in stack.names], np.int64)
            for stack in plan.stacks
            for side in (HAVE, WANT)
        }
        self.peak_bytes = plan.schedule.peak_bytes  # the most that any rank stages in a round
        staged = self.num_rounds * self.peak_bytes
        fits = staged * DEFERRED_CALLS <= plan.memory
        self.defers_release = fits and staged <= MAX_DEFERRED_BYTES
        """Whether eager messages of all rounds fit into memory together, so that their sender does
        not wait until they are read."""
        self._offsets: dict[tuple[int, tuple[int, ...], int], FindOffsets] = {}
        self._kept: dict[int, Round] = {}
        self._num_blocks = 0
        """Blocks that are kept, approximately: several threads may count at once."""

    def round(self, number: int) -> Round:
        """One round; it is kept, as long as there is room."""
        round_ = self._kept.get(number)
        if round_ is None:
            round_ = self._compile(number)
            num_blocks = sum(len(one.width) for side in round_.sides for one in side)
            if (self._num_blocks + num_blocks) * BLOCK_BYTES < MAX_KEPT_BYTES:
                round_ = self._kept.setdefault(number, round_)
                self._num_blocks += num_blocks
        return round_

    @cached_property
    def num_bytes(self) -> int:
        """Bytes that this rank receives or copies."""
        return self.part.receives.num_bytes + self.part.copies.num_bytes

    @cached_property
    def total(self) -> int:
        """Bytes that this rank sends, receives or copies."""
        return self.num_bytes + self.part.sends.num_bytes

    @cached_property
    def peers(self) -> frozenset[int]:
        """The ranks that this one sends to or receives from, in any round."""
        ranks = [rows.transfers.destination for rows in self.part.sends.rows]
        ranks += [rows.transfers.source for rows in self.part.receives.rows]
        return frozenset(map(int, distinct(np.concatenate(ranks)))) if ranks else frozenset()

    def first_name(self, peer: int) -> str:
        """The first tensor that is exchanged with a peer, for errors."""
        for number in range(self.num_rounds):
            round_ = self.round(number)
            for transfer in (*round_.receives.get(peer, []), *round_.sends.get(peer, [])):
                return f'"{transfer.name}"'
        return "nothing"

    def round_text(self, number: int) -> str:
        """A round in words, for errors."""
        return f"round {number + 1} of {self.num_rounds}"

    def part_text(self, round_: Round, peer: int) -> str:
        """What is exchanged with a peer in a round in words, for errors."""
        transfers = round_.receives.get(peer) or round_.sends[peer]
        return f'its part of "{transfers[0].name}" in {self.round_text(round_.number)}'

    def numbers_of(self, stack: Stack, side: int) -> Ints:
        """The base numbers of a stack's tensors on a side."""
        return self._numbers[id(stack), side]

    def _compile(self, number: int) -> Round:
        copies, sends, receives = (dict[int, list[Transfer]]() for _ in range(3))
        steps_of = (self.part.copies, self.part.sends, self.part.receives)
        for steps, by_peer in zip(steps_of, (copies, sends, receives), strict=True):
            for rows in (rows for rows in steps.rows if number in rows.rounds()):
                for peer, transfer in self._transfers_of(rows, number):
                    by_peer.setdefault(peer, []).append(transfer)
        for transfers in (*sends.values(), *receives.values()):
            # Wide elements first, so that each is aligned in a message without padding.
            transfers.sort(key=lambda transfer: -transfer.itemsize)
        return Round(number, copies.get(self.rank, []), sends, receives)

    def _transfers_of(self, rows: Rows, number: int) -> Iterator[tuple[int, Transfer]]:
        """The transfers of one flow in one round, by peer."""
        row, start, stop = rows.of_round(number)
        moved, stack = rows.transfers, rows.flow.stack
        ends = (moved.source[row], moved.destination[row])
        peers = ends[0] if (ends[1] == self.rank).all() else ends[1]
        for peer in distinct(peers):
            mine = np.flatnonzero(peers == peer)
            cell = moved.runs.cell[row[mine]]
            ranges = (moved.cells.width[cell], len(stack.names), start[mine], stop[mine])
            of, stacked, low, width = blocks_of(*ranges)
            cells = cell[of]
            lows = (moved.cells.have_low[cells] + low, moved.cells.want_low[cells] + low)
            sides = (HAVE if moved.hop == 0 else WANT, WANT)
            (source, by), (destination, to) = (
                self._place(stack, side, int(ranks[mine[0]]), stacked, lows[side])
                for side, ranks in zip(sides, ends, strict=True)
            )
            part = moved.part[row[mine]][of]
            more = (part, stacked, width, source, destination, (by, to))
            yield int(peer), Transfer(stack, moved.hop, moved.addend, *more)

    def _place(
        self, stack: Stack, side: int, rank: int, stacked: Ints, low: Ints
    ) -> tuple[Place, Ints]:
        """Where blocks are on a rank, and their strides if its tensors were contiguous.

        On this rank the place takes the actual strides of its tensors into account.
        """
        spec = (stack.have, stack.want)[side]
        insert = (stack.feed.have_insert, stack.feed.want_insert)[side]
        key = (id(spec.layout), spec.shape, rank)
        if key not in self._offsets:
            self._offsets[key] = local_offsets(spec.layout, spec.shape, rank)
        kept = [dim for dim in range(low.shape[1]) if dim not in insert]
        offset, strides = self._offsets[key](low[:, kept])
        if insert:
            # Dims that only the other side has get stride 0.
            full = np.zeros_like(low)
            full[:, kept] = strides
            strides = full
        base, plain = self.numbers_of(stack, side)[stacked], strides
        if rank == self.rank and self.strides:
            offset, strides = offset.copy(), np.array(strides)
            for number, (shape, actual) in self.strides.items():
                mine = np.flatnonzero(base == number)
                if len(mine):
                    offset[mine] = as_strided(offset[mine], shape, actual)
                    strides[mine] = as_strided(strides[mine], shape, actual)
        return Place(base, offset * itemsize(spec.dtype), strides, spec.dtype), plain


def as_strided(offset: Ints, shape: tuple[int, ...], strides: tuple[int, ...]) -> Ints:
    """Convert offsets in a contiguous tensor to offsets in one with other strides.

    A stride is an offset too, that of the next index; for a dim of one element it is never used.
    """
    count = int(np.prod(shape, dtype=np.int64))
    index = np.unravel_index(offset % max(count, 1), shape) if shape else ()
    parts = (at * stride for at, stride in zip(index, strides, strict=True))
    return sum(parts, np.zeros_like(offset))
