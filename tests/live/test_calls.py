"""Repeated calls: kept state is right, agreed plans are not compared again, and nothing grows."""

from __future__ import annotations

import gc
import os
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import reshard as rs
from reshard.live.program import rounds
from reshard.live.session.session import Connections, all_connections
from reshard.live.session.store import StoreClient
from tests.ranks.live import local_of, numbered
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.soak import cases, soaking

FOUR = range(4)
TRANSPORTS = ["auto", "peer", "shared", "network"]
GRID, LINE = rs.Mesh(dp=2, tp=2), rs.Mesh(tp=4)
HAVE, WANT = rs.Layout(GRID, "dp tp"), rs.Layout(LINE, "- tp")
SMALL, LARGE = (8, 8), (512, 512)


def plan_of(shape: tuple[int, ...], **options: object) -> rs.Plan:
    return rs.plan(HAVE, WANT, shape=shape, **options)


def team_of_four() -> Connections:
    return next(team for team in all_connections() if team.ranks == (0, 1, 2, 3))


def run_into_others(rank: int, transport: str, shape: tuple[int, ...]) -> None:
    """Sources and destinations at other addresses, come back, and with other strides."""
    plan = plan_of(shape)
    rows, columns = local_of(numbered(shape), WANT, rank).shape
    intos = [torch.zeros(rows, columns) for _ in range(3)]
    intos.append(torch.zeros(columns, rows).t())
    sources = [local_of(numbered(shape, first=first), HAVE, rank) for first in (0, 5)]
    for turn, which in enumerate((0, 1, 0, 0, 2, 3, 1, 3, 0, 1, 0)):
        first = (0, 5)[turn % 2]
        sources[turn % 2].copy_(local_of(numbered(shape, first=first + turn), HAVE, rank))
        into = intos[which].fill_(-1)
        out = plan.run({"tensor": sources[turn % 2]}, into={"tensor": into}, transport=transport)
        assert out["tensor"] is into
        assert torch.equal(into, local_of(numbered(shape, first=first + turn), WANT, rank)), turn


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_destinations_at_other_addresses(
    pool: Pool, transport: str, shape: tuple[int, ...]
) -> None:
    pool.run(run_into_others, transport, shape, ranks=FOUR)


def run_into_same_memory(rank: int, transport: str, size: int) -> None:
    """One address and shape, two orders of strides: what was worked out for one is not kept."""
    plan = plan_of((2 * size, 4 * size))
    square, wide = torch.zeros(size, 2 * size), torch.zeros(2 * size, size)
    for turn in range(6):
        full = numbered((2 * size, 4 * size), first=turn)
        source, into = local_of(full, HAVE, rank), wide.fill_(-1)
        if turn % 2:
            source = square.view(2 * size, size).t().copy_(source)
            into = wide.view(size, 2 * size).t()
        else:
            source = square.copy_(source)
        out = plan.run({"tensor": source}, into={"tensor": into}, transport=transport)
        assert torch.equal(out["tensor"], local_of(full, WANT, rank)), turn


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [3, 128])
def test_destinations_with_other_strides_at_one_address(
    pool: Pool, transport: str, size: int
) -> None:
    pool.run(run_into_same_memory, transport, size, ranks=FOUR)


def run_many_short_rows(rank: int, transport: str) -> None:
    """More runs than are listed at a time, cold and warm."""
    full = numbered((70_000, 8))
    plan = rs.plan(
        rs.Layout(rs.Mesh(tp=2), "- tp"), rs.Layout(rs.Mesh(a=2), "- - | on a=0"), shape=full.shape
    )
    mine = local_of(full, plan.have["tensor"].layout, rank)
    into = {"tensor": torch.zeros_like(full)} if rank == 0 else None
    for _ in range(3):
        out = plan.run({"tensor": mine}, into=into, transport=transport)
        if rank == 0:
            assert torch.equal(out["tensor"], full)
            out["tensor"].zero_()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_very_many_short_rows(pool: Pool, transport: str) -> None:
    pool.run(run_many_short_rows, transport, ranks=range(2))


def run_without_keeping(rank: int, transport: str) -> None:
    kept = rounds.MAX_KEPT_BYTES
    rounds.MAX_KEPT_BYTES = 0
    try:
        for shape in (SMALL, LARGE):
            plan = plan_of(shape)
            for first in range(5):
                mine = local_of(numbered(shape, first=first), HAVE, rank)
                out = plan.run({"tensor": mine}, transport=transport)
                assert torch.equal(
                    out["tensor"], local_of(numbered(shape, first=first), WANT, rank)
                )
    finally:
        rounds.MAX_KEPT_BYTES = kept


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rounds_that_are_too_large_to_keep(pool: Pool, transport: str) -> None:
    pool.run(run_without_keeping, transport, ranks=FOUR)


def asks_of_calls(rank: int, transport: str, check: str) -> tuple[list[int], list[int]]:
    """How often every call talks to the store, and how many keys it leaves there."""
    shape = (8, 40 + 4 * TRANSPORTS.index(transport) + (check == "always"))
    plan = plan_of(shape)
    mine = {"tensor": local_of(numbered(shape), HAVE, rank)}
    asked, counts, keys = StoreClient.begin, [0], []

    def counting(self: StoreClient, question: object, seconds: float | None = None) -> object:
        counts[-1] += 1
        return asked(self, question, seconds)

    StoreClient.begin = counting
    try:
        for _ in range(6):
            plan.run(mine, transport=transport, check=check)
            dist.barrier(pool_group(4))
            keys.append(int(team_of_four().store.num_keys()))
            dist.barrier(pool_group(4))
            counts.append(0)
    finally:
        StoreClient.begin = asked
    return counts[:-1], keys


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_warm_call_agrees_on_nothing_anew(pool: Pool, transport: str) -> None:
    told = pool.run(asks_of_calls, transport, "first", ranks=FOUR)
    for counts, keys in told:
        assert counts[0] > 0
        # Over the network the store is asked whether a move has failed meanwhile.
        assert counts[1:] == [1 if transport == "network" else 0] * 5
        # There it stays known for a while which connections a call uses.
        assert keys[-1] - keys[0] <= (5 if transport == "network" else 0)


