"""Gather a few bytes from every rank of a session, without a plan.

A rank puts its bytes into a shared buffer, and sends the buffer's descriptor with its Hello. That
is the whole exchange: a rank that has the Hellos of all others reads their buffers. It is a call
like any other: it uses one number of the session, a rank in another call, a lost one or a late one
is named, and all ranks raise the same cause.

    rank 0   Hello(call 7, buffer 1) -->  |  | length | bytes ... |   read by ranks 1 and 2
    rank 1   Hello(call 7, buffer 4) -->  |  | length | bytes ... |   read by ranks 0 and 2
    rank 2   Hello(call 7, buffer 2) -->  |  | length | bytes ... |   read by ranks 0 and 1

Ranks of several hosts share no memory: they move their bytes along a plan instead. This call has
its number all the same, because one rank may know of the hosts before another does.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct

import torch.distributed as dist

from reshard.errors import LiveError, ReshardError
from reshard.layout.mesh import format_ranks
from reshard.live.failure.cleanup import fail_and_close, with_ticket
from reshard.live.failure.watch import Watch
from reshard.live.session.control import Cause
from reshard.live.session.rendezvous import Connections
from reshard.live.session.session import Session, Ticket, session_of
from reshard.live.session.shared_memory import SharedBuffer
from reshard.live.transport.in_flight import check_earlier_calls

__all__ = ["gather_bytes"]

_LENGTH = struct.Struct("<Q")

DIGEST = hashlib.blake2b(b"reshard gather 1", digest_size=16).digest()
"""Takes the place of a plan's digest in the Hellos of these calls."""


def gather_bytes(
    group: dist.ProcessGroup, data: bytes, *, timeout: float, what: str, limit: int
) -> dict[int, bytes] | None:
    """The bytes of all ranks of a group; None if the ranks are not all on one host.

    ``what`` says what the ranks are doing, for errors. A rank that sends more than ``limit`` bytes
    is broken.
    """
    ranks = sorted(dist.get_process_group_ranks(group))
    session = session_of(group, ranks)

    def gather(ticket: Ticket) -> dict[int, bytes] | None:
        session.begin(ticket)
        return _Gather(ticket, session, timeout, what, limit).run(data)

    return with_ticket(group, None, gather)


class _Gather:
    """One call on one rank, from its number to its result."""

    watch: Watch | None = None
    _ok = False

    def __init__(
        self, ticket: Ticket, session: Session, timeout: float, what: str, limit: int
    ) -> None:
        self.ticket, self.session, self.timeout = ticket, session, timeout
        self.what, self.limit = what, limit
        self._buffers: list[SharedBuffer] = []
        """The buffer with this rank's bytes."""

    def run(self, data: bytes) -> dict[int, bytes] | None:
        ticket, session = self.ticket, self.session
        ticket.undo = self._close
        found = None
        try:
            connections = session.connections
            if connections is None:
                connections = session.connect(ticket, self.timeout, self.what)
            if not connections.spans_hosts:
                found = self._exchange(connections, data)
                self._ok = True
        except ReshardError as error:
            fail_and_close(self.watch, error, self._close)
        self._close()
        return found

    def _exchange(self, connections: Connections, data: bytes) -> dict[int, bytes]:
        """Send this rank's bytes in a buffer, wait for all Hellos, and read what they name."""
        ticket, session, peers = self.ticket, self.session, connections.peers
        watch = self.watch = ticket.watch = Watch(
            session, connections, ticket.number, DIGEST, timeout=self.timeout, what=self.what
        )
        watch.status = lambda: f"on rank {connections.rank}: its own part is sent"
        check_earlier_calls(watch)
        frame = _LENGTH.pack(len(data)) + data
        buffer = connections.buffers.take(len(frame))
        self._buffers.append(buffer)
        ctypes.memmove(buffer.address, frame, len(frame))
        hello, hellos = watch.hello(eager=1, buffer=buffer.number), watch.inbox.hellos
        for peer in peers:
            watch.mailbox.send(peer, hello, buffer.fd_for(peer))

        def missing() -> list[int]:
            self._check_calls(watch)
            return [peer for peer in peers if peer not in hellos]

        watch.wait(missing, lambda peer: "its part")
        return {rank: self._read(watch, rank) if rank in peers else data for rank in session.ranks}

    def _check_calls(self, watch: Watch) -> None:
        """Fail if a rank is in a move, or in a call with a tag."""
        expected = watch.digest, watch.grad, watch.tag_code
        others = [peer for peer, one in tuple(watch.inbox.hellos.items()) if one[1:4] != expected]
        if others:
            one = len(others) == 1
            watch.fail(Cause("disagree", (
                f"{'rank' if one else 'ranks'} {format_ranks(sorted(others))} "
                f"{'is' if one else 'are'} in a move and rank {watch.connections.rank} is not: "
                "make the same calls in the same order on all ranks"
            )))  # fmt: skip

    def _read(self, watch: Watch, peer: int) -> bytes:
        """Copy the bytes of a peer, which may be broken."""
        begin = _LENGTH.size
        if (peer, 0) not in watch.inbox.ready:
            raise LiveError(f"rank {peer} sends no bytes: it is broken, or runs another version")
        address = watch.inbox.address_of(peer, 0, begin)
        (size,) = _LENGTH.unpack(ctypes.string_at(address, begin))
        if size > self.limit:
            raise LiveError(f"rank {peer} sends {size} bytes: at most {self.limit} work")
        return ctypes.string_at(watch.inbox.address_of(peer, 0, begin + size) + begin, size)

    def _close(self) -> None:
        """End the call; may be repeated, as an exception may come between any two bytecodes."""
        watch = self.watch
        if watch is None:
            self.session.close_call(self.ticket.number)
        else:
            connections = watch.connections
            connections.buffers.end_call(self._buffers, watch.call, connections.peers, self._ok)
            watch.close()
        self.ticket.finish()
