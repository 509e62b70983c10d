"""Cut plain tensors into sharded ones: one rank has the values, and each gets its shards.

Ranks first compare what they were given, all tensors together, with one collective of a few
numbers; then everything moves along one plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
import torch.distributed as dist

from reshard.dtypes import canonical_dtype
from reshard.layout.spec import TensorSpec
from reshard.planning.plans import plan
from reshard.sharded.content import Content, Group, members
from reshard.sharded.fingerprints import UNKNOWN, Numbers, ShardMismatchError, compare, digest
from reshard.sharded.making import content_for
from reshard.sharded.metadata import TensorProperties
from reshard.sharded.moving import split
from reshard.sharded.spec import ShardingSpec
from reshard.sharded.tensor import ShardedTensor, wrap
from reshard.tensors.kinds import this_rank
from reshard.tensors.local import whole_on

__all__ = ["ShardMismatchError", "shard_by_spec", "shard_tensor", "shard_tensors"]

Check = Literal["fingerprint", "none"]
ONE = "tensor"


def shard_tensor(
    tensor: torch.Tensor,
    sharding_spec: ShardingSpec,
    src_rank: int | None = 0,
    process_group: Group = None,
    check: Check = "fingerprint",
    scatter: bool = True,
) -> ShardedTensor:
    """Cut a tensor of which rank ``src_rank`` of the group has the values.

    With ``src_rank=None``, or without ``scatter``, every rank takes its shards from its own
    tensor, and nobody communicates.
    """
    known = isinstance(sharding_spec, ShardingSpec)
    if known and type(sharding_spec).shard is not ShardingSpec.shard:
        return sharding_spec.shard(tensor, src_rank, process_group)  # type: ignore[arg-type]
    tensors, specs = {ONE: tensor}, {ONE: sharding_spec}
    return shard_tensors(tensors, specs, src_rank, process_group, check, scatter)[ONE]


def shard_by_spec(
    spec: ShardingSpec, tensor: torch.Tensor, src_rank: int | None, process_group: Group
) -> ShardedTensor:
    """What ``spec.shard`` does, unless a user's spec does otherwise."""
    return shard_tensors({ONE: tensor}, {ONE: spec}, src_rank, process_group)[ONE]


def shard_tensors(
    tensors: Mapping[str, torch.Tensor],
    specs: Mapping[str, ShardingSpec],
    src_rank: int | None = 0,
    process_group: Group = None,
    check: Check = "fingerprint",
    scatter: bool = True,
) -> dict[str, ShardedTensor]:
    """Cut many tensors, with one comparison between ranks and along one plan."""
    ranks = members(process_group)
    scatter = scatter and src_rank is not None
    contents: dict[str, Content] = {}
    problem = None
    try:
        _check_option(check)
        owners = (ranks[_source(src_rank, ranks)],) if scatter else ranks
        contents = _contents(tensors, specs, process_group)
    except Exception as error:
        problem = error
    if scatter and check != "none" and len(ranks) > 1:
        # Also with a problem: the others must hear of it, or they would wait for this rank.
        compare(_numbers(tensors, contents, src_rank, problem), process_group, problem)
    if problem is not None:
        raise problem
    moved = _moved(tensors, contents, owners, process_group)
    return {
        name: _wrapped(content, moved.get(name), tensors[name])
        for name, content in contents.items()
    }


def _contents(
    tensors: Mapping[str, torch.Tensor], specs: Mapping[str, ShardingSpec], group: Group
) -> dict[str, Content]:
    return {name: _content(name, one, specs[name], group) for name, one in tensors.items()}


def _content(name: str, tensor: torch.Tensor, spec: ShardingSpec, group: Group) -> Content:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f'"{name}" is of type {type(tensor).__name__}: give a tensor')
    if isinstance(tensor, ShardedTensor) or hasattr(tensor, "device_mesh"):
        raise TypeError(
            f'"{name}" is a {type(tensor).__name__}, which is sharded already: use its reshard(), '
            "or ShardedTensor.from_dtensor(tensor).resharded()"
        )
    return content_for(spec, tensor.shape, TensorProperties(tensor.dtype, tensor.layout), group)


def _check_option(check: str) -> None:
    if check not in get_args(Check):
        raise ValueError(
            f'check="{check}" is no way to compare ranks: give one of {get_args(Check)}'
        )


def _source(src_rank: object, ranks: tuple[int, ...]) -> int:
    if isinstance(src_rank, int) and 0 <= src_rank < len(ranks):
        return src_rank
    raise ValueError(
        f"src_rank={src_rank!r} is no rank of a group of {len(ranks)}: give 0 to {len(ranks) - 1}"
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
            # The memory of a lazy conjugate or negative holds other values.
            given[name] = tensors[name].detach().resolve_conj().resolve_neg()
    device = next(iter(contents.values())).device if contents else None
    if not dist.is_initialized():
        from reshard.sharded.alone import cut_here

        return {name: cut_here(one, contents[name].layout) for name, one in given.items()}
    # Where every rank cuts its own tensor nothing travels, and a rank may do so alone.
    check: Literal["first", "never"] = "first" if len(owners) == 1 else "never"
    moved: dict[str, torch.Tensor] = plan(have, want).run(
        given, group=group, device=device, check=check
    )
    return moved


def _wrapped(content: Content, moved: torch.Tensor | None, source: torch.Tensor) -> ShardedTensor:
    parts = () if moved is None else split(moved, content.layout, content.shape)
    # The source stays the user's: shards have memory of their own.
    own = [(part.clone() if _shares(part, source) else part).to(content.device) for part in parts]
    tensor = wrap(content.with_parts(own))
    return tensor.requires_grad_() if source.requires_grad else tensor


def _shares(part: torch.Tensor, source: torch.Tensor) -> bool:
    return part.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


def _numbers(
    tensors: Mapping[str, torch.Tensor],
    contents: Mapping[str, Content],
    src_rank: object,
    problem: Exception | None,
) -> Numbers:
    """What this rank was given, for the comparison; a rank with a problem says which kind."""
    source = src_rank if isinstance(src_rank, int) and abs(src_rank) < UNKNOWN else UNKNOWN
    if problem is not None:
        return Numbers(source, digest(type(problem).__name__), 0, 0)
    kinds = [
        (name, content.shape, str(content.dtype), tensors[name].requires_grad)
        for name, content in contents.items()
    ]
    cuts = [repr(content.stated or content.layout) for content in contents.values()]
    return Numbers(source, 0, digest(repr(kinds)), digest("".join(cuts)))
