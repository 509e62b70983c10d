"""Functions that make sharded tensors, and those of torch's ``reshard`` module.

To shard plain tensors, ranks first compare what they were given, all tensors together, with one
small exchange; then all tensors move along one plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, Unpack, cast, get_args, overload

import torch
import torch.distributed as dist

from reshard.dtypes import canonical_dtype
from reshard.errors import ArgumentError, ArgumentTypeError
from reshard.layout.spec import TensorSpec
from reshard.live.inputs.bound import materialize
from reshard.planning.plans import ONE, Plan, plan
from reshard.sharded.content import Content, ContentTensor
from reshard.sharded.create import content_for
from reshard.sharded.groups import Group, digest, members
from reshard.sharded.move import from_parts, local_part, split_parts
from reshard.sharded.specs import (
    Placement,
    PlacementError,
    Shard,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
)
from reshard.sharded.tensor import Options, ShardedTensor, Size, filled_tensor, tensor_of
from reshard.tensors.agreement import Agreement
from reshard.tensors.kinds import this_rank
from reshard.tensors.local import whole_on

Check = Literal["fingerprint", "none"]


class ShardMismatchError(ArgumentError):
    """Ranks were given different tensors, specs or source ranks."""


def _content_for(name: str, tensor: torch.Tensor, spec: ShardingSpec, group: Group) -> Content:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f'"{name}" is of type {type(tensor).__name__}: give a tensor')
    if isinstance(tensor, ContentTensor) or hasattr(tensor, "device_mesh"):
        raise ArgumentTypeError(
            f'"{name}" is a {type(tensor).__name__}, which is sharded already: use its reshard(), '
            "or ShardedTensor.from_dtensor(tensor).resharded()"
        )
    return content_for(spec, tensor.shape, TensorProperties(tensor.dtype, tensor.layout), group)


def _compare(
    tensors: Mapping[str, torch.Tensor],
    contents: Mapping[str, Content],
    src_rank: object,
    group: Group,
    problem: Exception | None,
) -> None:
    """Raise on every rank alike if ranks were not given the same."""
    kinds = [
        (name, content.shape, str(content.dtype), tensors[name].requires_grad)
        for name, content in contents.items()
    ]
    shards = [repr(content.stated or content.layout) for content in contents.values()]
    arguments = {
        "source": repr(src_rank),
        "kind": None if problem is None else type(problem).__name__,
        "problem": str(problem),
        "tensors": digest(repr(kinds)),
        "specs": digest("".join(shards)),
    }
    by_rank = Agreement(group, "sharding tensors").gather(arguments)

    def check_equal(key: str, what: str) -> None:
        ((usual, _),) = Counter(one[key] for one in by_rank.values()).most_common(1)
        differing = [rank for rank, one in by_rank.items() if one[key] != usual]
        if differing:
            raise ShardMismatchError(
                f"what ranks {differing} were given does not match with {what}; give all ranks the "
                "same"
            )

    sources = ", ".join(one["source"] for one in by_rank.values())
    check_equal("source", f"src_rank of the other ranks: they are [{sources}]")
    if len({one["kind"] for one in by_rank.values()}) > 1:
        refusing = [rank for rank, one in by_rank.items() if one["kind"] is not None]
        raise ShardMismatchError(
            f"ranks {refusing} of {list(by_rank)} refused what they were given, rank {refusing[0]} "
            f"because: {by_rank[refusing[0]]['problem']}"
        ) from problem
    if problem is None:
        what = "the names, sizes, dtypes or requires_grad of the tensors of other ranks"
        check_equal("tensors", what)
        check_equal("specs", "sharding_spec of the other ranks")


def _move(
    tensors: Mapping[str, torch.Tensor],
    contents: Mapping[str, Content],
    owners: tuple[int, ...],
    group: Group,
) -> dict[str, Content]:
    """The contents with this rank's parts, in memory that is not that of the given tensors."""
    have, want, sources = {}, {}, {}
    for name, content in contents.items():
        dtype = canonical_dtype(content.dtype)
        have[name] = TensorSpec(content.shape, dtype, whole_on(owners))
        want[name] = TensorSpec(content.shape, dtype, content.layout)
        if this_rank() in owners:
            sources[name] = materialize(tensors[name].detach())
    if dist.is_initialized():
        device = next((one.device for one in contents.values()), None)
        # If every rank takes shards of its own tensor nothing is sent, and a rank may call alone.
        check: Literal["first", "never"] = "first" if len(owners) == 1 else "never"
        local = plan(have, want).run(sources, group=group, device=device, check=check)
    else:
        local = {name: local_part(one, contents[name].layout) for name, one in sources.items()}
    moved = {}
    for name, content in contents.items():
        memory, parts = tensors[name].untyped_storage().data_ptr(), []
        for part in split_parts(local[name], content.layout) if name in local else ():
            is_shared = part.untyped_storage().data_ptr() == memory
            parts.append((part.clone() if is_shared else part).to(content.device))
        moved[name] = content.with_parts(parts)
    return moved


def empty(sharding_spec: ShardingSpec, *size: Size, **options: Unpack[Options]) -> ShardedTensor:
    """A sharded tensor with uninitialized values."""
    return filled_tensor(torch.empty, sharding_spec, size, **options)


def zeros(sharding_spec: ShardingSpec, *size: Size, **options: Unpack[Options]) -> ShardedTensor:
    """A sharded tensor of zeros."""
    return filled_tensor(torch.zeros, sharding_spec, size, **options)


def ones(sharding_spec: ShardingSpec, *size: Size, **options: Unpack[Options]) -> ShardedTensor:
    """A sharded tensor of ones."""
    return filled_tensor(torch.ones, sharding_spec, size, **options)


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
    return filled_tensor(fill, sharding_spec, [size], **options)


