"""Shard the parameters of modules, and keep activations as shares between forward and backward.

    from reshard.nn import ShardingPlan, shard_module
    from reshard.sharded import ChunkShardingSpec

    rows = ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(4)])
    handle = shard_module(model, ShardingPlan({"layers.{i}.fc1.weight": rows}))

module        shard_module and shard_parameter: all of a plan or nothing; ShardHandle undoes it
plan          ShardingPlan: what of a module is sharded, and how; which tensors its paths name
outputs       forward hooks that reshard sharded outputs or make them local
paths         modules, parameters and buffers by path and pattern
activations/  input_reshard

The names with an underscore are those of ``torch.distributed._shard``.
"""

from __future__ import annotations

from reshard.errors import needing_torch

with needing_torch("reshard.nn"):
    import torch  # noqa: F401

from reshard.nn.activations.api import (
    Resharding,
    input_reshard,
    pack_activation,
    resharded_activations,
    resharding_of,
    unpack_activation,
)
from reshard.nn.activations.region import Stats
from reshard.nn.activations.replicated import mark_replicated
from reshard.nn.module import ShardHandle, shard_module, shard_parameter
from reshard.nn.outputs import collect_local_shard, remove_output_hooks, reshard_output
from reshard.nn.plan import Sharder, ShardingPlan, ShardingPlanner
from reshard.sharded.api import shard_tensor
from reshard.sharded.groups import current_process_group, load_with_process_group

__all__ = [
    "Resharding", "ShardHandle", "Sharder", "ShardingPlan", "ShardingPlanner", "Stats",
    "collect_local_shard", "current_process_group", "input_reshard", "load_with_process_group",
    "mark_replicated", "pack_activation", "remove_output_hooks", "reshard_output",
    "resharded_activations", "resharding_of", "shard_module", "shard_parameter", "shard_tensor",
    "unpack_activation",
]  # fmt: skip

_shard_tensor = shard_tensor
_reshard_output = reshard_output
_collect_local_shard = collect_local_shard
_get_current_process_group = current_process_group
_pack_hook_tp = pack_activation
_unpack_hook_tp = unpack_activation


def __dir__() -> list[str]:
    return [*__all__]
