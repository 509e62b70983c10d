"""Options of a run: a memory cap, atomic, donated sources, released buffers, forced transports."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import reshard as rs
from reshard.live.session.session import all_connections
from tests.ranks.live import local_of, locals_of, numbered, same_bits
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.soak import cases

FOUR = range(4)
TRANSPORTS = ["auto", "peer", "shared", "network"]
NAMES = {
    "peer": "peer memory", "shared": "shared memory", "network": "network (gloo)",
    "auto": "peer memory",
}  # fmt: skip
GRID, LINE = rs.Mesh(dp=2, tp=2), rs.Mesh(tp=4)
HAVE, WANT = rs.Layout(GRID, "dp tp"), rs.Layout(LINE, "- tp")


def mixed(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Tensors of every element size, so that messages hold odd numbers of bytes."""
    kinds = ("bool", "int16", "float32", "int64", "complex128", "uint8")
    return {f"{kind}.{n}": numbered(shape, kind, n) for n, kind in enumerate(kinds)}


def specs(full: dict[str, torch.Tensor], layout: rs.Layout) -> dict[str, rs.TensorSpec]:
    return {
        name: rs.TensorSpec(tuple(tensor.shape), str(tensor.dtype), layout)
        for name, tensor in full.items()
    }


def run_atomic(rank: int, transport: str) -> None:
    full = mixed((16, 12))
    have, want = specs(full, HAVE), specs(full, WANT)
    plan = rs.plan(have, want)
    into = {name: torch.zeros_like(t) for name, t in locals_of(full, want, rank).items()}
    mine = locals_of(full, have, rank)
    bad = {**mine, "int64.3": mine["int64.3"][:1]} if rank == 2 else mine
    with pytest.raises(rs.TensorError, match=r"rank 2"):
        plan.run(bad, into=into, atomic=True, transport=transport, timeout=20)
    assert not any(tensor.any() for tensor in into.values())
    for _ in range(2):
        out = plan.run(mine, into=into, atomic=True, transport=transport)
        assert all(out[name] is into[name] for name in into)
        same_bits(into, locals_of(full, want, rank))
        for tensor in into.values():
            tensor.zero_()


@pytest.mark.parametrize("transport", ["auto", "network"])
def test_atomic_changes_all_destinations_or_none(pool: Pool, transport: str) -> None:
    pool.run(run_atomic, transport, ranks=FOUR)


def atomic_on_some(rank: int) -> None:
    """Also when the plan was compared before without it."""
    plan = rs.plan(HAVE, WANT, shape=(8, 8))
    mine, wanted = (local_of(numbered((8, 8)), layout, rank) for layout in (HAVE, WANT))
    into = {"tensor": torch.zeros_like(wanted)}
    plan.run({"tensor": mine})
    with pytest.raises(rs.DisagreementError, match=r"atomic: ranks 0,2-3 have True, rank 1 has"):
        plan.run({"tensor": mine}, into=into, atomic=rank != 1, timeout=20)
    plan.run({"tensor": mine}, into=into, atomic=True)
    assert torch.equal(into["tensor"], wanted)


def test_atomic_on_some_ranks_only(pool: Pool) -> None:
    pool.run(atomic_on_some, ranks=FOUR)


def many_rounds_in_flight(rank: int) -> None:
    """Several calls of a plan that none has made before, each working out all rounds."""
    shape, want = (128, 64), rs.Layout(LINE, "tp:2 -")
    plan = rs.plan(HAVE, want, shape=shape, memory=512)
    assert plan.num_rounds > 40
    mine, wanted = (local_of(numbered(shape), layout, rank) for layout in (HAVE, want))
    handles = [plan.start({"tensor": mine + number}, timeout=20) for number in range(cases(4, 8))]
    for number, handle in enumerate(handles):
        assert torch.equal(handle.wait()["tensor"], wanted + number)


def test_many_rounds_in_flight(pool: Pool) -> None:
    pool.run(many_rounds_in_flight, ranks=FOUR)


def donate_at_rest(rank: int) -> None:
    """Where nothing moves the source is the result, and stays."""
    local = local_of(numbered((8, 8)), HAVE, rank)
    for _ in range(2):
        found = rs.move(local.clone(), HAVE, HAVE, shape=(8, 8), group=pool_group(4), donate=True)
        assert found.untyped_storage().nbytes()
        assert torch.equal(found, local)


def test_a_donated_source_at_rest_is_the_result(pool: Pool) -> None:
    pool.run(donate_at_rest, ranks=FOUR)


def donate_tied(rank: int, transport: str) -> None:
    """Names that share memory: it is freed after the last of them, not after the first."""
    shape = (64, 48)
    full = dict.fromkeys("abcde", numbered(shape))
    have, want = specs(full, HAVE), specs(full, WANT)
    plan = rs.plan(have, want, memory=2048)
    assert plan.num_rounds > 5
    mine = local_of(full["a"], HAVE, rank)
    tied, memory = mine.clone(), torch.cat([mine.reshape(-1), torch.ones(5)])
    array = mine.numpy().copy()
    given = {
        "a": tied, "b": tied, "c": tied.view(-1).view(tied.shape),
        "d": memory[: mine.numel()].view(mine.shape), "e": torch.from_numpy(array),
    }  # fmt: skip
    out = plan.run(given, donate=True, transport=transport)
    same_bits(out, locals_of(full, want, rank))
    assert tied.untyped_storage().nbytes() == 0
    assert torch.equal(memory[-5:], torch.ones(5))
    assert np.array_equal(array, mine.numpy())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_donated_sources_that_share_memory(pool: Pool, transport: str) -> None:
    pool.run(donate_tied, transport, ranks=FOUR)


