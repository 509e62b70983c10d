"""Operations that mix elements of several ranks: products, norms, attention. DTensor does them.

Every sharded argument becomes a DTensor of the same memory, a plain one is taken to be the same on
all ranks, and what comes out is sharded again, as DTensor left it.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._pytree import tree_map

from reshard.errors import LiveError, OperationError, ReshardError
from reshard.layout.layout import Layout
from reshard.planning.adjoint import unreduced
from reshard.sharded.content import Content, Group, materialized, members, strides_like
from reshard.sharded.moving import moved_to
from reshard.sharded.tensor import ShardedTensor, wrap
from reshard.tensors.dtensor.from_layout import placements_of
from reshard.tensors.dtensor.placements import layout_from
from reshard.tensors.dtensor.wrapping import dtensor_layout, dtensor_local, dtensor_of
from reshard.tensors.kinds import this_rank
from reshard.tensors.local import whole_on

__all__ = ["content_of", "dtensor_from", "fits_dtensor", "mesh_of_group", "through_dtensor"]

aten = torch.ops.aten

NEED_ALL = {
    aten.nll_loss_forward, aten.nll_loss_backward, aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
}  # fmt: skip
"""Operations that average what ranks have, of which DTensor takes each to count the same."""
COUNTED = {aten.cumsum, aten.cumprod, aten.logcumsumexp, aten.cummax, aten.cummin}
"""Operations of which DTensor takes a dim of -1 for one that is not cut."""
BACKWARD = {aten.select_backward, aten.slice_backward}
"""The same, where the dim is one of the tensor that the gradient is of: (gradient, sizes, dim)."""
FINE_WITHOUT = {
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.view, aten._unsafe_view, aten.reshape,
    aten.t, aten.transpose, aten.permute, aten.unsqueeze, aten.squeeze, aten.expand,
}  # fmt: skip
"""Operations that a rank without elements does like the others; of others it might be refused."""

_meshes: WeakKeyDictionary[Any, dict[str, DeviceMesh]] = WeakKeyDictionary()


def mesh_of_group(content: Content) -> DeviceMesh:
    """The mesh that a tensor lies on: the one it was read from, or its group as one axis."""
    if content.mesh is not None:
        return content.mesh
    group = content.group or dist.group.WORLD
    found = _meshes.setdefault(group, {})
    kind = content.device.type
    if kind not in found:
        assert group is not None
        found[kind] = DeviceMesh.from_group(group, kind)
    return found[kind]


def dtensor_from(content: Content, mesh: DeviceMesh) -> DTensor:
    """The same memory as a DTensor."""
    placements = _placements(content.layout, mesh, content.shape)
    if placements is None:
        raise OperationError(
            f'DTensor cannot say the layout "{content.layout}" of a tensor {list(content.shape)} '
            f"on ranks {list(members(content.group))}: reshard it first, to a ChunkShardingSpec "
            "with one placement per rank of its group, in order"
        )
    local = content.local
    own = _local_shape(mesh, placements, content.shape, this_rank())
    if local is not None and tuple(local.shape) != own:
        # The same elements: several parts, or none of a tensor that could be cut along other dims.
        local = local.reshape(own) if prod(own) else local.new_empty(own)
    if local is not None:
        local = _in_order(local, content.stride)
    return dtensor_of(
        local, mesh, placements, content.shape, stride=content.stride, dtype=content.dtype
    )


@lru_cache(maxsize=4096)
def _local_shape(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], rank: int
) -> tuple[int, ...]:
    return layout_from(mesh, placements, shape).local_shape(rank, shape)


def _in_order(local: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A local tensor with its dims in the order of these strides: views then work on all ranks."""
    if local.ndim != len(stride):
        return local
    wanted = strides_like(tuple(local.shape), stride)
    dims = [dim for dim, size in enumerate(local.shape) if size > 1]
    own = local.stride()
    if sorted(dims, key=lambda dim: (own[dim], -dim)) == sorted(dims, key=lambda dim: wanted[dim]):
        return local
    made = torch.empty_strided(local.shape, wanted, dtype=local.dtype, device=local.device)
    return made.copy_(local)


@lru_cache(maxsize=4096)
def _placements(
    layout: Layout, mesh: DeviceMesh, shape: tuple[int, ...]
) -> tuple[Placement, ...] | None:
    return placements_of(layout, mesh, shape)


def fits_dtensor(content: Content) -> bool:
    """Whether placements of DTensor can say how a tensor lies."""
    return _placements(content.layout, mesh_of_group(content), content.shape) is not None


