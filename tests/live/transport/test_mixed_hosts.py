"""Ranks that identify as two hosts: memory within each, the network between them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import reshard as rs
from reshard.live.session import rendezvous
from tests.ranks.live import Told, check_told, local_of, numbered, plan_of, run_case, simulate_all
from tests.ranks.pool import Pool
from tests.soak import cases

BY_HOST = {0: "a", 1: "b", 2: "a", 3: "b", 4: "b", 5: "a", 6: "b", 7: "a"}
EIGHT = rs.Mesh(tp=8)
ROWS, COLUMNS = rs.Layout(EIGHT, "tp -"), rs.Layout(EIGHT, "- tp")


def on_two_hosts(rank: int, num_cases: int) -> tuple[Told, list[str]]:
    group = dist.new_group(range(8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "host_identity", lambda: BY_HOST[rank])
        told = random_cases(rank, num_cases, group)
        in_flight(rank, group)
        names = transports(rank, group)
    dist.barrier()
    dist.destroy_process_group(group)
    return told, names


def random_cases(rank: int, num_cases: int, group: object) -> Told:
    told = Told([], [], {})
    for place, one in enumerate(simulate_all(rank, 8, range(5000, 5000 + num_cases), False)):
        told.planned[one.seed] = (one.report.wire_bytes, one.report.num_messages, one.memory)
        if rank in one.ranks:
            run_case(rank, one, plan_of(one.case), "large" if place % 2 else "auto", told, group)
        if told.problems:
            break
    return told


def in_flight(rank: int, group: object) -> None:
    """Several moves at a time, each with peers of both kinds."""
    for shape in ((16, 24), (160, 240)):
        plans = [rs.plan(*pair, shape=shape) for pair in ((ROWS, COLUMNS), (COLUMNS, ROWS))] * 3
        handles = []
        for first, plan in enumerate(plans):
            mine = local_of(numbered(shape, first=first), plan.have["tensor"].layout, rank)
            handles.append(plan.start({"tensor": mine}, group=group, timeout=20))
        for first, (plan, handle) in enumerate(zip(plans, handles, strict=True)):
            expected = local_of(numbered(shape, first=first), plan.want["tensor"].layout, rank)
            assert torch.equal(handle.wait()["tensor"], expected)


def transports(rank: int, group: object) -> list[str]:
    plan = rs.plan(ROWS, COLUMNS, shape=(16, 16))
    handle = plan.start({"tensor": local_of(numbered((16, 16)), ROWS, rank)}, group=group)
    handle.wait()
    return [handle.report.transports.get(peer, "itself") for peer in range(8)]


def test_memory_within_a_host_and_the_network_between(pool: Pool) -> None:
    outcomes = pool.run(on_two_hosts, cases(12, 40), timeout=100)
    check_told([told for told, _ in outcomes], cases(10, 36))
    for rank, (_, names) in enumerate(outcomes):
        for peer, name in enumerate(names):
            near = "peer memory" if BY_HOST[peer] == BY_HOST[rank] else "network (gloo)"
            assert name == ("itself" if peer == rank else near)
