"""Which way data goes between GPUs, pair by pair, with stand-ins: these run on any machine."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reshard as rs
from reshard.live.session.session import all_connections
from reshard.live.transport.gpu_routes import GpuRoutes, choose_routes
from reshard.live.transport.nccl import NcclGroups
from tests.device import stand_in
from tests.ranks.outcome import Returned
from tests.ranks.pool import fresh_ranks

FACTS = {rank: {"gpu": f"gpu {rank}", "nccl": True} for rank in range(3)}
FULL = torch.arange(48.0 * 48).reshape(48, 48)


def test_all_pairs_read_each_other() -> None:
    routes = choose_routes("auto", [(0, 1), (1, 2)], FACTS, {(0, 2): "not asked for"})
    assert routes == GpuRoutes({}, True)
    assert isinstance(routes, GpuRoutes)
    assert routes.reads(1, 0)
    assert not routes.opens_nccl


def test_other_pairs_use_nccl() -> None:
    routes = choose_routes("auto", [(0, 1), (1, 2)], FACTS, {(1, 2): "a reason"})
    assert isinstance(routes, GpuRoutes)
    assert routes.reads(0, 1)
    assert not routes.reads(2, 1)
    assert routes.reason(2, 1) == "a reason"
    assert routes.opens_nccl


@pytest.mark.parametrize("shared", [{"gpu": "gpu 0", "nccl": True}, {"gpu": "x", "nccl": False}])
def test_other_pairs_go_by_the_host_where_nccl_is_impossible(shared: dict[str, Any]) -> None:
    routes = choose_routes("auto", [(0, 1)], {**FACTS, 2: shared}, {(0, 1): "a reason"})
    assert isinstance(routes, GpuRoutes)
    assert not routes.uses_nccl
    assert not routes.opens_nccl


def test_what_is_forced_is_impossible() -> None:
    refused = choose_routes("gpu_peer", [(0, 1)], FACTS, {(0, 1): "a reason"})
    assert refused == ('transport="gpu_peer" was forced and ranks 0 and 1 cannot use it: a reason')
    shared = {**FACTS, 2: FACTS[0]}
    assert "ranks 0 and 2 share a GPU" in str(choose_routes("nccl", [(0, 1)], shared, {}))
    apart = {0: {**FACTS[0], "nccl host": "a"}, 1: {**FACTS[0], "nccl host": "b"}}
    assert choose_routes("nccl", [(0, 1)], apart, {}) == GpuRoutes({}, True, "nccl")


def moves(rank: int, setting: str) -> list[str]:
    """Rows to columns, and a sum, on 4 ranks of which some cannot read each other's memory."""
    stand_in.use(peer_memory=True)
    torch.set_num_threads(1)
    pids: list[Any] = [None] * 4
    dist.all_gather_object(pids, os.getpid())
    driver = stand_in.StandInDriver
    driver.refused = {pids[3 - rank]} if setting in ("nccl", "host", "forced") else set()
    driver.exportable = setting != "packed"
    driver.gpu = "one" if setting == "host" else ""
    line = rs.Mesh(tp=4)
    rows, columns = rs.Layout(line, "tp -"), rs.Layout(line, "- tp")
    mine, right = FULL.chunk(4)[rank], FULL.chunk(4, 1)[rank]
    option = {"transport": "gpu_peer"} if setting == "forced" else {}
    plan = rs.plan(rows, columns, shape=FULL.shape, dtype="float32")
    labels: dict[int, str] = {}
    for number in range(3):
        handle = plan.start({"tensor": mine + number}, timeout=20, **option)
        assert torch.equal(handle.wait()["tensor"], right + number), number
        labels = handle.report.transports
    strided = mine.t().contiguous().t()
    assert torch.equal(plan.run({"tensor": strided}, timeout=20)["tensor"], right)
    memory = torch.arange(576.0)  # tensors of several sizes at one address
    for height in (1, 12, 4, 12):
        full = torch.cat([memory[: height * 48].view(height, 48) + 1000 * n for n in range(4)])
        memory += 1000 * rank
        out = rs.move(memory[: height * 48].view(height, 48), rows, columns, shape=full.shape)
        memory -= 1000 * rank
        assert torch.equal(out, full.chunk(4, 1)[rank]), height
    pending = rs.Layout(line, "- - | sum tp")
    for want in (columns, rs.Layout(line, "- -")):
        summed = rs.move(FULL * (rank + 1), pending, want, shape=FULL.shape, timeout=20)
        assert torch.equal(summed, FULL.chunk(4, 1)[rank] * 10 if want is columns else FULL * 10)
    opened = all_connections()[0].resources.get(NcclGroups) is not None
    assert opened == (setting == "nccl")
    rs.check()
    dist.barrier()
    return [labels[peer] for peer in sorted(labels)]


def run(setting: str) -> list[Any]:
    with fresh_ranks(4) as ranks:
        return ranks.outcomes(moves, setting, timeout=80)


@pytest.mark.parametrize("setting", ["peer", "packed"])
def test_moves_by_peer_memory(setting: str) -> None:
    for outcome in run(setting):
        assert isinstance(outcome, Returned), outcome
        assert set(outcome.value) == {"GPU peer memory"}


@pytest.mark.parametrize(("setting", "way"), [("nccl", "NCCL"), ("host", "memory")])
def test_two_pairs_go_another_way(setting: str, way: str) -> None:
    for rank, outcome in enumerate(run(setting)):
        assert isinstance(outcome, Returned), outcome
        other = [label for label in outcome.value if label != "GPU peer memory"]
        assert len(other) == 1, outcome.value
        low = min(rank, 3 - rank)
        assert way in other[0]
        assert (
            f"rank {low} cannot map the GPU memory of rank {3 - low} (STAND_IN_REFUSED)" in other[0]
        )


def test_forced_peer_memory_names_the_pair_on_all_ranks() -> None:
    for outcome in run("forced"):
        assert not isinstance(outcome, Returned), outcome
        text = 'transport="gpu_peer" was forced and ranks 0 and 3 cannot use it: rank 0 cannot map'
        assert text in outcome.message
