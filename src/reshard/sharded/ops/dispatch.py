"""Operations on sharded tensors, below autograd.

An operation on single elements runs shard by shard if all operands have the same layout; other
operands are moved to the layout of the operand with the shape of the result, or of the tensor that
is written. An operation on lists, as optimizers have them, gets the parts of all tensors at once.
Everything else goes through DTensor, except operations that need whole tensors on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from math import prod

import torch
import torch.distributed as dist

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
from reshard.sharded.move import (
    copy_into,
    local_part,
    move_to,
    reduced,
    replicated_content,
    split_parts,
    whole,
)
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
from reshard.sharded.ops.functions import all_agree
from reshard.sharded.ops.whole import needs_whole, run_whole
from reshard.tensors.kinds import this_rank
from reshard.tensors.local import box_view

aten = torch.ops.aten

ELEMENTWISE = {
    aten.detach, aten.alias, aten.clone, aten._to_copy, aten.copy_, aten.fill_, aten.zero_,
    aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like,
    aten.randn_like, aten.randint_like, aten.uniform_, aten.normal_, aten.bernoulli_,
    aten.exponential_, aten.random_, aten.log_normal_, aten.geometric_, aten.cauchy_,
    aten.lift_fresh, aten.contiguous, aten.lerp_, aten.lerp, aten.masked_fill_, aten.masked_fill,
    aten.where, aten._fused_dropout, aten.native_dropout, aten.nan_to_num_, aten._conj,
    aten._conj_physical, aten._neg_view,
}  # fmt: skip
"""Operations on single elements that torch does not tag as pointwise."""
LOSSES = {
    aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.binary_cross_entropy,
    aten.binary_cross_entropy_with_logits, aten.soft_margin_loss,
}  # fmt: skip
LOSS_GRADIENTS = {
    aten.mse_loss_backward, aten.smooth_l1_loss_backward, aten.huber_loss_backward,
    aten.binary_cross_entropy_backward, aten.soft_margin_loss_backward,
}  # fmt: skip
LOSSES |= LOSS_GRADIENTS
NONE, MEAN = 0, 1
"""Numbers of torch for the reduction of a loss; 2 is the sum."""
PREFIXES = ("_foreach", "_amp_foreach", "_fused_ada", "_fused_sgd")
"""The prefixes of the names of operations on lists of tensors."""
UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_
REDUCTIONS: dict[object, Op] = {
    aten._foreach_norm: aten.linalg_vector_norm.default,
    aten._foreach_max: aten.max.default,
}
"""Operations on lists that reduce each tensor, and the reduction of one tensor."""
LAZY = [getattr(torch._C.DispatchKey, name) for name in ("Conjugate", "Negative", "ZeroTensor")]
"""The keys that resolve lazy tensors; torch excludes them while it runs our operations."""


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
    special = SPECIAL.get(func.overloadpacket)
    if special is not None:
        return special(func, args, kwargs)
    view = _copied_view(func)
    if view is not None:
        viewed = run(view, args, kwargs)
        return map_nested(lambda one: run(aten.clone.default, (one,), {}), viewed, Content)
    if func.overloadpacket in LOSSES:
        return run_loss(func, args, kwargs)
    targets = written(func, args, kwargs)
    if is_elementwise(func) and len(targets) < 2:
        return run_elementwise(func, args, kwargs)
    if func.overloadpacket.__name__.startswith(PREFIXES):
        return run_on_lists(func, args, kwargs)
    if targets or needs_whole(func, args):
        return run_whole(func, args, kwargs, targets)
    return run_in_dtensor(func, args, kwargs)


@cache
def _copied_view(func: Op) -> Op | None:
    """The view that an operation such as ``view_copy`` copies, which has a rule in DTensor."""
    name = func.overloadpacket.__name__
    view = getattr(aten, name.removesuffix("_copy"), None) if name.endswith("_copy") else None
    overload: Op | None = getattr(view, func._overloadname, None)
    return overload if overload is not None and overload.is_view else None


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
    first: dict[tuple[Box, ...], int] = {}
    for rank in layout.ranks:
        first.setdefault(tuple(piece.box for piece in layout.pieces(rank, shape)), rank)
    return tuple({*layout.ranks} - {*first.values()})


def _to_copy(func: Op, args: Args, kwargs: Kwargs) -> Value:
    # Rounding each addend would change the sum.
    return run_elementwise(func, (reduced(args[0]),), kwargs)


def _new_alike(func: Op, args: Args, kwargs: Kwargs) -> Value:
    """A new tensor: one of the same shape has the same layout, any other is whole on all ranks."""
    content, size, *rest = args
    if tuple(size) != content.shape or content.layout.reduce is not None:
        like = torch.empty(0, dtype=content.dtype, device=content.device)
        return replicated_content(func(like, *args[1:], **kwargs), content.group)
    stride = tuple(rest[0]) if func.overloadpacket is aten.new_empty_strided else None
    if stride is not None:  # autograd wants the strides of the tensor for its gradient
        content = replace(content, stated_stride=stride)
    if not content.parts:
        return _to_copy(aten._to_copy.default, (content,), kwargs)
    parts = []
    for part in content.parts:
        shape = tuple(part.shape)
        own = rest if stride is None else [strides_like(shape, stride[: part.ndim])]
        parts.append(func(part, shape, *own, **kwargs))
    return content.with_parts(parts)


def _detach(func: Op, args: Args, kwargs: Kwargs) -> Content:
    """The same memory; a short path, because every parameter is made by it."""
    content: Content = args[0]
    return replace(content, parts=tuple(part.detach() for part in content.parts))


@cache
def is_elementwise(func: Op) -> bool:
    """Whether an operation is on single elements; some are tagged only in their other form."""
    packet = func.overloadpacket
    if torch.Tag.pointwise in func.tags or packet in ELEMENTWISE:
        return True
    other = getattr(aten, packet.__name__.removesuffix("_"), packet)
    name = func._overloadname
    return name in other.overloads() and torch.Tag.pointwise in getattr(other, name).tags


def run_elementwise(func: Op, args: Args, kwargs: Kwargs) -> Value:
    values = (*args, *kwargs.values())
    tensors = [value for value in values if isinstance(value, torch.Tensor | Content)]
    targets = written(func, args, kwargs)
    like = targets[0] if targets else _widest(tensors)
    # DTensor broadcasts without gathering, but may write into a copy.
    same_shape = {tuple(one.shape) for one in tensors} <= {like.shape, ()} if like else False
    if like is None or like.layout.reduce or (like.mesh and not same_shape and not targets):
        return run_in_dtensor(func, args, kwargs)
    # The operands of a rank without parts have no elements, and one dim.
    names = [name for name in kwargs if like.parts or name != "memory_format"]
    columns = [_operands(value, like) for value in (*args, *map(kwargs.get, names))]
    results = [
        func(*row[: len(args)], **dict(zip(names, row[len(args) :], strict=True)))
        for row in zip(*columns, strict=True)
    ]
    if targets:
        return targets[0]
    memory_format, stride = kwargs.get("memory_format"), like.stated_stride
    if memory_format not in (None, torch.preserve_format):
        stride = torch.empty(like.shape, device="meta", memory_format=memory_format).stride()
    return _join(replace(like, stated_stride=stride), results)


def _widest(tensors: list[Value]) -> Content | None:
    """The first operand with the shape of the result; None if all must be broadcast."""
    contents = [value for value in tensors if isinstance(value, Content)]
    if any(content.layout.reduce for content in contents):
        return None
    shapes = {tuple(value.shape) for value in tensors}
    shape = next(iter(shapes))
    if len(shapes) > 1:  # comparing is much quicker than broadcasting, and most are equal
        shape = tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    return next((content for content in contents if content.shape == shape), None)


def _join(like: Content, results: list[Value]) -> Value:
    if isinstance(results[0], tuple):
        return tuple(_join(like, list(column)) for column in zip(*results, strict=True))
    return like.with_parts(results if like.parts else (), results[0])


def _operands(value: Value, like: Content) -> Sequence[Value]:
    """An operand for each part of a content; all ranks call this: others may need their parts."""
    count = max(len(like.parts), 1)
    if not isinstance(value, torch.Tensor | Content):
        return [value] * count
    if not value.shape and like.shape:
        return [_as_plain(value)] * count
    content = value if isinstance(value, Content) else replicated_content(value, like.group)
    if content.shape != like.shape:
        return _broadcast(content, like)
    if not content.is_like(like):
        content = move_to(content, like.layout)
    # A rank without parts computes without elements, so that results have the same dtype there.
    return content.parts or [torch.empty(0, dtype=value.dtype, device=value.device)]


def _as_plain(value: Value) -> Value:
    return whole(value) if isinstance(value, Content) else value


def _broadcast(content: Content, like: Content) -> Sequence[torch.Tensor]:
    """The elements of a smaller tensor that each part of a content needs."""
    wide = whole(content).expand(like.shape)  # every rank has it: nothing more is sent
    if not like.parts:
        return [wide.new_empty(0)]
    boxes = [piece.box for piece in like.layout.pieces(this_rank(), like.shape)]
    views = [box_view(wide, Box.whole(like.shape), box) for box in boxes]
    if [view.shape for view in views] == [part.shape for part in like.parts]:
        return views
    return split_parts(local_part(wide, like.layout), like.layout)


def run_loss(func: Op, args: Args, kwargs: Kwargs) -> Value:
    """Run a loss without its reduction, in which each rank would average over its own elements."""
    schema = func._schema.arguments
    named: Kwargs = {one.name: one.default_value for one in schema if one.has_default_value()}
    named |= {one.name: value for one, value in zip(schema, args, strict=False)} | kwargs
    reduction, named["reduction"] = named["reduction"], NONE
    if func.overloadpacket in LOSS_GRADIENTS and reduction == MEAN:
        divided = named["grad_output"], max(prod(named["self"].shape), 1)
        named["grad_output"] = _run_any(aten.div.Scalar, divided, {})
    by_place = [named[one.name] for one in schema if not one.kwarg_only]
    by_name = {one.name: named[one.name] for one in schema if one.kwarg_only}
    each = run_elementwise(func, by_place, by_name)
    if func.overloadpacket in LOSS_GRADIENTS or reduction == NONE:
        return each
    return run(aten.mean.default if reduction == MEAN else aten.sum.default, (each,), {})


def _run_any(func: Op, args: Args, kwargs: Kwargs) -> Value:
    return run(func, args, kwargs) if isinstance(args[0], Content) else func(*args, **kwargs)


def run_on_lists(func: Op, args: Args, kwargs: Kwargs) -> Value:
    reduction = REDUCTIONS.get(func.overloadpacket)
    if reduction is not None:
        return [_run_any(reduction, (one, *args[1:]), kwargs) for one in args[0]]
    # ``_foreach_pow`` may have a number in front of its list.
    first = next(at for at, value in enumerate(args) if isinstance(value, list | tuple))
    likes = [one if isinstance(one, Content) else None for one in args[first]]
    named = {name: _column(value, likes) for name, value in kwargs.items()}
    columns = [_column(value, likes) for value in args]
    results = func(*columns, **named)
    if func.overloadpacket is UNSCALE and dist.is_initialized():  # all ranks learn of overflows
        dist.all_reduce(args[1], dist.ReduceOp.MAX, group=first_content(args, kwargs).group)
    _write_back(func, args, likes, columns)
    if not func._schema.returns:
        return None
    rest = iter(results)
    return [
        next(rest) if like is None else _join(like, list(islice(rest, max(len(like.parts), 1))))
        for like in likes
    ]


def _write_back(func: Op, args: Args, likes: list[Content | None], columns: list[Value]) -> None:
    """Copy results into written tensors, also plain ones, that were moved to another layout."""
    for index, (argument, value) in enumerate(zip(func._schema.arguments, args, strict=False)):
        info = argument.alias_info
        is_list = isinstance(value, list | tuple) and len(value) == len(likes)
        if info is None or not info.is_write or index == 0 or not is_list:
            continue
        rest = iter(columns[index])
        for one, like in zip(value, likes, strict=True):
            parts = tuple(islice(rest, 1 if like is None else max(len(like.parts), 1)))
            if like is None or tuple(one.shape) != like.shape:
                continue
            parts = parts[: len(like.parts)]
            content = one if isinstance(one, Content) else replicated_content(one, like.group)
            if not content.is_like(like):
                copy_into(content, replace(like, parts=parts, dtype=content.dtype))


def _column(value: Value, likes: list[Content | None]) -> Value:
    """A list of operands, one for every part of every tensor; a single value stays single."""
    if not isinstance(value, list | tuple):
        return _as_plain(value)
    if len(value) != len(likes):
        return value
    pairs = zip(value, likes, strict=True)
    lists = [[_as_plain(one)] if like is None else _operands(one, like) for one, like in pairs]
    return [operand for operands in lists for operand in operands]


SPECIAL: dict[object, Callable[[Op, Args, Kwargs], Value]] = {
    aten.detach: _detach,
    aten._to_copy: _to_copy,
    aten.equal: lambda func, args, kwargs: all_agree(args[0], args[1], torch.equal),
    aten.new_empty_strided: _new_alike,
    aten.new_empty: _new_alike,
    aten.new_zeros: _new_alike,
    aten.new_ones: _new_alike,
    aten.new_full: _new_alike,
    # The value of a tensor of one element, the same on all ranks.
    aten._local_scalar_dense: lambda func, args, kwargs: whole(args[0]).item(),
}