def shared_bytes() -> int:
    """Bytes of shared memory of ours that this process maps."""
    rows = [row.split() for row in Path("/proc/self/maps").read_text().splitlines()]
    spans = [row[0].split("-") for row in rows if len(row) > 5 and "memfd:reshard" in row[5]]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


def release_and_run(rank: int, transport: str, shape: tuple[int, ...]) -> None:
    """Again and again: a rank that lets go at once must not take a message from a slow one."""
    plan = rs.plan(HAVE, WANT, shape=shape)
    mine, expected = (local_of(numbered(shape), layout, rank) for layout in (HAVE, WANT))
    for turn in range(cases(12, 30)):
        out = plan.run({"tensor": mine + turn}, transport=transport)
        plan.release()
        assert torch.equal(out["tensor"], expected + turn), turn
    plan.run({"tensor": mine}, transport=transport)
    before = shared_bytes()
    dist.barrier(pool_group(4))
    plan.release()
    dist.barrier(pool_group(4))
    if transport == "shared":
        assert shared_bytes() < before
    assert all(not one.buffers._free for one in all_connections())


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("shape", [(12, 8), (400, 400)])
def test_released_and_run_again(pool: Pool, transport: str, shape: tuple[int, ...]) -> None:
    pool.run(release_and_run, transport, shape, ranks=FOUR)


def report_of(rank: int, transport: str, folder: str) -> str:
    plan = rs.plan(HAVE, WANT, shape=(300, 200), memory="64KiB")
    handle = plan.start({"tensor": local_of(numbered((300, 200)), HAVE, rank)}, transport=transport)
    handle.wait()
    for suffix in ("json", "trace"):
        handle.report.save(Path(folder) / f"{rank}.{suffix}")
    assert str(handle.report).startswith(f"rank {rank}, call ")
    return handle.report.to_json()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_report_shows_how_it_went(pool: Pool, transport: str, tmp_path: Path) -> None:
    plan = rs.plan(HAVE, WANT, shape=(300, 200), memory="64KiB")
    for rank, text in enumerate(pool.run(report_of, transport, str(tmp_path), ranks=FOUR)):
        told = json.loads(text)
        assert told == json.loads((tmp_path / f"{rank}.json").read_text())
        assert set(told["transports"].values()) == {NAMES[transport]}
        part = plan.for_rank(rank)
        peers = {step.destination for step in part.sends} | {step.source for step in part.receives}
        assert told["transports"].keys() == set(map(str, peers))
        assert told["plan"] == plan.digest
        assert len(told["rounds"]) == plan.num_rounds > 1
        for key, steps in (("sent", part.sends), ("received", part.receives)):
            total = sum(step.num_bytes for step in steps)
            assert sum(one[f"bytes_{key}"] for one in told["rounds"]) == total
        check_trace(json.loads((tmp_path / f"{rank}.trace").read_text()), rank)


def check_trace(trace: dict, rank: int) -> None:
    """What the Chrome trace format asks of a file."""
    events = trace["traceEvents"]
    assert {"X", "M"} == {event["ph"] for event in events}
    for event in events:
        assert event["pid"] == rank
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert isinstance(event["tid"], int)
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert math.isfinite(event["ts"] + event["dur"])
    phases = {event["name"].split()[0] for event in events if event["ph"] == "X"}
    assert {"packing", "waiting", "unpacking"} <= phases


def forced_by_environment(rank: int) -> str:
    os.environ["RESHARD_TRANSPORT"] = "shared"
    try:
        plan = rs.plan(HAVE, WANT, shape=(8, 8))
        handle = plan.start({"tensor": local_of(numbered((8, 8)), HAVE, rank)})
        handle.wait()
    finally:
        del os.environ["RESHARD_TRANSPORT"]
    return " ".join(set(handle.report.transports.values()))


def test_a_transport_forced_by_the_environment(pool: Pool) -> None:
    assert pool.run(forced_by_environment, ranks=FOUR) == ["shared memory"] * 4


def misspelt_at_rest(rank: int) -> None:
    """Also where nothing has to move."""
    local = local_of(numbered((8, 8)), HAVE, rank)
    with pytest.raises(rs.LiveError, match="no option time_out=: did you mean timeout="):
        rs.move(local, HAVE, HAVE, shape=(8, 8), group=pool_group(4), time_out=3)


def test_an_option_that_does_not_exist(pool: Pool) -> None:
    pool.run(misspelt_at_rest, ranks=FOUR)


def run_with_default_device(rank: int, transport: str) -> None:
    """torch.set_default_device is for the caller's tensors; staging is in the host's memory."""
    full = mixed((16, 12))
    have, want = specs(full, HAVE), specs(full, WANT)
    with torch.device("meta"):
        moved = rs.plan(have, want).run(
            locals_of(full, have, rank), transport=transport, timeout=20
        )
    same_bits(moved, locals_of(full, want, rank))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_default_device(pool: Pool, transport: str) -> None:
    pool.run(run_with_default_device, transport, ranks=FOUR)
