"""Every pair of placements that DTensor can redistribute: the same values, the same gradients."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.ranks.pool import Pool
from tests.soak import soaking
from tests.tensors.dtensor.redistribution import compare_back, pairs

EVEN, UNEVEN = (8, 8), (7, 5)
ODD = ((3, 9), (1, 4), (0, 6))


def compare_all(rank: int, sizes: tuple[int, ...], every: int) -> int:
    """Compare pairs on a mesh of the first ranks, or every so many of them.

    All of them with an even and an uneven shape; odd shapes take turns.
    """
    mesh = DeviceMesh("cpu", torch.arange(torch.Size(sizes).numel()).reshape(sizes))
    if mesh.get_coordinate() is None:
        return 0
    num_axes = len(sizes)
    others = pairs(num_axes, [UNEVEN], ["avg", "max", "min"])
    all_pairs = [*pairs(num_axes, [EVEN, UNEVEN], [None, "sum"]), *others]
    for n, pair in enumerate([*all_pairs, *[*pairs(num_axes, ODD, [None, "sum"])][::4]][::every]):
        compare_back(mesh, pair, rank, n)
    return len(all_pairs) // every


def test_one_axis(pool: Pool) -> None:
    assert pool.run(compare_all, (4,), 1)[0] == 4 * 3 * 2 + 3 * 3


def test_two_axes(pool: Pool) -> None:
    every = 1 if soaking() else 37
    told = pool.run(compare_all, (2, 2), every, timeout=110)
    assert told[0] == (16 * 9 * 2 + 3 * 7 * 9) // every


def test_three_axes(pool: Pool) -> None:
    every = 73 if soaking() else 73 * 15
    assert pool.run(compare_all, (2, 2, 2), every, timeout=110)[0] == 88 * 73 // every
