"""Cut plain tensors into sharded ones: one rank has the values, and each gets its shards.

Ranks first compare what they were given, all tensors together, with one collective of a few
numbers; then everything moves along one plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from reshard.dtypes import canonical_dtype
from reshard.planning.plan import plan
from reshard.sharded.content import Content, Group, members
from reshard.sharded.making import content_for, home_of
from reshard.sharded.metadata import TensorProperties
from reshard.sharded.moving import split
from reshard.sharded.telling import numbers_of_all
from reshard.sharded.tensor import ShardedTensor, wrap
from reshard.spec import TensorSpec
from reshard.tensors.meshes import this_rank
from reshard.tensors.reading import whole_on

if TYPE_CHECKING:
    from reshard.sharded.spec import ShardingSpec

__all__ = ["ShardMismatchError", "shard_by_spec", "shard_tensor", "shard_tensors"]

Check = Literal["fingerprint", "none"]
ONE = "tensor"


class ShardMismatchError(ValueError):
    """Ranks were given different tensors, specs or source ranks."""


def shard_tensor(
    tensor: torch.Tensor,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: Group = None,
    check: Check = "fingerprint",
    scatter: bool = True,
) -> ShardedTensor:
    """Cut a tensor of which rank ``src_rank`` of the group has the values.

    Without ``scatter`` every rank takes its shards from its own tensor, and nobody communicates.
    """
    from reshard.sharded.spec import ShardingSpec

    if type(sharding_spec).shard is not ShardingSpec.shard:
        return sharding_spec.shard(tensor, src_rank, process_group)
    tensors, specs = {ONE: tensor}, {ONE: sharding_spec}
    return shard_tensors(tensors, specs, src_rank, process_group, check, scatter)[ONE]


def shard_by_spec(
    spec: ShardingSpec, tensor: torch.Tensor, src_rank: int, process_group: Group
) -> ShardedTensor:
    """What ``spec.shard`` does, unless a user's spec does otherwise."""
    return shard_tensors({ONE: tensor}, {ONE: spec}, src_rank, process_group)[ONE]


def shard_tensors(
    tensors: Mapping[str, torch.Tensor],
    specs: Mapping[str, ShardingSpec],
    src_rank: int = 0,
    process_group: Group = None,
    check: Check = "fingerprint",
    scatter: bool = True,
) -> dict[str, ShardedTensor]:
    """Cut many tensors, with one comparison between ranks and along one plan."""
    ranks = members(process_group)
    try:
        _check_source(src_rank, ranks)
        contents = _contents(tensors, specs, process_group)
        problem = None
    except Exception as error:
        contents, problem = {}, error
    if scatter and check == "fingerprint" and len(ranks) > 1:
        # Also with a problem: the others must hear of it, or they would wait for this rank.
        _compare(tensors, contents, src_rank, process_group, problem)
    if problem is not None:
        raise problem
    owners = (ranks[src_rank],) if scatter else ranks
    moved = _moved(tensors, contents, owners, process_group)
    return {
        name: _wrapped(content, moved.get(name), tensors[name])
        for name, content in contents.items()
    }


def _contents(
    tensors: Mapping[str, torch.Tensor], specs: Mapping[str, ShardingSpec], group: Group
) -> dict[str, Content]:
    return {
        name: content_for(specs[name], tensor.shape, TensorProperties(tensor.dtype), group)
        for name, tensor in tensors.items()
    }


def _check_source(src_rank: int, ranks: tuple[int, ...]) -> None:
    if not 0 <= src_rank < len(ranks):
        raise ValueError(
            f"src_rank={src_rank} is no rank of a group of {len(ranks)}: give 0 to {len(ranks) - 1}"
        )


def _moved(
    tensors: Mapping[str, torch.Tensor],
    contents: Mapping[str, Content],
    owners: tuple[int, ...],
    group: Group,
) -> dict[str, torch.Tensor]:
    """The local tensors of all shards of this rank."""
    have, want, given = {}, {}, {}
    for name, content in contents.items():
        kind = canonical_dtype(content.dtype)
        have[name] = TensorSpec(content.shape, kind, whole_on(owners))
        want[name] = TensorSpec(content.shape, kind, content.layout)
        if this_rank() in owners:
            given[name] = tensors[name].detach()
    device = next(iter(contents.values())).device if contents else None
    if not dist.is_initialized():
        from reshard.sharded.alone import cut_here

        return cut_here(given, contents)
    moved: dict[str, torch.Tensor] = plan(have, want).run(given, group=group, device=device)
    return moved


def _wrapped(content: Content, moved: torch.Tensor | None, source: torch.Tensor) -> ShardedTensor:
    parts = () if moved is None else split(moved, content.layout, content.shape)
    # The source stays the user's: shards have memory of their own.
    own = [part.clone() if _shares(part, source) else part for part in parts]
    tensor = wrap(content.with_parts(own))
    return tensor.requires_grad_() if source.requires_grad else tensor


def _shares(part: torch.Tensor, source: torch.Tensor) -> bool:
    return part.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


def _compare(
    tensors: Mapping[str, torch.Tensor],
    contents: Mapping[str, Content],
    src_rank: int,
    group: Group,
    problem: Exception | None,
) -> None:
    """Raise on every rank alike, if they were not given the same."""
    kinds = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
    cuts = [repr(content.stated or content.layout) for content in contents.values()]
    mine = [src_rank, _digest(repr(kinds)), _digest("".join(cuts)), int(problem is not None)]
    rows = numbers_of_all(mine, group, home_of(group))
    sources, kinds_, specs, failed = (list(column) for column in zip(*rows, strict=True))
    ranks, first = members(group), next(iter(tensors), "")
    _check_alike(sources, f"src_rank of the other ranks, which are {sources}", ranks, first)
    _check_alike(kinds_, "names, sizes and dtypes of the tensors of other ranks", ranks, first)
    if problem is None and any(failed):
        bad = [rank for rank, one in zip(ranks, failed, strict=True) if one]
        raise ShardMismatchError(f"what ranks {bad} were given was refused there: see their errors")
    if problem is None:
        _check_alike(specs, "sharding_spec of the other ranks", ranks, first)


def _check_alike(values: list[int], what: str, ranks: tuple[int, ...], first: str) -> None:
    if len(set(values)) == 1:
        return
    usual = max(set(values), key=lambda value: (values.count(value), -values.index(value)))
    odd = [rank for rank, value in zip(ranks, values, strict=True) if value != usual]
    raise ShardMismatchError(
        f'what ranks {odd} were given for "{first}" does not match with {what}: give all ranks '
        "the same"
    )


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")
