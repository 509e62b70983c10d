"""Exchange with ranks of other hosts, through a process group of the team's own.

A message is one buffer, packed; blocks that are large and contiguous on both ends travel by
themselves, straight from and into the tensors. The group is made for the team alone: when a move
fails it is thrown away, and the next move makes a new one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from reshard.run.live.addresses import bytes_of, own_views
from reshard.run.live.cause import Cause
from reshard.run.live.copying import Copies, Spot, packed_strides
from reshard.run.live.faults import Watch
from reshard.run.live.holding import Held
from reshard.run.live.lots import Lot, Program
from reshard.run.live.mailbox import MESSAGE_BYTES, Kind, Message
from reshard.run.live.ways import run_lengths
from reshard.run.live.wire import Awaitable, Wire

__all__ = ["Network"]

DIRECT_BYTES = 64 << 10
"""From this size on a contiguous block is not packed: measured on gloo, packing costs more."""


PIECE_BYTES = 32 << 20
"""A longer block goes in pieces, so that its progress can be seen."""

PATIENCE = 5.0
"""Seconds that gloo waits longer than the call may."""

END_SECONDS = 1.0
"""How long what waits for a connection may take to notice that it was cut."""


@dataclass(eq=False)
class _Arrival:
    """A message on its way here."""

    buffer: torch.Tensor
    works: list[Awaitable] = field(default_factory=list)


class Network:
    """This rank's exchange with ranks of other hosts, in one call."""

    def __init__(
        self,
        watch: Watch,
        program: Program,
        held: tuple[Held, Held],
        peers: frozenset[int],
        wire: Wire,
        numbers: tuple[int, ...] = (),
    ) -> None:
        self.watch = watch
        self.team = watch.team
        self.program = program
        self.held = held
        self.peers = peers
        self.wire = wire
        self._waiter = wire.waiter()
        watch.by_network = peers
        self.tag = watch.call % (1 << 20)
        self._arrivals: dict[tuple[int, int], _Arrival] = {}
        self._sent: list[Awaitable] = []
        self._unsent: set[int] = set()
        self._is_sending = False
        """Whether tensors of this rank may still be read, to be sent."""
        self._keep: list[torch.Tensor] = []
        self.numbers = numbers or (int(not all(side.is_ordinary for side in held)),)
        """What a greeting says: whether tensors of this rank are not plain memory of the host."""

    def name(self, peer: int) -> str:
        """How a peer is reached, for the report."""
        return "network (gloo)"

    def greet(self) -> None:
        """Say that this rank has entered the call."""
        watch = self.watch
        hello = Message(Kind.HELLO, watch.call, watch.digest, watch.word, *self.numbers)
        data = hello._replace(tag=watch.tag_code).pack()
        for peer in self.peers:
            self._exchange_hellos(peer, torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _exchange_hellos(self, peer: int, hello: torch.Tensor) -> None:
        """Send a greeting and receive the peer's; the peer is met when both are complete.

        gloo drops a message, or sends freed memory, if the send is destroyed before it is complete.
        A rank that sends nothing else would leave the call before that.
        """
        buffer = torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
        self._keep += [hello, buffer]
        works = [
            self.wire.send(self._index(peer), hello, self.tag),
            self.wire.receive(self._index(peer), buffer, self.tag),
        ]

        def then(error: str | None) -> None:
            message = Message.unpack(bytes(buffer.numpy()))
            if error is None and message is not None and message.kind is Kind.HELLO:
                self.watch.inbox.put(peer, message)
            else:
                self._break(peer, error or "it sent something else than a greeting")
            self.team.mailbox.wake()

        self._when_done(works, then, [peer])

    def unmet(self) -> list[int]:
        """Peers that have not entered the call, or do not know that this rank has."""
        return [peer for peer in self.peers if peer not in self.watch.inbox.hellos]

    def learn(self) -> None:
        """Nothing more is known of tensors on other hosts than whether they are ordinary."""

    def put(self, number: int, sends: dict[int, list[Lot]]) -> int:
        """Pack and begin to send this rank's messages of a round; gives bytes staged."""
        staged = 0
        for peer, lots in sends.items():
            if peer not in self.peers:
                continue
            packed, direct = self._split(peer, lots)
            size = sum(lot.num_bytes for lot in packed)
            buffer = torch.empty(size, dtype=torch.uint8)
            for lot, at in _placed(packed, buffer.data_ptr()):
                into = Spot(at + lot.at * lot.itemsize, packed_strides(lot.width), lot.dtype)
                Copies(lot.width, into, own_views(lot.source, lot.width, self.held)).run()
            tensors = ([buffer] if size else []) + self._straight(direct, sending=True)
            self._begin_sending(peer, tensors)
            staged += size
        return staged

    def _begin_sending(self, peer: int, tensors: list[torch.Tensor]) -> None:
        self._is_sending = True
        works = [self.wire.send(self._index(peer), tensor, self.tag) for tensor in tensors]
        self._keep += tensors
        self._sent += works

    def expect(self, number: int, receives: dict[int, list[Lot]]) -> int:
        """Begin to receive the messages of a round; gives bytes staged."""
        staged = 0
        for peer, lots in receives.items():
            if peer not in self.peers:
                continue
            packed, direct = self._split(peer, lots)
            size = sum(lot.num_bytes for lot in packed)
            arrival = _Arrival(torch.empty(size, dtype=torch.uint8))
            tensors = ([arrival.buffer] if size else []) + self._straight(direct, sending=False)
            arrival.works = [
                self.wire.receive(self._index(peer), tensor, self.tag) for tensor in tensors
            ]
            self._keep += tensors
            self._arrivals[peer, number] = arrival
            self._when_done(arrival.works, self._arrived(peer, number), [peer])
            staged += size
        return staged

    def _arrived(self, peer: int, number: int) -> Callable[[str | None], None]:
        def then(error: str | None) -> None:
            if error is not None:
                self._break(peer, error)
            else:
                self.watch.inbox.put(peer, Message(Kind.READY, self.watch.call, b"", number))
            self.team.mailbox.wake()

        return then

    def take(
        self, number: int, peer: int, lots: Sequence[Lot], summed: Callable[[Lot, int], None]
    ) -> None:
        """Unpack a message that has arrived; addends are handed on with their address."""
        packed, _ = self._split(peer, lots)
        buffer = self._arrivals[peer, number].buffer
        for lot, at in _placed(packed, buffer.data_ptr()):
            if lot.addend >= 0:
                summed(lot, at)
                continue
            source = Spot(at + lot.at * lot.itemsize, packed_strides(lot.width), lot.dtype)
            Copies(lot.width, own_views(lot.target, lot.width, self.held), source).run()

    def taken(self, number: int, peer: int, lots: Sequence[Lot]) -> None:
        """The buffer of a message is not needed any more."""
        del self._arrivals[peer, number]

    def unread(self, number: int, sends: dict[int, list[Lot]]) -> list[int]:
        """Peers that have not taken this rank's messages off its hands."""
        peers = [peer for peer in sends if peer in self.peers]
        if peers and self._sent:
            works, self._sent = self._sent, []
            self._unsent = set(peers)
            self._when_done(works, self._all_sent, peers)
        return sorted(self._unsent)

    def _all_sent(self, error: str | None) -> None:
        if error is not None:
            for peer in self._unsent:
                self._break(peer, error)
        else:
            self._keep.clear()
            self._unsent, self._is_sending = set(), False
        self.team.mailbox.wake()

    def _split(self, peer: int, lots: Sequence[Lot]) -> tuple[list[Lot], list[Lot]]:
        """What is packed, and what goes straight; both ends split alike."""
        hello = self.watch.inbox.hellos[peer]
        ordinary = not hello.a and all(side.is_ordinary for side in self.held)
        packed = [lot for lot in lots if not (ordinary and _is_direct(lot))]
        return packed, [lot for lot in lots if ordinary and _is_direct(lot)]

    def _straight(self, lots: Sequence[Lot], sending: bool) -> list[torch.Tensor]:
        """The tensors' own memory, block by block, as bytes; the views keep it alive."""
        found: list[torch.Tensor] = []
        for lot in lots:
            end = lot.source if sending else lot.target
            for n, (number, size) in enumerate(
                zip(end.tensor.tolist(), lot.sizes.tolist(), strict=True)
            ):
                whole = bytes_of(self.held[end.side].tensors[number], int(end.offset[n]), size)
                found += torch.split(whole, PIECE_BYTES)
        return found

    def _break(self, peer: int, error: str) -> None:
        """A connection failed: by itself, or because a call beside this one had to cut it."""
        cut = self.wire.cut_because
        if cut is not None:
            self.watch.undone = cut
        self.watch.broken[peer] = error

    def _when_done(
        self, works: list[Awaitable], then: Callable[[str | None], None], peers: list[int]
    ) -> None:
        """Call back later; whoever watches the call should lose patience before gloo does."""
        heard = self.watch.inbox.heard

        def progress() -> None:
            heard.update(dict.fromkeys(peers, time.monotonic()))

        self._waiter.when_done(works, self.watch.timeout + PATIENCE, then, progress)

    def _index(self, peer: int) -> int:
        return self.team.ranks.index(peer)

    def close(self, well: bool) -> None:
        """Let go of what was sent; after a failure nobody may touch the tensors any more."""
        under_way = bool(self._arrivals) or self._is_sending
        if well:
            self.wire.give_back(self._waiter)
        elif under_way:
            self.wire.cut(self.watch.cause or Cause("error", "a move was given up"))
            self.wire.let_go(self._waiter, END_SECONDS)
        else:
            self.wire.let_go(self._waiter, 0.0)
        self._keep.clear()


def _is_direct(lot: Lot) -> bool:
    if not lot.as_is or lot.num_bytes < DIRECT_BYTES * len(lot.width):
        return False
    ends = (lot.source, lot.target)
    return all(bool((run_lengths(lot.width, end.strides) == lot.sizes).all()) for end in ends)


def _placed(lots: Sequence[Lot], address: int) -> list[tuple[Lot, int]]:
    """Where each lot of a message lies."""
    sizes = np.array([0, *(lot.num_bytes for lot in lots)], dtype=np.int64)
    return [(lot, int(address + at)) for lot, at in zip(lots, np.cumsum(sizes), strict=False)]
