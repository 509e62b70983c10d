"""The order in which memory of another process is checked, marked, read and written."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest

from reshard.errors import PeerLostError
from reshard.live.failure.watch import WRITER_SECONDS, Watch
from reshard.live.program.messages import IovecCall
from reshard.live.session.control import Abort, Cause
from reshard.live.session.rendezvous import Connections
from reshard.live.session.shared_memory import AbortFlags
from reshard.live.transport.host import PeerMemory

CALL, PEER = 5, 1


class Peer:
    """A peer whose memory is that of this process, and which looks around when it is checked."""

    pid = os.getpid()

    def __init__(self, failed: bool = False) -> None:
        self.own, self.flags, self._failed = AbortFlags.create(), self, failed
        self.here, self.there = np.arange(4), np.zeros(4, dtype=np.int64)
        self.seen: list[tuple[bool, list[int]]] = []
        """At every check, whether this rank was marked as writing, and what it had copied."""

    def has_failed(self, call: int) -> bool:
        assert call == CALL
        self.seen.append((self.own.is_writing(call), self.there.tolist()))
        return self._failed

    def memory(self) -> PeerMemory:
        def fail(peer: int, what: str, error: OSError | None = None) -> NoReturn:
            raise PeerLostError(f"rank {peer}: {what}, {error}")

        connections = SimpleNamespace(peers={PEER: self}, flags=self.own)
        watch: Any = SimpleNamespace(call=CALL, connections=connections, fail_because_of=fail)
        return PeerMemory(watch)

    def copy(self, writing: bool) -> list[IovecCall]:
        ends = (self.here, self.there) if writing else (self.there, self.here)
        return [IovecCall.single(*(end.ctypes.data for end in ends), self.here.nbytes)]


def test_a_rank_marks_that_it_writes_before_it_checks_the_peer() -> None:
    """The peer marks that it has failed before it waits for writers: one of them sees the other."""
    peer = Peer()
    peer.memory().write(PEER, peer.copy(writing=True), "w")
    assert peer.seen == [(True, [0, 0, 0, 0])]
    assert peer.there.tolist() == [0, 1, 2, 3]
    assert not peer.own.is_writing(CALL)


def test_nothing_is_written_into_a_call_that_has_failed() -> None:
    peer = Peer(failed=True)
    with pytest.raises(PeerLostError, match='rank 1: it to take its part of "w"'):
        peer.memory().write(PEER, peer.copy(writing=True), "w")
    assert peer.there.tolist() == [0, 0, 0, 0]
    assert not peer.own.is_writing(CALL)


def test_what_was_read_counts_only_if_the_call_had_not_failed_after_it() -> None:
    """The peer may free its tensors once it has failed: read first, check second."""
    peer = Peer()
    peer.memory().read(PEER, peer.copy(writing=False), "w")
    assert peer.seen == [(False, [0, 1, 2, 3])]
    peer = Peer(failed=True)
    with pytest.raises(PeerLostError, match='rank 1: its part of "w"'):
        peer.memory().read(PEER, peer.copy(writing=False), "w")


@pytest.mark.parametrize("writing", [True, False])
def test_memory_that_cannot_be_reached_is_an_error_of_the_peer(writing: bool) -> None:
    peer = Peer()
    (call,) = peer.copy(writing)
    outside = IovecCall.single(peer.here.ctypes.data, 8, call.num_bytes)
    access = peer.memory().write if writing else peer.memory().read
    with pytest.raises(PeerLostError, match="Bad address"):
        access(PEER, [outside], "w")
    assert not peer.own.is_writing(CALL)


def writers_among(writing: set[int], lost: set[int], ends: set[int]) -> set[int]:
    """Who still writes after a wait, of ranks 1 to 3; some end at its first step, and go on."""
    pages = {rank: AbortFlags.create() for rank in (1, 2, 3)}
    for rank in writing:
        pages[rank].begin_writing(CALL)

    def step(seconds: float) -> None:
        for rank in ends:
            pages[rank].end_writing(CALL)
        pages[3].begin_writing(CALL)

    peers = {rank: SimpleNamespace(flags=page) for rank, page in pages.items()}
    connections: Any = SimpleNamespace(peers=peers, mailbox=SimpleNamespace(lost=lost, step=step))
    return Connections.writers_after(connections, 0.02, CALL)


def test_a_rank_that_fails_waits_for_peers_that_write() -> None:
    """One that was seen not to write checks the flags before it writes again: it does not count."""
    assert writers_among(writing={1, 2}, lost=set(), ends={1, 2}) == set()
    assert writers_among(writing={1, 2}, lost=set(), ends={1}) == {2}
    assert writers_among(writing={1, 2}, lost={2}, ends=set()) == {1}


@pytest.mark.parametrize("writers", [set(), {1}])
def test_tensors_into_which_a_stopped_peer_may_write_are_kept(writers: set[int]) -> None:
    own, sent, tensors = AbortFlags.create(), list[tuple[int, object]](), object()

    def writers_after(seconds: float, call: int) -> set[int]:
        assert (seconds, call) == (WRITER_SECONDS, CALL)
        assert own.has_failed(call), "peers must see it before they are waited for"
        assert [(peer, type(message)) for peer, message in sent] == [(PEER, Abort)]
        return writers

    connections = SimpleNamespace(
        flags=own, peers={PEER: None}, last_failed=-1, quarantine=[], writers_after=writers_after
    )
    mailbox = SimpleNamespace(send=lambda peer, message: sent.append((peer, message)))
    watch: Any = SimpleNamespace(
        connections=connections, call=CALL, mailbox=mailbox, written=tensors
    )
    Watch._stop(watch, Cause("late", "on purpose"))
    assert watch.cause
    assert connections.last_failed == CALL
    assert connections.quarantine == ([tensors] if writers else [])
