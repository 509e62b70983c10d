"""What an operation on sharded tensors does, below autograd.

An operation that looks at one element at a time goes shard by shard, if all operands lie alike;
others are brought to the layout of the first that has the shape of the result, or of what is
written. What writes by index, or finds a size in values, is done with whole tensors. Everything
else goes through DTensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from reshard.errors import OperationError
from reshard.planning.adjoint import unreduced
from reshard.sharded.at_once import changed, first_content, needs_values, on_whole, written
from reshard.sharded.chance import agreed
from reshard.sharded.content import Content, strides_like
from reshard.sharded.lists import on_lists
from reshard.sharded.losses import is_loss, loss_of
from reshard.sharded.misjudged import is_misjudged
from reshard.sharded.moving import moved_to
from reshard.sharded.spreading import parts_like
from reshard.sharded.tensor import ShardedTensor, wrap

__all__ = ["dispatched"]

aten = torch.ops.aten

ONE_BY_ONE = {
    aten.detach, aten.alias, aten.clone, aten._to_copy, aten.copy_, aten.fill_, aten.zero_,
    aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like,
    aten.randn_like, aten.randint_like, aten.uniform_, aten.normal_, aten.bernoulli_,
    aten.exponential_, aten.random_, aten.log_normal_, aten.geometric_, aten.cauchy_,
    aten.lift_fresh, aten.contiguous, aten.lerp_, aten.lerp, aten.masked_fill_, aten.masked_fill,
    aten.where, aten._fused_dropout, aten.native_dropout, aten.nan_to_num_, aten._conj,
    aten._conj_physical, aten._neg_view,
}  # fmt: skip
"""Operations on elements, which torch does not mark as such."""


ON_LISTS = ("_foreach", "_amp_foreach", "_fused_ada", "_fused_sgd")
"""How the names of operations on lists of tensors begin."""


LAZY = [getattr(torch._C.DispatchKey, name) for name in ("Conjugate", "Negative", "ZeroTensor")]
"""What resolves the flags of lazy tensors; torch leaves it out while it runs our operations."""


def dispatched(func: Any, args: Any, kwargs: Any) -> Any:
    """Do an operation of which some argument is a ShardedTensor."""
    resolves = torch._C._SetExcludeDispatchKeyGuard
    with resolves(LAZY[0], False), resolves(LAZY[1], False), resolves(LAZY[2], False):
        return _dispatched(func, args, kwargs)


def _dispatched(func: Any, args: Any, kwargs: Any) -> Any:
    targets = written(func, args, kwargs)
    _check_written(func, targets)
    result = _done(func, args, kwargs, targets)
    if func.is_view:
        _mark_copies(args[0], result)
    return agreed(result) if torch.Tag.nondeterministic_seeded in func.tags else result


def _done(func: Any, args: Any, kwargs: Any, targets: list[Any]) -> Any:
    special = SPECIAL.get(func.overloadpacket)
    if special is not None:
        return special(func, args, kwargs)
    view = _viewed_by(func)
    if view is not None:
        return tree_map(torch.clone, dispatched(view, args, kwargs))
    if is_loss(func):
        return loss_of(func, args, kwargs, one_by_one)
    if _is_on_elements(func):
        return one_by_one(func, args, kwargs)
    if func.overloadpacket.__name__.startswith(ON_LISTS):
        return on_lists(func, args, kwargs)
    if targets:
        return changed(func, args, kwargs, targets)
    if needs_values(func, args) or is_misjudged(func, args):
        return on_whole(func, args, kwargs, first_content(args, kwargs))
    return _through_dtensor(func, args, kwargs)


@cache
def _viewed_by(func: Any) -> Any:
    """The view that an operation such as ``view_copy`` copies; None for any other."""
    name = func.overloadpacket.__name__
    view = getattr(aten, name.removesuffix("_copy"), None) if name.endswith("_copy") else None
    found = getattr(view, func._overloadname, None)
    return found if found is not None and found.is_view else None


@cache
def _is_on_elements(func: Any) -> bool:
    """Whether an operation looks at one element at a time; some say so only of their other form."""
    packet = func.overloadpacket
    if torch.Tag.pointwise in func.tags or packet in ONE_BY_ONE:
        return True
    other = getattr(aten, packet.__name__.removesuffix("_"), packet)
    name = func._overloadname
    return name in other.overloads() and torch.Tag.pointwise in getattr(other, name).tags


def _check_written(func: Any, targets: list[Any]) -> None:
    """Refuse to write where it would be lost, or to change a shape in place."""
    for target in targets:
        if getattr(target, "_is_copy", False):
            raise _refused(
                func,
                target,
                "it writes into a view whose elements came from other ranks, and the tensor would "
                "not change; clone() the view first, or write with index_put_ or index_copy_",
            )
        if torch.Tag.inplace_view in func.tags and isinstance(target, ShardedTensor):
            raise _refused(
                func, target, "it changes the shape in place; use the one that makes a new tensor"
            )


def _refused(func: Any, target: ShardedTensor, why: str) -> OperationError:
    return OperationError(
        f'the operation {func} is not supported for ShardedTensor of layout "{target.cut}" and '
        f"shape {list(target.shape)}: {why}"
    )


def _mark_copies(base: Any, result: Any) -> None:
    """Views of what had to move are copies: remembered, so that nobody writes into them."""
    lost_before = getattr(base, "_is_copy", False)
    for view in result if isinstance(result, list | tuple) else [result]:
        if isinstance(view, ShardedTensor) and (lost_before or _is_apart(view, base)):
            view._is_copy = True  # type: ignore[attr-defined]


def _is_apart(view: ShardedTensor, base: ShardedTensor) -> bool:
    own = {part.untyped_storage().data_ptr() for part in base._content.parts}
    return any(
        part.numel() > 0 and part.untyped_storage().data_ptr() not in own
        for part in view._content.parts
    )


def _through_dtensor(func: Any, args: Any, kwargs: Any) -> Any:
    from reshard.sharded.computing import through_dtensor

    return through_dtensor(func, args, kwargs, first_content(args, kwargs))


def one_by_one(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on elements, shard by shard."""
    leaves, tree = tree_flatten((args, kwargs))
    targets = written(func, args, kwargs)
    like = targets[0]._content if targets else _widest(leaves)
    if like is None or like.layout.reduce or (like.mesh and not _all_alike(leaves, like)):
        return _through_dtensor(func, args, kwargs)
    lying = [parts_like(leaf, like) for leaf in leaves]
    results = []
    for number in range(max(len(like.parts), 1)):
        own = [parts[number] if isinstance(parts, tuple) else parts for parts in lying]
        some_args, some_kwargs = tree_unflatten(own, tree)
        results.append(func(*some_args, **some_kwargs))
    if targets:
        return targets[0]
    return _joined(replace(like, stated_stride=_strides(like, kwargs)), results)


