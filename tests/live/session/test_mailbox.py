"""Control messages between processes of one host: none is lost when a peer exits."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from reshard.errors import MoveTimeoutError
from reshard.live.session.control import (
    Abort,
    Alive,
    Hello,
    Ready,
    Retired,
    Waiting,
    encode,
)
from reshard.live.session.mailbox import MAX_AHEAD, YIELD_SECONDS, Mailbox
from reshard.live.session.shared_memory import BufferPool, SharedBuffer

DIGEST = b"d" * 16


def pair() -> tuple[Mailbox, socket.socket]:
    """A mailbox, and the socket of its only peer, which is rank 1."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Mailbox({1: ours}), theirs


def test_all_that_has_come_is_filed_at_once() -> None:
    mailbox, peer = pair()
    inbox = mailbox.open(0)
    peer.send(encode(Hello(0, DIGEST, table_at=4096)))
    peer.send(encode(Ready(0, 0)))
    peer.send(encode(Abort(0, b"{}")))
    mailbox.step(0.0)
    assert inbox.hellos[1].call == 0
    assert inbox.hellos[1].table_at == 4096
    assert (1, 0) in inbox.ready
    assert inbox.abort == Abort(0, b"{}")
    mailbox.shut()
    peer.close()


def test_messages_of_a_call_that_opens_after_a_later_one() -> None:
    """Calls in flight go on in threads, in any order."""
    mailbox, peer = pair()
    mailbox.open(1)
    mailbox.open(2)
    mailbox.close(2)
    for call in range(3):
        peer.send(encode(Hello(call, DIGEST)))
    mailbox.step(0.0)
    assert 1 in mailbox.open(0).hellos
    assert 1 in mailbox.open(1).hellos
    assert 1 not in mailbox.open(2).hellos
    mailbox.shut()
    peer.close()


def test_a_buffer_is_used_again_when_its_peers_have_finished_the_call() -> None:
    """A peer's Hello says how many calls it has finished: call 2 is read once it has finished 3."""
    mailbox, peer = pair()
    pool = BufferPool(SharedBuffer.close, mailbox.have_read)
    lent = pool.take(100)
    lent.loans = {1: 2}
    pool.give_back(lent)
    for call, finished in ((3, 1), (4, 2)):
        peer.send(encode(Hello(call, DIGEST, finished=finished)))
        mailbox.step(0.0)
        other = pool.take(100)
        assert other is not lent, "rank 1 may still read it"
        other.close()
    peer.send(encode(Hello(5, DIGEST, finished=3)))
    mailbox.step(0.0)
    assert pool.take(100) is lent
    pool.give_back(lent)
    lent.loans = {1: 9}
    peer.close()
    mailbox.step(0.0)
    assert pool.take(100) is lent, "a peer that is gone reads nothing"
    lent.close()
    mailbox.shut()


def test_a_buffer_that_another_thread_lends_meanwhile_is_not_taken() -> None:
    """Between the moment a thread sees a free buffer and the moment it takes it, another thread may
    have used it for a whole call, whose messages peers still read."""
    calls = []

    def have_read(loans: Mapping[int, int]) -> bool:
        unread = bool(loans)
        if not calls:
            calls.append(1)
            pool.end_call([pool.take(100)], 1, (1,), ok=True)
        return not unread

    pool = BufferPool(SharedBuffer.close, have_read)
    pool.give_back(pool.take(100))
    taken = pool.take(100)
    assert not taken.loans
    taken.close()
    pool.release()


def test_a_message_that_is_filed_twice_maps_its_buffer_once() -> None:
    """An exception of a signal handler may come after it was filed, and threads read it by then."""
    mailbox, peer = pair()
    inbox, sent = mailbox.open(0), SharedBuffer.create(4096)
    found = []
    for _ in range(2):
        message = encode(Hello(0, DIGEST, eager=1, buffer=sent.number))
        socket.send_fds(peer, [message], [sent.fd])
        mailbox.step(0.0)
        found.append(inbox.buffers[1, sent.number])
    first = found[0]
    assert inbox.buffers[1, sent.number] is first is mailbox.buffers[1, sent.number]
    mailbox.close(0)
    assert inbox.buffers[1, sent.number] is first  # the thread of the call may still read it
    mailbox.shut()
    peer.close()
    sent.close()


