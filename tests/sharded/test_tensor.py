"""A ShardedTensor seen from outside: shards, sizes, flags, metadata, other dtypes and devices."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from reshard import CoverageError, Layout, Mesh, OperationError
from reshard.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    LayoutShardingSpec,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    empty,
    ones,
    shard_tensor,
    zeros,
)
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.sharded.specs_and_values import (
    FOUR,
    box,
    check_shards,
    chunk,
    group_of,
    numbered,
    sharded,
)


def one_shard(rank: int) -> None:
    full = numbered(10, 3)
    st = shard_tensor(full, chunk(0), None, pool_group(4))
    local = st.local_tensor()
    assert type(local) is torch.Tensor
    assert torch.equal(local, full[3 * rank : 3 * rank + 3])
    local.fill_(7)
    assert torch.equal(st.local_shards()[0].tensor, local)
    st.requires_grad_()
    (st.local_tensor() * 2).sum().backward()
    assert isinstance(st.grad, ShardedTensor)
    assert torch.equal(st.grad.local_tensor(), torch.full_like(local, 2))


def test_B21_local_tensor_is_the_one_shard(pool: Pool) -> None:
    pool.run(one_shard, ranks=FOUR)


def other_numbers_of_shards(rank: int) -> None:
    st = zeros(chunk(0, [0, 1, 0]), 6, 2, process_group=pool_group(4))
    held = {0: 2, 1: 1}.get(rank, 0)
    assert len(st.local_shards()) == held
    if held == 1:
        assert st.local_tensor().shape == (2, 2)
        return
    message = f"Only single local shard is supported, and this rank has {held}"
    with pytest.raises(NotImplementedError, match=message):
        st.local_tensor()


def test_B22_local_tensor_of_several_shards_or_none_is_an_error(pool: Pool) -> None:
    pool.run(other_numbers_of_shards, ranks=FOUR)


def flags(rank: int) -> None:
    st = ones(chunk(0), 9, 4, dtype=torch.float64, process_group=pool_group(4))
    assert (st.dtype, st.layout) == (torch.float64, torch.strided)
    assert (st.requires_grad, st.is_leaf) == (False, True)
    assert st.is_contiguous()
    assert not st.is_pinned()
    assert not st.is_sparse
    assert not st.is_complex()
    assert st.is_floating_point()
    assert st.element_size() == 8
    assert ones(chunk(0), 4, requires_grad=True, process_group=pool_group(4)).requires_grad


def test_B23_flags_are_visible(pool: Pool) -> None:
    pool.run(flags, ranks=FOUR)


def frozen_by_assignment(rank: int) -> None:
    """Upstream refuses the assignment; here it is how parameters are frozen."""
    st = ones(chunk(0, [0, 1, 2]), 6, 2, process_group=pool_group(4))
    for wanted in (True, False, True, True, False, True):
        st.requires_grad = wanted
        assert st.requires_grad == wanted
        assert all(shard.tensor.requires_grad == wanted for shard in st.local_shards())
        assert st.metadata().tensor_properties.requires_grad == wanted
    assert len(st._backward_hooks or ()) == 1
    (st.resharded(chunk(1)).full_tensor() * 3).sum().backward()
    assert isinstance(st.grad, ShardedTensor)
    assert st.grad.metadata().shards_metadata == st.metadata().shards_metadata
    assert all(bool((shard.tensor == 3).all()) for shard in st.grad.local_shards())
    parameter = torch.nn.Parameter(ones(chunk(0), 4, process_group=pool_group(4)))
    parameter.requires_grad = False
    assert not parameter.local_tensor().requires_grad


def not_of_integers(rank: int) -> None:
    st = ones(chunk(0, [0, 1]), 4, dtype=torch.int64, process_group=pool_group(4))
    with pytest.raises(RuntimeError, match="floating point"):
        st.requires_grad = True
    assert not st.requires_grad
    moved = ones(chunk(0), 4, requires_grad=True, process_group=pool_group(4)) * 2
    with pytest.raises(RuntimeError, match="leaf"):
        moved.requires_grad = False


def test_B23_requires_grad_may_be_assigned(pool: Pool) -> None:
    pool.run(frozen_by_assignment, ranks=FOUR)
    pool.run(not_of_integers, ranks=FOUR)


def sizes(rank: int) -> None:
    group = pool_group(4)
    ways = [(10, 20), ([10, 20],), ((10, 20),), (torch.Size([10, 20]),), (np.int64(10), 20)]
    for size in ways:
        st = empty(chunk(0), *size, process_group=group)
        assert st.size() == st.shape == torch.Size([10, 20])
        assert (st.size(0), st.size(1), st.size(-1), st.size(-2)) == (10, 20, 20, 10)
        assert (st.dim(), st.ndim, st.numel(), len(st)) == (2, 2, 200, 10)
    assert empty(chunk(0), 5, process_group=group).size() == torch.Size([5])
    assert ShardedTensor(chunk(0), 10, 20, process_group=group).size() == torch.Size([10, 20])
    for index in (2, -3):
        with pytest.raises(IndexError, match="out of range"):
            st.size(index)
    with pytest.raises(TypeError, match="must be int"):
        st.size("rows")  # type: ignore[call-overload]
    for bad in (("10",), (10, None), (2.5,), ([4, "x"],), ({"rows": 4},)):
        with pytest.raises(TypeError, match="should be whole numbers"):
            empty(chunk(0), *bad, process_group=group)
    with pytest.raises(ValueError, match=r"size \[4, -1\] has a number below 0"):
        empty(chunk(0), 4, -1, process_group=group)


def test_B24_sizes_are_given_and_asked_as_of_any_tensor(pool: Pool) -> None:
    pool.run(sizes, ranks=FOUR)


def as_torch_chunks(rank: int) -> None:
    for dim in (0, -2):
        st = zeros(chunk(dim), 10, 2, process_group=pool_group(4))
        assert [shard.shard_sizes[0] for shard in st.metadata().shards_metadata] == [3, 3, 3, 1]
        (shard,) = st.local_shards()
        assert shard.metadata == box([3 * rank, 0], [1 if rank == 3 else 3, 2], rank)
        assert shard.tensor.shape == torch.zeros(10, 2).chunk(4)[rank].shape


def test_B25_shards_are_those_of_torch_chunk(pool: Pool) -> None:
    pool.run(as_torch_chunks, ranks=FOUR)


def fewer_rows_than_ranks(rank: int) -> None:
    for rows in (2, 1, 0):
        st = ones(chunk(0), rows, 5, process_group=pool_group(4))
        check_shards(st, torch.ones(rows, 5))
        assert st.local_tensor().shape == (1 if rank < rows else 0, 5)
        stated = st.metadata().shards_metadata
        EnumerableShardingSpec(stated).build_metadata(st.size(), TensorProperties())
        assert torch.equal(st.full_tensor(), torch.ones(rows, 5))


def test_B26_ranks_without_rows(pool: Pool) -> None:
    pool.run(fewer_rows_than_ranks, ranks=FOUR)


DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_B27_metadata_is_pickled_and_compared(dtype: torch.dtype) -> None:
    layouts, formats = (
        (torch.strided, torch.sparse_coo),
        (torch.contiguous_format, torch.channels_last),
    )
    shards = (box([0, 0], [5, 10], 0), box([5, 0], [5, 10], 1))
    found = set()
    for layout, requires_grad, memory, pinned in product(layouts, (0, 1), formats, (0, 1)):
        common = TensorProperties(dtype, layout, bool(requires_grad), memory, bool(pinned))
        metadata = ShardedTensorMetadata(shards, torch.Size([10, 10]), common)
        again = pickle.loads(pickle.dumps(metadata))
        assert again == metadata
        assert hash(again) == hash(metadata)
        found.add(again)
    assert len(found) == 16


def test_B27_metadata_takes_lists_and_keeps_tuples() -> None:
    one = ShardedTensorMetadata([box([0], [4], 0)], [4])  # type: ignore[arg-type]
    assert one == ShardedTensorMetadata((ShardMetadata((0,), (4,), "rank:0/cpu"),), torch.Size([4]))
    assert isinstance(one.size, torch.Size)


def no_remote_shards(rank: int) -> None:
    st = zeros(chunk(0), 8, process_group=pool_group(4))
    with pytest.raises(RuntimeError, match=r"with init_rrefs=False.*reshard\(\)"):
        st.remote_shards()
    for make in (zeros, ShardedTensor):
        with pytest.raises(RuntimeError, match=r"RPC Framework .* init_rrefs=True"):
            make(chunk(0), 8, init_rrefs=True, process_group=pool_group(4))
        make(chunk(0), 8, init_rrefs=False, process_group=pool_group(4))


def test_B28_no_references_without_rpc(pool: Pool) -> None:
    pool.run(no_remote_shards, ranks=FOUR)


def let_go(rank: int) -> None:
    st = shard_tensor(numbered(8, 6), chunk(0), process_group=pool_group(4)).requires_grad_()
    moved = st.resharded(chunk(1))
    (moved * 2).full_tensor().sum().backward()
    gathered, copied = st.gather(), st.detach().clone()
    held = [st, moved, st.grad, copied, *st._content.parts, *moved._content.parts]
    gone = [weakref.ref(one) for one in held]
    del st, moved, gathered, copied, held
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)


def test_B29_nothing_keeps_tensors_alive(pool: Pool) -> None:
    pool.run(let_go, ranks=FOUR)


def other_dtypes(rank: int) -> None:
    grid = EnumerableShardingSpec([box([0, 0], [4, 3], 0), box([0, 3], [4, 3], 1)])
    for spec in (chunk(0), grid):
        st = shard_tensor(numbered(4, 6), spec, None, pool_group(4))
        stated = st.metadata()
        assert st.cpu() is st
        for same in (("cpu",), (torch.float64,), (st,), (torch.device("cpu"), torch.float64)):
            assert st.to(*same) is st
            copied = st.to(*same, copy=True)
            assert copied is not st
            assert copied.metadata() == stated
            check_shards(copied, numbered(4, 6))
        for asked in ((torch.int32,), (torch.zeros(1, dtype=torch.int32),), ("cpu", torch.int32)):
            other = st.to(*asked)
            check_shards(other, numbered(4, 6, dtype=torch.int32))
            assert other.metadata().shards_metadata == stated.shards_metadata
            assert other.sharding_spec() == st.sharding_spec()
            assert other.process_group is st.process_group
        for name, dtype in (("float", torch.float32), ("half", torch.float16)):
            assert getattr(st, name)().metadata().tensor_properties.dtype == dtype


def test_B56_other_dtypes_keep_the_metadata(pool: Pool) -> None:
    pool.run(other_dtypes, ranks=FOUR)


def other_devices(rank: int) -> None:
    """The device "meta" stands for one that is not the CPU."""
    st = shard_tensor(numbered(6, 2), chunk(0, [0, 2]), None, pool_group(4))
    assert st.device == torch.device("cpu")
    moved = st.to("meta")
    assert moved.device == torch.device("meta")
    assert all(shard.tensor.device == moved.device for shard in moved.local_shards())
    assert [shard.metadata.rank for shard in moved.local_shards()] == [rank] * (rank in (0, 2))
    boxes = [shard.box for shard in moved.metadata().shards_metadata]
    assert boxes == [shard.box for shard in st.metadata().shards_metadata]
    assert st.device == torch.device("cpu")


def test_B56_B57_the_device_is_that_of_the_shards(pool: Pool) -> None:
    pool.run(other_devices, ranks=FOUR)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without GPU")
def test_B56_cuda_without_a_gpu_is_an_error() -> None:
    st = zeros(chunk(0, [0]), 4)
    with pytest.raises((RuntimeError, AssertionError), match=r"(?i)cuda"):
        st.cuda()
    assert st.device == torch.device("cpu")


def replicas_and_copies(rank: int) -> None:
    spec = LayoutShardingSpec(Layout(Mesh(tp=4), "- -"))
    one = sharded(numbered(3, 4), spec).requires_grad_()
    for _ in range(2):
        one.sum().backward()
    nn.utils.clip_grad_norm_([one], 1.0)
    assert isinstance(copy.copy(one), ShardedTensor)
    assert copy.copy(one).requires_grad
    if rank in (2, 3):
        mesh = DeviceMesh.from_group(group_of(2, 3), "cpu")
        tensor = DTensor.from_local(numbered(2, 2) + rank, mesh, [Shard(0)], run_check=False)
        assert ShardedTensor.from_dtensor(tensor).full_tensor().shape == (4, 2)
    moved = nn.Parameter(sharded(numbered(8, 2), chunk(0)))
    moved.data = sharded(numbered(4, 6), chunk(1))
    (moved * 2).sum().backward()
    assert moved.grad.sharding_spec() == chunk(1)
    moved.grad = None
    moved.requires_grad_(False).data = sharded(numbered(8, 2), chunk(0))
    (moved.requires_grad_() * 2).sum().backward()
    assert moved.grad.sharding_spec() == chunk(0)


def test_replicas_copies_and_data_that_is_set(pool: Pool) -> None:
    pool.run(replicas_and_copies, ranks=FOUR)


def converted_modules(rank: int) -> None:
    module = nn.Linear(4, 8)
    weight = module.weight = nn.Parameter(sharded(numbered(8, 4, dtype=torch.float32), chunk(0)))
    module(torch.ones(2, 4)).sum().backward()
    for requires_grad in (True, False):
        module.weight.requires_grad_(requires_grad)
        for dtype in (torch.float64, torch.bfloat16, torch.float32):
            assert module.to(dtype).weight is weight
            assert weight.dtype is weight.grad.dtype is weight.local_tensor().dtype is dtype
    module.share_memory()
    assert all(part.is_shared() for part in weight._content.parts)
    assert torch.equal(weight.full_tensor(), numbered(8, 4, dtype=torch.float32))


def test_modules_are_converted_in_place_also_frozen_ones(pool: Pool) -> None:
    pool.run(converted_modules, ranks=FOUR)


def test_an_array_of_a_part_is_refused() -> None:
    one = shard_tensor(numbered(6, 5), ChunkShardingSpec(0, ["rank:0/cpu", "rank:0/cpu"]))
    with pytest.raises(OperationError, match=r"take full_tensor\(\)\.numpy\(\)"):
        one.numpy()
    with pytest.raises(OperationError, match="of which this rank has a part"):
        np.asarray(one)


def test_one_process_without_a_group() -> None:
    full = numbered(6, 5)
    one = shard_tensor(full, ChunkShardingSpec(0, ["rank:0/cpu", "rank:0/cpu"])).requires_grad_()
    assert [tuple(shard.tensor.shape) for shard in one.local_shards()] == [(3, 5), (3, 5)]
    other = one.resharded(ChunkShardingSpec(1, ["rank:0/cpu", "rank:0/cpu"]))
    assert torch.equal(other.local_shards()[1].tensor, full[:, 3:])
    assert torch.equal(one.full_tensor(), full)
    assert torch.equal(one.gather(), full)
    (other.full_tensor() * full).sum().backward()
    assert torch.equal(one.grad.full_tensor(), full)


def test_shards_elsewhere_without_a_group() -> None:
    spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    one = zeros(spec, 4, 4)
    with pytest.raises(CoverageError, match="init_process_group"):
        one.full_tensor()
