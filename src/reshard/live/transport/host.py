"""Ranks of one host exchange through memory alone.

A message is three things at most: what was written straight into the receiver's tensors, what is
staged in memory that both map, and what the receiver reads straight out of the sender's tensors.
The control messages that say so go over a socket. A small message is eager: it is staged before its
sender even says Hello, so a rank that has all Hellos has all the data, and nobody waits a second
time.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np

from reshard.errors import LiveError
from reshard.layout.columns import Ints
from reshard.live.failure.watch import Watch
from reshard.live.inputs.bound import BoundTensors
from reshard.live.program.copies import CopyList
from reshard.live.program.modes import HOST, Message, Mode, Policy, message_of
from reshard.live.program.rounds import Program, Round, Transfer
from reshard.live.program.runs import IovecPlan, Runs, runs_of
from reshard.live.session.control import Ready, Released
from reshard.live.session.shared_memory import SharedBuffer
from reshard.live.transport.base import Transport
from reshard.live.transport.exchange import Copies, prepared_copies
from reshard.live.transport.peer_memory import MAX_INLINE, PeerMemory

__all__ = ["HostTransport"]

HELLO_FIELDS = 5
"""What the watch says in a Hello; the rest is of the transport."""

MAX_KEPT = 4
"""Compiled forms of a round, for tensors of peers that are or are not contiguous."""

STRAIGHT = Policy(eager_bytes=-1)
"""``transport="peer"``: nothing is staged that can go straight, small or not."""


@dataclass(frozen=True, eq=False, slots=True)
class _Send:
    """A message to one peer."""

    message: Message
    offset: int
    """Where in the shared buffer it begins."""
    pack: Copies | None
    """None if nothing is staged, or the same bytes are staged for another peer already."""
    write: IovecPlan | None
    eager: bool
    """Whether it can be made without knowing where the peer's tensors are."""
    awaited: bool
    """Whether the round waits until the peer has read it."""


@dataclass(frozen=True, eq=False, slots=True)
class _Receive:
    """A message of one peer."""

    message: Message
    unpack: Copies | None
    read: IovecPlan | None
    addends: Sequence[tuple[Transfer, int]]
    releases: bool
    """Whether the sender waits until it is read."""


@dataclass(frozen=True, eq=False, slots=True)
class _HostRound:
    """What this rank does with the peers of its host in one round."""

    sends: Sequence[_Send]
    receives: dict[int, _Receive]
    end: int
    """Where messages end in the shared buffer."""
    staged: int
    awaited: frozenset[int]
    eager: dict[int, _Send]
    """The messages that go with the Hello, in the first round."""


