"""New sharded tensors: every rank makes only its own shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from reshard.sharded.content import Group
from reshard.sharded.making import content_for, shapes_here, size_of
from reshard.sharded.metadata import TensorProperties
from reshard.sharded.rpc import check_rrefs
from reshard.sharded.tensor import ShardedTensor, wrap

if TYPE_CHECKING:
    from reshard.sharded.spec import ShardingSpec

__all__ = ["empty", "full", "made", "ones", "rand", "randn", "zeros"]

Size = int | Sequence[int]
Fill = Callable[..., torch.Tensor]


def made(
    spec: ShardingSpec,
    size: Sequence[Size],
    properties: TensorProperties,
    group: Group,
    fill: Fill,
) -> ShardedTensor:
    """A tensor of this size of which every rank fills its own shards."""
    content = content_for(spec, size_of(size), properties, group)
    options: dict[str, Any] = {"dtype": properties.dtype, "device": content.device}
    if properties.pin_memory:
        options["pin_memory"] = True
    parts = [fill(shape, **options) for shape in shapes_here(content)]
    tensor = wrap(content.with_parts(parts))
    return tensor.requires_grad_() if properties.requires_grad else tensor


def _properties(
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    pin_memory: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> TensorProperties:
    kind = torch.get_default_dtype() if dtype is None else dtype
    return TensorProperties(kind, layout, requires_grad, memory_format, pin_memory)


def _new(
    fill: Fill, spec: ShardingSpec, size: Sequence[Size], process_group: Group, options: Any
) -> ShardedTensor:
    init_rrefs = options.pop("init_rrefs", False)
    check_rrefs(init_rrefs)
    tensor = made(spec, size, _properties(**options), process_group, fill)
    return tensor.refer_to_others(init_rrefs)


def empty(
    sharding_spec: ShardingSpec, *size: Size, process_group: Group = None, **options: Any
) -> ShardedTensor:
    """Shards with values that nobody has set yet."""
    return _new(torch.empty, sharding_spec, size, process_group, options)


def zeros(
    sharding_spec: ShardingSpec, *size: Size, process_group: Group = None, **options: Any
) -> ShardedTensor:
    """Shards of zeros."""
    return _new(torch.zeros, sharding_spec, size, process_group, options)


def ones(
    sharding_spec: ShardingSpec, *size: Size, process_group: Group = None, **options: Any
) -> ShardedTensor:
    """Shards of ones."""
    return _new(torch.ones, sharding_spec, size, process_group, options)


def full(
    sharding_spec: ShardingSpec,
    size: Sequence[int],
    fill_value: float,
    *,
    process_group: Group = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> ShardedTensor:
    """Shards of one value, whose dtype is that of the value if none is given."""
    kind = torch.full((), fill_value).dtype if dtype is None else dtype
    fill = partial(torch.full, fill_value=fill_value)
    return _new(fill, sharding_spec, [size], process_group, {"dtype": kind, **options})


def rand(
    sharding_spec: ShardingSpec, *size: Size, process_group: Group = None, **options: Any
) -> ShardedTensor:
    """Shards of uniform random numbers, drawn by each rank from its own generator."""
    return _new(torch.rand, sharding_spec, size, process_group, options)


def randn(
    sharding_spec: ShardingSpec, *size: Size, process_group: Group = None, **options: Any
) -> ShardedTensor:
    """Shards of normal random numbers, drawn by each rank from its own generator."""
    return _new(torch.randn, sharding_spec, size, process_group, options)
