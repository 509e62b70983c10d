"""The names of ``torch.distributed._shard``, at the same paths: imports change by one word.

    from torch.distributed._shard.sharding_spec import ChunkShardingSpec      # before
    from reshard.compat.sharding_spec import ChunkShardingSpec                # after

The modules below this one have no files; the table ``MODULES`` lists their names. New code imports
from ``reshard.sharded`` and ``reshard.nn``. docs/behaviours.md says what is not the same as
in torch, and why.
"""

from __future__ import annotations

import logging
import sys
from collections import ChainMap
from collections.abc import Sequence
from types import ModuleType

from reshard.errors import ArgumentError, needing_torch

with needing_torch("reshard.compat"):
    import torch

    from reshard import nn, sharded
    from reshard.sharded import specs
    from reshard.sharded.groups import Group, check_members
    from reshard.sharded.specs import Placement, ShardMetadata, TensorProperties, layout_of_shards

__all__ = ["MODULES"]

__path__: list[str] = []  # makes it a package for Python, with modules below it

MODULES = {
    "": "_shard_tensor load_with_process_group shard_module shard_parameter",
    "_utils": "narrow_tensor narrow_tensor_by_index",
    "api": "_collect_local_shard _get_current_process_group _reshard_output _shard_tensor "
    "load_with_process_group shard_module shard_parameter",
    "metadata": "ShardMetadata",
    "sharded_optim": "ShardedOptimizer named_params_with_sharded_tensor",
    "sharded_optim.api": "ShardedOptimizer",
    "sharded_tensor": "Shard ShardMetadata ShardedTensor ShardedTensorBase ShardedTensorMetadata "
    "TensorProperties _sharded_op_impl custom_sharded_op_impl empty full init_from_local_shards "
    "ones pre_load_state_dict_hook rand randn state_dict_hook zeros",
    "sharded_tensor.api": "Shard ShardedTensor ShardedTensorBase ShardedTensorMetadata "
    "TensorProperties _create_tensor_from_params",
    "sharded_tensor.logger": "_get_or_create_logger",
    "sharded_tensor.metadata": "ShardMetadata ShardedTensorMetadata TensorProperties",
    "sharded_tensor.reshard": "build_reshard_metadata get_idx_from_placements "
    "reshard_local_shard reshuffle_local_shard",
    "sharded_tensor.shard": "Shard",
    "sharded_tensor.utils": "_parse_and_validate_remote_device",
    "sharder": "Sharder",
    "sharding_plan": "ShardingPlan ShardingPlanner",
    "sharding_plan.api": "ShardingPlan ShardingPlanner",
    "sharding_spec": "ChunkShardingSpec DevicePlacementSpec EnumerableShardingSpec PlacementSpec "
    "ShardMetadata ShardingSpec _infer_sharding_spec_from_shards_metadata",
    "sharding_spec._internals": "check_tensor get_chunk_sharding_params get_chunked_dim_size "
    "get_split_size validate_non_overlapping_shards_metadata",
    "sharding_spec.api": "DevicePlacementSpec EnumerableShardingSpec PlacementSpec ShardMetadata "
    "ShardingSpec _infer_sharding_spec_from_shards_metadata custom_sharding_spec_op",
    "sharding_spec.chunk_sharding_spec": "ChunkShardingSpec",
}
"""The names in each module of ``torch.distributed._shard``, by its path below that."""


def narrow_tensor(whole: torch.Tensor, metadata: ShardMetadata) -> torch.Tensor:
    """The part of a whole tensor that belongs to a shard."""
    return narrow_tensor_by_index(whole, metadata.shard_offsets, metadata.shard_sizes)


def narrow_tensor_by_index(
    whole: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """The part of a tensor with these offsets and sizes."""
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole


def _create_tensor_from_params(
    *size: int, local_device: torch.device, tensor_properties: TensorProperties
) -> torch.Tensor:
    """A tensor for one shard, with uninitialized values."""
    names = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
    options = {name: getattr(tensor_properties, name) for name in names}
    return torch.empty(*size, device=local_device, **options)


def _parse_and_validate_remote_device(
    pg: Group, remote_device: Placement
) -> tuple[int | None, torch.device]:
    """The rank and the device of a placement, whose rank must be in the group."""
    if remote_device is None:
        raise ArgumentError("remote device is None: give a placement such as rank:0/cpu")
    where = ShardMetadata([], [], remote_device)
    layout_of_shards((), (where,))  # raises if it names no rank
    check_members([where.rank], pg)
    return where.rank, torch.device(remote_device.device())


def _get_or_create_logger() -> logging.Logger:
    logger = logging.getLogger("reshard.sharded")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
    return logger


check_tensor = specs.check_tensor
validate_non_overlapping_shards_metadata = specs.check_disjoint
ShardedTensorBase = sharded.ShardedTensor
_infer_sharding_spec_from_shards_metadata = sharded.infer_sharding_spec
_sharded_op_impl = sharded.custom_sharded_op_impl


def _install() -> None:
    known = ChainMap(globals(), vars(sharded), vars(nn))
    for path, names in MODULES.items():
        full = f"{__name__}.{path}" if path else __name__
        module = sys.modules.get(full) or ModuleType(full, f"Names of torch's ``{path}``.")
        for name in names.split():
            setattr(module, name, known[name])
        if path:
            module.__path__ = []
            sys.modules[full] = module
            above, _, last = full.rpartition(".")
            setattr(sys.modules[above], last, module)


_install()
