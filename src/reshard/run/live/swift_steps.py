"""What a move whose messages are packed does on one rank, round by round, in plain numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.dtypes import itemsize
from reshard.run.live.adding import add_up
from reshard.run.live.copying import RAW, packed_strides
from reshard.run.live.lots import End, Lot, Program, Round
from reshard.run.live.memory import array_at
from reshard.run.live.summing import are_alike
from reshard.run.live.ways import run_lengths
from reshard.run.numpy_dtypes import storage_dtype

__all__ = ["Addresses", "Script", "Stage", "Step", "kept_steps", "run_steps", "script_of"]

MOST_BLOCKS = 64
"""Blocks of one round; with more, what is around them does not matter."""

Addresses = tuple[int, int]
"""Where the source tensor and the destination tensor begin."""

Form = tuple[Sequence[int], np.dtype[Any], Sequence[int], Sequence[int]]
"""Shape, dtype, and strides of target and source of a block that is not one stretch."""

Step = tuple[int, int, int, Form | None]
"""A copy: offsets in target and source, bytes, and how, if it is not one stretch."""

Operand = tuple[int, int, Sequence[int]]
"""An addend of a block: the peer whose message it is in (-1: own tensor), offset and strides."""


@dataclass(frozen=True, eq=False, slots=True)
class Addition:
    """A block whose addends are added up in the order of the addends."""

    op: str
    dtype: str
    shape: Sequence[int]
    into: tuple[int, Sequence[int]]
    operands: Sequence[Operand]

    def run(self, addresses: Addresses, found: Mapping[int, int]) -> None:
        """Add up, straight into the destination tensor."""
        shape, kind = self.shape, storage_dtype(self.dtype)
        total = array_at(addresses[1] + self.into[0], shape, kind, self.into[1])
        arrays = [
            array_at((found[peer] if peer >= 0 else addresses[0]) + at, shape, kind, strides)
            for peer, at, strides in self.operands
        ]
        add_up(self.op, self.dtype, total, arrays)


@dataclass(frozen=True, eq=False, slots=True)
class Stage:
    """One round."""

    copies: Sequence[Step]
    sends: Sequence[tuple[int, int, int]]
    """Peer, where its message lies in the arena, and how long it is."""
    packing: Sequence[tuple[int, Sequence[Step]]]
    """From which side, and the copies into the arena; the same message is packed once."""
    receives: Sequence[tuple[int, int, Sequence[Step]]]
    """Peer, bytes, and the copies out of its message."""
    additions: Sequence[Addition]

    def pack(self, addresses: Addresses, arena: int) -> None:
        """Put messages into the arena."""
        for side, steps in self.packing:
            run_steps(steps, arena, addresses[side])

    def copy(self, addresses: Addresses) -> None:
        """What stays on this rank."""
        if self.copies:
            run_steps(self.copies, addresses[1], addresses[0])

    def unpack(self, addresses: Addresses, found: Mapping[int, int]) -> None:
        """Take messages, which begin at these addresses, and add up."""
        for peer, _, steps in self.receives:
            run_steps(steps, addresses[1], found[peer])
        for addition in self.additions:
            addition.run(addresses, found)


@dataclass(frozen=True, eq=False, slots=True)
class Script:
    """All rounds of one rank."""

    rounds: tuple[Stage, ...]
    num_bytes: int
    """Bytes of the arena, for all rounds together."""
    largest: int
    """Bytes of the largest message, sent or received."""
    adds: bool
    """Whether all messages are addends, which are packed whatever their size."""
    lends: bool
    """Whether small messages may be read after their sender has gone on."""
    greeting: Mapping[int, int]
    """Where the first message to each peer lies in the arena."""


def run_steps(steps: Sequence[Step], target: int, source: int) -> None:
    """Copy between what begins at two addresses."""
    for to, by, size, form in steps:
        if form is None:
            ctypes.memmove(target + to, source + by, size)
        else:
            shape, kind, to_strides, by_strides = form
            into = array_at(target + to, shape, kind, to_strides)
            into[...] = array_at(source + by, shape, kind, by_strides)


def script_of(program: Program) -> Script | None:
    """The script of one rank's part of a plan of one tensor; None if it is another kind of move."""
    rounds = [program.round(number) for number in range(program.num_rounds)]
    if not (program.lends or len(rounds) == 1) or not all(map(_is_plain, rounds)):
        return None
    end, stages = 0, []
    for made in rounds:
        stage, end = _stage(made, end)
        if stage is None:
            return None
        stages.append(stage)
    largest = [size for stage in stages for _, _, size in stage.sends]
    largest += [size for stage in stages for _, size, _ in stage.receives]
    first = {peer: at for peer, at, _ in stages[0].sends} if stages else {}
    adds = all(lot.addend >= 0 for made in rounds for lot in _travelling(made))
    return Script(tuple(stages), end, max(largest, default=0), adds, program.lends, first)