def _strides(like: Content, kwargs: Any) -> tuple[int, ...] | None:
    """The strides of a result, which has those of a tensor if it is not asked for others."""
    asked = kwargs.get("memory_format")
    if asked is None or asked is torch.preserve_format:
        return like.stated_stride
    return torch.empty(like.shape, device="meta", memory_format=asked).stride()


def _widest(leaves: list[Any]) -> Content | None:
    """The first operand that has the shape of the result; none if all must be spread."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    sharded = [leaf._content for leaf in tensors if isinstance(leaf, ShardedTensor)]
    if any(content.layout.reduce for content in sharded):
        return None
    spread: Any = torch.broadcast_shapes
    shape = tuple(spread(*(tensor.shape for tensor in tensors)))
    return next((content for content in sharded if content.shape == shape), None)


def _all_alike(leaves: list[Any], like: Content) -> bool:
    """Whether no tensor has to be spread; DTensor does that without gathering."""
    shapes = {tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return shapes <= {like.shape, ()}


def _joined(like: Content, results: list[Any]) -> Any:
    """Results of all parts as one."""
    if isinstance(results[0], tuple):
        return tuple(_joined(like, list(column)) for column in zip(*results, strict=True))
    if not isinstance(results[0], torch.Tensor):
        return results[0]
    if like.parts:
        return wrap(like.with_parts(results))
    # Done with nothing, only to know of which kind the result is.
    return wrap(like.of_kind(results[0].dtype, results[0].device))


def _to_copy(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """Another dtype or device; also known on ranks that hold nothing."""
    content = args[0]._content
    if content.layout.reduce is not None:
        # Rounded one by one, addends would make another sum.
        content = moved_to(content, unreduced(content.layout))
    parts = [func(part, **kwargs) for part in content.parts]
    content = replace(content, stated_stride=_strides(content, kwargs))
    if parts:
        return wrap(content.with_parts(parts))
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    where = content.device if device is None else torch.device(device)
    return wrap(content.of_kind(dtype or content.dtype, where))


def _new_strided(func: Any, args: Any, kwargs: Any) -> Any:
    """Room for a gradient, which autograd wants to lie as the tensor does."""
    content, stride = args[0]._content, tuple(args[2])
    if tuple(args[1]) != content.shape:
        return _through_dtensor(func, args, kwargs)
    content = replace(content, stated_stride=stride)
    if any(part.ndim != len(stride) for part in content.parts) or not content.parts:
        return _to_copy(aten._to_copy.default, (wrap(content),), kwargs)
    parts = [
        func(part, part.shape, strides_like(tuple(part.shape), stride), **kwargs)
        for part in content.parts
    ]
    return wrap(content.with_parts(parts))


def _new_alike(func: Any, args: Any, kwargs: Any) -> Any:
    """A new tensor of the same shape is sharded in the same way, whatever way that is."""
    content = args[0]._content
    if tuple(args[1]) != content.shape or content.layout.reduce is not None:
        return _through_dtensor(func, args, kwargs)
    if not content.parts:
        return _to_copy(aten._to_copy.default, args[:1], kwargs)
    parts = [func(part, part.shape, *args[2:], **kwargs) for part in content.parts]
    return wrap(content.with_parts(parts))


def _equal(func: Any, args: Any, kwargs: Any) -> bool:
    from reshard.sharded.comparing import equal

    return equal(*args, **kwargs)


def _item(func: Any, args: Any, kwargs: Any) -> Any:
    """The value of a tensor of one element, the same on all ranks."""
    from reshard.sharded.moving import whole

    found = whole(args[0]._content)
    assert found is not None
    return found.item()


def _detached(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """The same memory; every parameter is made by it, so it takes the shortest way."""
    content = args[0]._content
    return wrap(replace(content, parts=tuple(part.detach() for part in content.parts)))


SPECIAL: dict[Any, Callable[[Any, Any, Any], Any]] = {
    aten.detach: _detached,
    aten._to_copy: _to_copy,
    aten.equal: _equal,
    aten.new_empty_strided: _new_strided,
    aten.new_empty: _new_alike,
    aten.new_zeros: _new_alike,
    aten.new_ones: _new_alike,
    aten.new_full: _new_alike,
    aten._local_scalar_dense: _item,
}
