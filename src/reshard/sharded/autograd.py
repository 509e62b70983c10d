"""Moves and conversions between sharded and other tensors that autograd follows.

A gradient of a ShardedTensor is a ShardedTensor, with a layout of its own. Ranks that hold the same
plain tensor get the same gradient of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from reshard.errors import ArgumentError
from reshard.planning.adjoint import unreduced
from reshard.sharded.content import Content, ContentTensor, part_shapes, wrap
from reshard.sharded.groups import Group
from reshard.sharded.move import move_like, replicated_content, whole
from reshard.sharded.specs import Shard
from reshard.tensors.autograd import Linear, linear
from reshard.tensors.kinds import this_rank
from reshard.tensors.local import joined

Function = Callable[..., Any]


class _LinearInPlace(Linear):
    @staticmethod
    def forward(ctx: Any, compute: Function, adjoint: Function, *tensors: torch.Tensor) -> Any:
        ctx.mark_dirty(*tensors)
        return Linear.forward(ctx, compute, adjoint, *tensors)


def to_layout(tensor: ContentTensor, target: Content) -> ContentTensor:
    """The same tensor in the layout of another content."""
    content = tensor._content
    return linear(lambda: wrap(move_like(content, target)), _gradient_for(content), tensor)


def to_layout_in_place(tensor: ContentTensor, target: Content) -> None:
    """Move the tensor itself to the layout of another content."""

    def move() -> ContentTensor:
        tensor._content = move_like(tensor._content, target)
        return tensor

    gradient = _gradient_for(tensor._content)
    _LinearInPlace.apply(move, gradient, tensor)  # type: ignore[no-untyped-call]


def to_whole(tensor: ContentTensor) -> torch.Tensor:
    """The whole tensor, on every rank of the group, each of which has the same gradient of it."""
    content = tensor._content

    def gather() -> torch.Tensor:
        full = whole(content)
        return full.clone() if full is content.local else full

    return linear(gather, _gradient_for(content), tensor)


def replicated(tensor: torch.Tensor, group: Group) -> ContentTensor:
    """The ShardedTensor of a plain tensor that is the same on all ranks of a group."""

    def gather(gradient: torch.Tensor) -> torch.Tensor:
        return to_whole(gradient) if isinstance(gradient, ContentTensor) else gradient

    return linear(lambda: wrap(replicated_content(tensor, group)), gather, tensor)


def _to_parts(tensor: ContentTensor) -> tuple[torch.Tensor, ...]:
    """This rank's parts; one empty tensor if it has none, so that it takes part in backward."""
    content, source = tensor._content, tensor._content.without_parts()

    def take() -> tuple[torch.Tensor, ...]:
        if not content.parts:
            return (torch.zeros(0, dtype=content.dtype, device=content.device),)
        # Views: writing into them writes into the shards.
        return tuple(part.detach() for part in content.parts)

    def join(*gradients: torch.Tensor) -> ContentTensor:
        # Clones: autograd may give the same gradient to others, and accumulate into each.
        return from_parts(source, *(one.clone() for one in gradients))

    return linear(take, join, tensor)


def from_parts(content: Content, *parts: torch.Tensor) -> ContentTensor:
    """The ShardedTensor of a content with these parts of this rank; gradients flow back to them."""
    source = content.without_parts()

    def join() -> ContentTensor:
        if not part_shapes(source.layout, this_rank(), source.shape):
            return wrap(source)
        return wrap(source.with_parts([part.detach() for part in parts]))

    return linear(join, lambda one: _to_parts(lay_out_gradient(source, one)), *parts)


def to_local(tensor: ContentTensor) -> torch.Tensor:
    """This rank's only part; its gradient is the part of the gradient."""
    (part,) = _to_parts(tensor) if tensor._content.parts else ()
    return part


def to_move_input(tensor: ContentTensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """This rank's local tensor for a move, with gradients, and a leaf if it has none.

    A rank without parts gets an empty leaf, so that it takes part in backward.
    """
    content = tensor._content
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return content.local, None
    local = joined(_to_parts(tensor))
    return (local, None) if content.parts else (None, local)


class OwnedShard(Shard):
    """A shard of a sharded tensor of this rank.

    It follows ``requires_grad_`` of its tensor, and a tensor that is assigned to it becomes that
    part of the sharded tensor.
    """

    __slots__ = ("_number", "_owner", "_seen")

    def __init__(self, owner: ContentTensor, number: int) -> None:
        self._owner, self._number = owner, number
        self._seen: tuple[Content, bool, torch.Tensor] | None = None
        self.metadata = owner._content.shards[number].metadata

    @property
    def tensor(self) -> torch.Tensor:
        """The values: memory of the sharded tensor; gradients flow back."""
        owner, seen = self._owner, self._seen
        content, collects = owner._content, owner.requires_grad and torch.is_grad_enabled()
        if seen is None or seen[0] is not content or seen[1] != collects:
            source = replace(content, parts=_to_parts(owner)) if collects else content
            seen = self._seen = (content, collects, source.shards[self._number].tensor)
        return seen[2]

    @tensor.setter
    def tensor(self, tensor: torch.Tensor) -> None:
        owner, number, content = self._owner, self._number, self._owner._content
        self.check(tensor)
        if tensor.dtype != content.dtype:
            raise ArgumentError(
                f"a shard of {tensor.dtype} is assigned to a ShardedTensor of {content.dtype}: "
                "cast one to the other"
            )
        if len(content.parts) == len(content.shards):
            parts = list(content.parts)
            parts[number] = tensor.detach()
            owner._content = replace(content, parts=tuple(parts))
        else:  # several boxes in one part
            with torch.no_grad():
                content.shards[number].tensor.copy_(tensor)
        if tensor.requires_grad and not owner.requires_grad:
            owner.requires_grad_()


def lay_out_gradients(tensor: ContentTensor) -> None:
    """Lay the gradients of a leaf out like it, so that optimizers need not move them."""
    if tensor._hook is not None:
        tensor._hook.remove()
    source = tensor._content.without_parts()

    def lay_out(gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:
            return None  # an operation gave none
        own = lay_out_gradient(source, gradient)
        expanded = any(0 in part.stride() and part.numel() > 1 for part in own._content.parts)
        # Autograd cannot accumulate into an expanded tensor.
        return own.clone() if expanded else own

    tensor._hook = cast(Any, tensor).register_hook(lay_out)


def _gradient_for(content: Content) -> Function:
    """The function that lays a gradient out like a tensor."""
    return partial(lay_out_gradient, content.without_parts())


def lay_out_gradient(source: Content, gradient: torch.Tensor) -> ContentTensor:
    """Any gradient in the layout of the tensor that it belongs to."""
    if not isinstance(gradient, ContentTensor):
        gradient = replicated(gradient, source.group)
    # Every addend of a pending sum has the gradient of the sum.
    return to_layout(gradient, replace(source, layout=unreduced(source.layout)))
