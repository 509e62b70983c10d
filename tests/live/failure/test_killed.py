"""A rank is killed: the others name it and their progress, soon, and no resources leak."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reshard as rs
from reshard.live.session.rendezvous import Rendezvous
from reshard.live.transport.gloo import GlooTransport
from tests.live.failure.faults import FOUR, TRANSPORTS, Tried, plan_of, source_of, tried
from tests.ranks.outcome import Died, Returned
from tests.ranks.pool import fresh_ranks
from tests.ranks.rank import tell
from tests.soak import cases, soaking, within

TIMEOUT = 4.0 if soaking() else 2.0
PROGRESS = re.compile(r"\(on rank \d: (no round begun|round \d+ of \d+, .* of .* done).*\)$")


def plans() -> list[rs.Plan]:
    """Many rounds, straight rows, relayed replicas, sums."""
    rows, whole = rs.Layout(FOUR, "x -"), rs.Layout(FOUR, "- -")
    addends = rs.Layout(FOUR, "- - | sum x")
    return [
        plan_of((1024, 1024), memory="256KiB"),
        plan_of((1024, 1024)),
        rs.plan(rows, whole, shape=(512, 512)),
        rs.plan(addends, rows, shape=(256, 512)),
    ]


def move_for_ever(rank: int, transport: str, victim: int) -> Tried:
    made = [(plan, source_of(plan, rank)) for plan in plans()]
    tell("begun")

    def move() -> None:
        options: Any = {"timeout": TIMEOUT, "transport": transport}
        while True:
            for plan, given in made:
                plan.run(given, **options)

    outcome = tried(move)
    move_without(victim, rank)
    return outcome


def move_without(dead: int, rank: int) -> None:
    """Who is left can go on, unless the dead rank served the caller's own store."""
    if dead == 0:
        return
    left = rs.Mesh(x=3, ranks=[other for other in range(4) if other != dead])
    plan = rs.plan(rs.Layout(left, "x -"), rs.Layout(left, "- x"), shape=(12, 9))
    result = plan.run(source_of(plan, rank), timeout=15)
    assert result["tensor"].shape == (12, 3)


def left_behind() -> set[str]:
    """Names in the folder of shared memory."""
    return {path.name for path in Path("/dev/shm").iterdir() if "reshard" in path.name}


@pytest.mark.parametrize("seed", range(cases(3, 20)))
def test_a_rank_is_killed_at_some_moment(seed: int) -> None:
    random = Random(seed)
    transport, victim = TRANSPORTS[seed % 3], random.randrange(4)
    before = left_behind()
    with fresh_ranks(4) as ranks:
        job = ranks.begin(move_for_ever, transport, victim)
        for rank in range(4):
            job.hear(rank)
        # From the making of connections to the middle of moves.
        time.sleep(random.choice([0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8]) * random.random() * 2)
        ranks.kill(victim)
        killed = time.monotonic()
        outcomes = job.outcomes(TIMEOUT + 40)
        for rank, outcome in enumerate(outcomes):
            if rank == victim:
                assert isinstance(outcome, Died)
                continue
            assert isinstance(outcome, Returned), str(outcome)
            check(outcome.value, victim, killed)
    assert left_behind() <= before


def check(one: Tried, victim: int, killed: float) -> None:
    assert one.kind in ("PeerLostError", "MoveTimeoutError"), one
    # The caller's own store does not say which rank serves it.
    named = f"rank {victim} " in one.message or (
        victim == 0 and "the store of the process group does not answer" in one.message
    )
    assert named, one
    assert one.ended - killed < within(TIMEOUT + 1.0), (one.ended - killed, one)
    assert PROGRESS.search(one.message), one
    assert '"tensor"' in one.message, one


LATE = 3


