"""Operations that need whole tensors on every rank.

Run shard by shard, writes by index would change other elements, and results whose size depends on
values would have other sizes, without an error. For some operations DTensor has a rule that is
wrong for some tensors, or fails on one rank.
"""

from __future__ import annotations

import torch

from reshard.errors import OperationError
from reshard.layout.box import Box
from reshard.layout.layout import Layout
from reshard.sharded.content import Content, per_layout
from reshard.sharded.groups import Group
from reshard.sharded.move.engine import copy_into, replicated_content, whole
from reshard.sharded.ops.arguments import (
    Args,
    Kwargs,
    Op,
    Value,
    each_value,
    first_content,
    map_values,
)
from reshard.sharded.ops.elementwise import as_plain

__all__ = ["needs_whole", "run_whole", "write_whole"]

aten = torch.ops.aten

NEVER = {aten.linalg_ldl_solve}
"""Operations that DTensor shards along dims that must be whole."""
BY_INDEX = {aten.gather, aten.scatter, aten.scatter_add, aten.scatter_reduce}
"""Operations with an index for every element: (tensor, dim, index, ...)."""
CONVOLUTIONS = {aten.convolution: 1, aten.convolution_backward: 2}
"""Convolutions, and how many of their first arguments have a batch dim; the weights follow."""
KEEPS_CONJUGATES = {
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._unsafe_view, aten.cat, aten.stack,
    aten.index_select, aten.index,
}  # fmt: skip
"""Operations during which DTensor conjugates nothing."""


def run_whole(func: Op, args: Args, kwargs: Kwargs) -> Value:
    """Run an operation with whole tensors; every rank has the whole result."""
    group = first_content(args, kwargs).group
    named = {name: map_values(as_plain, value) for name, value in kwargs.items()}
    results = func(*map_values(as_plain, tuple(args)), **named)
    return map_values(lambda value: _replicated(value, group), results)


def _replicated(value: Value, group: Group) -> Value:
    return replicated_content(value, group) if isinstance(value, torch.Tensor) else value


def write_whole(func: Op, args: Args, kwargs: Kwargs, targets: list[Value]) -> Value:
    """Run an operation that writes, on whole copies, and write the results into the shards."""
    group = first_content(args, kwargs).group
    contents = [one for one in targets if isinstance(one, Content)]
    copies = {id(one): _whole_copy(one) for one in contents}

    def lend(value: Value) -> Value:
        return copies[id(value)] if id(value) in copies else as_plain(value)

    named = {name: map_values(lend, value) for name, value in kwargs.items()}
    results = func(*map_values(lend, tuple(args)), **named)
    for one in contents:
        _write(func, one, copies[id(one)])
    owners = {id(copies[id(one)]): one for one in contents}

    def result_of(value: Value) -> Value:
        if any(value is one for one in targets):
            return value
        return owners[id(value)] if id(value) in owners else _replicated(value, group)

    return map_values(result_of, results)


def _whole_copy(content: Content) -> torch.Tensor:
    full = whole(content)
    assert full is not None
    return full.clone()


def _write(func: Op, target: Content, result: torch.Tensor) -> None:
    if tuple(result.shape) != target.shape:
        raise OperationError(
            f"the operation {func} is not supported for ShardedTensor: it would change the shape "
            f"{list(target.shape)} to {list(result.shape)}; use the one that makes a new tensor"
        )
    copy_into(target, replicated_content(result, target.group))


def needs_whole(func: Op, args: Args) -> bool:
    """Whether the result size depends on values, or DTensor's rule is wrong for the operation."""
    packet = func.overloadpacket
    if packet is aten.index:
        masks = (torch.bool, torch.uint8)
        if any(one is not None and one.dtype in masks for one in args[1]):
            return True
    elif torch.Tag.dynamic_output_shape in func.tags or packet in NEVER:
        return True
    if packet in BY_INDEX:
        return _has_short_index(args)
    if packet in CONVOLUTIONS:
        count = CONVOLUTIONS[packet]
        batches, weights = args[:count], args[count : count + 2]
        return any(not _is_sharded_only_in(0, one) for one in batches) or any(
            isinstance(one, Content) and not _is_sharded_only_in(None, one) for one in weights
        )
    if func.is_view or packet in KEEPS_CONJUGATES or torch.Tag.reduction in func.tags:
        return False
    return _has_complex(args)


def _has_short_index(args: Args) -> bool:
    """Whether the index is smaller than the tensor in a dim that DTensor shards like the tensor."""
    tensor, dim, index = args[:3]
    kept = [at for at in range(tensor.ndim) if at != dim % max(tensor.ndim, 1)]
    sources = [one for one in args[3:4] if isinstance(one, torch.Tensor | Content)]
    shapes = [one.shape for one in (index, *sources)]
    return any(shape[at] != tensor.shape[at] for shape in shapes for at in kept if shape)


def _has_complex(args: Args) -> bool:
    """Whether DTensor may decompose an operation, and lose the conjugate flag of a tensor."""
    tensors = (one for one in each_value(args) if isinstance(one, torch.Tensor | Content))
    return any(one.dtype.is_complex for one in tensors)


def _is_sharded_only_in(dim: int | None, value: Value) -> bool:
    """Whether a tensor is whole in every other dim."""
    if not isinstance(value, Content):
        return dim is None
    return all(
        at == dim or (box.start[at], box.stop[at]) == (0, size)
        for box in _boxes(value.layout, value.shape)
        for at, size in enumerate(value.shape)
    )


@per_layout
def _boxes(layout: Layout, shape: tuple[int, ...]) -> tuple[Box, ...]:
    return tuple(piece.box for rank in layout.ranks for piece in layout.pieces(rank, shape))
