"""What docs/sharded.md shows, as a type checker sees it; nothing here is run."""

from typing import assert_type

import torch

import reshard as rs
from reshard.nn import ShardHandle, ShardingPlan, shard_module
from reshard.sharded import ChunkShardingSpec, GridShardingSpec, ShardedTensor, shard_tensor

everyone = [f"rank:{rank}/cpu" for rank in range(4)]
full = torch.arange(80.0).reshape(10, 8)
rows, columns = ChunkShardingSpec(0, everyone), ChunkShardingSpec(1, everyone)
st = shard_tensor(full, rows)
assert_type(st, ShardedTensor)
assert_type(st.local_tensor(), torch.Tensor)
assert_type(st.resharded(columns), ShardedTensor)
assert_type(st.resharded(GridShardingSpec([2, [3, 5]], everyone)), ShardedTensor)
assert_type(st.full_tensor(), torch.Tensor)

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
handle = shard_module(model, ShardingPlan({"0.*": rows, "1.weight": columns}))
assert_type(handle, ShardHandle)
handle.remove()
assert_type(rs.sharded.zeros(rows, 10, 8), ShardedTensor)
