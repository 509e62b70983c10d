"""The transport between ranks of one host: shared memory, and the memory of the other process.

A message has up to three parts: what the sender has written into the receiver's tensors, what is
staged in memory that both processes map, and what the receiver reads from the sender's tensors.
Control messages over a socket announce it. A small message is eager: it is staged before its sender
sends a Hello, so a rank that has all Hellos has all data and does not wait a second time.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from reshard.errors import LiveError
from reshard.layout.columns import Ints, drop_oldest
from reshard.live.copy.host import read_memory, write_memory
from reshard.live.copy.reduce import Arrived
from reshard.live.failure.watch import Watch
from reshard.live.inputs.bound import BoundTensors
from reshard.live.program.blocks import CopyList
from reshard.live.program.messages import DIRECT, HOST, IovecCall, IovecPlan, Message, Mode
from reshard.live.program.rounds import Program, Round, Transfer
from reshard.live.session.control import Ready, Released, encode_hello
from reshard.live.session.shared_memory import SharedBuffer
from reshard.live.transport.base import (
    Copies,
    Transport,
    common_ranks,
    compile_copies,
    compile_received,
)

MAX_KEPT = 4  # compiled forms of a round, for tensors of peers that are or are not contiguous

HEARTBEAT_EVERY = 0.02
"""Seconds of copying after which the watch is asked whether a heartbeat is due."""


class PeerMemory:
    """Copies between the tensors of two processes; the error names a peer that has failed.

    When a call has raised, no process writes into its destinations any more. So a rank marks that
    it writes before it checks whether the peer has aborted; a peer that aborts waits while it is
    marked.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._peers, self._flags = watch.connections.peers, watch.connections.flags
        self._heartbeat_at = 0.0
        self._tables: dict[int, Ints] = {}

    def write(self, peer: int, calls: Iterable[IovecCall], name: str) -> None:
        """Copy into a peer's tensors."""
        call, there, failed = self._watch.call, self._peers[peer], False
        error: OSError | None = None
        for one in calls:
            self._heartbeat()
            self._flags.begin_writing(call)
            try:
                failed = there.flags.has_failed(call)
                if not failed:
                    write_memory(there.pid, one)
            except OSError as raised:
                error = raised
            finally:
                self._flags.end_writing(call)
            if failed or error is not None:
                self._watch.fail_because_of(peer, f'it to take its part of "{name}"', error)

    def read(self, peer: int, calls: Iterable[IovecCall], name: str) -> None:
        """Copy out of a peer's tensors; fails if the peer may have freed them meanwhile."""
        call, there = self._watch.call, self._peers[peer]
        error: OSError | None = None
        for one in calls:
            self._heartbeat()
            try:
                read_memory(there.pid, one)
            except OSError as raised:
                error = raised
            if error is not None or there.flags.has_failed(call):
                self._watch.fail_because_of(peer, f'its part of "{name}"', error)

    def _heartbeat(self) -> None:
        now = time.monotonic()
        if now > self._heartbeat_at:
            if self._heartbeat_at:
                self._watch.heartbeat()
            self._heartbeat_at = now + HEARTBEAT_EVERY

    def table(self, peer: int, count: int) -> Ints:
        """The base addresses of a peer's tensors; 0 for those that must not be touched."""
        table = self._tables.get(peer)
        if table is None:
            table = np.zeros(count, dtype=np.int64)
            at = self._watch.inbox.hellos[peer].table_at
            own = table.__array_interface__["data"][0]
            call = IovecCall.single(own, at, table.nbytes)
            self.read(peer, [call], "the move")
            self._tables[peer] = table
        return table


