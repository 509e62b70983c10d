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
from reshard.live.failure.cleanup import fail_and_close, with_ticket
from reshard.live.failure.watch import Watch
from reshard.live.session.control import Cause, ranks_with
from reshard.live.session.session import Session, Ticket, session_of
from reshard.live.session.shared_memory import SharedBuffer
from reshard.live.transport.in_flight import check_earlier_calls

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
    session = session_of(group, sorted(dist.get_process_group_ranks(group)))

    def gather(ticket: Ticket) -> dict[int, bytes] | None:
        session.begin(ticket)
        return _Gather(ticket, session, limit).run(data, timeout, what)

    return with_ticket(group, None, gather)


class _Gather:
    """One call on one rank, from its number to its result."""

    watch: Watch | None = None
    _ok = False

    def __init__(self, ticket: Ticket, session: Session, limit: int) -> None:
        self.ticket, self.session, self.limit = ticket, session, limit
        self._buffers: list[SharedBuffer] = []
        """The buffer with this rank's bytes."""

    def run(self, data: bytes, timeout: float, what: str) -> dict[int, bytes] | None:
        gathered, self.ticket.undo = None, self._close
        try:
            connections = self.session.connect(self.ticket, timeout, what)
            if not connections.spans_hosts:
                self.watch = Watch(self.ticket, DIGEST, what, timeout)
                gathered = self._exchange(self.watch, data)
                self._ok = True
        except ReshardError as error:
            fail_and_close(self.watch, error, self._close)
        self._close()
        return gathered

    def _exchange(self, watch: Watch, data: bytes) -> dict[int, bytes]:
        """Send this rank's bytes in a buffer, wait for all Hellos, and read what they name."""
        me, peers, hellos = watch.connections.rank, watch.connections.peers, watch.inbox.hellos
        watch.progress = lambda: f"on rank {me}: its own part is sent"
        check_earlier_calls(watch)
        frame = _LENGTH.pack(len(data)) + data
        buffer = watch.connections.buffers.take(len(frame))
        self._buffers.append(buffer)
        ctypes.memmove(buffer.address, frame, len(frame))
        hello = watch.hello(eager=1, buffer=buffer.number)
        for peer in peers:
            watch.mailbox.send(peer, hello, buffer.fd_for(peer))

        def missing() -> list[int]:
            others = [peer for peer, one in tuple(hellos.items()) if one[1:4] != hello[1:4]]
            if others:
                text = f"{ranks_with(others, 'is', 'are')} in a move and rank {me} is not"
                advice = "make the same calls in the same order on all ranks"
                watch.fail(Cause("disagree", f"{text}: {advice}"))
            return [peer for peer in peers if peer not in hellos]

        watch.wait(missing, lambda peer: "its part")
        ranks = self.session.ranks
        return {rank: data if rank == me else self._read(watch, rank) for rank in ranks}

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