def test_a_check_of_every_call(pool: Pool) -> None:
    told = pool.run(asks_of_calls, "auto", "always", ranks=FOUR)
    for counts, keys in told:
        assert all(count > 1 for count in counts)
        assert len(set(keys)) == 1


def asks_of_silent_calls(rank: int) -> list[int]:
    """How often calls in which nothing travels talk to the store."""
    shape = (8, 12)
    plan = rs.plan(HAVE, HAVE, shape=shape)
    mine = local_of(numbered(shape), HAVE, rank)
    asked, counts = StoreClient.begin, []

    def counting(self: StoreClient, question: object, seconds: float | None = None) -> object:
        counts[-1] += 1
        return asked(self, question, seconds)

    StoreClient.begin = counting
    try:
        for check in ("first", "first", "always"):
            counts.append(0)
            assert torch.equal(plan.run({"tensor": mine}, check=check)["tensor"], mine)
            dist.barrier(pool_group(4))
    finally:
        StoreClient.begin = asked
    return counts


def test_a_move_without_messages_is_compared_once(pool: Pool) -> None:
    for first, second, always in pool.run(asks_of_silent_calls, ranks=FOUR):
        assert first > 0
        assert second == 0
        assert always > 0


def open_things() -> dict[str, int]:
    """What this process has open: descriptors, threads, mapped shared memory, megabytes."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    mapped = Path("/proc/self/maps").read_text().count("memfd:reshard")
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    fds = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    return {"fds": fds, "threads": threads, "mapped": mapped, "rss": pages * 4096 >> 20}


WAYS = {
    "fresh": {}, "into": {"into": True}, "started": {"start": True},
    "shared": {"transport": "shared"}, "network": {"transport": "network"},
    "atomic": {"atomic": True, "into": True}, "always": {"check": "always"},
    "rounds": {"memory": "256KiB"},
}  # fmt: skip


def run_often(rank: int, way: str) -> tuple[dict[str, int], dict[str, int]]:
    options = dict(WAYS[way])
    memory, start = options.pop("memory", None), options.pop("start", False)
    plan = plan_of(LARGE, memory=memory)
    mine = {"tensor": local_of(numbered(LARGE), HAVE, rank)}
    into = {"tensor": torch.zeros(512, 128)} if options.pop("into", False) else None

    def calls(count: int) -> dict[str, int]:
        for _ in range(count):
            if start:
                plan.start(mine, into=into, **options).wait()
            else:
                plan.run(mine, into=into, **options)
        dist.barrier(pool_group(4))
        return open_things()

    # A quarter of a megabyte in each: what every call kept would be more than is allowed.
    return calls(cases(12, 30)), calls(cases(60, 200))


@pytest.mark.parametrize("way", WAYS)
def test_many_calls_without_growth(pool: Pool, way: str) -> None:
    for before, after in pool.run(run_often, way, ranks=FOUR):
        # A few arenas take turns; one more may be made late.
        assert after["fds"] <= before["fds"] + 2, (before, after)
        assert after["threads"] <= before["threads"], (before, after)
        assert after["mapped"] <= before["mapped"] + 2, (before, after)
        assert after["rss"] <= before["rss"] + 8, (before, after)


def make_and_drop_plans(rank: int) -> tuple[int, dict[str, int], dict[str, int]]:
    """Plans take with them what was kept for them."""
    told = []
    watched = []
    for turn in range(24):
        plan = plan_of((128, 64 + 4 * (turn % 8)))
        mine = local_of(numbered((128, 64 + 4 * (turn % 8))), HAVE, rank)
        plan.run({"tensor": mine})
        watched.append(weakref.ref(plan))
        del plan
        if turn in (7, 23):
            dist.barrier(pool_group(4))
            told.append(open_things())
    return sum(one() is not None for one in watched), told[0], told[1]


def test_plans_that_are_gone_keep_nothing(pool: Pool) -> None:
    for alive, before, after in pool.run(make_and_drop_plans, ranks=FOUR):
        assert alive == 0
        assert after["fds"] <= before["fds"]
        assert after["threads"] <= before["threads"]
        assert after["rss"] <= before["rss"] + 8


def use_and_destroy_groups(rank: int, transport: str) -> list[dict[str, int]]:
    """A group's team goes with it: its threads, sockets, store and memory."""
    told: list[dict[str, int]] = []
    plan = plan_of(SMALL)
    mine = local_of(numbered(SMALL), HAVE, rank)
    for _ in range(cases(4, 12)):
        group = dist.new_group(FOUR)
        if rank in FOUR:
            plan.run({"tensor": mine}, group=group, transport=transport)
            dist.barrier(group)
            dist.destroy_process_group(group)
        del group
        dist.barrier()
        deadline = time.monotonic() + 5
        while told and open_things()["threads"] > told[0]["threads"]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        told.append(open_things())
    return told


@pytest.mark.parametrize("transport", ["auto", "network"] if soaking() else ["network"])
def test_groups_that_are_destroyed_leave_nothing(pool: Pool, transport: str) -> None:
    for told in pool.run(use_and_destroy_groups, transport):
        assert told[-1]["fds"] <= told[1]["fds"], told
        assert told[-1]["mapped"] <= told[1]["mapped"], told
        assert told[-1]["threads"] <= told[1]["threads"], told