def rand(sharding_spec: ShardingSpec, *size: Size, **options: Unpack[Options]) -> ShardedTensor:
    """Uniform random numbers, which each rank draws from its own generator."""
    return filled_tensor(torch.rand, sharding_spec, size, **options)


def randn(sharding_spec: ShardingSpec, *size: Size, **options: Unpack[Options]) -> ShardedTensor:
    """Normal random numbers, which each rank draws from its own generator."""
    return filled_tensor(torch.randn, sharding_spec, size, **options)


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


def shard_tensors(
    tensors: Mapping[str, torch.Tensor],
    specs: Mapping[str, ShardingSpec],
    src_rank: int | None = 0,
    process_group: Group = None,
    check: Check = "fingerprint",
    scatter: bool = True,
) -> dict[str, ShardedTensor]:
    """Shard many tensors, with one comparison between ranks and along one plan."""
    ranks = members(process_group)
    scatter = scatter and src_rank is not None
    contents: dict[str, Content] = {}
    owners, problem = ranks, None
    try:
        if check not in get_args(Check):
            raise ArgumentError(
                f'check="{check}" is no way to compare ranks: give one of {get_args(Check)}'
            )
        if scatter:
            if not isinstance(src_rank, int) or not 0 <= src_rank < len(ranks):
                raise ArgumentError(
                    f"src_rank={src_rank!r} is no rank of a group of {len(ranks)}: give 0 to "
                    f"{len(ranks) - 1}"
                )
            owners = (ranks[src_rank],)
        contents = {
            name: _content_for(name, tensor, specs[name], process_group)
            for name, tensor in tensors.items()
        }
    except Exception as error:
        problem = error
    if scatter and check != "none" and len(ranks) > 1:
        # Also with a problem: the other ranks would otherwise wait for this one.
        _compare(tensors, contents, src_rank, process_group, problem)
    if problem is not None:
        raise problem
    moved = _move(tensors, contents, owners, process_group)
    return {name: tensor_of(one, tensors[name].requires_grad) for name, one in moved.items()}


init_from_local_shards = ShardedTensor._init_from_local_shards


def reshard_local_shard(
    local_tensor: torch.Tensor,
    st_size: Sequence[int],
    sharding_spec: ShardingSpec,
    resharding_spec: ShardingSpec,
    pg: dist.ProcessGroup | None = None,
) -> tuple[list[Shard], list[ShardMetadata]]:
    """This rank's shards under another spec, and all metadata; gradients flow back."""
    content = content_for(sharding_spec, st_size, TensorProperties(local_tensor.dtype), pg)
    moved = cast(ShardedTensor, from_parts(content, local_tensor)).resharded(resharding_spec)
    return moved.local_shards(), list(moved._content.shards_metadata)


def reshuffle_local_shard(
    local_shard: torch.Tensor,
    st_size: Sequence[int],
    sharding_spec: ShardingSpec,
    resharding_spec: ShardingSpec,
    pg: dist.ProcessGroup | None = None,
) -> tuple[list[Shard], list[ShardMetadata]]:
    """The same for specs that split the same dim, which torch treats separately."""
    return reshard_local_shard(local_shard, st_size, sharding_spec, resharding_spec, pg)


def build_reshard_metadata(
    st_size: Sequence[int],
    sharding_spec: ShardingSpec,
    group_or_world: Group | int = None,
    *,
    world_size: int | None = None,
) -> tuple[tuple[ShardMetadata, ...], tuple[int, ...]]:
    """The metadata of all shards of a spec in rank order, and those ranks.

    >>> from reshard.sharded import ChunkShardingSpec
    >>> spec = ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"])
    >>> shards, ranks = build_reshard_metadata([4, 6], spec, 2)
    >>> [shard.shard_offsets for shard in shards], ranks
    ([(2, 0), (0, 0)], (0, 1))
    """
    shards = sharding_spec.build_metadata(torch.Size(st_size), TensorProperties()).shards_metadata
    ordered = tuple(sorted(shards, key=lambda shard: -1 if shard.rank is None else shard.rank))
    ranks = tuple(-1 if shard.rank is None else shard.rank for shard in ordered)
    group_or_world = group_or_world if world_size is None else world_size
    known = range(group_or_world) if isinstance(group_or_world, int) else members(group_or_world)
    for rank in ranks:
        if rank not in known:
            raise PlacementError(f"rank {rank} of the spec is not among {list(known)}")
    return ordered, ranks


@overload
def get_idx_from_placements(
    placements: Sequence[Placement | str], current_rank: int, *, all: Literal[False] = False
) -> int: ...


@overload
def get_idx_from_placements(
    placements: Sequence[Placement | str], current_rank: int, *, all: bool
) -> tuple[int, ...] | int: ...


def get_idx_from_placements(
    placements: Sequence[Placement | str], current_rank: int, *, all: bool = False
) -> tuple[int, ...] | int:
    """The index of a rank among placements: the first one, or with ``all`` a tuple of all.

    >>> get_idx_from_placements(["rank:3/cpu", "rank:1/cpu"], 1)
    1
    """
    read = [Placement(place) if isinstance(place, str) else place for place in placements]
    indices = [index for index, place in enumerate(read) if place.rank() == current_rank]
    if not indices and not all:
        raise PlacementError(
            f"rank {current_rank} is not among the placements {[str(place) for place in read]}"
        )
    return tuple(indices) if all else indices[0]


def plan_reshard(
    src: ShardingSpec, dst: ShardingSpec, size: Sequence[int], dtype: torch.dtype = torch.float32
) -> Plan:
    """The plan of a reshard, without communication: it can be printed, proven and simulated."""
    shape = tuple(size)
    return plan(src.layout(shape), dst.layout(shape), shape=shape, dtype=str(dtype))
