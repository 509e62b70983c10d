"""Tensors that only one rank needs are read directly: no move, two agreements, one read."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from reshard import checkpoint
from reshard.checkpoint.catalog import StoredPiece
from reshard.checkpoint.live import direct_reads, loading, shared_reads
from reshard.checkpoint.live.direct_reads import MappedFiles, ReadAhead
from reshard.checkpoint.storage.local import LocalStorage
from reshard.errors import DamageError
from reshard.layout.box import Box
from reshard.planning.plans import Plan
from reshard.tensors.agreement import Agreement
from tests.checkpoint.live.test_load_save import State, bytes_read, mesh_of
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group

SHAPES = {"up": (64, 24), "down": (24, 64), "norm": (24,), "odd": (7, 3, 10)}


def stored() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def places(kind: str, name: str) -> Any:
    if kind == "rows":
        return Shard(0)
    return {"up": Shard(0), "down": Shard(1), "norm": Replicate(), "odd": Shard(2)}[name]


def into_of(kind: str, dtype: torch.dtype = torch.float32) -> State:
    mesh = mesh_of(4)
    return {
        name: distribute_tensor(
            torch.full(shape, -1.0, dtype=dtype), mesh, [places(kind, name)], src_data_rank=None
        )
        for name, shape in SHAPES.items()
    }


def is_loaded(into: State, dtype: torch.dtype = torch.float32) -> bool:
    return all(
        torch.equal(
            distribute_tensor(
                value.to(dtype), into[name].device_mesh, into[name].placements, src_data_rank=None
            ).to_local(),
            into[name].to_local(),
        )
        for name, value in stored().items()
    )


def load_counted(rank: int, folder: str, kind: str, hosts: int, dtype: torch.dtype) -> tuple:
    """How often ranks spoke and moved, how much was read, and whether all is right."""
    rounds, moves = [], []
    say, move = Agreement._gather, Plan.run

    def says(*given: Any) -> Any:
        rounds.append(1)
        return say(*given)

    def runs(*given: Any, **options: Any) -> Any:
        moves.append(1)
        return move(*given, **options)

    into = into_of(kind, dtype)
    with (
        patch.object(Agreement, "_gather", says),
        patch.object(Plan, "run", runs),
        patch.object(loading, "boot_id", lambda: f"host {rank % hosts}"),
        bytes_read() as counted,
    ):
        report = checkpoint.load(
            folder, into=into, group=pool_group(4), cast=dtype != torch.float32
        )
    return len(rounds), len(moves), counted[0], report.bytes_read, is_loaded(into, dtype)


@pytest.mark.parametrize(
    ("kind", "hosts", "dtype"),
    [
        ("rows", 1, torch.float32),
        ("rows", 2, torch.float32),
        ("rows", 1, torch.bfloat16),
        ("tp", 1, torch.float32),
    ],
)
def test_shards_are_read_by_the_rank_that_wants_them(
    pool: Pool, tmp_path: Path, kind: str, hosts: int, dtype: torch.dtype
) -> None:
    save_file(stored(), tmp_path / "model.safetensors", {"format": "pt"})
    told = pool.run(load_counted, str(tmp_path), kind, hosts, dtype, ranks=range(4))
    size = 4 * sum(value.numel() for value in stored().values())
    header = (tmp_path / "model.safetensors").stat().st_size  # all of it is in the first read
    assert all(one[4] for one in told)
    assert {one[:2] for one in told} == {(2, 0)}
    assert {one[3] for one in told} == {size}
    assert size <= sum(one[2] for one in told) <= size + header


def try_load(rank: int, folder: str, kind: str, broken: str) -> str:
    real = getattr(LocalStorage, broken, None)

    def fails(*given: Any) -> None:
        raise OSError(5, "Input/output error")

    into = into_of(kind)
    where: Any = LocalStorage if real else MappedFiles
    changed = fails if rank == 2 else getattr(where, broken)
    try:
        with patch.object(where, broken, changed):
            checkpoint.load(folder, into=into, group=pool_group(4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


@pytest.mark.parametrize(("kind", "broken"), [("rows", "read_into"), ("tp", "copy")])
def test_a_rank_that_cannot_read_fails_all(
    pool: Pool, tmp_path: Path, kind: str, broken: str
) -> None:
    save_file(stored(), tmp_path / "model.safetensors")
    told = pool.run(try_load, str(tmp_path), kind, broken, ranks=range(4))
    assert len(set(told)) == 1, told
    assert "on rank 2: [Errno 5]" in told[0]
    assert "up to 4 of 4 tensors were already changed: load again before use" in told[0]
    assert not is_alone_changed(tmp_path)


def is_alone_changed(folder: Path) -> bool:
    """Whether a load right after it, by one process, gives anything but what is stored."""
    into = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    checkpoint.load(folder, into=into)
    return any(not torch.equal(into[name], value) for name, value in stored().items())


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64, torch.float8_e5m2],
)
def test_tensors_that_are_not_contiguous(tmp_path: Path, dtype: torch.dtype) -> None:
    values = {
        "t": torch.randn(30, 40).mul(9).to(dtype),
        "s": torch.randn(()).to(dtype),
        "e": torch.zeros(0, 4, dtype=dtype),
    }
    save_file(values, tmp_path / "model.safetensors")
    for turn in (
        lambda one: one.t().contiguous().t() if one.ndim == 2 else one,
        lambda one: torch.stack([one, one], -1)[..., 0],
    ):
        into = {name: turn(torch.zeros_like(value)) for name, value in values.items()}
        with bytes_read() as counted:
            checkpoint.load(tmp_path, into=into)
        for name, value in values.items():
            found = into[name].contiguous().view(-1).view(torch.uint8)
            assert torch.equal(found, value.view(-1).view(torch.uint8))
        assert counted[0] <= (tmp_path / "model.safetensors").stat().st_size * 2


@pytest.mark.parametrize(
    ("is_first", "message"), [(False, "truncated"), (True, "was replaced or written while")]
)
def test_a_file_that_was_cut_short_is_an_error(
    tmp_path: Path, is_first: bool, message: str
) -> None:
    """The first rank knows the file as it was; the others see it as it is."""
    save_file({"t": torch.randn(600, 40)}, tmp_path / "model.safetensors")
    into = {"t": torch.zeros(40, 600).t()}
    survey = loading.read_catalog

    def then_cut(*given: Any) -> Any:
        found = survey(*given)
        with (tmp_path / "model.safetensors").open("r+b") as file:
            file.truncate(5000)
        given[0].close()
        if not is_first:
            given[0]._identities.clear()  # as if another process had surveyed
        return found

    with (
        patch.object(loading, "read_catalog", then_cut),
        pytest.raises(DamageError, match=message),
    ):
        checkpoint.load(tmp_path, into=into)


BLOCK, NUM_BLOCKS = 4096, 40


def read_ahead(source: Any, place: tuple[int, int], come_to: int, expected: int) -> list[int]:
    """The blocks of a file of columns that one rank reads, when its copies have come to one."""
    sent: list[int] = []
    send = os.sendfile

    def sends(out: int, file: int, offset: int, count: int) -> int:
        sent.append(offset // BLOCK)
        return send(out, file, offset, count)

    def waits(*given: Any) -> int:
        raise BlockingIOError

    def task(block: int) -> Any:
        """Two rows within one block."""
        piece = StoredPiece(Box((0, 0), (2, 8)), 0, block * BLOCK, (64, 1))
        return direct_reads._Task(piece, torch.zeros(2, 8), "bfloat16")

    with (
        patch.object(direct_reads, "BLOCK", BLOCK),
        patch.object(direct_reads, "BLOCKS_AHEAD", 2),
        patch.object(os, "sendfile", sends),
        patch.object(os, "preadv", waits),  # as if nothing was in the page cache
    ):
        ahead = ReadAhead(source, map(task, range(NUM_BLOCKS)), place)
        ahead.reach(task(come_to))
        end = time.monotonic() + 30
        while len(sent) < expected and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.01)  # what should not be read would be by now
        ahead.close()
    return sent


def test_ranks_of_a_host_read_ahead_in_shares(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(BLOCK * NUM_BLOCKS))
    source: Any = SimpleNamespace(storage=LocalStorage(str(tmp_path)), name=lambda file: "data")
    for num in (1, 3):
        for come_to in (0, 11, NUM_BLOCKS - 1):
            last = min(come_to + 2 * num, NUM_BLOCKS - 1)
            mine = [range(rank, last + 1, num) for rank in range(num)]
            found = [
                read_ahead(source, (rank, num), come_to, len(mine[rank])) for rank in range(num)
            ]
            assert found == [[*blocks] for blocks in mine]


def load_without_reading_ahead(rank: int, folder: str) -> tuple[bool, bool]:
    into, copy, tried = into_of("tp"), MappedFiles.copy, threading.Event()

    def fails(*given: Any) -> int:
        tried.set()
        raise OSError(22, "Invalid argument")

    def copies(*given: Any) -> None:
        tried.wait(20 if rank == 0 else 0)  # the only block is that of rank 0
        copy(*given)

    preadv = os.preadv

    def waits(file: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            raise BlockingIOError
        return preadv(file, buffers, offset, flags)

    with (
        patch.object(os, "sendfile", fails),
        patch.object(os, "preadv", waits),
        patch.object(MappedFiles, "copy", copies),
    ):
        checkpoint.load(folder, into=into, group=pool_group(4))
    return tried.is_set(), is_loaded(into)


def test_a_load_does_not_need_to_read_ahead(pool: Pool, tmp_path: Path) -> None:
    """A file system may not support what it is done with."""
    save_file(stored(), tmp_path / "model.safetensors")
    told = pool.run(load_without_reading_ahead, str(tmp_path), ranks=range(4))
    assert told == [(rank == 0, True) for rank in range(4)]


def load_by_move(rank: int, folder: str, most: int, hosts: int) -> tuple[int, int, bool]:
    with patch.object(shared_reads, "MOST_SMALL", most):
        _, moves, _, read, right = load_counted(rank, folder, "tp", hosts, torch.float32)
    return moves, read, right


def test_what_ranks_read_for_each_other(pool: Pool, tmp_path: Path) -> None:
    """Norms travel with what ranks say, unless there is more: then by one move.

    That is the way of columns too where ranks are on two hosts, which would read the same pages.
    """
    save_file(stored(), tmp_path / "model.safetensors")
    size = 4 * sum(value.numel() for value in stored().values())
    for most, hosts, moves in ((1 << 20, 1, 0), (0, 1, 1), (0, 2, 1)):
        told = pool.run(load_by_move, str(tmp_path), most, hosts, ranks=range(4))
        assert set(told) == {(moves, size, True)}


def load_norms(rank: int, folder: str) -> tuple[int, bool]:
    into = {name: torch.zeros(25) for name in ("norm.0", "norm.2")}
    report = checkpoint.load(folder, into=into, group=pool_group(2))
    return report.bytes_read, all((one == 1).all() for one in into.values())


def test_what_is_between_small_tensors_is_not_read(pool: Pool, tmp_path: Path) -> None:
    tensors = {"norm.0": torch.ones(25), "norm.1": torch.zeros(500), "norm.2": torch.ones(25)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert pool.run(load_norms, str(tmp_path), ranks=range(2)) == [(200, True)] * 2
