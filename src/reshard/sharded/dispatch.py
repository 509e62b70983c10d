"""What an operation on sharded tensors does, below autograd.

An operation that looks at one element at a time goes shard by shard, if all operands lie alike;
others are brought to the layout of the first. Everything else goes through DTensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from reshard.sharded.content import Content
from reshard.sharded.gradients import as_content
from reshard.sharded.moving import moved_to
from reshard.sharded.tensor import ShardedTensor, wrap

__all__ = ["dispatched"]

aten = torch.ops.aten

ONE_BY_ONE = {
    aten.detach, aten.alias, aten.clone, aten._to_copy, aten.copy_, aten.fill_, aten.zero_,
    aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like,
    aten.randn_like, aten.randint_like, aten.uniform_, aten.normal_, aten.bernoulli_,
    aten.exponential_, aten.random_, aten.log_normal_, aten.geometric_, aten.cauchy_,
    aten.lift_fresh, aten.contiguous, aten.lerp_, aten.lerp, aten.masked_fill_, aten.masked_fill,
    aten.where, aten._fused_dropout, aten.native_dropout, aten.nan_to_num_,
}  # fmt: skip
"""Operations on elements, which torch does not mark as such."""


def dispatched(func: Any, args: Any, kwargs: Any) -> Any:
    """Do an operation of which some argument is a ShardedTensor."""
    special = SPECIAL.get(func.overloadpacket)
    if special is not None:
        return special(func, args, kwargs)
    if _is_one_by_one(func):
        return _one_by_one(func, args, kwargs)
    if func.overloadpacket.__name__.startswith("_foreach"):
        return _each(func, args, kwargs)
    from reshard.sharded.computing import through_dtensor

    return through_dtensor(func, args, kwargs, _first(args, kwargs))


def _is_one_by_one(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags or func.overloadpacket in ONE_BY_ONE


def _first(args: Any, kwargs: Any) -> Content:
    """The content that decides how the others must lie: that of the first sharded argument."""
    leaves, _ = tree_flatten((args, kwargs))
    return next(leaf._content for leaf in leaves if isinstance(leaf, ShardedTensor))


def _one_by_one(func: Any, args: Any, kwargs: Any) -> Any:
    leaves, tree = tree_flatten((args, kwargs))
    sharded = [leaf._content for leaf in leaves if isinstance(leaf, ShardedTensor)]
    like = _widest(sharded, func, leaves)
    if like is None or any(content.layout.reduce for content in sharded):
        from reshard.sharded.computing import through_dtensor

        return through_dtensor(func, args, kwargs, sharded[0])
    lying = [_parts(leaf, like) for leaf in leaves]
    results = []
    for number in range(len(like.parts)):
        own = [parts[number] if isinstance(parts, tuple) else parts for parts in lying]
        some_args, some_kwargs = tree_unflatten(own, tree)
        results.append(func(*some_args, **some_kwargs))
    return _joined(func, args, like, results)


def _widest(sharded: list[Content], func: Any, leaves: list[Any]) -> Content | None:
    """The first operand, if all have its shape or are scalars; shapes that spread are DTensor's."""
    like = sharded[0]
    shapes = {tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return like if shapes <= {like.shape, ()} and like.shape else None


def _parts(leaf: Any, like: Content) -> Any:
    """An argument for every part of a content: its own parts, or the same value for all."""
    if not isinstance(leaf, torch.Tensor) or (not leaf.shape and like.shape):
        return _scalar(leaf)
    content = as_content(leaf, like)
    if not content.is_like(like):
        content = moved_to(content, like.layout)
    return content.parts


def _scalar(leaf: Any) -> Any:
    if isinstance(leaf, ShardedTensor):
        from reshard.sharded.moving import whole

        return whole(leaf._content)
    return leaf


def _joined(func: Any, args: Any, like: Content, results: list[Any]) -> Any:
    """Results of all parts as one: an operation in place gives back what it changed."""
    name = func._schema.name
    if name.endswith("_") and not name.endswith("__") and isinstance(args[0], ShardedTensor):
        return args[0]
    if not results:
        return _without_parts(func, like)
    if isinstance(results[0], tuple):
        return tuple(wrap(like.with_parts(column)) for column in zip(*results, strict=True))
    if not isinstance(results[0], torch.Tensor):
        return results[0]
    return wrap(like.with_parts(results))


def _without_parts(func: Any, like: Content) -> ShardedTensor:
    """The result on a rank that holds nothing."""
    return wrap(replace(like, parts=()))


def _each(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on lists of tensors, as one on lists of their parts."""
    if func.overloadpacket in (aten._foreach_norm, aten._foreach_max):
        single = (
            torch.linalg.vector_norm if func.overloadpacket is aten._foreach_norm else torch.max
        )
        return [single(one, *args[1:], **kwargs) for one in args[0]]
    lists = [list(arg) if isinstance(arg, list | tuple) else None for arg in args]
    columns = [[] if own is not None else args[at] for at, own in enumerate(lists)]
    likes = []
    for number, first in enumerate(args[0]):
        content = first._content if isinstance(first, ShardedTensor) else None
        likes.append(content)
        count = 1 if content is None else len(content.parts)
        for at, own in enumerate(lists):
            if own is not None:
                columns[at] += _spread(own[number], content, count)
    results = func(*columns, **kwargs)
    return None if results is None else _regrouped(results, likes)


def _spread(value: Any, content: Content | None, count: int) -> list[Any]:
    """An operand for every part of a tensor."""
    parts = value if content is None else _parts(value, content)
    return list(parts) if isinstance(parts, tuple) else [parts] * count


def _regrouped(results: Any, likes: list[Content | None]) -> list[Any]:
    """The parts of results as the tensors that they are of."""
    left, found = list(results), []
    for content in likes:
        count = 1 if content is None else len(content.parts)
        mine, left = left[:count], left[count:]
        found.append(mine[0] if content is None else wrap(content.with_parts(mine)))
    return found


def _to_copy(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """Another dtype or device; also known on ranks that hold nothing."""
    content = args[0]._content
    parts = [func(part, **kwargs) for part in content.parts]
    if parts:
        return wrap(content.with_parts(parts))
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    known = replace(content, dtype=dtype or content.dtype, device=device or content.device)
    return wrap(known)


def _equal(func: Any, args: Any, kwargs: Any) -> bool:
    from reshard.sharded.comparing import equal

    return equal(*args, **kwargs)


def _item(func: Any, args: Any, kwargs: Any) -> Any:
    """The value of a tensor of one element, the same on all ranks."""
    from reshard.sharded.moving import whole

    found = whole(args[0]._content)
    assert found is not None
    return found.item()


SPECIAL: dict[Any, Callable[[Any, Any, Any], Any]] = {
    aten._to_copy: _to_copy,
    aten.equal: _equal,
    aten._local_scalar_dense: _item,
}