def test_last_words_of_a_peer_that_did_not_hear_us() -> None:
    """Linux says "connection reset" before it gives what the peer has said."""
    mailbox, peer = pair()
    inbox = mailbox.open(0)
    mailbox.send(1, Hello(0, DIGEST))
    peer.send(encode(Abort(0, b"why")))
    peer.close()
    mailbox.step(0.0)
    assert inbox.abort == Abort(0, b"why")
    assert mailbox.lost == {1}
    mailbox.shut()


def test_last_words_of_a_peer_that_we_speak_to_in_vain() -> None:
    mailbox, peer = pair()
    inbox = mailbox.open(0)
    peer.send(encode(Abort(0, b"why")))
    peer.close()
    for _ in range(3):
        mailbox.send(1, Hello(0, DIGEST))
    mailbox.step(0.0)
    assert inbox.abort == Abort(0, b"why")
    assert mailbox.lost == {1}
    mailbox.shut()


def test_a_peer_that_talks_nonsense_is_lost() -> None:
    for nonsense in (b"x", b"rsh3" + b"\xff" * 76, b"\0" * 80, b"rsh3" * 9000):
        mailbox, peer = pair()
        mailbox.open(0)
        peer.send(nonsense)
        mailbox.step(0.0)
        assert mailbox.lost == {1}
        mailbox.shut()
        peer.close()


def test_a_peer_that_reads_nothing_holds_up_no_rank() -> None:
    """A rank that is stopped, or makes no calls, lets its socket fill up."""
    mailbox, peer = pair()
    mailbox.seconds = 0.2

    def fill() -> None:
        for _ in range(100_000):
            mailbox.send(1, Hello(0, DIGEST))

    with pytest.raises(MoveTimeoutError, match=r"rank 1 has not read its messages for 0\.2 s"):
        fill()
    began = time.monotonic()
    for message in (Alive(0), Abort(0, b"why"), Waiting(0, b"x"), Retired(0, 1)):
        mailbox.send(1, message)
    assert time.monotonic() - began < 0.1
    while select.select([peer], [], [], 0)[0]:
        peer.recv(4096)
    mailbox.send(1, Hello(0, DIGEST))  # there is room again
    mailbox.shut()
    peer.close()


def test_a_peer_may_be_as_far_ahead_as_this_rank_has_come() -> None:
    """Calls without an exchange count as well, while an earlier call waits in a thread."""
    mailbox, peer = pair()
    mailbox.open(0)
    for call in range(1, 2 * MAX_AHEAD):
        mailbox.skip(call)
    peer.send(encode(Hello(2 * MAX_AHEAD, DIGEST, finished=1)))
    mailbox.step(0.0)
    assert not mailbox.lost
    assert 1 in mailbox.open(2 * MAX_AHEAD).hellos
    mailbox.close(0)
    assert mailbox.num_finished == 2 * MAX_AHEAD
    mailbox.shut()
    peer.close()


def test_a_thread_that_polls_lets_the_one_that_receives_run() -> None:
    """It waits without the interpreter's lock, which the other needs to file a message."""
    mailbox, peer = pair()
    with ThreadPoolExecutor(1) as other:
        other.submit(mailbox._polling.try_acquire).result()
        began = time.monotonic()
        mailbox.step(0.0)
        assert time.monotonic() - began > YIELD_SECONDS / 2
        other.submit(mailbox._polling.release).result()
    mailbox.shut()
    peer.close()


def test_calls_are_counted_in_any_order_and_once() -> None:
    sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mailbox = Mailbox({1: sockets[0]}, first_call=3)
    for call, finished in ((1, 3), (5, 3), (3, 4), (3, 4), (4, 6), (6, 7)):
        mailbox.close(call)
        assert mailbox.num_finished == finished
    mailbox.close(9, 8, 7, 3)
    assert mailbox.num_finished == 10
    assert not mailbox._over
    mailbox.shut()
    sockets[1].close()
