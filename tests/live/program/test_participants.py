"""Participants of a move: ranks outside, sub-groups, disjoint sides, several moves in flight."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist

import reshard as rs
from reshard.live.session.session import all_connections
from tests.ranks.live import local_of, numbered
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.soak import cases

TRANSPORTS = ["auto", "shared", "network"]


def line(*ranks: int) -> rs.Mesh:
    return rs.Mesh(tp=len(ranks), ranks=list(ranks))


def move(rank: int, plan: rs.Plan, first: int = 0, **options: object) -> dict[str, torch.Tensor]:
    """Run a plan of one tensor and check what comes."""
    full = numbered(plan.have["tensor"].shape, first=first)
    mine = local_of(full, plan.have["tensor"].layout, rank)
    out = plan.run({} if mine is None else {"tensor": mine}, timeout=20, **options)
    check(rank, plan, out, first)
    return out


def check(rank: int, plan: rs.Plan, out: dict[str, torch.Tensor], first: int = 0) -> None:
    full = numbered(plan.want["tensor"].shape, first=first)
    expected = local_of(full, plan.want["tensor"].layout, rank)
    assert out.keys() == (set() if expected is None else {"tensor"})
    assert expected is None or torch.equal(out["tensor"], expected)


def one(have: rs.Layout, want: rs.Layout, shape: tuple[int, ...] = (12, 10), **more) -> rs.Plan:
    return rs.plan(have, want, shape=shape, **more)


def stand_by(rank: int) -> tuple[float, bool]:
    plan = one(rs.Layout(line(1, 2), "tp -"), rs.Layout(line(2, 5), "- tp"))
    start = time.perf_counter()
    if rank in (1, 2, 5):
        time.sleep(2)
    move(rank, plan)
    return time.perf_counter() - start, any(one.ranks == (1, 2, 5) for one in all_connections())


def test_ranks_outside_both_layouts_return_at_once(pool: Pool) -> None:
    for rank, (seconds, in_team) in enumerate(pool.run(stand_by)):
        assert in_team == (rank in (1, 2, 5))
        assert in_team or seconds < 1.5


def move_in_sub_group(rank: int) -> None:
    for ranks in ((0, 1, 2, 3), (3, 1), (2, 0, 3)):
        plan = one(rs.Layout(line(*ranks), "tp -"), rs.Layout(line(*reversed(ranks)), "- tp"))
        move(rank, plan, group=pool_group(4))


def test_a_sub_group(pool: Pool) -> None:
    pool.run(move_in_sub_group, ranks=range(4))
    pool.run(move_in_sub_group)


def move_in_late_group(rank: int) -> None:
    """A group whose own numbers of ranks are not the global ones."""
    group = dist.new_group([7, 4, 6, 5])
    plan = one(rs.Layout(line(4, 5, 6), "tp -"), rs.Layout(line(7, 4), "- tp"))
    move(rank, plan, group=group)
    dist.barrier()
    if rank >= 4:
        dist.destroy_process_group(group)


def test_layouts_name_global_ranks_in_any_group(pool: Pool) -> None:
    pool.run(move_in_late_group)


def move_beyond_group(rank: int) -> str:
    plan = one(rs.Layout(line(0, 1), "tp -"), rs.Layout(line(2, 3), "- tp"))
    with pytest.raises(rs.LiveError) as caught:
        move(rank, plan, group=pool_group(2))
    return str(caught.value)


def test_a_group_that_lacks_ranks_of_the_layouts(pool: Pool) -> None:
    for message in pool.run(move_beyond_group, ranks=range(2)):
        assert "ranks [2, 3]" in message
        assert "[0, 1]" in message


def move_across(rank: int, transport: str) -> None:
    sides = (line(0, 1, 2, 3), line(4, 5, 6, 7)), (line(6), line(1, 3)), (line(0, 7, 2), line(5))
    for have, want in sides:
        for shape in ((12, 10), (300, 200)):
            plan = one(rs.Layout(have, "tp -"), rs.Layout(want, "- tp"), shape)
            move(rank, plan, transport=transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_disjoint_sources_and_destinations(pool: Pool, transport: str) -> None:
    pool.run(move_across, transport)


def two_in_flight(rank: int, transport: str, backwards_on: tuple[int, ...]) -> None:
    there = one(rs.Layout(rs.Mesh(tp=4), "tp -"), rs.Layout(rs.Mesh(tp=4), "- tp"), (400, 300))
    back = one(rs.Layout(rs.Mesh(tp=4), "- tp"), rs.Layout(rs.Mesh(tp=4), "tp -"), (64, 8))
    for turn in range(cases(3, 5)):
        handles = []
        for plan in (there, back):
            full = numbered(plan.have["tensor"].shape, first=turn)
            mine = local_of(full, plan.have["tensor"].layout, rank)
            handles.append(plan.start({"tensor": mine}, transport=transport, timeout=20))
        both = [(there, handles[0]), (back, handles[1])]
        for plan, handle in reversed(both) if rank in backwards_on else both:
            check(rank, plan, handle.wait(), turn)
            assert handle.done()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_plans_in_flight(pool: Pool, transport: str) -> None:
    pool.run(two_in_flight, transport, (), ranks=range(4))
    pool.run(two_in_flight, transport, (0, 1, 2, 3), ranks=range(4))
    pool.run(two_in_flight, transport, (1, 2), ranks=range(4))


def one_plan_often_in_flight(rank: int, transport: str, shape: tuple[int, ...]) -> None:
    """The same plan with other tensors each time, waited for in another order on every rank."""
    plan = one(rs.Layout(rs.Mesh(dp=2, tp=2), "dp tp"), rs.Layout(rs.Mesh(tp=4), "tp:3 -"), shape)
    for turn in range(cases(3, 6)):
        handles = {}
        for first in range(turn, turn + 5):
            full = numbered(shape, first=first)
            mine = local_of(full, plan.have["tensor"].layout, rank)
            handles[first] = plan.start({"tensor": mine}, transport=transport, timeout=20)
        order = list(handles)
        random.Random(rank).shuffle(order)
        for first in order:
            check(rank, plan, handles[first].wait(), first)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("shape", [(13, 6), (300, 200)])
def test_one_plan_often_in_flight(pool: Pool, transport: str, shape: tuple[int, ...]) -> None:
    pool.run(one_plan_often_in_flight, transport, shape, ranks=range(4))


def start_and_run(rank: int) -> None:
    """A move that runs in this thread while another is in flight, in two sessions of one group."""
    wide = one(rs.Layout(rs.Mesh(tp=4), "tp -"), rs.Layout(rs.Mesh(tp=4), "- tp"), (500, 400))
    narrow = one(rs.Layout(line(0, 2), "tp -"), rs.Layout(line(1, 2), "- tp"))
    mine = local_of(numbered((500, 400)), wide.have["tensor"].layout, rank)
    for turn in range(cases(3, 5)):
        handle = wide.start({"tensor": mine}, timeout=20)
        move(rank, narrow, turn)
        check(rank, wide, handle.wait())


def test_a_move_while_another_is_in_flight(pool: Pool) -> None:
    pool.run(start_and_run, ranks=range(4))
