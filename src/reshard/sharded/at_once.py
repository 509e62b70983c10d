"""Operations that need all elements at once: every rank does them with whole tensors.

For what writes into a tensor by index, and for results whose size depends on values: done with the
shards alone, these would change other elements, or find other sizes, without an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from reshard.errors import OperationError
from reshard.sharded.content import Content
from reshard.sharded.gradients import as_content
from reshard.sharded.moving import moved_to, whole
from reshard.sharded.tensor import ShardedTensor, wrap

__all__ = ["changed", "first_content", "needs_values", "on_whole", "written"]

aten = torch.ops.aten


def written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors that an operation changes."""
    found = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[at] if at < len(args) else kwargs.get(argument.name))
    return found


def needs_values(func: Any, args: Any) -> bool:
    """Whether the size of a result depends on values."""
    if func.overloadpacket is aten.index:
        masks = (torch.bool, torch.uint8)
        return any(one is not None and one.dtype in masks for one in args[1])
    return torch.Tag.dynamic_output_shape in func.tags


def on_whole(func: Any, args: Any, kwargs: Any, like: Content) -> Any:
    """Do an operation with whole tensors; every rank has the whole result."""
    results = func(*tree_map(_whole, args), **tree_map(_whole, kwargs))
    return tree_map(lambda value: _kept(value, like), results)


def _kept(value: Any, like: Content) -> Any:
    return wrap(as_content(value, like)) if isinstance(value, torch.Tensor) else value


def changed(func: Any, args: Any, kwargs: Any, targets: list[Any]) -> Any:
    """Do an operation that changes tensors, and put what it made of them where they lie."""
    sharded = [one for one in targets if isinstance(one, ShardedTensor)]
    copies = {id(one): whole(one._content).clone() for one in sharded}  # type: ignore[union-attr]

    def lent(value: Any) -> Any:
        return copies.get(id(value)) if id(value) in copies else _whole(value)

    results = func(*tree_map(lent, args), **tree_map(lent, kwargs))
    for one in sharded:
        _put(func, one, copies[id(one)])
    owners = {id(copies[id(one)]): one for one in sharded}
    like = first_content(args, kwargs)

    def returned(value: Any) -> Any:
        if any(value is one for one in targets):
            return value
        return owners[id(value)] if id(value) in owners else _kept(value, like)

    return tree_map(returned, results)


def _put(func: Any, target: ShardedTensor, made: torch.Tensor) -> None:
    content = target._content
    if tuple(made.shape) != content.shape:
        raise OperationError(
            f"the operation {func} is not supported for ShardedTensor: it would change the shape "
            f"{list(content.shape)} to {list(made.shape)}; use the one that makes a new tensor"
        )
    moved = moved_to(as_content(made, content), content.layout)
    for part, new in zip(content.parts, moved.parts, strict=True):
        part.copy_(new)


def first_content(args: Any, kwargs: Any) -> Content:
    """What a rank has of the first sharded tensor among arguments."""
    leaves, _ = tree_flatten((args, kwargs))
    return next(leaf._content for leaf in leaves if isinstance(leaf, ShardedTensor))


def _whole(value: Any) -> Any:
    return whole(value._content) if isinstance(value, ShardedTensor) else value
