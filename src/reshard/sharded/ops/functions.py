"""torch's functions on sharded tensors, above autograd; comparison; functions that users register.

Ranks that hold whole heads compute attention without communication.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from reshard.errors import ArgumentTypeError, OperationError
from reshard.layout.layout import BoxLayout, Layout
from reshard.layout.mesh import Mesh
from reshard.layout.words import Chunk
from reshard.sharded.content import Content, ContentTensor, map_nested
from reshard.sharded.groups import is_outside, members
from reshard.sharded.move import (
    from_parts,
    lay_out_gradients,
    replicated,
    to_layout,
    to_local,
    to_whole,
)
from reshard.sharded.ops.dtensor import Args, Kwargs, each_value
from reshard.sharded.ops.lookup import call_on_inputs
from reshard.tensors.agreement import Agreement

HEADS = 1
"""The dim of heads; tensors are (batch, heads, sequence, head dim)."""


def _attend(
    func: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    *args: object,
    **kwargs: object,
) -> Any:
    """Attention head by head if ranks hold whole heads; else in steps that DTensor knows."""
    tensors = [one for one in (query, key, value) if isinstance(one, ContentTensor)]
    # Whether a mask is the same for all heads, and on all ranks.
    is_for_all = attn_mask is None or (
        not isinstance(attn_mask, ContentTensor)
        and not attn_mask.requires_grad
        and (attn_mask.ndim < 3 or attn_mask.shape[-3] == 1)
    )
    contents = [one._content for one in tensors]
    if is_for_all and len(tensors) == 3 and _have_whole_heads(contents):
        if dropout_p > 0:  # replicas would draw different random numbers
            ranks = contents[0].layout.ranks
            spread = Layout(Mesh(rank=len(ranks), ranks=ranks), "- rank - -")
            tensors = [_in_layout(one, spread) for one in tensors]
        local = func(*map(to_local, tensors), attn_mask, dropout_p, *args, **kwargs)
        first = tensors[0]._content
        shape = (*first.shape[:-1], local.shape[-1])
        result = replace(first, shape=shape, spec=None, stated=None, stated_stride=None)
        return _in_layout(from_parts(result, local), contents[0].layout)
    with sdpa_kernel(SDPBackend.MATH), torch._C.DisableTorchFunctionSubclass():
        return func(query, key, value, attn_mask, dropout_p, *args, **kwargs)


def _in_layout(tensor: ContentTensor, layout: Layout) -> ContentTensor:
    content = tensor._content
    if content.layout is layout or content.layout.same_as(layout, content.shape):
        return tensor
    return to_layout(tensor, replace(content, layout=layout, parts=(), spec=None, stated=None))


def _have_whole_heads(contents: list[Content]) -> bool:
    """Whether all three tensors have the same layout, which shards nothing but the heads."""
    layout, words = contents[0].layout, contents[0].layout.words
    if any(one.ndim != 4 or one.layout != layout for one in contents):
        return False
    if isinstance(layout, BoxLayout) or words.reduce or words.on or words.flat or words.without:
        return False
    ranks, cuts = layout.ranks, layout.dims(contents[0].shape)
    counts = [one.shape[HEADS] for one in contents]
    if {*ranks} != {*members(contents[0].group)} or any((*cuts[:HEADS], *cuts[HEADS + 1 :])):
        return False
    # Otherwise a rank's query heads need not be those of its key heads.
    in_chunks = all(isinstance(part, Chunk) and part.unit == 1 for part in cuts[HEADS])
    return not any(count % len(ranks) for count in counts) and (in_chunks or len({*counts}) == 1)


Function = Callable[..., Any]
Registered = TypeVar("Registered", bound=Function)

IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}
IN_PLACE |= {"__setitem__", "__iand__", "__ior__", "__ixor__"}
"""Functions that change their first argument although their names do not end in _."""
NO_MEMORY = "its data is not allocated"
"""torch's message for a function that reads the memory of a tensor below the dispatcher."""
OF_AUTOGRAD = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}
"""Functions that need the very tensors that they are given, not replicas of them."""
TAKES_INPUTS = {F.embedding, F.embedding_bag, F.linear}
"""Functions of plain inputs, which may differ between ranks, and a weight."""
SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]

_registered: dict[tuple[type | None, object], Function] = {}
"""Functions of users in place of functions of torch: for one class of specs, or None for all."""


def custom_sharded_op_impl(func: Function) -> Callable[[Registered], Registered]:
    """Register ``f(types, args, kwargs, process_group)`` in place of a function of torch."""
    return partial(_register, None, func)


def custom_sharding_spec_op(
    sharding_spec_class: type, func: Function
) -> Callable[[Registered], Registered]:
    """Register a function for tensors of one class of specs; it precedes those for all tensors."""
    return partial(_register, sharding_spec_class, func)


def _register(spec_class: type | None, func: Function, own: Registered) -> Registered:
    signature = inspect.signature(own)
    if len(signature.parameters) != 4:
        raise ArgumentTypeError(
            f"the custom operation for {getattr(func, '__name__', func)} expects signature "
            f"(types, args, kwargs, process_group), and was given {signature}"
        )
    _registered[spec_class, func] = own
    return own


