"""Code written for ``torch.distributed._shard``, with other imports and nothing else changed."""

import copy
import importlib
import pickle
import tempfile
import warnings

import pytest
import torch
from torch.distributed import rpc

from reshard import compat
from reshard.compat.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorBase,
    ShardedTensorMetadata,
    ShardMetadata,
    init_from_local_shards,
    pre_load_state_dict_hook,
    state_dict_hook,
    zeros,
)
from reshard.compat.sharding_spec import ChunkShardingSpec
from tests.ranks.pool import Pool, fresh_ranks
from tests.ranks.rank import pool_group
from tests.sharded.specs_and_values import FOUR, check_shards, chunk, numbered


@pytest.mark.parametrize("path", compat.MODULES, ids=lambda path: path or "_shard")
def test_every_name_is_where_torch_has_it(path: str) -> None:
    ours = importlib.import_module(f"reshard.compat.{path}".rstrip("."))
    theirs = importlib.import_module(f"torch.distributed._shard.{path}".rstrip("."))
    for name in compat.MODULES[path].split():
        assert hasattr(theirs, name), f"torch has no {name} there"
        assert callable(getattr(ours, name))


def shards_of_a_tensor(rank: int) -> None:
    group = pool_group(4)
    st = zeros(chunk(0), 8, 3, process_group=group)
    [shard] = shards = st.local_shards()
    assert not shard.tensor.requires_grad
    shard.tensor = torch.full((2, 3), float(rank))
    full = torch.arange(4.0).repeat_interleave(2)[:, None].expand(8, 3)
    check_shards(st, full)
    with pytest.raises(ValueError, match=r"Shard tensor size does not match .* \[2, 2\]"):
        shard.tensor = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"torch.int64 is assigned .* torch.float32"):
        shard.tensor = torch.zeros(2, 3, dtype=torch.int64)
    check_shards(st, full)
    copied = copy.deepcopy(shards)
    st.requires_grad_()
    assert shard.tensor.requires_grad
    assert not copied[0].tensor.requires_grad
    (shard.tensor * 2).sum().backward()
    check_shards(st.grad, torch.full((8, 3), 2.0))
    assert pickle.loads(pickle.dumps(shard)).metadata == shard.metadata


def test_shards_stay_with_their_tensor(pool: Pool) -> None:
    pool.run(shards_of_a_tensor, ranks=FOUR)


def specs_that_change(rank: int) -> None:
    full, spec = numbered(8, 6), chunk(0)
    made = compat.api._shard_tensor(full, spec, process_group=pool_group(4))
    spec.placements = ["rank:3/cpu", "rank:2/cpu", "rank:1/cpu", "rank:0/cpu"]
    assert made.sharding_spec() == chunk(0)
    assert made.resharded(spec) is not made
    check_shards(made.resharded(spec), full)
    spec.dim = 1
    assert made.reshard(spec) is made
    check_shards(made, full)
    assert made.sharding_spec() == chunk(1, [3, 2, 1, 0])
    assert [shard.rank for shard in made._metadata.shards_metadata] == [3, 2, 1, 0]
    made._sharding_spec = copy.deepcopy(spec)  # as torch's own tests do
    assert made.sharding_spec() == spec


def test_fields_of_specs_may_be_assigned(pool: Pool) -> None:
    pool.run(specs_that_change, ranks=FOUR)


class Holder(torch.nn.Module):
    def __init__(self, tensor: ShardedTensor | None) -> None:
        super().__init__()
        self.tensor = tensor
        self.inner = torch.nn.Linear(2, 2)
        self.inner.other = tensor


def state_dicts(rank: int) -> None:
    full = numbered(8, 6)
    source = Holder(compat.api._shard_tensor(full, chunk(0), process_group=pool_group(4)))
    source._register_state_dict_hook(state_dict_hook)
    state = source.state_dict()
    assert {"tensor", "inner.other", "inner.weight"} <= state.keys()
    target = Holder(None)
    target._register_load_state_dict_pre_hook(pre_load_state_dict_hook, True)
    target.load_state_dict(state, strict=False)
    for found in (target.tensor, target.inner.other):
        assert isinstance(found, ShardedTensor)
        check_shards(found, full)


def test_hooks_of_state_dicts(pool: Pool) -> None:
    pool.run(state_dicts, ranks=FOUR)


def without_a_size(rank: int) -> None:
    metadata = ShardMetadata([0, 0], [rank + 1, 3], f"rank:{rank}/cpu")
    shards = [Shard(torch.full((rank + 1, 3), float(rank)), metadata)]
    st = init_from_local_shards(shards, None, None, process_group=pool_group(4))
    assert st.size() == (10, 3)
    assert st.local_shards()[0].metadata.shard_offsets == (rank * (rank + 1) // 2, 0)
    other = st.cpu(process_group=pool_group(4))
    assert other is st


def test_sizes_that_nobody_gives(pool: Pool) -> None:
    pool.run(without_a_size, ranks=FOUR)


def test_without_a_group_all_shards_may_be_here() -> None:
    stated = [ShardMetadata([at, 0], [2, 2], f"rank:{at // 2}/cpu") for at in (0, 2)]
    whole = torch.randn(4, 2)
    shards = [Shard(whole[one.shard_offsets[0] :][:2], one) for one in stated]
    st = ShardedTensorBase._init_from_local_shards_and_global_metadata(
        shards, ShardedTensorMetadata(stated, [4, 2])
    )
    assert torch.equal(torch.cat([shard.tensor for shard in st.local_shards()]), whole)
    assert [shard.metadata for shard in st.local_shards()] == stated


def with_rpc(rank: int, folder: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc")
    with warnings.catch_warnings():
        # torch's own, about how torch itself gathers the workers
        warnings.filterwarnings("ignore", message="You are using a Backend")
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    try:
        spec = ChunkShardingSpec(0, ["worker1/cpu", "worker0/cpu"])
        st = zeros(spec, 4, 3, init_rrefs=True)
        [shard] = st.local_shards()
        assert shard.metadata.shard_offsets == (0 if rank == 1 else 2, 0)
        [(other, [reference])] = st.remote_shards().items()
        assert other == 1 - rank == reference.owner().id
        assert reference.to_here().metadata.shard_offsets == (2 if rank == 1 else 0, 0)
        with pytest.raises(ValueError, match="Invalid worker name: worker7"):
            zeros(ChunkShardingSpec(0, ["worker7/cpu"]), 4)
        alone = zeros(ChunkShardingSpec(0, ["rank:0/cpu"]), 4, init_rrefs=True)
        assert list(alone.remote_shards()) == ([] if rank == 0 else [0])
    finally:
        rpc.shutdown()


def test_references_and_workers_of_rpc() -> None:
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(2) as ranks:
        ranks.run(with_rpc, folder)
