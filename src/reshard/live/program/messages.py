"""How transfers travel, the layout of a message, and the system calls of direct copies.

    STAGED  the sender packs into a staging buffer and the receiver unpacks: two copies.
            A small message is sent eagerly: its data is there when its announcement arrives.
    READ    rendezvous read: the receiver reads the sender's tensor
    WRITE   rendezvous write: the sender writes the receiver's tensor; over a network the sender
            sends from its tensor and the receiver receives into its own, without staging

Sender and receiver derive the same modes independently of each other.

A run is a range of memory that is contiguous in a tensor. One `process_vm_readv` or
`process_vm_writev` copies between two lists of runs, one in each process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from reshard.layout.columns import Ints, distinct, spread
from reshard.live.program.blocks import CopyList
from reshard.live.program.rounds import Transfer


class Mode(Enum):
    """How a transfer travels."""

    STAGED = "staged"
    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class Policy:
    """When a transport copies directly between tensors instead of staging."""

    eager_bytes: int = 0
    """A message of at most so many bytes is staged, whatever its blocks look like."""
    block_bytes: int = 0
    """Direct blocks must have so many bytes on average and be contiguous on both sides; 0: any."""
    forced: bool = False  # whether to read what would be cheaper to stage

    def mode(self, transfer: Transfer, message_bytes: int) -> Mode:
        """The mode of a transfer in a message of so many bytes, between contiguous tensors."""
        if not transfer.as_is or message_bytes <= self.eager_bytes:
            return Mode.STAGED
        width, sizes = transfer.width, transfer.sizes
        if not self.block_bytes:
            chosen = _cheapest(transfer)
            return Mode.READ if self.forced and chosen is Mode.STAGED else chosen
        large = transfer.num_bytes >= self.block_bytes * len(width)
        contiguous = all((run_lengths(width, one) == sizes).all() for one in transfer.strides)
        return Mode.WRITE if large and contiguous else Mode.STAGED

    def message(
        self,
        peer: int,
        transfers: Sequence[Transfer],
        direct: bool,
        allows: Callable[[Transfer, Mode], bool] = lambda transfer, mode: True,
    ) -> Message:
        """Lay out a message; without ``direct``, and where a mode is not allowed, it is staged."""
        total = sum(transfer.num_bytes for transfer in transfers)

        def mode(transfer: Transfer) -> Mode:
            chosen = self.mode(transfer, total)
            return chosen if chosen is Mode.STAGED or allows(transfer, chosen) else Mode.STAGED

        return message_of(peer, transfers, mode if direct else None)


HOST = Policy(eager_bytes=7 << 19)
"""Up to 3.5 MiB one wait less is worth more than one copy: measured, 4 ranks on 2 cores."""
DIRECT = Policy(eager_bytes=-1, forced=True)
"""``transport="peer"``: whatever can go directly between tensors does, however small."""
GLOO = Policy(block_bytes=64 << 10)
"""Measured on gloo: from this size on, packing costs more than one more message."""
NCCL = Policy(block_bytes=512 << 10)  # A message of its own costs a few microseconds

NS_PER_THEIR_RUN = 220
NS_PER_OWN_RUN = 45
NS_PER_LOOPED_RUN = 12
NS_PER_LOOPED_BLOCK = 1200
"""Measured on Linux 6.18, 4 ranks on 2 cores; only their order of magnitude matters."""


def _cheapest(transfer: Transfer) -> Mode:
    """The cheapest mode between two processes of one host.

    The kernel spends about 220 ns per run in another process's memory and 45 ns in one's own, so
    the side with the longer runs should be the other process's. Tiny runs on both sides are better
    packed by a copy loop.
    """
    width, sizes, num_bytes = transfer.width, transfer.sizes, transfer.num_bytes
    runs = [int((sizes // run_lengths(width, one)).sum()) for one in transfer.strides]
    read = NS_PER_THEIR_RUN * runs[0] + NS_PER_OWN_RUN * runs[1] + num_bytes // 4
    write = NS_PER_THEIR_RUN * runs[1] + NS_PER_OWN_RUN * runs[0] + num_bytes // 4
    looped = NS_PER_LOOPED_BLOCK * len(width) + NS_PER_LOOPED_RUN * sum(runs)
    if looped + num_bytes * 55 // 100 < min(read, write):
        return Mode.STAGED
    return Mode.READ if read <= write else Mode.WRITE


@dataclass(frozen=True, eq=False, slots=True)
class Message:
    """The transfers between this rank and a peer in one round, and how each travels."""

    peer: int
    staged: Sequence[tuple[Transfer, int]]
    """Transfers in the staging buffer, and where each begins in the message."""
    reads: Sequence[Transfer]
    writes: Sequence[Transfer]
    staged_bytes: int
    num_bytes: int
    name: str  # the first tensor in it, for errors
    offset: int = 0  # where it begins in the sender's staging buffer; 0 on the receiver
    awaited: bool = False  # whether the sender waits until it is read
    copies: Any = None
    """On the receiver, compiled copies of what is staged and is no addend; on the sender it may
    pack."""
    addends: Sequence[tuple[Transfer, int]] = ()
    iovecs: IovecPlan | None = None
    """Writes into the receiver's tensors, or reads from the sender's."""

    @property
    def alignment(self) -> int:
        """What the message must be aligned to, so that every element in it is."""
        return max((transfer.itemsize for transfer, _ in self.staged), default=1)

    @property
    def is_eager(self) -> bool:
        """Whether it can be sent before the addresses of the peer's tensors are known."""
        transfers = (*(transfer for transfer, _ in self.staged), *self.reads)
        return not self.writes and all(transfer.hop == 0 for transfer in transfers)

    @property
    def content(self) -> tuple[object, ...]:
        """What is staged: equal for messages that stage the same bytes of the same tensors."""
        return tuple(transfer.content for transfer, _ in self.staged)

    def pack(self, copies: CopyList, at: int, staging: int) -> None:
        """Add the copies that stage it at an offset of the staging buffer."""
        for one, offset in self.staged:
            copies.add(one.width, one.source, one.in_message(at + offset, staging))

    def unpack(self, copies: CopyList, at: int, staging: int) -> list[tuple[Transfer, int]]:
        """Add the copies into the tensors; returns the addends, which stay, and their offsets."""
        addends = []
        for transfer, offset in self.staged:
            if transfer.addend >= 0:
                addends.append((transfer, at + offset))
            else:
                place = transfer.in_message(at + offset, staging)
                copies.add(transfer.width, place, transfer.destination)
        return addends


