"""Sharded tensors: a tensor of which every rank holds some shards, and how it is cut.

from reshard.sharded import ChunkShardingSpec, shard_tensor

spec = ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(4)])
st = shard_tensor(weight, spec)              # rank 0 has the values
st.reshard(ChunkShardingSpec(1, spec.placements))

The names, and more than them, of ``torch.distributed._shard``: see the docs for what is the same
and what is better.
"""

from reshard.errors import needing_torch

with needing_torch("reshard.sharded"):
    import torch  # noqa: F401

from reshard.sharded.by_layout import LayoutShardingSpec
from reshard.sharded.chunk import ChunkShardingSpec
from reshard.sharded.comparing import allclose, equal
from reshard.sharded.custom_ops import custom_sharded_op_impl, custom_sharding_spec_op
from reshard.sharded.enumerable import EnumerableShardingSpec, RaggedShardingSpec
from reshard.sharded.factories import empty, full, ones, rand, randn, zeros
from reshard.sharded.from_local import init_from_local_shards
from reshard.sharded.grid import GridShardingSpec
from reshard.sharded.inference import infer_sharding_spec
from reshard.sharded.loading import current_process_group, load_with_process_group
from reshard.sharded.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from reshard.sharded.optim import ShardedOptimizer, lay_out_state, named_params_with_sharded_tensor
from reshard.sharded.pickling import rebuild_sharded_tensor
from reshard.sharded.resharding import (
    build_reshard_metadata,
    get_idx_from_placements,
    plan_reshard,
    reshard_local_shard,
    reshuffle_local_shard,
)
from reshard.sharded.saved import load_files
from reshard.sharded.shard import Shard
from reshard.sharded.sharding import ShardMismatchError, shard_tensor, shard_tensors
from reshard.sharded.sizes import (
    get_chunk_sharding_params,
    get_chunked_dim_size,
    get_split_size,
)
from reshard.sharded.spec import DevicePlacementSpec, PlacementSpec, ShardingSpec
from reshard.sharded.state_dicts import pre_load_state_dict_hook, state_dict_hook
from reshard.sharded.tensor import ShardedTensor

__all__ = [
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "GridShardingSpec",
    "LayoutShardingSpec",
    "PlacementSpec",
    "RaggedShardingSpec",
    "Shard",
    "ShardMetadata",
    "ShardMismatchError",
    "ShardedOptimizer",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "ShardingSpec",
    "TensorProperties",
    "allclose",
    "build_reshard_metadata",
    "current_process_group",
    "custom_sharded_op_impl",
    "custom_sharding_spec_op",
    "empty",
    "equal",
    "full",
    "get_chunk_sharding_params",
    "get_chunked_dim_size",
    "get_idx_from_placements",
    "get_split_size",
    "infer_sharding_spec",
    "init_from_local_shards",
    "lay_out_state",
    "load_files",
    "load_with_process_group",
    "named_params_with_sharded_tensor",
    "ones",
    "plan_reshard",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "rebuild_sharded_tensor",
    "reshard_local_shard",
    "reshuffle_local_shard",
    "shard_tensor",
    "shard_tensors",
    "state_dict_hook",
    "zeros",
]
