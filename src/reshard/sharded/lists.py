"""Operations on lists of tensors, as optimizers do them: as one on the lists of their parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from reshard.sharded.content import Content
from reshard.sharded.moving import moved_to
from reshard.sharded.spreading import parts_like, plain
from reshard.sharded.tensor import ShardedTensor, wrap

__all__ = ["on_lists"]

aten = torch.ops.aten

MIXING: dict[Any, Callable[..., torch.Tensor]] = {
    aten._foreach_norm: torch.linalg.vector_norm,
    aten._foreach_max: torch.max,
}
"""Those that mix the elements of a tensor, and what they do with each."""


def on_lists(func: Any, args: Any, kwargs: Any) -> Any:
    """Do an operation on lists of plain and of sharded tensors."""
    if func.overloadpacket is aten._amp_foreach_non_finite_check_and_unscale_:
        return _unscaled(func, *args, **kwargs)
    mixing = MIXING.get(func.overloadpacket)
    if mixing is not None:
        return [mixing(one, *args[1:], **kwargs) for one in args[0]]
    likes = [one._content if isinstance(one, ShardedTensor) else None for one in args[0]]
    named = {name: _column(value, likes) for name, value in kwargs.items()}
    columns = [_column(value, likes) for value in args]
    # A rank that holds nothing has nothing to do; torch refuses empty lists.
    results = func(*columns, **named) if columns[0] else []
    _put_back(func, args, likes, columns)
    return None if not func._schema.returns else _regrouped(results, likes)


def _unscaled(func: Any, tensors: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Gradients by the inverse of a loss scale; what is not finite anywhere counts everywhere."""
    contents = [one._content for one in tensors if isinstance(one, ShardedTensor)]
    parts = [one for one in tensors if not isinstance(one, ShardedTensor)]
    parts += [part for content in contents for part in content.parts]
    if parts:
        func(parts, found_inf, inv_scale)
    dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=contents[0].group)


def _put_back(func: Any, args: Any, likes: list[Content | None], columns: list[Any]) -> None:
    """What was changed of tensors that lie otherwise than the first list, and so were moved."""
    for at, (argument, value) in enumerate(zip(func._schema.arguments, args, strict=False)):
        info = argument.alias_info
        lists = isinstance(value, list | tuple) and len(value) == len(likes)
        if info is None or not info.is_write or at == 0 or not lists:
            continue
        changed = list(columns[at])
        for one, like in zip(value, likes, strict=True):
            count = 1 if like is None else len(like.parts)
            mine, changed = changed[:count], changed[count:]
            if like is not None and isinstance(one, ShardedTensor):
                _return(one._content, like, mine)


def _return(content: Content, like: Content, parts: list[torch.Tensor]) -> None:
    if content.shape != like.shape or content.is_like(like):
        return
    moved = moved_to(replace(like, parts=tuple(parts), dtype=content.dtype), content.layout)
    for own, new in zip(content.parts, moved.parts, strict=True):
        own.copy_(new)


def _column(value: Any, likes: list[Content | None]) -> Any:
    """A list of operands, one for every part of every tensor; one for all stays one."""
    if not isinstance(value, list | tuple):
        return plain(value)
    if len(value) != len(likes):
        return value
    pairs = zip(value, likes, strict=True)
    return [own for one, like in pairs for own in _operands(one, like)]


def _operands(value: Any, like: Content | None) -> list[Any]:
    if like is None:
        return [plain(value)]
    if not like.parts:
        parts_like(value, like)  # others may need what this rank has of it
        return []
    parts = parts_like(value, like)
    return list(parts) if isinstance(parts, tuple) else [parts] * len(like.parts)


def _regrouped(results: Any, likes: list[Content | None]) -> list[Any]:
    """The parts of results as the tensors that they are of."""
    left, found = list(results), []
    for content in likes:
        count = 1 if content is None else len(content.parts)
        mine, left = left[:count], left[count:]
        found.append(mine[0] if content is None else wrap(content.with_parts(mine)))
    return found
