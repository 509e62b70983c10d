"""The arguments of an operation, with contents in place of sharded tensors.

Arguments of an operation of aten are values or lists of values; nothing is nested deeper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from reshard.errors import OperationError
from reshard.layout.layout import Layout
from reshard.sharded.content import Content

__all__ = [
    "Args",
    "Kwargs",
    "Op",
    "Run",
    "Value",
    "each_value",
    "first_content",
    "map_values",
    "named_arguments",
    "unsupported",
    "written",
]

Op = torch._ops.OpOverload
Value = Any
"""One argument or result of an operation, or a list of them."""
Args = Sequence[Value]
Kwargs = dict[str, Value]
Run = Callable[[Op, Args, Kwargs], Value]


def map_values(function: Callable[[Value], Value], values: Value) -> Value:
    """Values with a function applied to each, inside lists and tuples as well."""
    if isinstance(values, list | tuple):
        mapped = [map_values(function, value) for value in values]
        return tuple(mapped) if isinstance(values, tuple) else mapped
    return function(values)


def each_value(args: Iterable[Value]) -> Iterator[Value]:
    """All values of arguments, those in lists as well."""
    for value in args:
        if isinstance(value, list | tuple):
            yield from each_value(value)
        else:
            yield value


def first_content(args: Args, kwargs: Kwargs) -> Content:
    """The content of the first sharded tensor among arguments."""
    values = each_value((*args, *kwargs.values()))
    return next(value for value in values if isinstance(value, Content))


def written(func: Op, args: Args, kwargs: Kwargs) -> list[Value]:
    """The arguments that an operation writes to."""
    targets = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            targets.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return targets


def named_arguments(func: Op, args: Args, kwargs: Kwargs) -> Kwargs:
    """All arguments by name, with the defaults of those that were left out."""
    schema = func._schema.arguments
    named: Kwargs = {one.name: one.default_value for one in schema if one.has_default_value()}
    named |= {one.name: value for one, value in zip(schema, args, strict=False)}
    return {**named, **kwargs}


def unsupported(func: object, layout: Layout, shape: Sequence[int], why: str) -> OperationError:
    """The error for an operation that is not supported, with the reason and what to do instead."""
    return OperationError(
        f'the operation {func} is not supported for ShardedTensor of layout "{layout}" and '
        f"shape {list(shape)}{why}"
    )