def content_of(tensor: DTensor, group: Group) -> Content:
    """What a rank has of a DTensor."""
    tensor = _in_words(tensor)
    local, layout = dtensor_local(tensor), dtensor_layout(tensor)
    parts = () if local is None else (local,)
    shape, mesh = tuple(tensor.shape), tensor.device_mesh
    device = torch.device(mesh.device_type) if local is None else local.device
    stride = tuple(tensor.stride())
    return Content(
        layout, shape, tensor.dtype, parts, device, group, mesh=mesh, stated_stride=stride
    )


def _in_words(tensor: DTensor) -> DTensor:
    """The same tensor without sums that only DTensor knows of: of a masked lookup, of norms."""
    plain = (Shard, Replicate, _StridedShard)
    odd = [not isinstance(one, plain) and type(one) is not Partial for one in tensor.placements]
    if not any(odd):
        return tensor
    pairs = zip(tensor.placements, odd, strict=True)
    return tensor.redistribute(placements=[Replicate() if is_odd else one for one, is_odd in pairs])


def through_dtensor(func: Any, args: Any, kwargs: Any, first: Content) -> Any:
    """Do an operation with DTensors, for sharded tensors of one group."""
    mesh, given = mesh_of_group(first), []

    def lent(value: object) -> object:
        if isinstance(value, ShardedTensor):
            made = dtensor_from(_doable(func, value._content, mesh), mesh)
            given.append((made, value))
            return made
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            same = [Replicate()] * mesh.ndim
            own = materialized(value.detach())
            return dtensor_of(own, mesh, same, own.shape, stride=own.stride())
        return value

    def returned(value: object) -> object:
        if not isinstance(value, DTensor):
            return value
        for made, own in given:
            if value is made:
                return own
        return wrap(_added_up(content_of(value, first.group)))

    try:
        inputs, named = tree_map(lent, _from_front(func, args)), tree_map(lent, kwargs)
        return tree_map(returned, func(*inputs, **named))
    except LiveError:
        raise
    except (ReshardError, NotImplementedError, RuntimeError, AssertionError) as error:
        raise _unsupported(func, first, error) from error


def _from_front(func: Any, args: Any) -> Any:
    """Arguments with dims as DTensor's rules read them: from the front, and all by number."""
    first = args[0] if args else None
    if func.overloadpacket in BACKWARD:
        gradient, sizes, dim, *rest = args
        return [gradient, sizes, dim % len(sizes), *rest]
    if not isinstance(first, torch.Tensor) or not first.ndim:
        return args
    counted, reduces = func.overloadpacket in COUNTED, torch.Tag.reduction in func.tags

    def dims(name: str, value: Any) -> Any:
        if name != "dim":
            return value
        if counted and type(value) is int:
            return value % first.ndim
        # No dims are all of them; DTensor would take it for none.
        return (
            list(range(first.ndim)) if reduces and isinstance(value, list) and not value else value
        )

    stated = func._schema.arguments[: len(args)]
    return [dims(one.name, value) for one, value in zip(stated, args, strict=True)]


def _doable(func: Any, content: Content, mesh: DeviceMesh) -> Content:
    """A tensor that an operation can be done with on every rank: whole, if not as it lies.

    All ranks decide alike, from the layout: an error on one would leave the others waiting.
    """
    ranks, shape, layout = members(content.group), content.shape, content.layout
    if _placements(layout, mesh, shape) is None:
        # A reduction gives little; of anything else the user should know that all is gathered.
        reduces = torch.Tag.reduction in func.tags
        return moved_to(content, whole_on(ranks)) if reduces else content
    shapes = _shapes(layout, shape, ranks)
    nothing = any(not prod(one) for one in shapes) and prod(shape) > 0
    if nothing and func.overloadpacket not in FINE_WITHOUT:
        return moved_to(content, whole_on(ranks))
    if func.overloadpacket in NEED_ALL:
        return moved_to(content, whole_on(ranks))
    return content


@lru_cache(maxsize=4096)
def _shapes(
    layout: Layout, shape: tuple[int, ...], ranks: tuple[int, ...]
) -> frozenset[tuple[int, ...]]:
    """The different shapes that ranks have of a tensor."""
    held = (layout.holds(rank) is not None for rank in ranks)
    return frozenset(
        layout.local_shape(rank, shape) if is_held else (0,)
        for rank, is_held in zip(ranks, held, strict=True)
    )


def _added_up(content: Content) -> Content:
    """Without a pending sum: whoever uses the tensor next would add it up, each for itself.

    It is added up once, in the order of ranks, and before anything rounds it.
    """
    if content.layout.reduce is None:
        return content
    return moved_to(content, unreduced(content.layout))


def _unsupported(func: Any, first: Content, error: Exception) -> OperationError:
    return OperationError(
        f'the operation {func} is not supported for ShardedTensor of layout "{first.layout}" and '
        f"shape {list(first.shape)} ({_line(error)}): reshard the tensor so that DTensor has it, "
        "or take full_tensor() or local_tensor()"
    )


def _line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
