"""One round on a GPU: what is packed where, and the tables of copies before and after the exchange.

All messages of a round lie in one room, first those that go, then those that come; each begins at a
multiple of 16 bytes, and its lots follow one another. What is packed, and what stays on the rank,
is one launch per change of dtype before the exchange; what is unpacked is the same after it. Long
blocks that are contiguous on both ends are not packed: they go straight from tensor to tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from reshard.columns import Ints
from reshard.dtypes import itemsize
from reshard.run.live.addresses import bytes_of, own_offsets
from reshard.run.live.copying import Spot, packed_strides
from reshard.run.live.device_copy import Among, CopyTable
from reshard.run.live.device_table import CopyBlocks
from reshard.run.live.holding import Held
from reshard.run.live.lots import HAVE, WANT, End, Lot, Program, Round
from reshard.run.live.ways import run_lengths

__all__ = ["DeviceRound", "Packet", "among_of", "room_bytes"]

STRAIGHT_BYTES = 512 << 10
"""Blocks of this size on average are not packed: a message of its own costs a few microseconds."""

GRID = 16
"""Messages begin at a multiple of this: so many bytes are copied at a time."""


@dataclass(frozen=True, eq=False)
class Packet:
    """The message of one peer."""

    peer: int
    at: int
    """Where in the room it begins."""
    num_bytes: int
    packed: list[tuple[Lot, int]]
    """The lots in it, and where in the room each begins."""
    straight: list[Lot]
    """The lots that go beside it."""

    def tensors(
        self, room: torch.Tensor, held: tuple[Held, Held], sending: bool
    ) -> Iterable[torch.Tensor]:
        """The memory that is sent, or received into, in the order of both ends."""
        if self.num_bytes:
            yield room[self.at : self.at + self.num_bytes]
        for lot in self.straight:
            end = lot.source if sending else lot.target
            columns = (end.tensor.tolist(), end.offset.tolist(), lot.sizes.tolist())
            for number, at, size in zip(*columns, strict=True):
                yield bytes_of(held[end.side].tensors[number], at, size)


class DeviceRound:
    """What one rank does in one round; made once, as long as strides of tensors stay the same."""

    def __init__(self, made: Round, held: tuple[Held, Held], plain: frozenset[int]) -> None:
        """``plain`` are the peers whose tensors, like this rank's, are all contiguous."""
        self.sends, at = _packets(made.sends, plain, 0)
        self.receives, self.num_bytes = _packets(made.receives, plain, at)
        tables = _Tables(held)
        before, after = _Rows(tables), _Rows(tables)
        for packet in self.sends:
            for lot, place in packet.packed:
                before.add(lot, tables.own(lot.source), tables.in_room(lot, place))
        for lot in made.copies:
            if lot.addend < 0:
                before.add(lot, tables.own(lot.source), tables.own(lot.target))
        for packet in self.receives:
            for lot, place in packet.packed:
                if lot.addend < 0:
                    after.add(lot, tables.in_room(lot, place), tables.own(lot.target))
        self.before, self.after = before.tables(), after.tables()

    @property
    def staged(self) -> int:
        """Bytes in the room that hold anything."""
        return sum(packet.num_bytes for packet in (*self.sends, *self.receives))

    def addends(self) -> Iterable[tuple[Lot, int]]:
        """The lots that come to be added up, and where in the room each is."""
        for packet in self.receives:
            for lot, place in packet.packed:
                if lot.addend >= 0:
                    yield lot, place


def among_of(held: tuple[Held, Held], room: torch.Tensor) -> Among:
    """The tensors of a call as tables number them: sources, destinations, the room."""
    spots = [side.spots for side in held]
    first = len(spots[HAVE])
    tensors = dict(held[HAVE].tensors)
    tensors |= {first + number: tensor for number, tensor in held[WANT].tensors.items()}
    tensors[first + len(spots[WANT])] = room
    return Among(np.concatenate([*spots, [room.data_ptr()]]), tensors, room.device)


