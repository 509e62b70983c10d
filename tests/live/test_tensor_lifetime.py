"""Moved tensors are freed with their last reference, without the garbage collector."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import reshard as rs
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.soak import cases

HAVE, WANT = (rs.Layout(rs.Mesh(tp=4), words) for words in ("tp -", "- tp"))


@contextmanager
def without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def let_go(rank: int, rows: int, transport: str) -> None:
    group, shape = pool_group(4), (rows, 64)
    options = {} if transport == "auto" else {"transport": transport}
    plan = rs.plan(HAVE, WANT, shape=shape, dtype="float32")
    with without_gc():
        for turn in range(cases(2, 3)):
            local = torch.ones(rows // 4, 64)
            moved = rs.move(local, HAVE, WANT, shape=shape, group=group, **options)
            ran = plan.run({"tensor": local}, group=group, **options)["tensor"]
            started = plan.start({"tensor": local}, group=group, **options).wait()["tensor"]
            refs = [StorageWeakRef(one.untyped_storage()) for one in (local, moved, ran, started)]
            del local, moved, ran, started
            end = time.monotonic() + 2  # a thread may be about to let go
            while time.monotonic() < end and not all(one.expired() for one in refs):
                time.sleep(0.001)
            assert [one.expired() for one in refs] == [True] * 4, (turn, rows)


@pytest.mark.parametrize("transport", ["auto", "shared", "network"])
@pytest.mark.parametrize("rows", [8, 512, 16384])
def test_tensors_go_with_their_last_user(pool: Pool, rows: int, transport: str) -> None:
    pool.run(let_go, rows, transport, ranks=range(4))
