"""How transfers travel, and the layout of a message.

    STAGED  the sender packs into a staging buffer and the receiver unpacks: two copies.
            A small message is sent eagerly: its data is there when its announcement arrives.
    READ    rendezvous read: the receiver reads the sender's tensor
    WRITE   rendezvous write: the sender writes the receiver's tensor; over a network the sender
            sends from its tensor and the receiver receives into its own, without staging

Sender and receiver derive the same modes independently of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from reshard.layout.columns import Ints
from reshard.live.program.copies import CopyList
from reshard.live.program.rounds import Transfer
from reshard.live.program.runs import run_lengths

__all__ = ["GLOO", "HOST", "NCCL", "Message", "Mode", "Policy", "message_of"]


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

    def mode(self, transfer: Transfer, message_bytes: int) -> Mode:
        """The mode of a transfer in a message of so many bytes, between contiguous tensors."""
        if not transfer.as_is or message_bytes <= self.eager_bytes:
            return Mode.STAGED
        width = transfer.width
        if not self.block_bytes:
            return _cheapest(width, *transfer.strides, transfer.itemsize)
        if transfer.num_bytes < self.block_bytes * len(width):
            return Mode.STAGED
        contiguous = (run_lengths(width, one) == transfer.sizes for one in transfer.strides)
        return Mode.WRITE if all(bool(one.all()) for one in contiguous) else Mode.STAGED

    def message(self, peer: int, transfers: Sequence[Transfer], direct: bool) -> Message:
        """Lay out a message; without ``direct`` all of it is staged."""
        total = sum(transfer.num_bytes for transfer in transfers)
        return message_of(
            peer, transfers, lambda one: self.mode(one, total) if direct else Mode.STAGED
        )


HOST = Policy(eager_bytes=7 << 19)
"""Up to 3.5 MiB one wait less is worth more than one copy: measured, 4 ranks on 2 cores."""
GLOO = Policy(block_bytes=64 << 10)
"""Measured on gloo: from this size on, packing costs more than one more message."""
NCCL = Policy(block_bytes=512 << 10)
"""A message of its own costs a few microseconds."""

NS_PER_THEIR_RUN = 220
NS_PER_OWN_RUN = 45
NS_PER_LOOPED_RUN = 12
NS_PER_LOOPED_BLOCK = 1200
"""Measured on Linux 6.18, 4 ranks on 2 cores; only their order of magnitude matters."""


def _cheapest(width: Ints, source: Ints, destination: Ints, itemsize: int) -> Mode:
    """The cheapest mode between two processes of one host, for blocks with these strides.

    The kernel spends about 220 ns per run in another process's memory and 45 ns in one's own, so
    the side with the longer runs should be the other process's. Tiny runs on both sides are better
    packed by a copy loop.
    """
    sizes = np.prod(width, axis=1, dtype=np.int64)
    num_bytes = int(sizes.sum()) * itemsize
    runs = [int((sizes // run_lengths(width, one)).sum()) for one in (source, destination)]
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
    name: str
    """The first tensor in it, for errors."""

    @property
    def alignment(self) -> int:
        """What the message must be aligned to, so that every element in it is."""
        return max((transfer.itemsize for transfer, _ in self.staged), default=1)

    def pack(self, copies: CopyList, at: int, staging: int) -> None:
        """Add the copies that stage it at an offset of the staging buffer."""
        for transfer, offset in self.staged:
            place = transfer.in_message(at + offset, staging)
            copies.add(transfer.width, transfer.source, place)

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
    peer: int, transfers: Sequence[Transfer], mode: Callable[[Transfer], Mode]
) -> Message:
    """Lay out a message: staged transfers follow one another."""
    staged, at = [], 0
    direct: dict[Mode, list[Transfer]] = {Mode.READ: [], Mode.WRITE: []}
    for transfer in transfers:
        chosen = mode(transfer)
        if chosen is Mode.STAGED:
            staged.append((transfer, at))
            at += transfer.num_bytes
        else:
            direct[chosen].append(transfer)
    total = sum(transfer.num_bytes for transfer in transfers)
    reads, writes = direct[Mode.READ], direct[Mode.WRITE]
    return Message(peer, staged, reads, writes, at, total, transfers[0].name)