def message_of(
    peer: int, transfers: Sequence[Transfer], mode: Callable[[Transfer], Mode] | None = None
) -> Message:
    """Lay out a message: staged transfers follow one another; without modes all are staged."""
    by_mode: dict[Mode, list[Transfer]] = {one: [] for one in Mode}
    for transfer in transfers:
        by_mode[Mode.STAGED if mode is None else mode(transfer)].append(transfer)
    staged, reads, writes = by_mode.values()
    ends = [0, *accumulate(transfer.num_bytes for transfer in staged)]
    total = sum(transfer.num_bytes for transfer in transfers)
    placed = list(zip(staged, ends[:-1], strict=True))
    return Message(peer, placed, reads, writes, ends[-1], total, transfers[0].name)


GRID = 16
"""Messages in a staging buffer of a GPU begin at a multiple of this: the kernel copies so many
bytes at a time."""


def on_grid(num_bytes: int) -> int:
    """So many bytes or a few more, up to the grid."""
    return -(-num_bytes // GRID) * GRID


def lay_out(messages: Iterable[Message], at: int = 0) -> tuple[list[Message], int]:
    """Messages one after the other in a staging buffer of a GPU, from an offset on; and the end."""
    placed = []
    for message in messages:
        placed.append(replace(message, offset=at))
        at += on_grid(message.staged_bytes)
    return placed, at


MAX_PIECES = 1024  # the kernel's limit of runs per side and system call (UIO_MAXIOV)
RUN_BYTES = 16  # bytes of a run in the kernel's table: its address and its length

MAX_BYTES = 8 << 20
"""Bytes of one system call: few enough that an abort is seen within milliseconds."""


def run_lengths(width: Ints, strides: Ints) -> Ints:
    """Number of elements that are contiguous from the start of each block.

    >>> run_lengths(np.array([[4, 8], [4, 8]]), np.array([[8, 1], [32, 1]])).tolist()
    [32, 8]
    """
    run = np.ones(len(width), dtype=np.int64)
    growing = np.ones(len(width), dtype=bool)
    for dim in reversed(range(width.shape[1])):
        one = width[:, dim] == 1
        growing &= one | (strides[:, dim] == run)
        run = np.where(growing & ~one, run * width[:, dim], run)
    return run


class Runs(NamedTuple):
    """A list of runs: tensor, offset and length of each, in bytes."""

    base: Ints  # the tensor's number in the table of base addresses
    offset: Ints
    length: Ints

    def split_at(self, places: Ints) -> Runs:
        """The same runs, with those that cross one of these places split there."""
        ends = np.cumsum(self.length)
        stops = distinct(np.concatenate([ends, places]))
        old = np.searchsorted(ends, stops, side="left")
        starts = np.concatenate([[0], stops[:-1]])
        begins = ends[old] - self.length[old]
        return Runs(self.base[old], self.offset[old] + starts - begins, stops - starts)


def runs_of(base: Ints, offset: Ints, width: Ints, strides: Ints, itemsize: int) -> Runs:
    """All runs of blocks, in row-major order; ``offset`` says where in a tensor a block begins.

    >>> runs = runs_of(np.array([0]), np.array([100]), np.array([[2, 3]]), np.array([[10, 1]]), 4)
    >>> runs.offset.tolist(), runs.length.tolist()
    ([100, 140], [12, 12])
    """
    run = run_lengths(width, strides)
    counts = np.prod(width, axis=1, dtype=np.int64) // run
    block, left = spread(np.zeros_like(counts), counts)
    elements, inner = np.zeros(len(block), dtype=np.int64), np.ones_like(run)
    for dim in reversed(range(width.shape[1])):
        inner *= width[:, dim]
        walked = np.where(inner <= run, 1, width[:, dim])[block]  # not the dims inside a run
        elements += left % walked * strides[block, dim]
        left //= walked
    return Runs(base[block], offset[block] + elements * itemsize, run[block] * itemsize)


class IovecCall(NamedTuple):
    """The operands of one system call: runs here and runs there, of equally many bytes."""

    operands: tuple[int, ...]
    num_bytes: int
    tables: object  # the operands are addresses in them

    @classmethod
    def single(cls, own: int, theirs: int, num_bytes: int) -> IovecCall:
        """Copy between two addresses."""
        table = (ctypes.c_uint64 * 4)(own, num_bytes, theirs, num_bytes)
        at = ctypes.addressof(table)
        return cls((at, 1, at + RUN_BYTES, 1, 0), num_bytes, table)


class IovecPlan:
    """The system calls that copy transfers between this process and a peer's, for any addresses.

    How lists of runs are divided into calls depends on lengths alone. Only the addresses are filled
    in for the tensors of each call.
    """

    def __init__(self, transfers: Sequence[Transfer], writing: bool) -> None:
        sides = []
        for own in (True, False):
            places = [one.source if own == writing else one.destination for one in transfers]
            parts = [
                runs_of(at.base, at.offset, one.width, at.strides, one.itemsize)
                for one, at in zip(transfers, places, strict=True)
            ]
            sides.append(Runs(*map(np.concatenate, zip(*parts, strict=True))))
        done = [np.cumsum(side.length) for side in sides]
        total = done[0][-1:]
        limits = [one[MAX_PIECES - 1 :: MAX_PIECES] for one in done]
        limits.append(np.arange(MAX_BYTES, int(total[0]), MAX_BYTES))
        self._ends = distinct(np.concatenate([*limits, total]))
        """Where calls end, in bytes from the start."""
        self._sides = [side.split_at(self._ends) for side in sides]
        self._last = [
            (np.searchsorted(np.cumsum(side.length), self._ends, side="left") + 1).tolist()
            for side in self._sides
        ]

    def calls(self, own: Ints, theirs: Ints) -> list[IovecCall]:
        """The calls for these tables of base addresses."""
        tables, at = [], []
        for side, bases in zip(self._sides, (own, theirs), strict=True):
            table = np.empty((len(side.base), 2), np.int64)
            np.add(bases[side.base], side.offset, out=table[:, 0])
            table[:, 1] = side.length
            tables.append(table)
            at.append(table.__array_interface__["data"][0])
        calls, first, done = [], (0, 0), 0
        for one, other, end in zip(*self._last, self._ends.tolist(), strict=True):
            here, there = (start + RUN_BYTES * n for start, n in zip(at, first, strict=True))
            operands = (here, one - first[0], there, other - first[1], 0)
            calls.append(IovecCall(operands, end - done, tables))
            first, done = (one, other), end
        return calls
