"""Control messages between processes of one host: none is lost when a peer exits."""

from __future__ import annotations

import socket

from reshard.live.session.control import Abort, Hello, Ready, encode
from reshard.live.session.mailbox import Mailbox

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
