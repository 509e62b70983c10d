"""Operations on single elements, shard by shard: of tensors, of lists of tensors, and losses.

Operations on lists are those of optimizers: one call with the parts of all tensors.
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
from reshard.layout.layout import BoxLayout
from reshard.sharded.content import Content
from reshard.sharded.move import (
    copy_into,
    local_part,
    move_to,
    replicated_content,
    split_parts,
    whole,
)
from reshard.sharded.ops.dtensor import Args, Kwargs, Op, Value, run_in_dtensor, written
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
REDUCTIONS: dict[object, Op] = {
    aten._foreach_norm: aten.linalg_vector_norm.default,
    aten._foreach_max: aten.max.default,
}
"""Operations on lists that reduce each tensor, and the reduction of one tensor."""
Run = Callable[[Op, Args, Kwargs], Value]


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
    """An operand for each part of a content; all ranks call this: others may need their parts.

    A rank without parts computes with one tensor without elements: results then have the same dtype
    there.
    """
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
    return content.parts or [torch.empty(0, dtype=value.dtype, device=value.device)]


def _as_plain(value: Value) -> Value:
    return whole(value) if isinstance(value, Content) else value


def _broadcast(content: Content, like: Content) -> Sequence[torch.Tensor]:
    """The elements of a smaller tensor that each part of a content needs."""
    wide = whole(content).expand(like.shape)  # every rank has it: nothing more is sent
    if not like.parts:
        return [wide.new_empty(0)]
    if isinstance(like.layout, BoxLayout):
        boxes = like.layout.boxes[this_rank()]
        return tuple(box_view(wide, Box.whole(like.shape), box) for box in boxes)
    return split_parts(local_part(wide, like.layout), like.layout)


def run_loss(func: Op, args: Args, kwargs: Kwargs, run: Run) -> Value:
    """Run a loss without its reduction, and reduce afterwards over the elements of all ranks.

    With its reduction, each rank would average over its own elements only.
    """
    schema = func._schema.arguments
    named: Kwargs = {one.name: one.default_value for one in schema if one.has_default_value()}
    named |= {one.name: value for one, value in zip(schema, args, strict=False)} | kwargs
    reduction = named["reduction"]
    named["reduction"] = NONE
    if func.overloadpacket in LOSS_GRADIENTS and reduction == MEAN:
        count = max(prod(named["self"].shape), 1)
        incoming = named["grad_output"]
        is_plain = isinstance(incoming, torch.Tensor)
        named["grad_output"] = (
            incoming / count if is_plain else run(aten.div.Scalar, (incoming, count), {})
        )
    by_place = [named[one.name] for one in schema if not one.kwarg_only]
    by_name = {one.name: named[one.name] for one in schema if one.kwarg_only}
    each = run_elementwise(func, by_place, by_name)
    if func.overloadpacket in LOSS_GRADIENTS or reduction == NONE:
        return each
    return run(aten.mean.default if reduction == MEAN else aten.sum.default, (each,), {})


def run_on_lists(func: Op, args: Args, kwargs: Kwargs, run: Run) -> Value:
    if func.overloadpacket is aten._amp_foreach_non_finite_check_and_unscale_:
        return _unscale(func, *args, **kwargs)
    reduction = REDUCTIONS.get(func.overloadpacket)
    if reduction is not None:
        return [
            run(reduction, (one, *args[1:]), kwargs)
            if isinstance(one, Content)
            else reduction(one, *args[1:], **kwargs)
            for one in args[0]
        ]
    # ``_foreach_pow`` may have a number in front of its list.
    first = next(at for at, value in enumerate(args) if isinstance(value, list | tuple))
    likes = [one if isinstance(one, Content) else None for one in args[first]]
    named = {name: _column(value, likes) for name, value in kwargs.items()}
    columns = [_column(value, likes) for value in args]
    results = func(*columns, **named)
    _write_back(func, args, likes, columns)
    if not func._schema.returns:
        return None
    rest = iter(results)
    return [
        next(rest) if like is None else _join(like, list(islice(rest, max(len(like.parts), 1))))
        for like in likes
    ]


def _unscale(func: Op, tensors: Args, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Multiply gradients by the inverse loss scale; all ranks learn of values that overflow."""
    contents = [one for one in tensors if isinstance(one, Content)]
    parts = [one for one in tensors if not isinstance(one, Content)]
    parts += [part for content in contents for part in content.parts]
    if parts:
        func(parts, found_inf, inv_scale)
    dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=contents[0].group)


def _write_back(func: Op, args: Args, likes: list[Content | None], columns: list[Value]) -> None:
    """Copy results into written tensors that had to be moved to the layout of the first list.

    Also into plain tensors, such as the state of an optimizer that was loaded from a whole model.
    """
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
    column: list[Value] = []
    for one, like in zip(value, likes, strict=True):
        column += [_as_plain(one)] if like is None else _operands(one, like)
    return column
