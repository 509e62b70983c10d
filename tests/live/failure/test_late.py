"""Ranks that are late, skip a call, or stop in it: the error names the rank that is to blame."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reshard as rs
from reshard.live.session import rendezvous, wait_graph
from reshard.live.session.rendezvous import Rendezvous
from reshard.live.session.session import all_connections, sessions
from tests.live.failure.faults import (
    COLUMNS,
    FOUR,
    ROWS,
    TRANSPORTS,
    Tried,
    check_same,
    moves_well,
    plan_of,
    source_of,
    tried,
)
from tests.ranks.pool import Pool
from tests.ranks.rank import local_group, pool_group
from tests.soak import soaking, within

LATE = 3


def come_late(rank: int, transport: str, seconds: float, options: dict[str, Any]) -> Tried:
    group, plan = pool_group(4), plan_of((16, 40))
    given = source_of(plan, rank)
    plan.run(given, group=group, transport=transport)
    if rank == LATE:
        time.sleep(seconds)
    outcome = tried(lambda: plan.run(given, group=group, transport=transport, **options))
    moves_well(rank, group, transport)
    return outcome


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_late_rank_is_waited_for(pool: Pool, transport: str) -> None:
    late = 30.0 if soaking() else 1.3  # longer than the engine's periods
    options = {"timeout": late + 3}
    for one in pool.run(come_late, transport, late, options, ranks=range(4), timeout=late + 30):
        assert one.kind == "moved", one


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_is_too_late(pool: Pool, transport: str) -> None:
    outcomes = pool.run(come_late, transport, 1.4, {"timeout": 0.6}, ranks=range(4))
    check_same(outcomes, "MoveTimeoutError", "rank 3 has not called within 0.6 s", '"tensor"')
    for rank, one in enumerate(outcomes):
        assert one.seconds < within(0.6 if rank == LATE else 1.6), one


def come_late_after_hearing(rank: int, options: dict[str, Any]) -> Tried:
    """The late rank has heard that all others have called, and not that they have given up."""
    group, plan = pool_group(4), plan_of((16, 40))
    local = source_of(plan, rank)["tensor"]

    def move(**more: Any) -> None:
        rs.move(local, ROWS, COLUMNS, shape=(16, 40), group=group, **more)

    move()
    move()
    dist.barrier(group)
    if rank == LATE:
        time.sleep(0.3)
        for connections in all_connections(group):
            connections.mailbox.step(0.0)
        time.sleep(1.2)
    outcome = tried(lambda: move(**options if rank == LATE else {"timeout": 0.7}))
    moves_well(rank, group)
    return outcome


@pytest.mark.parametrize("options", [{}, {"timeout": 30.0}], ids=["prepared", "any"])
def test_a_late_rank_learns_that_the_others_have_given_up(
    pool: Pool, options: dict[str, Any]
) -> None:
    outcomes = pool.run(come_late_after_hearing, options, ranks=range(4))
    check_same(outcomes, "MoveTimeoutError", "rank 3 has not called within 0.7 s", '"tensor"')


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_deadline(pool: Pool, transport: str) -> None:
    options = {"timeout": 30.0, "deadline": 0.5}
    outcomes = pool.run(come_late, transport, 1.3, options, ranks=range(4))
    check_same(outcomes[:3], "MoveTimeoutError", "rank 3", "the deadline of 0.5 s")
    assert all(one.seconds < within(1.5) for one in outcomes[:3]), outcomes


def row_plan() -> rs.Plan:
    """Each rank gets its part from the one before it, in several rounds."""
    shifted = rs.Layout(rs.Mesh(x=4, ranks=[1, 2, 3, 0]), "x -")
    return rs.plan(rs.Layout(FOUR, "x -"), shifted, shape=(64, 64), dtype="float32", memory="2KiB")


def wait_in_a_row(rank: int, transport: str) -> Tried:
    """Each rank gets its part from the one before it; the first of them is late.

    Rank 2, which exchanges nothing with it, gives up first: rank 1 has posted by then for whom it
    waits.
    """
    group, plan = pool_group(4), row_plan()
    given = source_of(plan, rank)
    plan.run(given, group=group, transport=transport)
    if rank == 0:
        time.sleep(3.2)
    options: Any = {"transport": transport, "timeout": 1.4 if rank == 2 else 3.0}
    outcome = tried(lambda: plan.run(given, group=group, **options))
    moves_well(rank, group, transport)
    return outcome


@pytest.mark.parametrize("transport", ["auto", "network"])
def test_the_first_in_a_row_is_to_blame(pool: Pool, transport: str) -> None:
    outcomes = pool.run(wait_in_a_row, transport, ranks=range(4))
    check_same(outcomes, "MoveTimeoutError", "rank 0 has not called")
    assert all(one.seconds < within(3.0) for one in outcomes), outcomes


def work_long(
    rank: int, transport: str, in_a_row: bool, two_hosts: bool = False, timeout: float = 0.6
) -> float:
    """A rank that works longer than the timeout, with signs of life, is not given up.

    It does so in the first of several rounds, so that all ranks wait for it; in a row, the last of
    them wait for ranks that wait for it.
    """
    from reshard.live.transport.base import Exchange

    plan = row_plan() if in_a_row else plan_of((64, 64), memory="2KiB")
    given, pause = source_of(plan, rank), timeout * 0.7 if two_hosts else 0.05
    usual, works = Exchange._receive, rank == 1

    def slowly(exchange: Exchange, *args: Any) -> None:
        nonlocal works
        end = time.monotonic() + max(1.6, 2.3 * timeout)
        while works and time.monotonic() < end:
            time.sleep(pause)
            watch = exchange._wait.__self__  # type: ignore[attr-defined]
            watch.heartbeat()
        works = False
        usual(exchange, *args)

    with pytest.MonkeyPatch.context() as patch:
        if two_hosts:
            host = f"host of ranks {rank // 2 * 2} and {rank // 2 * 2 + 1}"
            patch.setattr(rendezvous, "host_identity", lambda: host)
        group = local_group(0, 1, 2, 3) if two_hosts else pool_group(4)
        expected = plan.run(given, group=group)["tensor"]
        patch.setattr(Exchange, "_receive", slowly)
        began = time.monotonic()
        result = plan.run(given, group=group, transport=transport, timeout=timeout)
        seconds = time.monotonic() - began
    assert torch.equal(result["tensor"], expected)
    if two_hosts:
        dist.destroy_process_group(group)
    return seconds


@pytest.mark.parametrize("transport", ["auto", "shared", "network"])
def test_a_rank_that_works_long(pool: Pool, transport: str) -> None:
    assert min(pool.run(work_long, transport, False, ranks=range(4))) > 1.5


@pytest.mark.parametrize("transport", TRANSPORTS if soaking() else ["auto", "network"])
def test_a_rank_that_works_long_for_a_row_of_ranks(pool: Pool, transport: str) -> None:
    assert min(pool.run(work_long, transport, True, ranks=range(4))) > 1.5


def test_a_rank_of_another_host_that_works_long(pool: Pool) -> None:
    """Its heartbeats come more rarely than the others look."""
    assert min(pool.run(work_long, "auto", False, True, 1.2, ranks=range(4))) > 1.5


def stop_while_waiting(rank: int, transport: str) -> Tried:
    """Rank 1 stops when it has posted that it waits for rank 0, which is a little late."""
    group, plan = pool_group(4), plan_of((64, 64), memory="2KiB")
    given, post = source_of(plan, rank), wait_graph.WaitGraph.post

    def stopping(graph: wait_graph.WaitGraph, peers: list[int], what: str) -> None:
        post(graph, peers, what)
        if rank == 1:
            time.sleep(4.0)

    plan.run(given, group=group, transport=transport)
    dist.barrier(group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wait_graph.WaitGraph, "post", stopping)
        patch.setattr(wait_graph, "POST_EVERY", 0.2)
        patch.setattr(wait_graph, "OLD_AFTER", 1.2)
        if rank == 0:
            time.sleep(0.7)
        outcome = tried(lambda: plan.run(given, group=group, transport=transport, timeout=1.2))
    moves_well(rank, group, transport)
    return outcome


@pytest.mark.parametrize("transport", TRANSPORTS if soaking() else ["auto", "network"])
def test_a_rank_that_stops_while_it_waits_is_named(pool: Pool, transport: str) -> None:
    outcomes = pool.run(stop_while_waiting, transport, ranks=range(4))
    check_same(outcomes, "MoveTimeoutError", "rank 1 ", "within 1.2 s and rank")
    assert all(one.message.startswith("rank 1 ") for one in outcomes), outcomes
    assert all(one.seconds < within(3.5) for rank, one in enumerate(outcomes) if rank != 1)


def run_ahead(rank: int, transport: str) -> Tried:
    """Rank 2 is late, rank 0 is done without it, and waits in the next call for its neighbours."""
    group = pool_group(4)
    shifted = rs.Layout(rs.Mesh(x=4, ranks=[1, 2, 3, 0]), "x -")
    plan = rs.plan(rs.Layout(FOUR, "x -"), shifted, shape=(64, 64), dtype="float32")
    given = source_of(plan, rank)
    options: Any = {"group": group, "transport": transport}
    plan.run(given, **options)
    if rank == 2:
        time.sleep(2.6)
    plan.run(given, timeout=20.0, **options)
    outcome = tried(lambda: plan.run(given, timeout=1.2 if rank == 0 else 20.0, **options))
    moves_well(rank, group, transport)
    return outcome


@pytest.mark.parametrize("transport", ["auto", "shared"])
def test_a_rank_that_is_one_call_ahead_names_the_rank_that_holds_up_the_others(
    pool: Pool, transport: str
) -> None:
    outcomes = pool.run(run_ahead, transport, ranks=range(4))
    check_same(outcomes, "MoveTimeoutError", "rank 2 has not called within 1.2 s")


def fail_beside(rank: int, transport: str) -> tuple[Tried, Tried]:
    """Two moves in flight: one fails for want of a tensor, the other is right."""
    group, one, other = pool_group(4), plan_of((16, 48)), plan_of((512, 512))
    options: Any = {"group": group, "transport": transport, "timeout": 10}
    for plan in (one, other):
        plan.run(source_of(plan, rank), **options)
    handles = [
        one.start({} if rank == 2 else source_of(one, rank), **options),
        other.start(source_of(other, rank), **options),
    ]
    found = [tried(handle.wait) for handle in handles]
    moves_well(rank, group, transport)
    return found[0], found[1]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_move_that_fails_beside_another(pool: Pool, transport: str) -> None:
    outcomes = pool.run(fail_beside, transport, ranks=range(4))
    check_same([first for first, _ in outcomes], "TensorError", "rank 2")
    assert {second.kind for _, second in outcomes} == {"moved"}, outcomes


def stall_while_connecting(rank: int, step: int) -> Tried:
    """Rank 2 stops when it is about to say that it has reached a step of the rendezvous."""
    group, plan, reach = local_group(0, 1, 2, 3), plan_of(), Rendezvous._reach

    def stalling(rendezvous: Rendezvous, reached: int) -> None:
        if rank == 2 and reached == step:
            time.sleep(1.4)
        reach(rendezvous, reached)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rendezvous, "_reach", stalling)
        outcome = tried(lambda: plan.run(source_of(plan, rank), group=group, timeout=0.7))
    dist.barrier(pool_group(4))
    moves_well(rank, group, "auto")
    dist.destroy_process_group(group)
    return outcome


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_rank_that_stalls_while_ranks_connect_is_named(pool: Pool, step: int) -> None:
    outcomes = pool.run(stall_while_connecting, step, ranks=range(4))
    check_same(outcomes, "MoveTimeoutError", "rank 2 has stopped answering within 0.7 s")


LINE = rs.Mesh(tp=4)


def gather_row(size: int, timeout: float = 1) -> None:
    specs = [rs.TensorSpec((size,), "uint8", rs.Layout(LINE, words)) for words in ("tp", "-")]
    plan = rs.plan({"w": specs[0]}, {"w": specs[1]})
    local = torch.full((size // 4,), dist.get_rank(), dtype=torch.uint8)
    row = plan.run({"w": local}, group=pool_group(4), timeout=timeout)["w"]
    assert torch.equal(row, torch.arange(4, dtype=torch.uint8).repeat_interleave(size // 4))


def miss_the_first_call(rank: int, size: int) -> str:
    """Rank 2 calls when the others have given up; then all call again."""
    gather_row(64)  # connects the session
    if rank == 2:
        dist.barrier(pool_group(4))
    with pytest.raises(rs.MoveTimeoutError) as caught:
        gather_row(size)
    if rank != 2:
        dist.barrier(pool_group(4))
    gather_row(size)
    gather_row(size)
    return str(caught.value)


def test_a_call_works_after_its_plan_timed_out(pool: Pool) -> None:
    for number in range(2):
        for text in pool.run(miss_the_first_call, 1024 * (number + 1), ranks=range(4)):
            assert "rank 2 has not called within 1 s" in text


def compare_again(rank: int) -> None:
    """All ranks but one compare a plan again."""
    gather_row(4096)
    if rank != 1:
        for session in sessions(pool_group(4)):
            session.agreed.clear()
    gather_row(4096)
    gather_row(4096)


def test_ranks_that_have_not_compared_a_plan_meet_one_that_has(pool: Pool) -> None:
    pool.run(compare_again, ranks=range(4))