def first_move_of_all(rank: int, port: int) -> Tried:
    """The store of the group is served elsewhere, as torchrun does; one rank comes late."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    plan = plan_of((16, 24))
    given = source_of(plan, rank)
    announce = Rendezvous._announce

    def announced(self: Rendezvous, *args: Any) -> None:
        announce(self, *args)
        tell("called")

    Rendezvous._announce = announced  # type: ignore[method-assign]
    dist.barrier()
    if rank == LATE:
        tell("called")
        time.sleep(1.5)
    return tried(lambda: plan.run(given, timeout=20))


@pytest.mark.parametrize("victim", [0, 2] if not soaking() else [0, 1, 2])
def test_a_rank_is_killed_in_the_first_call(victim: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with fresh_ranks(4, init=False) as ranks:
        job = ranks.begin(first_move_of_all, store.port)
        for rank in range(4):
            job.hear(rank)
        ranks.kill(victim)
        killed = time.monotonic()
        outcomes = job.outcomes(40)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert isinstance(outcome, Returned), str(outcome)
        one = outcome.value
        assert one.kind == "PeerLostError", one
        assert f"rank {victim} is gone" in one.message, one
        # The late rank hears of it as soon as it calls.
        assert one.ended - max(killed, one.called) < within(1.0), one


def call_without_the_store(rank: int, port: int) -> Tried:
    """Rank 0 serves the store of the group, and is killed before the first call of the others."""
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    plan = rs.plan(*(rs.Layout(rs.Mesh(x=3), words) for words in ("x -", "- x")), shape=(3, 3))
    dist.barrier()
    tell("ready")
    time.sleep(20.0 if rank == 0 else 1.0)
    return tried(lambda: plan.run({"tensor": torch.zeros(1, 3)}, timeout=15))


def test_the_process_with_the_groups_store_is_killed_before_the_first_call() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    with fresh_ranks(3, init=False) as ranks:
        job = ranks.begin(call_without_the_store, port)
        for rank in range(3):
            job.hear(rank)
        ranks.kill(0)
        outcomes = job.outcomes(40)
    for outcome in outcomes[1:]:
        assert isinstance(outcome, Returned), str(outcome)
        assert outcome.value.kind == "PeerLostError", outcome
        assert "the process that serves it has ended" in outcome.value.message, outcome
        assert outcome.value.seconds < within(3.0), outcome


def wait_when_stopped(rank: int, transport: str) -> tuple[Tried, Tried]:
    """One long move: nobody is through with it when a rank is stopped."""
    plan, small = plan_of((2048, 2048), memory="64KiB"), plan_of((512, 512))
    given = source_of(plan, rank)
    small.run(source_of(small, rank), transport=transport)
    into = {"tensor": torch.full((2048, 512), -1.0)}
    tell("ready")
    options: Any = {"transport": transport, "timeout": 0.9}
    first = tried(lambda: plan.run(given, into=into, **options))
    into["tensor"].fill_(-1)
    dist.barrier()
    assert (into["tensor"] == -1).all(), "something came after the call had failed"
    again = tried(lambda: small.run(source_of(small, rank), transport=transport, timeout=10))
    return first, again


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_is_stopped_and_goes_on_later(transport: str) -> None:
    with fresh_ranks(4) as ranks:
        job = ranks.begin(wait_when_stopped, transport)
        for rank in range(4):
            job.hear(rank)
        time.sleep(0.15)
        ranks.kill(3, signal.SIGSTOP)
        time.sleep(2.6)  # until the others have failed
        ranks.kill(3, signal.SIGCONT)
        outcomes = [outcome.value for outcome in job.outcomes(30)]
    for rank, (first, second) in enumerate(outcomes):
        assert second.kind == "moved", second
        assert first.kind == "MoveTimeoutError", (rank, first)
        assert "rank 3 " in first.cause
        assert "0.9 s" in first.cause


def call_a_stopped_store(rank: int) -> Tried:
    """Rank 0, which serves the session's store, stops itself when it has sent its Hellos.

    Rank 1 has the store's answer by then; the others wait for it, and rank 1 for their Hellos.
    """
    plan = plan_of((64, 64))
    plan.run(source_of(plan, rank), transport="network")
    dist.barrier()
    if rank == 0:
        usual = GlooTransport.send_hellos

        def send_and_stop(transport: GlooTransport) -> None:
            usual(transport)
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGSTOP)

        GlooTransport.send_hellos = send_and_stop  # type: ignore[method-assign]
    elif rank > 1:
        time.sleep(0.6)
    return tried(lambda: plan.run(source_of(plan, rank), transport="network", timeout=1.0))


def test_the_rank_that_serves_the_store_is_stopped() -> None:
    with fresh_ranks(4) as ranks:
        job = ranks.begin(call_a_stopped_store)
        outcomes = job.outcomes(40, ranks=[1, 2, 3])
        ranks.kill(0, signal.SIGCONT)
        job.outcomes(30)
    for one in (outcome.value for outcome in outcomes):
        assert one.kind in ("MoveTimeoutError", "PeerLostError"), one
        assert "rank 0 " in one.cause, one
        assert one.seconds < within(3.5), one


def connect_through_a_stopped_store(rank: int, step: int) -> list[Tried]:
    """Rank 0, which serves the store of the group, stops itself while the ranks connect."""
    plan, reach = plan_of((64, 64)), Rendezvous._reach
    if rank == 0:

        def stopping(rendezvous: Rendezvous, reached: int) -> None:
            reach(rendezvous, reached)
            if reached == step:
                Rendezvous._reach = reach  # type: ignore[method-assign]
                os.kill(os.getpid(), signal.SIGSTOP)

        Rendezvous._reach = stopping  # type: ignore[method-assign]

    def call(timeout: float) -> Tried:
        return tried(lambda: plan.run(source_of(plan, rank), timeout=timeout))

    calls = [call(1.0), call(0.5)]
    tell("gave up")
    dist.barrier()
    return [*calls, call(20.0)]


@pytest.mark.parametrize("step", [1, 4])
def test_the_process_with_the_groups_store_is_stopped_while_ranks_connect(step: int) -> None:
    with fresh_ranks(4) as ranks:
        job = ranks.begin(connect_through_a_stopped_store, step)
        for rank in (1, 2, 3):
            job.hear(rank)
        stat = Path(f"/proc/{ranks.pids[0]}/stat")
        while ") T " not in stat.read_text():  # it may come later than the others give up
            time.sleep(0.05)
        ranks.kill(0, signal.SIGCONT)
        outcomes = [outcome.value for outcome in job.outcomes(40)]
    for first, second, third in outcomes:
        assert first.kind == "MoveTimeoutError", first
        # Half as long if this rank had waited for other ranks before.
        silent = r"usually rank 0 of the job, has not answered for (1|0\.5) s"
        assert re.search(silent, first.cause), first
        assert second.kind == "MoveTimeoutError", second
        assert third.kind == "moved", third
    for first, second, _ in outcomes[1:]:
        assert first.seconds < within(2.0), first
        assert second.seconds < within(1.5), second


def leave_after_the_move(rank: int, transport: str) -> None:
    """The rank that serves the store has done its part first, and leaves."""
    plan = plan_of((64, 64))
    if rank:
        time.sleep(0.05 * rank)
    plan.run(source_of(plan, rank), transport=transport, timeout=10)
    os._exit(0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_leave_after_their_part_harm_nobody(transport: str) -> None:
    with fresh_ranks(4) as ranks:
        for outcome in ranks.outcomes(leave_after_the_move, transport):
            assert isinstance(outcome, Died)
            assert outcome.exit_code == 0, outcome