def call(func: Function, types: object, args: Args, kwargs: Kwargs) -> Any:
    """Call a function of torch of which some argument is a ShardedTensor."""
    if len(args) == 1 and not kwargs and getattr(func, "__name__", "") == "__get__":
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args)  # an attribute: read a dozen times in every operation
    if _registered:
        values = each_value((*args, *kwargs.values()))
        content = next(one._content for one in values if isinstance(one, ContentTensor))
        own = _registered.get((type(content.spec), func)) or _registered.get((None, func))
        if own is not None:
            return own(types, args, kwargs, content.group)
    if func is torch.allclose or func is torch.Tensor.allclose:
        return allclose(*args, **kwargs)
    if func == SET_DATA:
        return _set_data(*args)
    if func is F.scaled_dot_product_attention:
        args, kwargs = _with_replicas(args, kwargs)
        return _attend(func, *args, **kwargs)
    if func in TAKES_INPUTS:
        return call_on_inputs(func, args, kwargs, lambda args, kwargs: _call(func, args, kwargs))
    return _call(func, args, kwargs)


def _call(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call a function below ``__torch_function__``."""
    if _writes_plain(func, args, kwargs):
        args, kwargs = map_nested(to_whole, (args, kwargs), ContentTensor)
    elif torch.is_grad_enabled() and func not in OF_AUTOGRAD:
        args, kwargs = _with_replicas(args, kwargs)
    # ``requires_grad_`` of a ShardedTensor also registers the hook that lays out gradients.
    name = getattr(func, "__name__", "")
    is_factory = name.endswith("_like") or name.startswith("new_")
    collects = is_factory and bool(kwargs.get("requires_grad"))
    if collects:
        kwargs = {**kwargs, "requires_grad": False}
    try:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
    except RuntimeError as error:
        if NO_MEMORY not in str(error):
            raise
        raise OperationError(
            f"{name or func} reads the memory of a tensor itself, which is not "
            "supported for ShardedTensor: take full_tensor() or local_tensor()"
        ) from error
    return result.requires_grad_() if collects else result


class MixedOperandError(OperationError, TypeError):
    """A sharded tensor is compared with a tensor that is not sharded."""


def all_agree(
    one: object, other: object, same: Callable[[torch.Tensor, torch.Tensor], bool]
) -> bool:
    """Whether two tensors have equal layouts and ``same`` holds for their parts on all ranks."""
    one, other = getattr(one, "_content", one), getattr(other, "_content", other)
    if not isinstance(one, Content) or not isinstance(other, Content):
        plain = other if isinstance(one, Content) else one
        raise MixedOperandError(
            f"a ShardedTensor is compared with a {type(plain).__name__}: both must be "
            "ShardedTensors; compare full_tensor() with a plain one"
        )
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if is_outside(one.group) or is_outside(other.group):
        return one.group is other.group and one.layout == other.layout  # this rank has no parts
    if not one.is_like(other):
        return False
    comparing = Agreement(one.group, "comparing ShardedTensors", error=OperationError)
    return all(comparing.run(lambda: all(map(same, one.parts, other.parts))).values())


def equal(one: object, other: object) -> bool:
    """Whether two sharded tensors have equal elements and equal layouts, on all ranks."""
    return all_agree(one, other, torch.equal)


def allclose(one: object, other: object, *args: Any, **kwargs: Any) -> bool:
    """Whether two sharded tensors have close elements and equal layouts, on all ranks."""
    return all_agree(one, other, lambda a, b: torch.allclose(a, b, *args, **kwargs))


def _set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Assign ``tensor.data``: the tensor then has the shards of the other one."""
    if not isinstance(tensor, ContentTensor) or not isinstance(data, ContentTensor):
        raise OperationError(
            f"data of a {type(tensor).__name__} is set to a {type(data).__name__}, which is not "
            "supported for ShardedTensor: give one of the same kind, or use copy_"
        )
    with torch._C.DisableTorchFunctionSubclass():
        SET_DATA(tensor, data)
    tensor._content = replace(data._content)
    if tensor._hook is not None and tensor.requires_grad:
        lay_out_gradients(tensor)


def _writes_plain(func: Function, args: Args, kwargs: Kwargs) -> bool:
    """Whether the result is written into a plain tensor, which then gets all elements."""
    target = kwargs.get("out")
    if isinstance(target, tuple | list) and target:
        target = target[0]  # of several results, as those of max
    name = getattr(func, "__name__", "")
    is_in_place = name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    if target is None and args and is_in_place:
        target = args[0]
    return isinstance(target, torch.Tensor) and not isinstance(target, ContentTensor)


def _with_replicas(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Arguments with plain tensors that require gradients as sharded ones, whole on every rank.

    Their gradients are then plain tensors, summed over what all ranks contribute.
    """
    # A quick check: most calls have sharded tensors and numbers only.
    simple = ContentTensor | int | float | str | torch.dtype | None
    if not kwargs and all(isinstance(arg, simple) for arg in args):
        return args, kwargs
    values = each_value((*args, *kwargs.values()))
    sharded = next((one for one in values if isinstance(one, ContentTensor)), None)
    if sharded is None:  # it is inside an object, of a function that torch does not have
        return args, kwargs
    group = sharded._content.group

    def replicate(one: torch.Tensor) -> torch.Tensor:
        is_plain = type(one) in (torch.Tensor, torch.nn.Parameter)
        return replicated(one, group) if is_plain and one.requires_grad and one.numel() else one

    replaced: tuple[Args, Kwargs] = map_nested(replicate, (args, kwargs), torch.Tensor)
    return replaced