@dataclass(frozen=True, eq=False, slots=True)
class _HostRound:
    """The messages between this rank and the peers of its host in one round, compiled."""

    later: dict[int, Message]
    eager: dict[int, Message]
    """What goes with the Hellos: messages of the first round that need no address of the peer's
    tensors."""
    packs: Sequence[Copies | None]  # what packs those that are sent later, and the eager ones
    receives: dict[int, Message]
    end: int  # where messages end in the shared buffer
    staged: int  # bytes that are staged
    awaited: frozenset[int]  # peers that must have read their messages before the round ends
    unread: frozenset[int]  # peers that may read staged messages after the call has returned
    accessed: Sequence[int]  # peers whose tensors this rank reads or writes
    direct: bool  # whether a message is copied between tensors of two processes


class HostTransport(Transport):
    """Exchanges messages with the ranks of this host in one call."""

    _first: _HostRound
    """The first round, compiled before the Hellos of peers are there."""
    _published: array[int] | None = None
    """The base addresses of this rank's tensors, which peers read from its memory."""
    _unread_by: frozenset[int] = frozenset()
    """Peers that may read staged messages after this call has returned."""
    _needs_buffer = False
    """Whether the eager messages occupy the buffer, because peers have strided tensors and the
    round was compiled again with another layout."""

    def __init__(
        self,
        watch: Watch,
        program: Program,
        bound: BoundTensors,
        peers: Collection[int],
        option: str = "auto",
        reason: Callable[[int], str] | None = None,
    ) -> None:
        """``option`` is the user's: ``auto``, ``peer`` or ``shared``.

        ``reason`` says why a peer is not reached from GPU to GPU.
        """
        super().__init__(watch, program, bound, peers)
        self._option, self._reason = option, reason
        self._policy = DIRECT if option == "peer" else HOST
        connections = self._connections = watch.connections
        self._direct = (
            frozenset() if option == "shared" else common_ranks(self.peers, connections.direct)
        )
        if option == "peer" and self._direct != self.peers:
            raise LiveError(
                f"peer memory was forced and rank {connections.rank} may not read that of ranks "
                f"{sorted(self.peers - self._direct)}: allow ptrace between them, or leave out "
                "transport="
            )
        self._buffers: list[SharedBuffer] = []  # shared buffers of this call, the one in use last
        self._rounds: dict[int, _HostRound] = {}
        """Rounds that have begun, compiled with the Hellos of all peers."""
        own = b"" if bound.is_plain else bytes(at == 0 for at in bound.published)
        self._key = (option, self._direct, bound.is_host, own)
        """What a compiled round depends on, besides the tensors of peers."""
        watch.written = bound

    @cached_property
    def _memory(self) -> PeerMemory:
        return PeerMemory(self.watch)

    def label(self, peer: int) -> str:
        way = "peer memory" if peer in self._direct else "shared memory"
        reason = "" if self._reason is None else self._reason(peer)
        return f"{way} ({reason})" if reason else way

    def send_hellos(self) -> None:
        """Send Hellos with the address of this rank's table of tensors, and eager messages."""
        bound, mailbox = self.bound, self.watch.mailbox
        messages: Mapping[int, Message] = {}
        if self.program.num_rounds:
            first = self._first = self._compiled(self.program.round(0), ())
            messages = first.eager
            if first.direct:
                bound.note_repeated()
            self._stage(first, 1)
        published = self._published = bound.published
        strided, table_at = int(not bound.is_plain), published.buffer_info()[0]
        fields = (*self.watch.hello_fields, 0, strided, table_at, 0)
        for peer in self.peers:
            send = messages.get(peer)
            if send is None:
                mailbox.send(peer, encode_hello(*fields, 0, 0, 0))
            elif not send.staged_bytes:
                mailbox.send(peer, encode_hello(*fields, 1, 0, 0))
            else:
                buffer = self._buffers[-1]
                hello = encode_hello(*fields, 1, buffer.number, send.offset)
                fd = None if peer in buffer.known_to else buffer.fd_for(peer)
                mailbox.send(peer, hello, fd)

    def begin(self, round_: Round) -> int:
        """Write into tensors of peers, stage, and announce what did not go with the Hellos."""
        compiled, bound = self._round(round_), self.bound
        sends = compiled.later
        if not sends:
            return compiled.staged
        self._stage(compiled, 0)
        for peer, send in sends.items():
            if send.iovecs is not None:
                theirs = self._memory.table(peer, bound.staging)
                self._memory.write(peer, send.iovecs.calls(bound.table, theirs), send.name)
        # In a row: between copies, which empty the caches, a message costs twice as much.
        for peer, send in sends.items():
            number, fd = 0, None
            if send.staged_bytes:
                number, fd = self._buffers[-1].number, self._buffers[-1].fd_for(peer)
            ready = Ready(self.watch.call, round_.number, number, send.offset)
            self.watch.mailbox.send(peer, ready, fd)
        return compiled.staged

    def _stage(self, compiled: _HostRound, eager: int) -> None:
        """Pack the eager messages of a round, or the others, into the shared buffer."""
        pack = compiled.packs[eager]
        if pack is None:
            return
        buffers = self._buffers
        if self._needs_buffer or not buffers or buffers[-1].num_bytes < compiled.end:
            self._needs_buffer = False
            rounds = self.program.num_rounds if self.program.defers_release else 1
            size = max(compiled.end, rounds * self.program.peak_bytes)
            buffers.append(self._connections.buffers.take(size))
        self._unread_by |= compiled.unread
        buffer = buffers[-1]
        pack.run(self.bound, buffer.address, buffer.num_bytes)

    def receive(self, round_: Round, peers: Collection[int], arrived: Arrived) -> None:
        """Unpack the staged parts of messages, and read the others from the senders' tensors."""
        compiled = self._rounds[round_.number]
        for peer in peers:
            receive = compiled.receives[peer]
            size, address = receive.staged_bytes, 0
            if size:
                address = self.watch.inbox.address_of(peer, round_.number, size)
            if receive.copies is not None:
                receive.copies.run(self.bound, address, size)
            for transfer, offset in receive.addends:
                arrived[id(transfer)] = address + offset
            if receive.iovecs is not None:
                theirs = self._memory.table(peer, self.bound.staging)
                calls = receive.iovecs.calls(self.bound.table, theirs)
                self._memory.read(peer, calls, receive.name)

    def release(self, round_: Round, peers: Collection[int]) -> None:
        """Tell the senders that wait for it that their messages were read."""
        compiled = self._rounds[round_.number]
        for peer in peers:
            if compiled.receives[peer].awaited:
                self.watch.mailbox.send(peer, Released(self.watch.call, round_.number))

    def unreleased(self, round_: Round) -> Collection[int]:
        """Peers that still read this rank's tensors, or large staged messages."""
        awaited = self._rounds[round_.number].awaited
        if not awaited:
            return ()
        released = self.watch.inbox.released
        return [peer for peer in awaited if (peer, round_.number) not in released]

    def close(self, ok: bool) -> None:
        pool = self._connections.buffers
        pool.end_call(self._buffers, self.watch.call, self._unread_by, ok)

    # Compiling ---------------------------------------------------------------------------------

    def _round(self, round_: Round) -> _HostRound:
        """The compiled round, when all Hellos are there."""
        compiled = self._rounds.get(round_.number)
        if compiled is None:
            compiled = self._first if not round_.number else self._compiled(round_, ())
            # Only peers whose tensors are accessed are sure to be in the call still: they wait for
            # this rank.
            if compiled.accessed:
                hellos, count = self.watch.inbox.hellos, self.bound.staging
                strided = [peer for peer in compiled.accessed if hellos[peer].strided]
                if strided:
                    tables = [(peer, self._memory.table(peer, count)) for peer in strided]
                    masks = tuple((peer, (table == 0).tobytes()) for peer, table in tables)
                    compiled = self._compiled(round_, masks)
                    self._needs_buffer = not round_.number
            self._rounds[round_.number] = compiled
        return compiled

    def _compiled(self, round_: Round, masks: tuple[tuple[int, bytes], ...]) -> _HostRound:
        """The compiled round; ``masks`` say which tensors of which peers must not be touched."""
        kept: dict[object, _HostRound] = round_.kept.setdefault("host", {})
        key = (*self._key, masks) if masks else self._key
        compiled = kept.get(key)
        if compiled is None:
            drop_oldest(kept, MAX_KEPT - 1)
            compiled = kept[key] = self._compile(round_, bool(masks))
        return compiled

    def _compile(self, round_: Round, masked: bool) -> _HostRound:
        """Compile a round; what went with the Hellos does not depend on the tensors of peers."""
        number, staging, start = round_.number, self.bound.staging, 0
        if self.program.defers_release and number:
            start = self._round(self.program.round(number - 1)).end
        sent = self._compiled(round_, ()).eager if masked and not number else None
        batches: tuple[dict[int, Message], ...] = ({}, {})
        lists, at = (CopyList(), CopyList()), start
        places: dict[object, int] = {}
        """Where each content is staged: messages with the same content are packed once."""
        # Each rank begins with another peer: several that write to one slow each other down.
        for peer in sorted(round_.sends, key=lambda peer: (peer < self.program.rank, peer)):
            if peer in self.peers:
                message = self._message(peer, round_.sends[peer], True, masked)
                eager = not number and (message.is_eager if sent is None else peer in sent)
                content = eager, message.content
                if content not in places:
                    at += -at % message.alignment
                    message.pack(lists[eager], at, staging)
                    places[content] = at
                    at += message.staged_bytes
                iovecs = IovecPlan(message.writes, True) if message.writes else None
                at_, awaited = places[content], self._is_awaited(message)
                batches[eager][peer] = replace(message, offset=at_, iovecs=iovecs, awaited=awaited)
        receives = {}
        for peer in self.peers & round_.receives.keys():
            message = self._message(peer, round_.receives[peer], False, masked)
            receives[peer] = compile_received(message, self.bound, self._is_awaited(message))
        packs = [compile_copies(copies, self.bound) if copies else None for copies in lists]
        sends, gets = ([*batches[0].values(), *batches[1].values()], receives.values())
        waiting = frozenset(one.peer for one in sends if one.awaited)
        unread = frozenset(one.peer for one in sends if one.staged) - waiting
        accessed = {one.peer for one in sends if one.writes}
        accessed |= {one.peer for one in gets if one.reads}
        direct = any(one.reads or one.writes for one in (*sends, *gets))
        more = (waiting, unread, sorted(accessed), direct)
        return _HostRound(batches[0], batches[1], packs, receives, at, at - start, *more)

    def _message(
        self, peer: int, transfers: Sequence[Transfer], sending: bool, masked: bool
    ) -> Message:
        def allows(transfer: Transfer, mode: Mode) -> bool:
            reads = mode is Mode.READ
            base = transfer.source.base if reads else transfer.destination.base
            return self._may_touch(peer, base, masked, reads == sending)

        return self._policy.message(peer, transfers, peer in self._direct, allows)

    def _may_touch(self, peer: int, base: Ints, masked: bool, own: bool) -> bool:
        """Whether the tensors that another process would read or write are plain memory."""
        if own:
            published = self.bound.published
            return self.bound.is_plain or all(published[number] for number in base.tolist())
        return not masked or bool(self._memory.table(peer, self.bound.staging)[base].all())

    def _is_awaited(self, message: Message) -> bool:
        """Whether the sender waits until the message is read: one that is eager may be read later.

        With ``transport="peer"`` none is eager: there the receiver learns from the sender's memory
        that a message is staged.
        """
        deferred = self.program.defers_release and message.num_bytes <= self._policy.eager_bytes
        return bool(message.reads) or (bool(message.staged) and not deferred)
