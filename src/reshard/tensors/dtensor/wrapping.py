"""The layout and the local tensor of a DTensor, and DTensors made from local tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from reshard.errors import LayoutError, TensorError
from reshard.layout.box import row_major
from reshard.layout.columns import sized_cache
from reshard.layout.layout import Layout
from reshard.tensors.dtensor.placements import (
    Placed,
    mesh_of,
    placed_on,
)
from reshard.tensors.kinds import this_rank, wait_ready

MAX_SPECS = 1024
MAX_LAYOUT_BYTES = 8 << 20
"""Bytes of layouts that are kept, of which a few list many parts."""


def dtensor_layout(tensor: DTensor) -> Layout:
    layout, expected = expected_of(placed_of(tensor), tuple(tensor.shape), this_rank())
    check_shape_of(tensor, expected, f'layout "{layout}"')
    return layout


def placed_of(tensor: DTensor) -> Placed:
    spec = tensor._spec
    nested = getattr(spec, "use_strided_shard_as_shard_order", True) is not False
    return Placed(mesh_of(spec.mesh), spec.placements, getattr(spec, "shard_order", None), nested)


@sized_cache(MAX_LAYOUT_BYTES, lambda result, *_: 2048 + 16 * len(str(result[0])))
def expected_of(
    placed: Placed, shape: tuple[int, ...], rank: int
) -> tuple[Layout, tuple[int, ...] | None]:
    """The layout of placements, and the local shape of a rank; None if it is outside the mesh."""
    layout = placed.layout(shape)
    is_inside = placed.mesh.index(rank) is not None
    return layout, layout.local_shape(rank, shape) if is_inside else None


def check_shape_of(tensor: DTensor, expected: tuple[int, ...] | None, by: str) -> None:
    """Refuse a local tensor of another shape than placements give this rank."""
    local = tensor._local_tensor
    # FSDP2 has empty local tensors of shape (0, 0) where placements give (3, 0); both are empty.
    if expected is not None and local.shape != expected and (local.numel() or 0 not in expected):
        sizes, shape, mesh = tuple(local.shape), tuple(tensor.shape), mesh_of(tensor.device_mesh)
        raise LayoutError(
            f"rank {this_rank()} holds a local tensor of shape {sizes} and placements "
            f"{list(tensor.placements)} on mesh {mesh} give it {expected} of the tensor {shape}, "
            f"as {by}: {_advice(tensor, sizes)}"
        )


def _advice(tensor: DTensor, sizes: tuple[int, ...]) -> str:
    shape, mesh = tuple(tensor.shape), mesh_of(tensor.device_mesh)
    with suppress(LayoutError):
        other = Placed(mesh, tensor.placements, nested=False).layout(shape)
        if other.local_shape(this_rank(), shape) == sizes:
            return (
                f'it has the shape that "{other}" gives, which is how distribute_tensor shards a '
                "_StridedShard: move the local tensor with that layout"
            )
    return (
        "DTensor has no placements for these sizes; move the local tensor with the layout it has, "
        'such as "tp[2,3,4,5] -"'
    )


def dtensor_local(tensor: DTensor, has_grad: bool = False) -> torch.Tensor | None:
    """This rank's local tensor, in the shape of its layout; None on a rank outside the mesh.

    With ``has_grad`` its gradient flows back to the DTensor.
    """
    if tensor.device_mesh.get_coordinate() is None:
        return None
    local = tensor._local_tensor
    if has_grad:
        local = tensor.to_local(grad_placements=gradient_placements(tensor.placements))
    local = wait_ready(local)
    if local.numel():
        return local  # the shape of an empty one may differ from the layout's
    return local.reshape(dtensor_layout(tensor).local_shape(this_rank(), tuple(tensor.shape)))


def gradient_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Placements of a gradient: that of a sum is the same for every addend."""
    return tuple(Replicate() if one.is_partial() else one for one in placements)


