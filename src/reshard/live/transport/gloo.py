"""The transport between ranks of different hosts, over a gloo group of the session's own.

A message is one packed buffer. Blocks that are large and contiguous on both sides follow it, sent
from and received into the tensors. Buffers and compiled tables are kept between calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch

from reshard.live.copy.reduce import Arrived
from reshard.live.failure.watch import Watch
from reshard.live.inputs.bound import BoundTensors
from reshard.live.program.blocks import CopyList
from reshard.live.program.messages import GLOO, Message
from reshard.live.program.rounds import Program, Round
from reshard.live.session.control import Cause, Hello, Ready, decode, encode
from reshard.live.transport.base import Transport, compile_copies, compile_received
from reshard.live.transport.gloo_group import GlooGroup, Pending, in_short

PIECE_BYTES = 32 << 20  # A longer block goes in pieces, so that its progress can be seen

NO_LIMIT = timedelta(days=1)
"""How long gloo waits for a message. The watch decides when to give up: a peer may work for long.
Connections that are cut end all waits in gloo."""

END_SECONDS = 1.0  # seconds that a worker may take to notice that its connection was cut


def direct_views(message: Message, bound: BoundTensors, sending: bool) -> Iterator[torch.Tensor]:
    """The memory of transfers that are not staged, block by block, as bytes."""
    for transfer in message.writes:
        place, item = transfer.source if sending else transfer.destination, transfer.itemsize
        rows = zip(place.base.tolist(), place.offset.tolist(), transfer.sizes.tolist(), strict=True)
        for base, offset, size in rows:
            tensor = bound.tensors[base].detach()
            # torch considers a tensor of one element contiguous whatever its strides are, but views
            # it as bytes only if its last stride is 1.
            at = tensor.storage_offset() + offset // item
            yield tensor.as_strided((size,), (1,), at).view(torch.uint8)


class GlooHellos:
    """Exchanges Hellos with peers over a gloo group, and waits for messages in a worker."""

    def __init__(self, watch: Watch, group: GlooGroup) -> None:
        self.watch, self.group = watch, group
        self.worker = group.worker()
        self.tag = watch.call % (1 << 20)
        self._kept: list[torch.Tensor] = []

    def send(self, peer: int, tensors: Iterable[torch.Tensor]) -> list[Pending]:
        index = self.watch.connections.ranks.index(peer)
        return [self.group.send(index, tensor, self.tag) for tensor in tensors]

    def receive(self, peer: int, tensors: Iterable[torch.Tensor]) -> list[Pending]:
        index = self.watch.connections.ranks.index(peer)
        return [self.group.receive(index, tensor, self.tag) for tensor in tensors]

    def exchange(self, peers: Iterable[int], hello: Hello) -> None:
        """Send a Hello to peers and receive theirs; a peer has called when both are complete.

        gloo drops a message, or sends freed memory, if the send is destroyed before it is complete,
        and a rank that sends nothing else would return from the call before that.
        """
        data = encode(hello)
        for peer in peers:
            own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            theirs = torch.empty(len(data), dtype=torch.uint8, device="cpu")
            self._kept += [own, theirs]
            works = self.send(peer, [own]) + self.receive(peer, [theirs])
            self.when_done(works, [peer], partial(self._received, peer, theirs))

    def _received(self, peer: int, data: torch.Tensor) -> None:
        message = decode(bytes(data.numpy()))
        if isinstance(message, Hello):
            self.watch.inbox.put(peer, message)
        else:
            self._broken(peer, "it sent something else than a Hello")

    def _broken(self, peer: int, error: str) -> None:
        """Record that a connection failed: by itself, or because another call had to cut it."""
        if self.group.cut_because is not None:
            self.watch.cut_by = self.group.cut_because
        self.watch.broken[peer] = error

    def when_done(
        self, works: Sequence[Pending], peers: Sequence[int], then: Callable[[], None]
    ) -> None:
        """Call back when messages with peers are complete, or record why not; then wake waits."""
        watch = self.watch

        def wait() -> None:
            try:
                for work in works:
                    work(NO_LIMIT)
                    watch.inbox.heard.update(dict.fromkeys(peers, time.monotonic()))
            except RuntimeError as failure:
                for peer in peers:
                    self._broken(peer, in_short(failure))
            else:
                then()
            watch.mailbox.wake()

        self.worker.submit(wait)

    def close(self, ok: bool, under_way: bool = False) -> None:
        """End the call; after a failure no message may be received into tensors any more."""
        if ok:
            self.group.give_back(self.worker)
        elif under_way:
            self.group.cut(self.watch.cause or Cause("error", "a move was aborted"))
            self.group.let_go(self.worker, END_SECONDS)
        else:
            self.group.let_go(self.worker, 0.0)
        self._kept.clear()


class GlooTransport(Transport):
    """Exchanges messages with ranks of other hosts in one call."""

    _closed = False

    def __init__(
        self,
        watch: Watch,
        program: Program,
        bound: BoundTensors,
        peers: Collection[int],
        group: GlooGroup,
    ) -> None:
        super().__init__(watch, program, bound, peers)
        self._group, self._hellos = group, GlooHellos(watch, group)
        watch.by_network = self.peers
        self._arrivals: dict[tuple[int, int], torch.Tensor] = {}
        """Buffers of messages that are being received, or have arrived, by peer and round."""
        self._unsent: set[int] = set()
        """Peers to which this rank's messages of the round are not sent yet."""
        self._kept: list[torch.Tensor] = []  # tensors that gloo reads until they are sent
        self._buffers: list[torch.Tensor] = []  # buffers of messages that are complete

    def label(self, peer: int) -> str:
        return "network (gloo)"

    def send_hellos(self) -> None:
        """Send Hellos, which say whether this rank's tensors are plain memory."""
        self._hellos.exchange(self.peers, self.watch.hello(strided=int(not self.bound.is_plain)))

    def begin(self, round_: Round) -> int:
        """Begin to receive the messages of a round, then pack and send this rank's."""
        staged = 0
        for peer, message in self._messages(round_, False).items():
            staged += self._begin_receiving(peer, round_.number, message)
        works: list[Pending] = []
        for peer, message in self._messages(round_, True).items():
            size = message.staged_bytes
            tensors = self._pieces(message, True)
            if message.copies is not None:
                buffer = self._group.take_buffer(size)
                message.copies.run(self.bound, buffer.data_ptr(), size)
                self._buffers.append(buffer)
                tensors.insert(0, buffer[:size])
            self._unsent.add(peer)
            self._kept += tensors
            works += self._hellos.send(peer, tensors)
            staged += size

        def then() -> None:
            self._kept.clear()
            self._unsent = set()

        if works:
            self._hellos.when_done(works, sorted(self._unsent), then)
        return staged

    def _begin_receiving(self, peer: int, number: int, message: Message) -> int:
        size = message.staged_bytes
        empty = torch.empty(0, dtype=torch.uint8, device="cpu")
        buffer = self._group.take_buffer(size) if size else empty
        tensors = ([buffer[:size]] if size else []) + self._pieces(message, False)
        self._arrivals[peer, number] = buffer

        def then() -> None:
            tensors.clear()  # they keep the memory alive
            self.watch.inbox.put(peer, Ready(self.watch.call, number))

        self._hellos.when_done(self._hellos.receive(peer, tensors), [peer], then)
        return size

    def _pieces(self, message: Message, sending: bool) -> list[torch.Tensor]:
        views = direct_views(message, self.bound, sending)
        return [piece for view in views for piece in torch.split(view, PIECE_BYTES)]

    def receive(self, round_: Round, peers: Collection[int], arrived: Arrived) -> None:
        messages = self._messages(round_, False)
        for peer in peers:
            message, buffer = messages[peer], self._arrivals[peer, round_.number]
            if message.copies is not None:
                message.copies.run(self.bound, buffer.data_ptr(), buffer.numel())
            for transfer, offset in message.addends:
                arrived[id(transfer)] = buffer.data_ptr() + offset

    def release(self, round_: Round, peers: Collection[int]) -> None:
        """Keep the buffers of messages for the next call."""
        for peer in peers:
            buffer = self._arrivals.pop((peer, round_.number))
            if buffer.numel():
                self._buffers.append(buffer)

    def unreleased(self, round_: Round) -> Collection[int]:
        """Peers to which messages are not sent yet: gloo still reads this rank's tensors."""
        return sorted(self._unsent)

    def close(self, ok: bool) -> None:
        """Keep buffers for the next call; after a failure cut messages that are under way."""
        if self._closed:
            return
        self._closed = True
        self._hellos.close(ok, bool(self._arrivals or self._unsent))
        if ok:
            self._group.give_back_buffers(self._buffers)
        self._buffers.clear()
        self._kept.clear()

    def _messages(self, round_: Round, sending: bool) -> dict[int, Message]:
        """The messages of a round with these peers, compiled once."""
        hellos, plain = self.watch.inbox.hellos, self.bound.is_plain
        direct = frozenset(peer for peer in self.peers if plain and not hellos[peer].strided)
        key = ("gloo", GLOO, sending, self.bound.is_host, self.peers, direct)
        messages: dict[int, Message] | None = round_.kept.get(key)
        if messages is None:
            side = round_.sends if sending else round_.receives
            messages = round_.kept[key] = {
                peer: self._compile(GLOO.message(peer, transfers, peer in direct), sending)
                for peer, transfers in side.items()
                if peer in self.peers
            }
        return messages

    def _compile(self, message: Message, sending: bool) -> Message:
        if not sending:
            return compile_received(message, self.bound)
        copies = CopyList()
        message.pack(copies, 0, self.bound.staging)
        return replace(message, copies=compile_copies(copies, self.bound) if copies else None)
