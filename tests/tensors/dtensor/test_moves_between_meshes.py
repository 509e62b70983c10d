"""DTensors that go from one mesh to another, and a move where DTensor itself is wrong."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import reshard as rs
from reshard.tensors.dtensor.placements import layout_from
from tests.ranks.pool import Pool
from tests.soak import cases
from tests.tensors.dtensor.redistribution import (
    TIMEOUT,
    Pair,
    check_local,
    leaf,
    pairs,
    plainly,
    source,
    values,
)
from tests.tensors.worlds import cut, numbered


@dataclass(frozen=True)
class Journey:
    """The ranks of two meshes, as nested lists."""

    have: list
    want: list


JOURNEYS = {
    "permuted": Journey([0, 1, 2, 3], [2, 0, 3, 1]),
    "sub-mesh": Journey([0, 1, 2, 3], [1, 2]),
    "into a larger one": Journey([1, 2], [0, 1, 2, 3]),
    "overlapping": Journey([0, 1, 2, 3], [2, 3, 4, 5]),
    "disjoint": Journey([0, 1], [2, 3]),
    "one to many": Journey([6], [1, 2, 3, 4]),
    "other axes": Journey([0, 1, 2, 3], [[0, 1], [2, 3]]),
    "transposed": Journey([[0, 1], [2, 3]], [[0, 2], [1, 3]]),
    "everything": Journey([[0, 1], [2, 3]], [[[4, 5], [6, 7]]]),
}


def journeys(journey: Journey) -> list[Pair]:
    """Pairs for two meshes; a mesh with fewer axes leaves out the first placements."""
    axes = [torch.tensor(ranks).dim() for ranks in (journey.have, journey.want)]
    found = pairs(max(axes), [(7, 5), (3, 9)], [None, "sum"])
    cut_down = {Pair(p.shape, p.have[-axes[0] :], p.want[-axes[1] :]): None for p in found}
    every = 1 + len(cut_down) // cases(7, 20)
    return [*cut_down][::every]


def travel(rank: int, journey: Journey, nones: bool) -> int:
    """Move to the other mesh and back by gradients; ranks without input may bring nothing."""
    here, there = (DeviceMesh("cpu", ranks) for ranks in (journey.have, journey.want))
    chosen = journeys(journey)
    for number, pair in enumerate(chosen):
        travel_once(rank, here, there, pair, number, nones)
    return len(chosen)


def travel_once(
    rank: int, here: DeviceMesh, there: DeviceMesh, pair: Pair, number: int, nones: bool
) -> None:
    inside, wanted = here.get_coordinate() is not None, there.get_coordinate() is not None
    if not inside and not wanted:
        return
    ours, to = leaf(source(here, pair, rank), grad=True), (there, pair.want)
    if nones and not inside:
        layout = layout_from(here, pair.have, pair.shape)
        moved = rs.move(None, layout, to=to, shape=pair.shape, dtype="float64", timeout=TIMEOUT)
    else:
        moved = rs.move(ours, to=to, timeout=TIMEOUT)
    assert (moved.device_mesh, moved.placements) == (there, tuple(pair.want))
    assert (moved.shape, moved.stride()) == (ours.shape, ours.stride())
    if wanted:
        _, worth = values(here, pair)
        check_local(moved.to_local(), cut(worth, rs.layout_of(moved), rank), f"{pair}")
    worth = travel_back(rank, moved, pair, number)
    if inside:
        kept = plainly(pair.have)
        assert ours.grad.placements == kept
        expected = cut(worth, layout_from(here, kept, pair.shape), rank)
        check_local(ours.grad.to_local(), expected, f"{pair}")


def travel_back(rank: int, moved: DTensor, pair: Pair, number: int) -> torch.Tensor:
    """Send a gradient back, laid out in one of several ways; gives what it is worth."""
    mesh = moved.device_mesh
    kinds = (pair.want, (Replicate(),) * mesh.ndim, (Partial(),) * mesh.ndim)
    given = replace(pair, have=kinds[number % 3])
    if mesh.get_coordinate() is None:
        rs.backward(moved)
    else:
        moved.backward(source(mesh, given, rank))
    return values(mesh, given)[1]


@pytest.mark.parametrize("name", JOURNEYS)
def test_between_meshes(pool: Pool, name: str) -> None:
    for nones in (False, True):
        assert min(pool.run(travel, JOURNEYS[name], nones)) >= cases(4, 10)


def gather_flattened(rank: int) -> tuple[bool, int]:
    """Nested uneven shards to replicas, where the mesh also exists flattened."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    mesh._flatten("ab")
    if rank > 3:
        return True, 0
    right, tried = True, 0
    for rows in (5, 6, 7, 3, 1):
        full = numbered(rows, 3).double()
        for dim in (0, 1):
            tensor = distribute_tensor(full, mesh, [Shard(dim), Shard(dim)])
            moved = rs.move(tensor, to=(mesh, [Replicate(), Replicate()]), timeout=TIMEOUT)
            check_local(moved.to_local(), full, f"{rows} rows, dim {dim}")
            theirs = tensor.redistribute(mesh, [Replicate(), Replicate()])
            right &= torch.equal(theirs.to_local(), full)
            tried += 1
    return right, tried


def test_flattened_mesh(pool: Pool) -> None:
    """torch 2.13 loses a row here (pytorch pull request 194457); ours must not."""
    told = pool.run(gather_flattened)
    assert [tried for _, tried in told] == [10] * 4 + [0] * 4
    if torch.__version__.startswith("2.13"):
        assert not any(right for right, _ in told[:4]), "this test no longer shows the defect"


def with_replicas_then_without(rank: int) -> None:
    """The second move is one of the mesh alone, though the first had the same placements."""
    mesh, full = DeviceMesh("cpu", [0, 2]), numbered(8, 6)
    have, to = rs.Layout.parse("dp=2 tp=2: dp -"), (mesh, [Replicate()])
    local = full.chunk(2)[rank // 2].clone()
    if rank in (1, 3):
        rs.move(local, have, to=to, shape=full.shape)
        return
    tensor = DTensor.from_local(local, mesh, [Shard(0)])
    assert torch.equal(rs.move(tensor, have, to=to).to_local(), full)
    # Without an option: only such moves are kept for a repetition.
    assert torch.equal(rs.move(tensor, to=to).to_local(), full)


def test_a_move_after_one_with_replicas_on_other_ranks(pool: Pool) -> None:
    pool.run(with_replicas_then_without, ranks=range(4))