def _travelling(made: Round) -> Iterator[Lot]:
    for message in (*made.sends.values(), *made.receives.values()):
        yield from message


def _is_plain(made: Round) -> bool:
    """Whether nothing changes its dtype, and blocks are few."""
    lots = [*made.copies, *_travelling(made)]
    plain = all(lot.source.dtype == lot.dtype == lot.target.dtype for lot in lots)
    return plain and made.num_blocks <= MOST_BLOCKS


def _stage(made: Round, end: int) -> tuple[Stage | None, int]:
    """A round whose messages lie in the arena from ``end`` on, and where they end."""
    sums = [lot for lot in made.copies if lot.addend >= 0]
    packing, places, sends = [], {}, []
    for peer, lots in made.sends.items():
        key = tuple(part for lot in lots for part in _name(lot))
        size = sum(lot.num_bytes for lot in lots)
        if key not in places:
            end += -end % max(lot.itemsize for lot in lots)
            places[key] = end
            for lot in lots:
                packing.append((lot.source.side, list(_steps(lot, lot.source, end, True))))
                end += lot.num_bytes
        sends.append((peer, places[key], size))
    receives = []
    arrived: list[tuple[Lot, int, int]] = [(lot, -1, 0) for lot in sums]
    for peer, lots in made.receives.items():
        at, steps = 0, list[Step]()
        for lot in lots:
            if lot.addend >= 0:
                arrived.append((lot, peer, at))
            else:
                steps += _steps(lot, lot.target, at, False)
            at += lot.num_bytes
        receives.append((peer, at, steps))
    additions = _additions(arrived)
    if additions is None:
        return None, end
    kept = [step for lot in made.copies if lot.addend < 0 for step in kept_steps(lot)]
    return Stage(kept, sends, packing, receives, additions), end


def _name(lot: Lot) -> Iterator[object]:
    """What two lots have in common that bring the same bytes."""
    yield lot.source.side
    yield lot.addend
    for column in (lot.source.offset, lot.source.strides, lot.width):
        yield np.ascontiguousarray(column).tobytes()


def _steps(lot: Lot, end: End, at: int, packing: bool) -> Iterator[Step]:
    """The copies of a lot between a tensor and a message, where it begins at ``at``."""
    size = lot.itemsize
    inside = (at + lot.at * size).tolist()
    ends = ((end.offset * size).tolist(), end.strides)
    message = (inside, packed_strides(lot.width))
    yield from _copies(lot, *((message, ends) if packing else (ends, message)))


def kept_steps(lot: Lot) -> Iterator[Step]:
    """The copies of a lot that stays."""
    size = lot.itemsize
    sides = [((end.offset * size).tolist(), end.strides) for end in (lot.target, lot.source)]
    yield from _copies(lot, *sides)


def _copies(lot: Lot, target: tuple[Any, Any], source: tuple[Any, Any]) -> Iterator[Step]:
    size = lot.itemsize
    whole = [run_lengths(lot.width, strides) == lot.sizes for strides in (target[1], source[1])]
    straight = (whole[0] & whole[1]).tolist()
    steps = [(strides * size).tolist() for strides in (target[1], source[1])]
    for n, (to, by, count) in enumerate(
        zip(target[0], source[0], (lot.sizes * size).tolist(), strict=True)
    ):
        form = None if straight[n] else (lot.width[n].tolist(), RAW[size], steps[0][n], steps[1][n])
        yield to, by, count, form


def _additions(arrived: Sequence[tuple[Lot, int, int]]) -> list[Addition] | None:
    """Block by block, who brings which addend; None where they are not alike."""
    if not arrived:
        return []
    arrived = sorted(arrived, key=lambda one: one[0].addend)
    first = arrived[0][0]
    reduce, dtype = first.stack.have.layout.reduce, first.dtype
    op = reduce[0] if reduce else "sum"
    if not are_alike(op, [lot for lot, _, _ in arrived]):
        return None
    size, found = itemsize(dtype), []
    for n, shape in enumerate(first.width.tolist()):
        into = (int(first.target.offset[n]) * size, _bytes(first.target.strides[n], size))
        operands = [_operand(lot, peer, at, n, size) for lot, peer, at in arrived]
        found.append(Addition(op, dtype, shape, into, operands))
    return found


def _operand(lot: Lot, peer: int, at: int, n: int, size: int) -> Operand:
    if peer < 0:
        return peer, int(lot.source.offset[n]) * size, _bytes(lot.source.strides[n], size)
    strides = packed_strides(lot.width[n : n + 1])[0]
    return peer, at + int(lot.at[n]) * size, _bytes(strides, size)


def _bytes(strides: Any, size: int) -> Sequence[int]:
    found: list[int] = (strides * size).tolist()
    return found
