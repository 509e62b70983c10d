"""Operations on sharded tensors, below autograd.

An operation on single elements runs shard by shard if all operands have the same layout; other
operands are moved to the layout of the operand with the shape of the result, or of the tensor that
is written. Everything else goes through DTensor, except operations that need whole tensors on every
rank: run shard by shard, writes by index would change other elements, and results whose size
depends on values would have other sizes. For some operations DTensor's rule is wrong for some
tensors, or fails on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from reshard.errors import OperationError
from reshard.layout.box import Box
from reshard.layout.layout import Layout
from reshard.sharded.content import (
    Content,
    ContentTensor,
    map_nested,
    per_layout,
    strides_like,
    wrap,
)
from reshard.sharded.move import all_agree, copy_into, reduced, replicated_content, whole
from reshard.sharded.ops import elementwise
from reshard.sharded.ops.dtensor import (
    Args,
    Kwargs,
    Op,
    Value,
    each_value,
    first_content,
    run_in_dtensor,
    unsupported,
    written,
)
from reshard.tensors.kinds import this_rank

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


LAZY = [getattr(torch._C.DispatchKey, name) for name in ("Conjugate", "Negative", "ZeroTensor")]
"""The keys that resolve lazy tensors; torch excludes them while it runs our operations."""


def _run_whole(func: Op, args: Args, kwargs: Kwargs, targets: list[Value]) -> Value:
    """Run an operation with whole tensors; every rank has the whole result.

    An operation that writes gets whole copies, which are then written into the shards.
    """
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


def _needs_whole(func: Op, args: Args) -> bool:
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


def dispatch(func: Op, args: Args, kwargs: Kwargs) -> Value:
    """Run an operation of which some argument is a ShardedTensor."""
    targets = written(func, args, kwargs)
    _check_written(func, targets)
    owners: dict[Content, ContentTensor] = {}

    def content_of(tensor: ContentTensor) -> Content:
        owners[tensor._content] = tensor
        return tensor._content

    included = torch._C._SetExcludeDispatchKeyGuard
    with included(LAZY[0], False), included(LAZY[1], False), included(LAZY[2], False):
        contents, named = map_nested(content_of, (args, kwargs), ContentTensor)
        result = run(func, contents, named)
        if torch.Tag.nondeterministic_seeded in func.tags:
            _agree_on_random(result)
    result = map_nested(lambda one: owners[one] if one in owners else wrap(one), result, Content)
    if func.is_view and isinstance(args[0], ContentTensor):
        _mark_copies(args[0], result)
    return result


def run(func: Op, args: Args, kwargs: Kwargs) -> Value:
    """Run an operation on contents."""
    special = SPECIAL.get(func.overloadpacket)
    if special is not None:
        return special(func, args, kwargs)
    if func.overloadpacket in elementwise.LOSSES:
        return elementwise.run_loss(func, args, kwargs, run)
    targets = written(func, args, kwargs)
    if elementwise.is_elementwise(func) and len(targets) < 2:
        return elementwise.run_elementwise(func, args, kwargs)
    if func.overloadpacket.__name__.startswith(elementwise.PREFIXES):
        return elementwise.run_on_lists(func, args, kwargs, run)
    if targets or _needs_whole(func, args):
        return _run_whole(func, args, kwargs, targets)
    return run_in_dtensor(func, args, kwargs)


def _check_written(func: Op, targets: list[Value]) -> None:
    """Refuse writes that would be lost, and changes of shape in place."""
    for target in targets:
        if not isinstance(target, ContentTensor):
            continue
        if target._is_view_copy:
            why = (
                ": it writes into a view whose elements came from other ranks, and the tensor "
                "would not change; clone() the view first, or write with index_put_ or index_copy_"
            )
            raise unsupported(func, target._content, why)
        if torch.Tag.inplace_view in func.tags:
            why = ": it changes the shape in place; use the one that makes a new tensor"
            raise unsupported(func, target._content, why)


def _mark_copies(base: ContentTensor, result: Value) -> None:
    """Mark views that had to be copied between ranks, so that a write into them is refused."""
    memory = {part.untyped_storage().data_ptr() for part in base._content.parts}
    for view in each_value([result]):
        if isinstance(view, ContentTensor):
            parts = [part for part in view._content.parts if part.numel()]
            copied = any(part.untyped_storage().data_ptr() not in memory for part in parts)
            view._is_view_copy = copied or base._is_view_copy


def _agree_on_random(result: Value) -> None:
    """Give replicas the random values of the first rank: every rank has its own generator."""
    for content in (one for one in each_value([result]) if isinstance(one, Content)):
        repeating = _repeating_ranks(content.layout, content.shape)
        if repeating:
            parts = () if this_rank() in repeating else content.parts
            with torch.no_grad():
                first = replace(content, layout=content.layout.without(repeating), parts=parts)
                copy_into(content, first)


@per_layout
def _repeating_ranks(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks that hold exactly the boxes of an earlier rank."""
    seen: set[tuple[Box, ...]] = set()
    repeating = []
    for rank in layout.ranks:
        boxes = tuple(piece.box for piece in layout.pieces(rank, shape))
        if boxes in seen:
            repeating.append(rank)
        seen.add(boxes)
    return tuple(repeating)


def _to_copy(func: Op, args: Args, kwargs: Kwargs) -> Value:
    # Rounding each addend would change the sum.
    return elementwise.run_elementwise(func, (reduced(args[0]),), kwargs)


def _new_strided(func: Op, args: Args, kwargs: Kwargs) -> Value:
    """Memory for a gradient, for which autograd wants the strides of the tensor."""
    content, stride = args[0], tuple(args[2])
    if tuple(args[1]) != content.shape:
        return run_in_dtensor(func, args, kwargs)
    content = replace(content, stated_stride=stride)
    if any(part.ndim != len(stride) for part in content.parts) or not content.parts:
        return _to_copy(aten._to_copy.default, (content,), kwargs)
    strides = [strides_like(tuple(part.shape), stride) for part in content.parts]
    pairs = zip(content.parts, strides, strict=True)
    return content.with_parts([func(part, part.shape, own, **kwargs) for part, own in pairs])


def _new_alike(func: Op, args: Args, kwargs: Kwargs) -> Value:
    """A new tensor: one of the same shape has the same layout, any other is whole on all ranks."""
    content = args[0]
    if tuple(args[1]) != content.shape or content.layout.reduce is not None:
        like = torch.empty(0, dtype=content.dtype, device=content.device)
        return replicated_content(func(like, *args[1:], **kwargs), content.group)
    if not content.parts:
        return _to_copy(aten._to_copy.default, args[:1], kwargs)
    parts = [func(part, part.shape, *args[2:], **kwargs) for part in content.parts]
    return content.with_parts(parts)


def _detach(func: Op, args: Args, kwargs: Kwargs) -> Content:
    """The same memory; a short path, because every parameter is made by it."""
    content: Content = args[0]
    return replace(content, parts=tuple(part.detach() for part in content.parts))


SPECIAL: dict[object, Callable[[Op, Args, Kwargs], Value]] = {
    aten.detach: _detach,
    aten._to_copy: _to_copy,
    aten.equal: lambda func, args, kwargs: all_agree(args[0], args[1], torch.equal),
    aten.new_empty_strided: _new_strided,
    aten.new_empty: _new_alike,
    aten.new_zeros: _new_alike,
    aten.new_ones: _new_alike,
    aten.new_full: _new_alike,
    # The value of a tensor of one element, the same on all ranks.
    aten._local_scalar_dense: lambda func, args, kwargs: whole(args[0]).item(),
}
