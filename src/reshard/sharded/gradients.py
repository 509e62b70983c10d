"""Between a ShardedTensor and other tensors, in both directions of autograd.

A gradient of a ShardedTensor is a ShardedTensor; it says itself how it lies. Ranks that hold the
same plain tensor hold the same gradient of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from reshard.planning.adjoint import unreduced
from reshard.sharded.content import Content, Group, members, strides_like
from reshard.sharded.moving import laid_as, whole
from reshard.sharded.tensor import ShardedTensor, wrap
from reshard.tensors.local import whole_on

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = [
    "as_content",
    "as_laid_out",
    "from_dtensor",
    "from_local",
    "like",
    "replicated",
    "to_dtensor",
    "to_joined",
    "to_layout",
    "to_local",
    "to_parts",
    "to_whole",
]


def to_layout(tensor: ShardedTensor, target: Content) -> ShardedTensor:
    """The same tensor in the layout of another content."""
    found: ShardedTensor = _to_layout(tensor, target)
    return found


def to_layout_in_place(tensor: ShardedTensor, target: Content) -> None:
    """Lay this very tensor out as another content is."""
    _to_layout_in_place(tensor, target)


def to_parts(tensor: ShardedTensor) -> tuple[torch.Tensor, ...]:
    """This rank's parts; their gradients are those parts of the gradient."""
    found: tuple[torch.Tensor, ...] = _to_parts(tensor) if tensor._content.parts else ()
    return found


def to_joined(tensor: ShardedTensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """This rank's parts as a move takes them, with gradients: one as it is, several joined.

    A rank without parts has an empty tensor beside that, so that it too has a part in backward.
    """
    content = tensor._content
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return content.local, None
    if not content.parts:
        return None, _to_nothing(tensor)
    parts = to_parts(tensor)
    if len(parts) == 1:
        return parts[0], None
    return torch.cat([part.reshape(-1) for part in parts]), None


def to_local(tensor: ShardedTensor) -> torch.Tensor:
    """This rank's only part."""
    (found,) = to_parts(tensor)
    return found


def like(content: Content) -> Callable[[torch.Tensor | None], ShardedTensor | None]:
    """Lays a gradient out as its tensor is: an optimizer then finds its shards side by side."""
    source = replace(content, parts=())

    def laid_out(gradient: torch.Tensor | None) -> ShardedTensor | None:
        if gradient is None:
            return None  # an operation gave none
        found = as_laid_out(source, gradient)
        repeats = any(0 in part.stride() and part.numel() > 1 for part in found._content.parts)
        # What was spread from fewer elements cannot be added to.
        return cast(ShardedTensor, found.clone()) if repeats else found

    return laid_out


def from_local(local: torch.Tensor, content: Content) -> ShardedTensor:
    """A ShardedTensor of which this rank has one part, with gradients back to that."""
    found: ShardedTensor = _from_parts(content, local)
    return found


def to_whole(tensor: ShardedTensor) -> torch.Tensor:
    """The whole tensor on every rank; each has the same gradient of it."""
    found: torch.Tensor = _to_whole(tensor)
    return found


def replicated(tensor: torch.Tensor, group: Group) -> ShardedTensor:
    """A plain tensor that all ranks of a group have alike."""
    found: ShardedTensor = _replicated(tensor, group)
    return found


def as_content(gradient: torch.Tensor, like: Content) -> Content:
    """A gradient of a sharded tensor, whatever it is; a plain one is the same on all ranks."""
    if isinstance(gradient, ShardedTensor):
        return gradient._content
    return _whole_content(gradient, like.group)


def _whole_content(tensor: torch.Tensor, group: Group) -> Content:
    layout, part = whole_on(members(group)), tensor.detach()
    shape = tuple(part.shape)
    stride = strides_like(shape, tuple(part.stride()))
    return Content(layout, shape, part.dtype, (part,), part.device, group, stated_stride=stride)


# Backward goes through the same functions as forward, so that it has gradients itself.


class _ToLayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor, target: Content) -> ShardedTensor:
        ctx.source = replace(tensor._content, parts=())
        return wrap(laid_as(tensor._content, target))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        return as_laid_out(ctx.source, gradients[0]), None


class _ToLayoutInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor, target: Content) -> ShardedTensor:
        ctx.source = replace(tensor._content, parts=())
        tensor._content = laid_as(tensor._content, target)
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        return as_laid_out(ctx.source, gradients[0]), None


