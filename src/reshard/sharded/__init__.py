"""Sharded tensors: tensors of which every rank holds some shards.

from reshard.sharded import ChunkShardingSpec, shard_tensor

spec = ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(4)])
st = shard_tensor(weight, spec)              # rank 0 has the values
st.reshard(ChunkShardingSpec(1, spec.placements))

The names of ``torch.distributed._shard`` and more; docs/sharded.md says what is better.

api        functions that make sharded tensors, and those of torch's reshard module
optim      ShardedOptimizer
tensor     the class ShardedTensor
ops/       operations of torch on sharded tensors
files/     sharded tensors in files and state dicts
move       contents moved to other layouts, and conversions that autograd follows
create     contents from specs, and from shards that the ranks already have
splits     specs that split a tensor into parts, and the spec that lists shards
content    the layout of a sharded tensor and the parts of this rank
specs      shards and their metadata; ShardingSpec, the base class of specs; the spec of a layout
groups     process groups, RPC workers and references
"""

from reshard.errors import needing_torch

with needing_torch("reshard.sharded"):
    import torch  # noqa: F401

from reshard.sharded.api import (
    ShardMismatchError,
    build_reshard_metadata,
    empty,
    full,
    get_idx_from_placements,
    init_from_local_shards,
    ones,
    plan_reshard,
    rand,
    randn,
    reshard_local_shard,
    reshuffle_local_shard,
    shard_tensor,
    shard_tensors,
    zeros,
)
from reshard.sharded.files.pickles import load_files, rebuild_sharded_tensor
from reshard.sharded.files.torch_checkpoint import pre_load_state_dict_hook, state_dict_hook
from reshard.sharded.groups import current_process_group, load_with_process_group
from reshard.sharded.ops.functions import (
    allclose,
    custom_sharded_op_impl,
    custom_sharding_spec_op,
    equal,
)
from reshard.sharded.optim import ShardedOptimizer, lay_out_state, named_params_with_sharded_tensor
from reshard.sharded.specs import (
    DevicePlacementSpec,
    LayoutShardingSpec,
    PlacementSpec,
    Shard,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
)
from reshard.sharded.splits import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    RaggedShardingSpec,
    get_chunk_sharding_params,
    get_chunked_dim_size,
    get_split_size,
    infer_sharding_spec,
)
from reshard.sharded.tensor import ShardedTensor

__all__ = [
    "ChunkShardingSpec", "DevicePlacementSpec", "EnumerableShardingSpec", "GridShardingSpec",
    "LayoutShardingSpec", "PlacementSpec", "RaggedShardingSpec", "Shard", "ShardMetadata",
    "ShardMismatchError", "ShardedOptimizer", "ShardedTensor", "ShardedTensorMetadata",
    "ShardingSpec", "TensorProperties", "allclose", "build_reshard_metadata",
    "current_process_group", "custom_sharded_op_impl", "custom_sharding_spec_op", "empty", "equal",
    "full", "get_chunk_sharding_params", "get_chunked_dim_size", "get_idx_from_placements",
    "get_split_size", "infer_sharding_spec", "init_from_local_shards", "lay_out_state",
    "load_files", "load_with_process_group", "named_params_with_sharded_tensor", "ones",
    "plan_reshard", "pre_load_state_dict_hook", "rand", "randn", "rebuild_sharded_tensor",
    "reshard_local_shard", "reshuffle_local_shard", "shard_tensor", "shard_tensors",
    "state_dict_hook", "zeros",
]  # fmt: skip


def __dir__() -> list[str]:
    return [*__all__]
