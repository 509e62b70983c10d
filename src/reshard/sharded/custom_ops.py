"""Operations that users register for sharded tensors, in general or for one kind of spec."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils._pytree import tree_flatten

from reshard.sharded.tensor import ShardedTensor

if TYPE_CHECKING:
    from reshard.sharded.spec import ShardingSpec

__all__ = ["custom_of", "custom_sharded_op_impl", "custom_sharding_spec_op"]

Op = TypeVar("Op", bound=Callable[..., Any])

_for_all: dict[Any, Callable[..., Any]] = {}
_for_spec: dict[type, dict[Any, Callable[..., Any]]] = {}


def custom_sharded_op_impl(func: Any) -> Callable[[Op], Op]:
    """Use ``f(types, args, kwargs, process_group)`` in place of a function of torch."""

    def registered(own: Op) -> Op:
        _check_signature(own, func)
        _for_all[func] = own
        return own

    return registered


def custom_sharding_spec_op(
    sharding_spec_class: type[ShardingSpec], func: Any
) -> Callable[[Op], Op]:
    """The same for tensors of one kind of spec only, where it comes first."""

    def registered(own: Op) -> Op:
        _check_signature(own, func)
        _for_spec.setdefault(sharding_spec_class, {})[func] = own
        return own

    return registered


def _check_signature(own: Callable[..., Any], func: Any) -> None:
    if len(inspect.signature(own).parameters) != 4:
        raise TypeError(
            f"the custom operation for {getattr(func, '__name__', func)} expects signature "
            f"(types, args, kwargs, process_group), and was given {inspect.signature(own)}"
        )


def custom_of(func: Any, args: Any, kwargs: Any) -> Callable[[Any, Any, Any], Any] | None:
    """What was registered for a call, if anything was."""
    if not _for_all and not _for_spec:
        return None
    leaves, _ = tree_flatten((args, kwargs))
    content = next(leaf._content for leaf in leaves if isinstance(leaf, ShardedTensor))
    own = _for_spec.get(type(content.spec), {}).get(func) or _for_all.get(func)
    if own is None:
        return None
    return lambda types, args, kwargs: own(types, args, kwargs, content.group)
