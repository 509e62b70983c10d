"""What torch's functions do with sharded tensors, above autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from reshard.sharded.tensor import ShardedTensor

__all__ = ["called"]


def called(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of torch of which some argument is a ShardedTensor."""
    from reshard.sharded.custom_ops import custom_of

    own = custom_of(func, args, kwargs)
    if own is not None:
        return own(types, args, kwargs)
    if func is torch.allclose or func is torch.Tensor.allclose:
        from reshard.sharded.comparing import allclose

        return allclose(*args, **kwargs)
    if func is torch.nn.functional.scaled_dot_product_attention:
        from reshard.sharded.attention import attended

        return attended(func, *_with_replicas(args, kwargs))
    if torch.is_grad_enabled():
        args, kwargs = _with_replicas(args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _with_replicas(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Plain tensors that require gradients, as sharded ones that every rank has in full.

    Their gradients must come back as plain tensors, with what all ranks add to them.
    """
    leaves, tree = tree_flatten((args, kwargs))
    plain = [leaf for leaf in leaves if _is_plain(leaf)]
    sharded = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
    if not plain or not sharded:
        return args, kwargs
    from reshard.sharded.gradients import replicated

    group = sharded[0]._content.group
    leaves = [replicated(leaf, group) if _is_plain(leaf) else leaf for leaf in leaves]
    found: tuple[Any, Any] = tree_unflatten(leaves, tree)
    return found


def _is_plain(leaf: object) -> bool:
    kind = type(leaf) in (torch.Tensor, torch.nn.Parameter)
    return kind and leaf.requires_grad and leaf.numel() > 0  # type: ignore[attr-defined]
