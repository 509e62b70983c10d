"""Peers that send malformed messages count as lost, and do no other harm."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from reshard.errors import LiveError
from reshard.live.failure import agreement
from reshard.live.session import listener
from reshard.live.session.control import Abort, Control, Hello, Ready, Waiting, encode
from reshard.live.session.session import Connections, all_connections
from tests.live.failure.faults import Tried, plan_of, source_of, tried
from tests.ranks.pool import Pool, fresh_ranks
from tests.ranks.rank import local_group
from tests.soak import soaking, within

BROKEN = 2


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    """Ranks of this file, which no other test relies on."""
    ranks = Pool(size=4)
    yield ranks
    ranks.close()


def unsealed(num_bytes: int) -> int:
    fd = os.memfd_create("broken")
    os.ftruncate(fd, num_bytes)
    return fd


def say(connections: Connections, data: bytes, fd: int | None = None) -> None:
    for peer in connections.peers.values():
        if fd is None:
            peer.socket.send(data)
        else:
            socket.send_fds(peer.socket, [data], [fd])


def sent(connections: Connections, kind: type, *fields: object, **named: object) -> bytes:
    message: Control = kind(connections.mailbox.num_finished, *fields, **named)
    return encode(message)


DIGEST = bytes.fromhex(plan_of((16, 52)).digest)

NONSENSE: dict[str, Callable[[Connections], None]] = {
    "garbage": lambda to: say(to, os.urandom(88)),
    "a long text": lambda to: say(to, sent(to, Waiting, b"") + bytes(20_000)),
    "an unknown kind": lambda to: say(to, b"rsh3" + b"\xff" * 84),
    "a far call": lambda to: say(to, encode(Hello(1 << 60, bytes(16)))),
    "memory that can shrink": lambda to: say(to, sent(to, Ready, 0, 5), unsealed(4096)),
    "no memory at all": lambda to: say(
        to, sent(to, Ready, 0, 5), os.open("/dev/null", os.O_RDONLY)
    ),
    "a place outside": lambda to: say(
        to, sent(to, Hello, DIGEST, eager=1, buffer=1 << 40, offset=1 << 50)
    ),
    "addresses that are none": lambda to: say(to, sent(to, Hello, DIGEST, table_at=1 << 62)),
    "a broken cause": lambda to: say(to, sent(to, Abort, b"\xff{")),
    "somebody who waits for nonsense": lambda to: say(to, sent(to, Waiting, b'{"peer": []')),
}


def hear_nonsense(rank: int, what: str, transport: str) -> Tried | None:
    """Each kind in a session of its own, which is of no use afterwards."""
    group, plan = local_group(0, 1, 2, 3), plan_of((16, 52))
    options: Any = {"transport": transport, "timeout": 1.5, "group": group}
    plan.run(source_of(plan, rank), **options | {"timeout": 20.0})
    outcome = None
    if rank == BROKEN:
        (connections,) = all_connections(group)
        NONSENSE[what](connections)
    else:
        outcome = tried(lambda: plan.run(source_of(plan, rank), **options))
    dist.barrier()  # it stays until the others have given up
    dist.destroy_process_group(group)
    return outcome


@pytest.mark.parametrize("transport", ["auto", "peer"] if soaking() else ["auto"])
@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_from_a_peer(four: Pool, what: str, transport: str) -> None:
    found = four.run(hear_nonsense, what, transport)
    assert [one is None for one in found] == [rank == BROKEN for rank in range(4)]
    for one in filter(None, found):
        assert one.kind in ("PeerLostError", "MoveTimeoutError", "LiveError"), one
        assert f"rank {BROKEN} " in one.message or what == "a broken cause", one
        assert one.seconds < within(1.5 + 1.5), one


def test_a_door_that_is_closed_meanwhile_is_an_error_of_ours() -> None:
    """As the cleanup thread closes it when the user has interrupted `wait`."""
    door = listener.Listener(0)
    members = dict.fromkeys(range(2), door.announced)
    with pytest.raises(LiveError, match="rank 0 cannot accept connections"):
        door.connect_all(members, 5, door.close, lambda step: None, lambda peers: AssertionError())


def meet_strangers(rank: int) -> str:
    """Somebody comes to the door before the others, says nothing or nonsense, and stays."""
    kept = []
    usual = listener.Listener.connect_all

    def besieged(door: listener.Listener, *args: Any) -> Any:
        for word in (None, b"nonsense", b'[3, "wrong name"]', b"[[[["):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.connect("\0" + door.name)
            if word is not None:
                stranger.send(word)
            kept.append(stranger)
        return usual(door, *args)

    group = local_group(0, 1, 2, 3)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(listener.Listener, "connect_all", besieged)
        plan = plan_of((16, 52))
        outcome = tried(lambda: plan.run(source_of(plan, rank), timeout=10, group=group))
    assert len(kept) == (4 if rank == 0 else 0), kept
    for stranger in kept:
        stranger.close()
    return outcome.kind + outcome.message


def test_strangers_at_the_door(four: Pool) -> None:
    assert four.run(meet_strangers) == ["moved"] * 4


def hear_a_broken_store(rank: int) -> Tried:
    plan = plan_of((16, 56))
    plan.run(source_of(plan, rank), timeout=5)
    with pytest.MonkeyPatch.context() as patch:
        if rank == BROKEN:
            patch.setattr(agreement.Signature, "to_json", lambda terms: '{"broken": ')
        other = plan_of((16, 60))
        outcome = tried(lambda: other.run(source_of(other, rank), timeout=3))
    plan.run(source_of(plan, rank), timeout=5)
    return outcome


def test_nonsense_in_the_store(four: Pool) -> None:
    for one in four.run(hear_a_broken_store):
        assert one.kind in ("LiveError", "DisagreementError"), one
        assert "\n" not in one.message


def leave_a_child(rank: int) -> int:
    plan = plan_of((16, 64))
    plan.run(source_of(plan, rank), timeout=5)
    if rank == BROKEN:
        if os.fork() == 0:
            time.sleep(8)
            os._exit(0)
        os.kill(os.getpid(), 9)
    began = time.monotonic()
    outcome = tried(lambda: plan.run(source_of(plan, rank), timeout=6))
    assert outcome.kind == "PeerLostError", outcome
    assert time.monotonic() - began < 4.0
    return threading.active_count()


def test_a_child_does_not_hide_that_its_parent_died() -> None:
    with fresh_ranks(4) as ranks:
        outcomes = ranks.outcomes(leave_a_child)
        assert [type(one).__name__ for one in outcomes].count("Returned") == 3, outcomes


def move_in_a_child(rank: int, connected: bool) -> Tried:
    """A child of rank 2 makes the call that its parent makes next."""
    group, plan = local_group(0, 1, 2, 3), plan_of((16, 64))
    given = source_of(plan, rank)
    if connected:
        plan.run(given, group=group)
    outcome = Tried("", "", 0.0, 0.0)
    if rank == BROKEN:
        receiver, sender = os.pipe()
        if os.fork() == 0:
            found = tried(lambda: plan.run(given, group=None if connected else group, timeout=6))
            if connected:
                found = tried(lambda: plan.run(given, group=group, timeout=6))
            os.write(sender, f"{found.kind}|{found.message}|{found.seconds}".encode())
            os._exit(0)
        os.close(sender)
        with os.fdopen(receiver) as answer:
            kind, message, seconds = answer.read().split("|")
        os.wait()
        outcome = Tried(kind, message, 0.0, float(seconds))
    for number in range(3):
        moved = plan.run(source_of(plan, rank, number), group=group, timeout=6)
        assert moved["tensor"].flatten()[0] == number + 16 * rank
    dist.destroy_process_group(group)
    return outcome


@pytest.mark.parametrize("connected", [True, False])
def test_a_forked_child_is_no_rank(four: Pool, connected: bool) -> None:
    child = four.run(move_in_a_child, connected)[BROKEN]
    assert child.kind == "LiveError"
    assert "was forked from a rank" in child.message
    assert child.seconds < within(1.0)


def test_no_file_is_made() -> None:
    assert not [path for path in Path("/dev/shm").iterdir() if "reshard" in path.name]