def as_laid_out(source: Content, gradient: torch.Tensor) -> ShardedTensor:
    """A gradient, whatever it is, as the tensor lies that it is of."""
    if not isinstance(gradient, ShardedTensor):
        gradient = replicated(gradient, source.group)
    # Every addend of a pending sum has the gradient of the sum.
    return to_layout(gradient, replace(source, layout=unreduced(source.layout)))


class _ToParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor) -> tuple[torch.Tensor, ...]:
        ctx.content = replace(tensor._content, parts=())
        # Views: writing into them writes into the shards.
        return tuple(part.detach() for part in tensor._content.parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> ShardedTensor:
        # Memory of their own: autograd may give the same gradient to others, and add to each.
        found: ShardedTensor = _from_parts(ctx.content, *(one.clone() for one in gradients))
        return found


class _FromParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, content: Content, *parts: torch.Tensor) -> ShardedTensor:
        ctx.content = replace(content, parts=())
        return wrap(content.with_parts([part.detach() for part in parts]))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return None, *to_parts(as_laid_out(ctx.content, gradients[0]))


class _ToNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor) -> torch.Tensor:
        ctx.content = content = tensor._content
        return torch.zeros(0, dtype=content.dtype, device=content.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> ShardedTensor:
        found: ShardedTensor = _from_nothing(gradients[0], ctx.content)
        return found


class _FromNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, nothing: torch.Tensor, content: Content) -> ShardedTensor:
        return wrap(replace(content, parts=()))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        return _to_nothing(gradients[0]), None


class _ToWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor) -> torch.Tensor:
        ctx.source = replace(tensor._content, parts=())
        found = whole(tensor._content)
        assert found is not None
        local = tensor._content.local
        return found.clone() if found is local else found

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> ShardedTensor:
        return as_laid_out(ctx.source, gradients[0])


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> ShardedTensor:
        return wrap(_whole_content(tensor, group))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        gradient = gradients[0]
        return to_whole(gradient) if isinstance(gradient, ShardedTensor) else gradient, None


def to_dtensor(tensor: ShardedTensor, device_mesh: DeviceMesh | None = None) -> DTensor:
    """The same memory as a DTensor; gradients flow back."""
    found: DTensor = _to_dtensor(tensor, device_mesh)
    return found


def from_dtensor(tensor: DTensor, group: Group = None) -> ShardedTensor:
    """A DTensor's memory; gradients flow back."""
    if group is None and tensor.device_mesh.ndim == 1:
        group = tensor.device_mesh.get_group()
    found: ShardedTensor = _from_dtensor(tensor, group)
    return found


class _ToDTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor, device_mesh: DeviceMesh | None) -> DTensor:
        from reshard.sharded.computing import dtensor_from, mesh_of_group

        content = tensor._content
        ctx.content = replace(content, parts=())
        return dtensor_from(content, device_mesh or mesh_of_group(content))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        return as_laid_out(ctx.content, from_dtensor(gradients[0], ctx.content.group)), None


class _FromDTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, group: Group) -> ShardedTensor:
        from reshard.sharded.computing import content_of

        ctx.mesh, ctx.placements = tensor.device_mesh, tensor.placements
        return wrap(content_of(tensor, group))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        from torch.distributed.tensor import Replicate

        from reshard.tensors.dtensor.placements import layout_from

        gradient = gradients[0]
        kept = tuple(Replicate() if one.is_partial() else one for one in ctx.placements)
        layout = layout_from(ctx.mesh, kept, gradient.shape)
        lying = replace(gradient._content, layout=layout, spec=None, stated=None)
        return to_dtensor(to_layout(gradient, lying), ctx.mesh), None


_to_layout: Callable[..., Any] = _ToLayout.apply
_to_layout_in_place: Callable[..., Any] = _ToLayoutInPlace.apply
_to_parts: Callable[..., Any] = _ToParts.apply
_from_parts: Callable[..., Any] = _FromParts.apply
_to_nothing: Callable[..., Any] = _ToNothing.apply
_from_nothing: Callable[..., Any] = _FromNothing.apply
_to_whole: Callable[..., Any] = _ToWhole.apply
_replicated: Callable[..., Any] = _Replicated.apply
_to_dtensor: Callable[..., Any] = _ToDTensor.apply
_from_dtensor: Callable[..., Any] = _FromDTensor.apply
