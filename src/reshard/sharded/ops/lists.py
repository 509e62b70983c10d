"""Operations on lists of tensors, as optimizers use them: one call with the lists of all parts."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from reshard.sharded.content import Content
from reshard.sharded.move.engine import copy_into
from reshard.sharded.ops.arguments import Args, Kwargs, Op, Run, Value
from reshard.sharded.ops.elementwise import as_plain, parts_like

__all__ = ["is_on_lists", "run_on_lists"]

aten = torch.ops.aten

PREFIXES = ("_foreach", "_amp_foreach", "_fused_ada", "_fused_sgd")
"""The prefixes of the names of operations on lists of tensors."""
REDUCTIONS: dict[object, Op] = {
    aten._foreach_norm: aten.linalg_vector_norm.default,
    aten._foreach_max: aten.max.default,
}
"""Operations on lists that reduce each tensor, and the reduction of one tensor."""


def is_on_lists(func: Op) -> bool:
    """Whether an operation is on lists of tensors."""
    return bool(func.overloadpacket.__name__.startswith(PREFIXES))


def run_on_lists(func: Op, args: Args, kwargs: Kwargs, run: Run) -> Value:
    """Run an operation on lists of plain tensors and contents."""
    if func.overloadpacket is aten._amp_foreach_non_finite_check_and_unscale_:
        return _unscale(func, *args, **kwargs)
    reduction = REDUCTIONS.get(func.overloadpacket)
    if reduction is not None:
        return [_reduce(reduction, one, args[1:], kwargs, run) for one in args[0]]
    likes = [one if isinstance(one, Content) else None for one in args[0]]
    named = {name: _column(value, likes) for name, value in kwargs.items()}
    columns = [_column(value, likes) for value in args]
    # torch refuses empty lists; a rank without parts has nothing to compute.
    results = func(*columns, **named) if columns[0] else []
    _write_back(func, args, likes, columns)
    return None if not func._schema.returns else _regroup(results, likes)


def _reduce(reduction: Op, one: Value, rest: Args, kwargs: Kwargs, run: Run) -> Value:
    if isinstance(one, Content):
        return run(reduction, (one, *rest), kwargs)
    return reduction(one, *rest, **kwargs)


def _unscale(func: Op, tensors: Args, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Multiply gradients by the inverse loss scale; all ranks learn of values that overflow."""
    contents = [one for one in tensors if isinstance(one, Content)]
    parts = [one for one in tensors if not isinstance(one, Content)]
    parts += [part for content in contents for part in content.parts]
    if parts:
        func(parts, found_inf, inv_scale)
    dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=contents[0].group)


def _write_back(func: Op, args: Args, likes: list[Content | None], columns: list[Value]) -> None:
    """Copy results into written tensors that had to be moved to the layout of the first list."""
    for index, (argument, value) in enumerate(zip(func._schema.arguments, args, strict=False)):
        info = argument.alias_info
        is_list = isinstance(value, list | tuple) and len(value) == len(likes)
        if info is None or not info.is_write or index == 0 or not is_list:
            continue
        for one, like, parts in zip(value, likes, _by_tensor(columns[index], likes), strict=True):
            if like is None or not isinstance(one, Content):
                continue
            if one.shape != like.shape or one.is_like(like):
                continue
            copy_into(one, replace(like, parts=tuple(parts), dtype=one.dtype))


def _column(value: Value, likes: list[Content | None]) -> Value:
    """A list of operands, one for every part of every tensor; a single value stays single."""
    if not isinstance(value, list | tuple):
        return as_plain(value)
    if len(value) != len(likes):
        return value
    pairs = zip(value, likes, strict=True)
    return [operand for one, like in pairs for operand in _operands(one, like)]


def _operands(value: Value, like: Content | None) -> list[Value]:
    if like is None:
        return [as_plain(value)]
    parts = parts_like(value, like)  # on all ranks: others may need parts of this one
    if not like.parts:
        return []
    return list(parts) if isinstance(parts, tuple) else [parts] * len(like.parts)


def _by_tensor(column: Value, likes: list[Content | None]) -> list[list[Value]]:
    """A column of parts, grouped by the tensors that they belong to."""
    rest, groups = list(column), []
    for like in likes:
        count = 1 if like is None else len(like.parts)
        groups.append(rest[:count])
        rest = rest[count:]
    return groups


def _regroup(results: Value, likes: list[Content | None]) -> list[Value]:
    groups = zip(likes, _by_tensor(results, likes), strict=True)
    return [parts[0] if like is None else like.with_parts(parts) for like, parts in groups]
