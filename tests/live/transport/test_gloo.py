"""The network transport: ranks that exchange nothing, and threads that wait when a process ends."""

from __future__ import annotations

import gc
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import reshard as rs
from reshard.live.failure import cleanup
from reshard.live.program.messages import Policy
from reshard.live.session.store import Worker
from reshard.live.transport import gloo
from reshard.live.transport.gloo import NO_LIMIT
from reshard.live.transport.gloo_group import GlooGroup
from tests.ranks.live import local_of, numbered
from tests.ranks.pool import Pool, fresh_ranks
from tests.ranks.rank import local_group, pool_group
from tests.soak import cases

ROWS = rs.Layout(rs.Mesh(dp=4), "dp -")
COLUMNS = rs.Layout(rs.Mesh(tp=2), "- tp")
SHAPE = (3, 8)


def move_with_an_empty_part(rank: int, num_calls: int) -> None:
    """Rank 3 holds no row and wants nothing: it exchanges nothing but Hellos."""
    full = numbered(SHAPE)
    local, wanted = local_of(full, ROWS, rank), local_of(full, COLUMNS, rank)
    for _ in range(num_calls):
        found = rs.move(
            local, ROWS, COLUMNS, shape=SHAPE, group=pool_group(4), transport="network", timeout=20
        )
        assert (found is None) == (wanted is None)
        assert found is None or torch.equal(found, wanted)


def test_a_rank_that_exchanges_only_hellos(pool: Pool) -> None:
    pool.run(move_with_an_empty_part, cases(100, 5000), ranks=range(4), timeout=200)


def move_single_elements(rank: int, dtype: torch.dtype) -> None:
    """Sent without packing; torch calls a tensor of one element contiguous whatever its strides."""
    have, want = (rs.Layout(rs.Mesh(dp=4), words) for words in ("dp", "-"))
    full = torch.arange(1, 4).to(dtype)
    with mock.patch.object(gloo, "GLOO", Policy(block_bytes=1)):
        for step in (0, 2, 3):
            local = torch.zeros(7, dtype=dtype).as_strided((1 if rank < 3 else 0,), (step,))
            local.copy_(full[rank : rank + 1])
            found = rs.move(
                local, have, want, shape=(3,), group=pool_group(4), transport="network", timeout=20
            )
            assert torch.equal(found, full), step


def test_single_elements_of_any_strides(pool: Pool) -> None:
    for dtype in (torch.int64, torch.uint16, torch.bfloat16, torch.complex64):
        pool.run(move_single_elements, dtype, ranks=range(4))


def fail_twice_in_a_row(rank: int) -> list[str]:
    """Rank 2 fails when it is about to send: connections are cut, so the next call has others.

    Returns what was raised in each call, or that it moved.
    """
    usual, group, told = gloo.GlooTransport.begin, local_group(0, 1, 2, 3), []
    full = numbered((8, 8))
    want = rs.Layout(rs.Mesh(tp=4), "- tp")

    def fails(*_: object) -> None:
        raise rs.LiveError("on purpose")

    for failing in (False, True, True, False, True, False):
        change = fails if failing and rank == 2 else usual
        with mock.patch.object(gloo.GlooTransport, "begin", change):
            try:
                found = rs.move(
                    local_of(full, ROWS, rank), ROWS, want, shape=(8, 8), group=group,
                    transport="network", timeout=10,
                )  # fmt: skip
                assert torch.equal(found, local_of(full, want, rank))
                told.append("moved")
            except rs.LiveError as error:
                told.append(str(error).partition(",")[0])
        dist.barrier(group)
    dist.destroy_process_group(group)
    return told


def test_calls_that_fail_one_after_the_other_leave_no_broken_connection(pool: Pool) -> None:
    for told in pool.run(fail_twice_in_a_row, ranks=range(4)):
        assert told == ["moved", *["on purpose"] * 2, "moved", "on purpose", "moved"], told


def leave_while_waiting(rank: int) -> list[Worker]:
    """Rank 1 does not make the second call; returns the workers that rank 0 has at its end."""
    have, want = (rs.Layout(rs.Mesh(dp=2), words) for words in ("dp -", "- dp"))
    local = local_of(numbered((4, 4)), have, rank)
    rs.move(local, have, want, shape=(4, 4), transport="network")
    if rank == 1:
        return []
    with pytest.raises(rs.MoveTimeoutError, match=r"rank 1 has not called within 0\.5 s"):
        rs.move(local, have, want, shape=(4, 4), transport="network", timeout=0.5)
    cleanup._leave_at_exit()
    return [one for one in gc.get_objects() if type(one) is Worker and one.is_alive]


def test_no_thread_waits_when_a_process_ends() -> None:
    with fresh_ranks(2) as ranks:
        assert ranks.run(leave_while_waiting) == [[], []]


def test_a_worker_that_still_sends_is_ended_with_its_group() -> None:
    """A rank that has its part is done, also if a peer has not received a message of it."""
    store = dist.HashStore()
    groups: dict[int, GlooGroup] = {}

    def connect(index: int) -> None:
        groups[index] = GlooGroup(store, index, 2, 30.0)

    threads = [threading.Thread(target=connect, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    worker = groups[0].worker()
    sent = groups[0].send(1, torch.zeros(8, dtype=torch.uint8), 5)
    worker.submit(lambda: sent(NO_LIMIT))
    groups[0].give_back(worker)
    groups[0].close()
    assert not worker.is_alive
    groups[1].close()
