"""What torch's functions do with sharded tensors, above autograd."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from reshard.errors import OperationError
from reshard.sharded.tensor import ShardedTensor

__all__ = ["called"]

IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}
IN_PLACE |= {"__setitem__", "__iand__", "__ior__", "__ixor__"}
"""Functions that change their first argument, and do not have the name of one that does."""
NO_MEMORY = "its data is not allocated"
"""What torch says of a function that reads the memory of a tensor below the dispatcher."""
OF_AUTOGRAD = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}
"""Functions that ask for gradients of the very tensors that they are given."""
TAKES_INPUTS = {F.embedding, F.embedding_bag, F.linear}
"""Functions of inputs, which may be each rank's own, and a weight."""
SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def called(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of torch of which some argument is a ShardedTensor."""
    if len(args) == 1 and not kwargs and getattr(func, "__name__", "") == "__get__":
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args)  # an attribute: asked for a dozen times in every operation
    from reshard.sharded.custom_ops import custom_of

    own = custom_of(func, args, kwargs)
    if own is not None:
        return own(types, args, kwargs)
    if func is torch.allclose or func is torch.Tensor.allclose:
        from reshard.sharded.comparing import allclose

        return allclose(*args, **kwargs)
    if func == SET_DATA:
        return _set_data(*args)
    if func is torch.nn.functional.scaled_dot_product_attention:
        from reshard.sharded.attention import attended

        return attended(func, *_with_replicas(args, kwargs))
    if func in TAKES_INPUTS:
        from reshard.sharded.own_inputs import on_inputs

        return on_inputs(func, args, kwargs, lambda args, kwargs: _done(func, args, kwargs))
    return _done(func, args, kwargs)


def _done(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function below ``__torch_function__``."""
    if _writes_plain(func, args, kwargs):
        args, kwargs = _with_whole(args, kwargs)
    elif torch.is_grad_enabled() and func not in OF_AUTOGRAD:
        args, kwargs = _with_replicas(args, kwargs)
    collects = bool(kwargs.get("requires_grad")) and _makes_new(func)
    if collects:
        kwargs = {**kwargs, "requires_grad": False}
    try:
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **kwargs)
    except RuntimeError as error:
        if NO_MEMORY not in str(error):
            raise
        raise OperationError(
            f"{getattr(func, '__name__', func)} reads the memory of a tensor itself, which is not "
            "supported for ShardedTensor: take full_tensor() or local_tensor()"
        ) from error
    return made.requires_grad_() if collects else made


def _makes_new(func: Any) -> bool:
    """Whether a function makes a tensor like another one: its gradients are laid out as it is."""
    name = getattr(func, "__name__", "")
    return name.endswith("_like") or name.startswith("new_")


def _set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Other values for a tensor: its shards are then those of the other one."""
    if not isinstance(tensor, ShardedTensor) or not isinstance(data, ShardedTensor):
        raise OperationError(
            f"data of a {type(tensor).__name__} is set to a {type(data).__name__}, which is not "
            "supported for ShardedTensor: give one of the same kind, or use copy_"
        )
    with torch._C.DisableTorchFunctionSubclass():
        SET_DATA(tensor, data)
    tensor._content = data._content
    if tensor._hook is not None:
        from reshard.sharded.gradients import like

        tensor._hook.remove()
        tensor._hook = cast(Any, tensor).register_hook(like(tensor._content))


def _writes_plain(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the result goes into a plain tensor, which stays one: it gets all elements."""
    target = kwargs.get("out")
    if isinstance(target, tuple | list) and target:
        target = target[0]  # of several results, as those of max
    name = getattr(func, "__name__", "")
    own_name = name.endswith("_") and not name.endswith("__")
    if target is None and args and (own_name or name in IN_PLACE):
        target = args[0]
    return isinstance(target, torch.Tensor) and not isinstance(target, ShardedTensor)


def _with_whole(args: Any, kwargs: Any) -> tuple[Any, Any]:
    leaves, tree = tree_flatten((args, kwargs))
    whole = [leaf.full_tensor() if isinstance(leaf, ShardedTensor) else leaf for leaf in leaves]
    found: tuple[Any, Any] = tree_unflatten(whole, tree)
    return found


def _with_replicas(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Plain tensors that require gradients, as sharded ones that every rank has in full.

    Their gradients must come back as plain tensors, with what all ranks add to them.
    """
    if not kwargs and not any(_may_hold_plain(arg) for arg in args):
        return args, kwargs
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


def _may_hold_plain(arg: object) -> bool:
    """Whether it is worth looking: most calls have sharded tensors and numbers only."""
    return not isinstance(arg, ShardedTensor | int | float | str | torch.dtype | None)


def _is_plain(leaf: object) -> bool:
    kind = type(leaf) in (torch.Tensor, torch.nn.Parameter)
    return kind and leaf.requires_grad and leaf.numel() > 0  # type: ignore[attr-defined]
