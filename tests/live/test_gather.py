"""Bytes of all ranks without a plan: what arrives, and how it fails together with other calls."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import torch.distributed as dist

from reshard.live.gather import DIGEST, gather_bytes
from reshard.live.session import rendezvous
from reshard.live.session.control import Hello
from reshard.live.session.session import all_connections, session_of
from tests.live.failure.faults import (
    Tried,
    check_same,
    check_soon,
    moves_well,
    plan_of,
    source_of,
    tried,
)
from tests.live.session.test_broken_peers import say, sent
from tests.ranks.pool import Pool, fresh_ranks
from tests.ranks.rank import pool_group
from tests.soak import within

ODD = 1
LIMIT = 1 << 20


def gather(group: Any, data: bytes, timeout: float = 20.0, limit: int = LIMIT) -> dict[int, bytes]:
    found = gather_bytes(group, data, timeout=timeout, what="a test", limit=limit)
    assert found is not None
    return found


def gather_many(rank: int) -> None:
    """Sizes that differ between ranks, and grow and shrink from call to call."""
    group = pool_group(4)
    for number in range(40):
        sizes = [(number * (one + 3) * 7919) % 20_000 for one in range(4)]
        found = gather(group, bytes([rank, number]) * sizes[rank])
        assert found == {one: bytes([one, number]) * sizes[one] for one in range(4)}
        if number % 10 == 9:
            moves_well(rank, group)


def test_values_of_many_sizes_between_moves(pool: Pool) -> None:
    pool.run(gather_many, ranks=range(4))


def numbers_of_buffers(rank: int) -> list[int]:
    """How many buffers of its peers a rank knows after some calls, and after many more."""
    group, numbers = pool_group(4), []
    for count in (10, 40):
        for _ in range(count):
            gather(group, b"x" * 5000)
        connections = session_of(group, range(4)).connections
        assert connections is not None
        numbers.append(len(connections.mailbox.buffers))
    return numbers


def test_buffers_are_used_again(pool: Pool) -> None:
    for few, many in pool.run(numbers_of_buffers, ranks=range(4)):
        assert few > 0
        # Each of 3 peers has at most two in use; the second is made when it is first ahead.
        assert many <= few + 3


def one_rank_moves(rank: int, warm: bool) -> Tried:
    group, plan = pool_group(4), plan_of((16, 68 + 4 * warm))
    source = source_of(plan, rank)
    gather(group, b"before")
    if warm:
        plan.run(source, group=group)
    if rank == ODD:
        outcome = tried(lambda: plan.run(source, group=group, timeout=20))
    else:
        outcome = tried(lambda: gather(group, b""))
    assert gather(group, bytes([rank])) == {one: bytes([one]) for one in range(4)}
    moves_well(rank, group)
    return outcome


@pytest.mark.parametrize("warm", [False, True])
def test_one_rank_is_in_a_move(pool: Pool, warm: bool) -> None:
    told = pool.run(one_rank_moves, warm, ranks=range(4))
    check_same(told, "DisagreementError", f"rank {ODD} is in a move", "make the same calls")
    check_soon(told, 2.0)


def interrupted_in_wait(rank: int) -> tuple[Tried, bool]:
    """All ranks but the last gather; one of them is interrupted while it waits."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    group = dist.group.WORLD
    gather(group, b"")
    if rank == 3:
        time.sleep(1.5)
    elif rank == ODD:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.7)
    outcome = tried(lambda: gather(group, b"part"))
    return outcome, gather(group, b"again") == dict.fromkeys(range(4), b"again")


def test_an_interrupt_while_a_rank_waits() -> None:
    with fresh_ranks(4) as ranks:
        told = ranks.run(interrupted_in_wait)
    outcomes = [one for one, _ in told]
    assert outcomes[ODD].kind == "KeyboardInterrupt"
    for rank in (0, 2, 3):
        assert outcomes[rank].kind == "LiveError", outcomes[rank]
        assert f"rank {ODD} was interrupted" in outcomes[rank].message
        assert outcomes[rank].ended - outcomes[ODD].ended < within(2.0)
    assert all(works for _, works in told)


def gather_while_connecting(rank: int) -> None:
    """Rank 0 knows that there are two hosts when it gathers, rank 1 not yet: numbers stay equal."""
    group, plan = dist.group.WORLD, plan_of((16, 36))
    usual = rendezvous.Rendezvous.run

    def run_late(one: rendezvous.Rendezvous) -> Any:
        found = usual(one)
        time.sleep(1.0 if rank == 1 else 0.0)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "host_identity", lambda: "ab"[rank % 2])
        patch.setattr(rendezvous.Rendezvous, "run", run_late)
        handle = plan.start(source_of(plan, rank), timeout=20)
        while rank == 0 and not all_connections():
            time.sleep(0.01)
        assert gather_bytes(group, b"", timeout=20, what="a test", limit=LIMIT) is None
        handle.wait()
        for _ in range(2):
            plan.run(source_of(plan, rank), timeout=20)


def test_ranks_of_two_hosts_gather_while_they_connect() -> None:
    with fresh_ranks(4) as ranks:
        ranks.run(gather_while_connecting)


def send_nonsense(rank: int, what: str) -> Tried | None:
    group = dist.group.WORLD
    gather(group, b"")
    if rank == ODD:
        (connections,) = all_connections()
        if what == "no buffer":
            say(connections, sent(connections, Hello, DIGEST))
        elif what == "a buffer that is none":
            say(connections, sent(connections, Hello, DIGEST, eager=1, buffer=1 << 40))
        else:
            return tried(lambda: gather(group, b"x" * 5000, limit=LIMIT))
        dist.barrier()  # it stays until the others have given up
        return None
    limit = 4000 if what == "too much" else LIMIT
    outcome = tried(lambda: gather(group, b"", timeout=1.5, limit=limit))
    if what != "too much":
        dist.barrier()
    return outcome


@pytest.mark.parametrize("what", ["no buffer", "a buffer that is none", "too much"])
def test_a_broken_peer(what: str) -> None:
    with fresh_ranks(4) as ranks:
        outcomes = ranks.outcomes(send_nonsense, what)
    for rank in (0, 2, 3):
        one: Tried = outcomes[rank].value
        assert one.kind in ("LiveError", "PeerLostError"), one
        assert f"rank {ODD} " in one.message, one
        assert one.seconds < within(3.0), one