def room_bytes(program: Program, plain: frozenset[int]) -> int:
    """The most that the messages of any round take up."""
    if plain not in program.rooms:
        most = 0
        for number in range(program.num_rounds):
            made = program.round(number)
            _, at = _packets(made.sends, plain, 0)
            most = max(most, _packets(made.receives, plain, at)[1])
        program.rooms[plain] = most
    return program.rooms[plain]


def _packets(
    messages: dict[int, list[Lot]], plain: frozenset[int], at: int
) -> tuple[list[Packet], int]:
    """Where messages lie in the room, from a place on; and where they end."""
    found = []
    for peer, lots in messages.items():
        straight = [lot for lot in lots if peer in plain and _is_straight(lot)]
        packed, start = [], at
        for lot in (lot for lot in lots if lot not in straight):
            packed.append((lot, at))
            at += lot.num_bytes
        found.append(Packet(peer, start, at - start, packed, straight))
        at = -(-at // GRID) * GRID
    return found, at


def _is_straight(lot: Lot) -> bool:
    """Whether a lot goes unpacked; both ends say the same."""
    if not lot.as_is or lot.num_bytes < STRAIGHT_BYTES * len(lot.width):
        return False
    ends = (lot.source, lot.target)
    return all(bool((run_lengths(lot.width, end.strides) == lot.sizes).all()) for end in ends)


@dataclass(frozen=True, eq=False)
class _Tables:
    """Where blocks are, as tables count."""

    held: tuple[Held, Held]

    def own(self, end: End) -> tuple[Ints, Spot]:
        """In this rank's tensors: the number of each, and places within."""
        first = len(self.held[HAVE].spots) if end.side == WANT else 0
        return end.tensor + first, own_offsets(end, self.held[end.side])

    def in_room(self, lot: Lot, place: int) -> tuple[Ints, Spot]:
        """In a message that lies in the room."""
        number = sum(len(side.spots) for side in self.held)
        at = place + lot.at * lot.itemsize
        return np.full(len(at), number), Spot(at, packed_strides(lot.width), lot.dtype)


@dataclass(eq=False)
class _Rows:
    """Copies that go into one launch per change of dtype."""

    of: _Tables
    found: dict[tuple[str, str], list[list[Ints]]] = field(default_factory=dict)

    def add(self, lot: Lot, source: tuple[Ints, Spot], target: tuple[Ints, Spot]) -> None:
        """Copy the blocks of a lot."""
        (by, out), (to, into) = source, target
        cast = (out.dtype, into.dtype) if out.dtype != into.dtype else ("", "")
        item = np.full(len(by), itemsize(out.dtype))
        columns = [by, to, out.address, into.address, lot.width, out.strides, into.strides, item]
        self.found.setdefault(cast, []).append(columns)

    def tables(self) -> list[CopyTable]:
        """One table per change of dtype."""
        made = []
        for (have, want), rows in self.found.items():
            cast = (getattr(torch, have), getattr(torch, want)) if have else None
            made.append(CopyTable(CopyBlocks(*_joined(rows)), cast=cast))
        return made


def _joined(rows: Sequence[list[Ints]]) -> list[Ints]:
    """The columns of all lots one after the other, with equally many dims."""
    num_dims = max(1, *(columns[4].shape[1] for columns in rows))
    fills = {4: 1, 5: 0, 6: 0}
    return [
        np.concatenate(
            [_filled(part, num_dims, fills[n]) if n in fills else part for part in parts]
        )
        for n, parts in enumerate(zip(*rows, strict=True))
    ]


def _filled(rows: Ints, num_dims: int, value: int) -> Ints:
    """Rows of so many dims, new ones first."""
    lacking = num_dims - rows.shape[1]
    return np.pad(rows, ((0, 0), (lacking, 0)), constant_values=value)