class HostTransport(Transport):
    """Exchanges with the ranks of this host, in one call."""

    _table = array("q")
    """The addresses of this rank's tensors, for peers that read them from its memory."""
    _eager: Mapping[int, _Send] = MappingProxyType({})
    """The messages that went with the Hellos."""
    _needs_buffer = False
    """Whether eager messages are in the way: tensors of peers are not as they were assumed."""

    def __init__(
        self,
        watch: Watch,
        program: Program,
        bound: BoundTensors,
        peers: Collection[int],
        option: str = "auto",
    ) -> None:
        """``option`` is the user's: ``auto``, ``peer`` or ``shared``."""
        self.peers = frozenset(peers)
        self.watch, self.program, self.bound = watch, program, bound
        self._option, self._policy = option, STRAIGHT if option == "peer" else HOST
        connections = self._connections = watch.connections
        self._direct = frozenset() if option == "shared" else self.peers & connections.direct
        if option == "peer" and self._direct != self.peers:
            raise LiveError(
                f"peer memory was forced and rank {connections.rank} may not read that of ranks "
                f"{sorted(self.peers - self._direct)}: allow ptrace between them, or leave out "
                "transport="
            )
        self._buffers: list[SharedBuffer] = []
        """Shared buffers of this call, the one in use last."""
        self._lent: set[int] = set()
        """Peers that may read staged messages after this rank has gone on."""
        self._rounds: dict[int, _HostRound] = {}
        """Rounds that were compiled with the Hellos of all peers."""
        watch.abort.written = bound

    @cached_property
    def _memory(self) -> PeerMemory:
        return PeerMemory(self.watch)

    def label(self, peer: int) -> str:
        return "peer memory" if peer in self._direct else "shared memory"

    def send_hellos(self) -> None:
        """With the addresses of this rank's tensors, and its eager messages."""
        bound, mailbox = self.bound, self.watch.mailbox
        if self.program.num_rounds:
            first = self._compiled(self.program.round(0), ())
            self._eager = first.eager
            self._stage(self._eager.values(), first.end)
        self._table = array("q", bound.published)
        table = self._table.tobytes() if len(self._table) <= MAX_INLINE else b""
        at = self._table.buffer_info()[0]
        hello = self.watch.hello(strided=int(not bound.is_plain), table_at=at, table=table)
        for peer in self.peers:
            send = self._eager.get(peer)
            if send is None:
                mailbox.send(peer, hello)
            elif not send.message.staged_bytes:
                mailbox.send(peer, hello._replace(eager=1))
            else:
                buffer = self._buffers[-1]
                eager = hello._replace(eager=1, buffer=buffer.number, offset=send.offset)
                mailbox.send(peer, eager, buffer.fd_for(peer))

    def begin(self, made: Round) -> int:
        """Write, stage, and tell peers that their messages are there."""
        todo = self._round(made)
        if made.number or len(self._eager) < len(todo.sends):
            self._begin_late(made, todo)
        return todo.staged

    def _begin_late(self, made: Round, todo: _HostRound) -> None:
        """The messages that did not go with the Hello."""
        bound, sends = self.bound, todo.sends
        if not made.number:
            sends = [one for one in sends if one.message.peer not in self._eager]
        self._stage(sends, todo.end)
        for send in sends:
            if send.write is not None:
                peer = send.message.peer
                theirs = self._memory.table(peer, bound.staging)
                self._memory.write(peer, send.write.calls(bound.table, theirs), send.message.name)
        # In a row: between copies, which empty the caches, a message costs twice as much.
        for send in sends:
            peer, number, fd = send.message.peer, 0, None
            if send.message.staged_bytes:
                number, fd = self._buffers[-1].number, self._buffers[-1].fd_for(peer)
            ready = Ready(self.watch.call, made.number, number, send.offset)
            self.watch.mailbox.send(peer, ready, fd)

    def _stage(self, sends: Iterable[_Send], end: int) -> None:
        """Pack the staged parts of messages, which end there in the shared buffer."""
        for send in sends:
            if not send.message.staged_bytes:
                continue
            if self._needs_buffer or not self._buffers or self._buffers[-1].num_bytes < end:
                self._needs_buffer = False
                rounds = self.program.num_rounds if self.program.lends else 1
                size = max(end, rounds * self.program.peak_bytes)
                self._buffers.append(self._connections.buffers.take(size))
            if not send.awaited:
                self._lent.add(send.message.peer)
            if send.pack is not None:
                buffer = self._buffers[-1]
                send.pack.run(self.bound, buffer.address, buffer.num_bytes)

    def receive(self, made: Round, peers: Collection[int], arrived: dict[int, int]) -> None:
        """Unpack and read the messages of peers."""
        todo = self._round(made)
        for peer in peers:
            message = todo.receives[peer]
            size, address = message.message.staged_bytes, 0
            if size:
                address = self.watch.inbox.address_of(peer, made.number, size)
            if message.unpack is not None:
                message.unpack.run(self.bound, address, size)
            for transfer, offset in message.addends:
                arrived[id(transfer)] = address + offset
            if message.read is not None:
                theirs = self._memory.table(peer, self.bound.staging)
                calls = message.read.calls(self.bound.table, theirs)
                self._memory.read(peer, calls, message.message.name)

    def release(self, made: Round, peers: Collection[int]) -> None:
        """Tell senders that wait for it that their messages were read."""
        todo = self._round(made)
        for peer in peers:
            if todo.receives[peer].releases:
                self.watch.mailbox.send(peer, Released(self.watch.call, made.number))

    def unreleased(self, made: Round) -> Collection[int]:
        """Peers that read this rank's tensors, or large staged messages."""
        awaited, released = self._round(made).awaited, self.watch.inbox.released
        return [peer for peer in awaited if (peer, made.number) not in released]

    def close(self, ok: bool) -> None:
        """Keep buffers for the next call; after a failure peers may still read what is in them."""
        while self._buffers:
            buffer = self._buffers[-1]
            if ok:
                # Eager messages stay where they are: the next Hello tells that they were read.
                buffer.loans |= dict.fromkeys(self._lent, self.watch.call)
            # In this order: after an exception a buffer must not be given back and retired.
            self._buffers.pop()
            if ok:
                self._connections.buffers.give_back(buffer)
            else:
                self._connections.buffers.retire(buffer)
        self._rounds.clear()

    # Compiling ---------------------------------------------------------------------------------

    def _round(self, made: Round) -> _HostRound:
        """The compiled round, when all Hellos are there."""
        found = self._rounds.get(made.number)
        if found is None:
            hellos, count = self.watch.inbox.hellos, self.bound.staging
            masks = tuple(
                (peer, (self._memory.table(peer, count) == 0).tobytes())
                for peer in sorted(self._direct)
                if hellos[peer].strided
            )
            found = self._rounds[made.number] = self._compiled(made, masks)
            self._needs_buffer = bool(masks) and not made.number
        return found

    def _compiled(self, made: Round, masks: tuple[tuple[int, bytes], ...]) -> _HostRound:
        """The compiled round; ``masks`` say which tensors of which peers are not plain memory."""
        bound = self.bound
        own = b"" if bound.is_plain else bytes(at == 0 for at in bound.published)
        key = ("host", self._policy, self._direct, bound.is_host, own, masks)
        found: _HostRound | None = made.kept.get(key)
        if found is None:
            others = [one for one in made.kept if isinstance(one, tuple) and one[0] == "host"]
            for other in others[MAX_KEPT:]:
                made.kept.pop(other, None)
            found = made.kept[key] = self._compile(made, bool(masks))
        return found

    def _compile(self, made: Round, masked: bool) -> _HostRound:
        start = 0
        if self.program.lends and made.number:
            start = self._round(self.program.round(made.number - 1)).end
        sends, at, places = [], start, dict[tuple[object, ...], int]()
        # Each rank begins with another peer: several that write to one get in each other's way.
        for peer in sorted(made.sends, key=lambda peer: (peer < self.program.rank, peer)):
            if peer not in self.peers:
                continue
            message = self._message(peer, made.sends[peer], True, masked)
            key = tuple(part for transfer, _ in message.staged for part in _content(transfer))
            fresh = key not in places
            if fresh:
                at += -at % message.alignment
                places[key] = at
                at += message.staged_bytes
            sends.append(self._send(message, places[key], fresh))
        receives = {
            peer: self._receive(self._message(peer, transfers, False, masked))
            for peer, transfers in made.receives.items()
            if peer in self.peers
        }
        awaited = frozenset(send.message.peer for send in sends if send.awaited)
        eager = {send.message.peer: send for send in sends if send.eager and not made.number}
        return _HostRound(sends, receives, at, at - start, awaited, eager)

    def _message(
        self, peer: int, transfers: Sequence[Transfer], sending: bool, masked: bool
    ) -> Message:
        total = sum(transfer.num_bytes for transfer in transfers)

        def mode(transfer: Transfer) -> Mode:
            if peer not in self._direct:
                return Mode.STAGED
            chosen = self._policy.mode(transfer, total)
            if self._option == "peer" and chosen is Mode.STAGED and transfer.as_is:
                chosen = Mode.READ
            touched = transfer.source if chosen is Mode.READ else transfer.destination
            if chosen is not Mode.STAGED:
                own = (chosen is Mode.READ) == sending
                if not self._is_touchable(peer, touched.base, masked, own):
                    return Mode.STAGED
            return chosen

        return message_of(peer, transfers, mode)

    def _is_touchable(self, peer: int, base: Ints, masked: bool, own: bool) -> bool:
        """Whether tensors that another process would touch are plain memory."""
        if own:
            if self.bound.is_plain:
                return True
            published = self.bound.published
            return all(published[number] for number in base.tolist())
        return not masked or bool(self._memory.table(peer, self.bound.staging)[base].all())

    def _send(self, message: Message, offset: int, fresh: bool) -> _Send:
        copies, pack = CopyList(), None
        if fresh and message.staged:
            message.pack(copies, offset, self.bound.staging)
            pack = prepared_copies(copies, self.bound)
        staged = [transfer for transfer, _ in message.staged]
        eager = not message.writes and all(t.hop == 0 for t in (*staged, *message.reads))
        awaited = bool(message.reads) or (bool(staged) and not self._is_lent(message))
        return _Send(message, offset, pack, _iovecs(message.writes, True), eager, awaited)

    def _receive(self, message: Message) -> _Receive:
        copies = CopyList()
        addends = message.unpack(copies, 0, self.bound.staging)
        unpacks = len(addends) < len(message.staged)
        unpack = prepared_copies(copies, self.bound) if unpacks else None
        large = bool(message.staged) and not self._is_lent(message)
        read = _iovecs(message.reads, False)
        return _Receive(message, unpack, read, addends, bool(message.reads) or large)

    def _is_lent(self, message: Message) -> bool:
        """Whether a staged message may be read after its sender has gone on.

        Not with ``transport="peer"``: there the receiver learns from the sender's memory that it is
        staged.
        """
        return self.program.lends and message.num_bytes <= self._policy.eager_bytes


def _content(transfer: Transfer) -> Sequence[object]:
    """What two transfers have in common that carry the same bytes."""
    place = transfer.source
    columns = (place.base, place.offset, place.strides, transfer.width)
    return transfer.addend, transfer.dtype, *(np.ascontiguousarray(c).tobytes() for c in columns)


def _iovecs(transfers: Sequence[Transfer], writing: bool) -> IovecPlan | None:
    """The system calls that copy transfers between this process and a peer's."""
    if not transfers:
        return None
    sides = []
    for own in (True, False):
        runs = []
        for transfer in transfers:
            place = transfer.source if own == writing else transfer.destination
            size = transfer.itemsize
            runs.append(runs_of(place.offset, transfer.width, place.strides, size, place.base))
        sides.append(_joined(runs))
    return IovecPlan(*sides)


def _joined(runs: Sequence[Runs]) -> Runs:
    if len(runs) == 1:
        return runs[0]
    tensors = [one.tensor for one in runs if one.tensor is not None]
    address, length = ([one.address for one in runs], [one.length for one in runs])
    return Runs(np.concatenate(address), np.concatenate(length), np.concatenate(tensors))
