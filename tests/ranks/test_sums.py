"""Sums of large tensors: block by block into the destination, or along a line, the same bits."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import reshard as rs
from reshard.run.live import neighbours, summing
from reshard.run.numpy_dtypes import reduce_in_order
from tests.ranks.live import local_of
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group

FOUR, GRID = rs.Mesh(x=4), rs.Mesh(x=2, y=2)
PAIRS = [
    (rs.Layout(FOUR, "- - | sum x"), rs.Layout(FOUR, "x -")),
    (rs.Layout(FOUR, "- - | avg x"), rs.Layout(FOUR, "- x")),
    (rs.Layout(FOUR, "- - | max x"), rs.Layout(FOUR, "- -")),
    (rs.Layout(GRID, "y - | sum x"), rs.Layout(GRID, "y -")),
]
SHAPE = (64, 96)
DTYPES = ["float32", "bfloat16", "float16", "int64", "float64"]


def addend_of(rank: int, dtype: str) -> torch.Tensor:
    """What a rank brings to the whole tensor."""
    made = torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank)) * 50
    return made.to(getattr(torch, dtype))


def bits_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def expected_of(have: rs.Layout, want: rs.Layout, rank: int, dtype: str) -> np.ndarray[Any, Any]:
    """A rank's part of all addends, added up in their order."""
    ranks = range(4) if have.mesh == FOUR else (rank % 2, rank % 2 + 2)
    assert have.reduce is not None
    addends = [bits_of(local_of(addend_of(one, dtype), want, rank)) for one in ranks]
    return reduce_in_order(have.reduce[0], addends, dtype)


def add_up(rank: int, dtype: str, least: int, options: dict[str, Any]) -> int:
    """Gives how often blocks were added up straight."""
    group = pool_group(4)
    with (
        mock.patch.object(summing, "LEAST_BYTES", least),
        mock.patch.object(neighbours, "SMALL", 64),  # so that no prepared move takes it
        mock.patch.object(summing, "add_up", side_effect=summing.add_up) as straight,
    ):
        for have, want in PAIRS:
            assert have.reduce is not None
            if have.reduce[0] == "avg" and dtype == "int64":
                continue
            local = local_of(addend_of(rank, dtype), have, rank)
            for _ in range(2):
                found = rs.move(local, have, want, shape=SHAPE, group=group, **options)
                expected = expected_of(have, want, rank, dtype)
                assert np.array_equal(bits_of(found), expected), (have, want)
        return straight.call_count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"transport": "network"}], ids=["host", "network"])
def test_straight_sums(pool: Pool, dtype: str, options: dict[str, Any]) -> None:
    assert all(pool.run(add_up, dtype, 1, options, ranks=range(4)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_along_a_line(pool: Pool, dtype: str) -> None:
    assert not any(pool.run(add_up, dtype, 1 << 40, {}, ranks=range(4)))


def add_up_prepared(rank: int, dtype: str) -> None:
    """Small sums that were made before."""
    group = pool_group(4)
    have, want = PAIRS[0]
    local = addend_of(rank, dtype)
    for _ in range(4):
        found = rs.move(local, have, want, shape=SHAPE, group=group)
        assert np.array_equal(bits_of(found), expected_of(have, want, rank, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_prepared_sums(pool: Pool, dtype: str) -> None:
    pool.run(add_up_prepared, dtype, ranks=range(4))
