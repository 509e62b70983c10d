"""Operations that need whole tensors on every rank.

Run shard by shard, writes by index would change other elements, and results whose size depends on
values would have other sizes. For some operations DTensor's rule is wrong for some tensors, or
fails on one rank.
"""

from __future__ import annotations

import torch

from reshard.errors import OperationError
from reshard.layout.layout import Layout
from reshard.sharded.content import Content, map_nested, per_layout
from reshard.sharded.move import copy_into, replicated_content, whole
from reshard.sharded.ops.dtensor import Args, Kwargs, Op, Value, each_value, first_content

aten = torch.ops.aten

TRUTH = {aten.any, aten.all}
"""Reductions that give uint8 for uint8, which DTensor would sum over ranks."""
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


def run_whole(func: Op, args: Args, kwargs: Kwargs, targets: list[Value]) -> Value:
    """Run an operation with whole tensors on every rank; what it writes goes into the shards."""
    group = first_content(args, kwargs).group
    copies = {one: whole(one).clone() for one in targets if isinstance(one, Content)}

    def lend(content: Content) -> torch.Tensor:
        return copies[content] if content in copies else whole(content)

    positional, named = map_nested(lend, (args, kwargs), Content)
    results = func(*positional, **named)
    for content, result in copies.items():
        if tuple(result.shape) != content.shape:
            raise OperationError(
                f"the operation {func} is not supported for ShardedTensor: it would change the "
                f"shape {list(content.shape)} to {list(result.shape)}; use the one that makes a "
                "new tensor"
            )
        copy_into(content, replicated_content(result, content.group))

    def result_of(tensor: torch.Tensor) -> torch.Tensor | Content:
        owner = next((one for one, copy in copies.items() if copy is tensor), None)
        return owner or replicated_content(tensor, group)

    return map_nested(result_of, results, torch.Tensor)


def needs_whole(func: Op, args: Args) -> bool:
    """Whether the result size depends on values, or DTensor's rule is wrong for the operation."""
    packet, masks = func.overloadpacket, (torch.bool, torch.uint8)
    if packet is aten.index:
        if any(one is not None and one.dtype in masks for one in args[1]):
            return True
    elif torch.Tag.dynamic_output_shape in func.tags or packet in NEVER:
        return True
    if packet in TRUTH and args[0].dtype is torch.uint8:
        return True
    if packet in BY_INDEX:
        # Whether the index is smaller than the tensor in a dim that DTensor shards like the tensor.
        tensor, dim, index = args[:3]
        kept = [at for at in range(tensor.ndim) if at != dim % max(tensor.ndim, 1)]
        sources = [one for one in args[3:4] if isinstance(one, torch.Tensor | Content)]
        shapes = [one.shape for one in (index, *sources)]
        return any(shape[at] != tensor.shape[at] for shape in shapes for at in kept if shape)
    if packet in CONVOLUTIONS:
        count = CONVOLUTIONS[packet]
        batches, weights = args[:count], args[count : count + 2]
        return not all(
            isinstance(one, Content) and _split_dims(one.layout, one.shape) <= {0}
            for one in batches
        ) or any(isinstance(one, Content) and _split_dims(one.layout, one.shape) for one in weights)
    if func.is_view or packet in KEEPS_CONJUGATES or torch.Tag.reduction in func.tags:
        return False
    # DTensor may decompose an operation, and lose the conjugate flag of a tensor.
    tensors = (one for one in each_value(args) if isinstance(one, torch.Tensor | Content))
    return any(one.dtype.is_complex for one in tensors)


@per_layout
def _split_dims(layout: Layout, shape: tuple[int, ...]) -> set[int]:
    """The dims of which some rank does not have all."""
    pieces = [piece for rank in layout.ranks for piece in layout.pieces(rank, shape)]
    return {dim for dim, size in enumerate(shape) if any(p.box.shape[dim] != size for p in pieces)}
