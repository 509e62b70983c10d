"""Functions that make sharded tensors: factories, sharding of plain tensors, local shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypedDict, Unpack, cast

import torch
import torch.distributed as dist

from reshard.sharded.create.factories import Fill, Size
from reshard.sharded.create.scatter import Check, scatter_tensors
from reshard.sharded.groups import Group
from reshard.sharded.metadata import Shard, ShardMetadata, TensorProperties
from reshard.sharded.move.autograd import from_local
from reshard.sharded.specs.base import ShardingSpec
from reshard.sharded.specs.lowering import content_for
from reshard.sharded.tensor import ShardedTensor, filled_tensor, tensor_of

__all__ = [
    "empty",
    "full",
    "init_from_local_shards",
    "ones",
    "rand",
    "randn",
    "reshard_local_shard",
    "reshuffle_local_shard",
    "shard_by_spec",
    "shard_tensor",
    "shard_tensors",
    "zeros",
]

ONE = "tensor"


class Options(TypedDict, total=False):
    """The keyword arguments of all factories."""

    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    pin_memory: bool
    memory_format: torch.memory_format
    process_group: Group
    init_rrefs: bool


def _new(
    fill: Fill,
    spec: ShardingSpec,
    size: Sequence[Size],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    pin_memory: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
    process_group: Group = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    kind = torch.get_default_dtype() if dtype is None else dtype
    properties = TensorProperties(kind, layout, requires_grad, memory_format, pin_memory)
    return filled_tensor(fill, spec, size, properties, process_group, init_rrefs)


def empty(sharding_spec: ShardingSpec, *size: Size, **options: Unpack[Options]) -> ShardedTensor:
    """A sharded tensor with uninitialized values."""
    return _new(torch.empty, sharding_spec, size, **options)


def zeros(sharding_spec: ShardingSpec, *size: Size, **options: Unpack[Options]) -> ShardedTensor:
    """A sharded tensor of zeros."""
    return _new(torch.zeros, sharding_spec, size, **options)


def ones(sharding_spec: ShardingSpec, *size: Size, **options: Unpack[Options]) -> ShardedTensor:
    """A sharded tensor of ones."""
    return _new(torch.ones, sharding_spec, size, **options)


def full(
    sharding_spec: ShardingSpec,
    size: Sequence[int],
    fill_value: float,
    **options: Unpack[Options],
) -> ShardedTensor:
    """A sharded tensor of one value, with the dtype of the value if none is given."""
    if options.get("dtype") is None:
        options["dtype"] = torch.full((), fill_value).dtype
    fill = partial(torch.full, fill_value=fill_value)
    return _new(fill, sharding_spec, [size], **options)


def rand(sharding_spec: ShardingSpec, *size: Size, **options: Unpack[Options]) -> ShardedTensor:
    """Uniform random numbers, which each rank draws from its own generator."""
    return _new(torch.rand, sharding_spec, size, **options)


def randn(sharding_spec: ShardingSpec, *size: Size, **options: Unpack[Options]) -> ShardedTensor:
    """Normal random numbers, which each rank draws from its own generator."""
    return _new(torch.randn, sharding_spec, size, **options)


def shard_tensor(
    tensor: torch.Tensor,
    sharding_spec: ShardingSpec,
    src_rank: int | None = 0,
    process_group: Group = None,
    check: Check = "fingerprint",
    scatter: bool = True,
) -> ShardedTensor:
    """Shard a tensor whose values are on rank ``src_rank`` of the group.

    With ``src_rank=None``, or without ``scatter``, every rank takes its shards from its own
    tensor, and nothing is communicated.
    """
    known = isinstance(sharding_spec, ShardingSpec)
    if known and type(sharding_spec).shard is not ShardingSpec.shard:
        own = sharding_spec.shard(tensor, src_rank, process_group)  # type: ignore[arg-type]
        return cast(ShardedTensor, own)
    tensors, specs = {ONE: tensor}, {ONE: sharding_spec}
    return shard_tensors(tensors, specs, src_rank, process_group, check, scatter)[ONE]


def shard_by_spec(
    spec: ShardingSpec, tensor: torch.Tensor, src_rank: int | None, process_group: Group
) -> ShardedTensor:
    """``spec.shard`` of the specs that do not override it."""
    return shard_tensors({ONE: tensor}, {ONE: spec}, src_rank, process_group)[ONE]


def shard_tensors(
    tensors: Mapping[str, torch.Tensor],
    specs: Mapping[str, ShardingSpec],
    src_rank: int | None = 0,
    process_group: Group = None,
    check: Check = "fingerprint",
    scatter: bool = True,
) -> dict[str, ShardedTensor]:
    """Shard many tensors, with one comparison between ranks and along one plan."""
    contents = scatter_tensors(tensors, specs, src_rank, process_group, check, scatter)
    return {name: tensor_of(one, tensors[name].requires_grad) for name, one in contents.items()}


def init_from_local_shards(
    local_shards: Sequence[Shard],
    *global_size: int | Sequence[int] | None,
    process_group: Group = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """A tensor from the shards of each rank; ranks exchange their metadata.

    With ``None`` as the size, or as its first number, shards follow each other along dim 0 in the
    order of ranks.
    """
    return ShardedTensor._init_from_local_shards(
        local_shards, *global_size, process_group=process_group, init_rrefs=init_rrefs
    )


def reshard_local_shard(
    local_tensor: torch.Tensor,
    st_size: Sequence[int],
    sharding_spec: ShardingSpec,
    resharding_spec: ShardingSpec,
    pg: dist.ProcessGroup | None = None,
) -> tuple[list[Shard], list[ShardMetadata]]:
    """This rank's shards under another spec, and all metadata; gradients flow back."""
    properties = TensorProperties(local_tensor.dtype)
    content = content_for(sharding_spec, st_size, properties, pg)
    moved = cast(ShardedTensor, from_local(local_tensor, content)).resharded(resharding_spec)
    target = content_for(resharding_spec, st_size, properties, pg)
    shards = moved.local_shards()
    if len(moved._content.parts) == 1:
        shards = [Shard(moved.local_tensor(), moved._content.shards[0].metadata)]
    return shards, list(target.shards_metadata)


def reshuffle_local_shard(
    local_shard: torch.Tensor,
    st_size: Sequence[int],
    sharding_spec: ShardingSpec,
    resharding_spec: ShardingSpec,
    pg: dist.ProcessGroup | None = None,
) -> tuple[list[Shard], list[ShardMetadata]]:
    """The same for specs that split the same dim; both use the same planner."""
    return reshard_local_shard(local_shard, st_size, sharding_spec, resharding_spec, pg)