def dtensor_of(
    local: torch.Tensor | None,
    device_mesh: DeviceMesh,
    placements: Placed | Sequence[Placement],
    shape: Sequence[int],
    *,
    stride: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> DTensor:
    """Wrap a rank's local tensor, which keeps its memory, as a DTensor of this global shape.

    A rank that holds nothing gives ``None`` and the dtype. ``stride`` is the global one, rows
    after rows if not given. Nothing is communicated; gradients flow back to the local tensor.
    """
    sizes = tuple(shape)
    placed = (
        placements if isinstance(placements, Placed) else placed_on(device_mesh, placements, sizes)
    )
    local = _part(local, device_mesh, *expected_of(placed, sizes, this_rank()), dtype)
    strides = tuple(row_major(sizes) if stride is None else stride)
    if local.requires_grad:
        size = torch.Size(sizes)
        return DTensor.from_local(local, device_mesh, placed.placements, shape=size, stride=strides)
    # Three times as quick as from_local.
    meta = TensorMeta(torch.Size(sizes), strides, local.dtype)
    spec = spec_on(device_mesh, placed.placements, meta)
    return DTensor(local.detach(), spec, requires_grad=False)  # type: ignore[no-untyped-call]


def dtensor_with(local: torch.Tensor, mesh: DeviceMesh, placed: Placed, like: DTensor) -> DTensor:
    """Wrap a local tensor with any placements; it has the shape and the stride of another."""
    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    spec = spec_on(mesh, placed.placements, meta)
    if not placed.nested and placed.is_strided:
        spec.use_strided_shard_as_shard_order = False
        spec.shard_order = placed.order  # type: ignore[assignment]
    return DTensor(local.detach(), spec, requires_grad=False)  # type: ignore[no-untyped-call]


SpecFields = dict[str, Any]
"""The fields of a spec without its mesh, which would keep process groups alive."""

_fields: dict[tuple[tuple[Placement, ...], TensorMeta], SpecFields] = {}


def spec_fields(
    mesh: DeviceMesh, placements: tuple[Placement, ...], meta: TensorMeta
) -> SpecFields:
    fields = {**vars(DTensorSpec(mesh, placements, tensor_meta=meta))}
    del fields["mesh"]
    return fields


def spec_from(mesh: DeviceMesh, fields: SpecFields) -> DTensorSpec:
    """A new spec, because torch may modify it; its constructor takes six times as long."""
    spec = DTensorSpec.__new__(DTensorSpec)
    spec.__dict__.update(fields, mesh=mesh)
    return spec


def spec_on(mesh: DeviceMesh, placements: tuple[Placement, ...], meta: TensorMeta) -> DTensorSpec:
    """A new spec, of fields that are kept for the next one."""
    if any(one.is_partial() for one in placements):  # it may have a mask, of one tensor
        return DTensorSpec(mesh, placements, tensor_meta=meta)
    fields = _fields.get((placements, meta))
    if fields is None:
        if len(_fields) >= MAX_SPECS:
            _fields.clear()
        fields = _fields[placements, meta] = spec_fields(mesh, placements, meta)
    return spec_from(mesh, fields)


def _part(
    local: torch.Tensor | None,
    device_mesh: DeviceMesh,
    layout: Layout,
    expected: tuple[int, ...] | None,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """The local tensor if it fits; an empty one on a rank that holds nothing."""
    shape = (0,) if expected is None else expected
    if local is not None and expected is not None:
        if tuple(local.shape) != expected:
            raise TensorError(
                f"rank {this_rank()} gives a local tensor of shape {tuple(local.shape)} and layout "
                f'"{layout}" on mesh {layout.mesh} gives it {expected}: give one of that shape'
            )
        # from_local would copy to the other device silently.
        if local.device.type != device_mesh.device_type:
            raise TensorError(
                f"rank {this_rank()} gives a local tensor on {local.device} for a mesh of "
                f"{device_mesh.device_type}: move it to {device_mesh.device_type} first"
            )
        return local
    kind = dtype if local is None else local.dtype
    if kind is None or 0 not in shape:
        raise TensorError(
            f'rank {this_rank()} gives no local tensor and layout "{layout}" on mesh '
            f"{layout.mesh} gives it {shape}: give its part, or dtype= where it has none"
        )
    return torch.empty(shape, dtype=kind, device=device_mesh.device_type)
