"""Layouts of tensors that real ranks made: FSDP2 over tensor parallelism, DTensors, old shards."""

from itertools import permutations, product

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard as OldShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import reshard as rs
from reshard.tensors.dtensor.placements import mesh_of, placements_of
from reshard.tensors.dtensor.wrapping import dtensor_of
from reshard.tensors.exchanging import merge_specs, specs_from_texts, specs_to_text
from reshard.tensors.local import layout_of, local_of
from tests.ranks.pool import Pool
from tests.soak import cases
from tests.tensors.worlds import cut, numbered


def train_state(rank: int, rows: int) -> str:
    """Six ranks shard a block; each compares its parts with the whole and tells its specs."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3], [4, 5]], mesh_dim_names=("dp", "tp"))
    if mesh.get_coordinate() is None:
        return specs_to_text({})
    block = torch.nn.Sequential(torch.nn.Linear(8, rows), torch.nn.Linear(rows, 8))
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(numbered(*parameter.shape))
    whole = {name: value.clone() for name, value in block.state_dict().items()}
    parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])
    for name, tensor in block.state_dict().items():
        layout = layout_of(tensor)
        assert torch.equal(local_of(tensor), cut(whole[name], layout, rank)), (name, layout)
        assert torch.equal(tensor.full_tensor(), whole[name]), name
    return specs_to_text(rs.describe(block.state_dict()))


def test_fsdp_over_tensor_parallel(pool: Pool) -> None:
    texts = pool.run(train_state, 13)
    specs = merge_specs(specs_from_texts(dict(enumerate(texts))))
    mesh = rs.Mesh(dp=3, tp=2)
    assert specs == {
        "0.weight": rs.TensorSpec((13, 8), "float32", rs.Layout(mesh, "(tp dp) -")),
        "0.bias": rs.TensorSpec((13,), "float32", rs.Layout(mesh, "(tp dp)")),
        "1.weight": rs.TensorSpec((8, 13), "float32", rs.Layout(mesh, "dp tp")),
        "1.bias": rs.TensorSpec((8,), "float32", rs.Layout(mesh, "dp")),
    }


ROWS = (13, 5, 16)[: cases(2, 3)]


def gather_every_order(rank: int) -> int:
    """Local parts of every nesting, wrapped as DTensors, that torch puts together again."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    tried = 0
    for axes, rows in product(permutations("abc"), ROWS):
        for count in (2, 3):
            words = " ".join(axes[:count])
            layout = rs.Layout(mesh_of(mesh), f"({words}) -")
            full = numbered(rows, 3)
            placements = placements_of(layout, mesh, (rows, 3))
            tensor = dtensor_of(cut(full, layout, rank), mesh, placements, (rows, 3))
            assert layout_of(tensor) == layout
            assert torch.equal(tensor.full_tensor(), full), (words, rows, placements)
            tried += 1
    return tried


def test_torch_gathers_what_we_wrap(pool: Pool) -> None:
    assert pool.run(gather_every_order) == [6 * 2 * len(ROWS)] * 8


def scatter_everything(rank: int) -> int:
    """What distribute_tensor really sends, for every placement on 2 x 2 x 2."""
    mesh = init_device_mesh("cpu", (2, 2, 2))
    full, tried = numbered(5, 7), 0
    for placements in product((Shard(0), Shard(1), Replicate(), Partial("max")), repeat=3):
        tensor = distribute_tensor(full if rank == 0 else torch.zeros_like(full), mesh, placements)
        layout = layout_of(tensor)
        # Along a pending axis nothing is sent: every rank keeps what it had.
        if not any(isinstance(placement, Partial) for placement in placements):
            assert torch.equal(local_of(tensor), cut(full, layout, rank)), layout
        assert placements_of(layout, mesh, (5, 7)) == placements
        tried += 1
    return tried


def test_what_distribute_tensor_sends(pool: Pool) -> None:
    assert pool.run(scatter_everything) == [64] * 8


def old_shards(rank: int) -> str:
    """A ShardedTensor on ranks 4 to 7, several shards on one of them."""
    group = dist.new_group([4, 5, 6, 7])
    if rank < 4:
        return specs_to_text({})
    rows = {4: [(6, 2)], 5: [(0, 1), (3, 3)], 6: [(1, 2)], 7: [(8, 2)]}[rank]
    full = numbered(10, 3)
    shards = [
        OldShard.from_tensor_and_offsets(full[at : at + size].clone(), [at, 0], rank)
        for at, size in reversed(rows)
    ]
    tensor = init_from_local_shards(shards, 10, 3, process_group=group)
    assert torch.equal(local_of(tensor), cut(full, layout_of(tensor), rank))
    return specs_to_text(rs.describe({"old": tensor}))


def test_old_shards_on_a_sub_group(pool: Pool) -> None:
    texts = pool.run(old_shards)
    specs = merge_specs(specs_from_texts(dict(enumerate(texts))))
    layout = specs["old"].layout
    assert list(layout.ranks) == [4, 5, 6, 7]
    assert layout.local_shape(5, (10, 3)) == (12,)


def gather_later(rank: int) -> None:
    """A DTensor whose collective is still under way is waited for."""
    mesh = init_device_mesh("cpu", (8,))
    rows = distribute_tensor(numbered(13, 5), mesh, [Shard(0)])
    for _ in range(20):
        pending = rows.redistribute(mesh, [Replicate()], async_op=True)
        assert layout_of(pending) == rs.Layout(rs.Mesh(d0=8), "- -")
        local = local_of(pending)
        assert type(local) is torch.Tensor
        assert torch.equal(local, numbered(13, 5))


def test_local_tensors_that_are_not_there_yet(pool: Pool) -> None:
    pool.run(gather_later)
