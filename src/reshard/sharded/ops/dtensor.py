"""Operations that mix elements of several ranks, done by DTensor: products, norms, reductions.

Every content becomes a DTensor of the same memory, a plain tensor is taken to be the same on all
ranks, and the DTensor that the operation returns becomes a content again. The functions on
arguments of operations, which all ways to run one use, are here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from reshard.errors import ArgumentError, LiveError, OperationError, ReshardError
from reshard.layout.layout import Layout
from reshard.live.inputs.bound import materialize
from reshard.sharded.content import (
    Content,
    ContentTensor,
    map_nested,
    per_layout,
    strides_like,
    wrap,
)
from reshard.sharded.groups import Group, members
from reshard.sharded.move import lay_out_gradient, move_to, reduced, to_layout
from reshard.tensors.autograd import linear
from reshard.tensors.dtensor.placements import layout_from, placements_of
from reshard.tensors.dtensor.wrapping import (
    dtensor_layout,
    dtensor_local,
    dtensor_of,
    gradient_placements,
)
from reshard.tensors.kinds import this_rank
from reshard.tensors.local import whole_on
from reshard.text import first_line

aten = torch.ops.aten

NEED_WHOLE = {
    aten.nll_loss_forward, aten.nll_loss_backward, aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
}  # fmt: skip
"""Operations that average over ranks, and for which DTensor gives each rank the same weight."""
SCANS = {aten.cumsum, aten.cumprod, aten.logcumsumexp, aten.cummax, aten.cummin}
"""Operations for which DTensor takes a dim of -1 for one that is not sharded."""
VIEW_GRADIENTS = {aten.select_backward, aten.slice_backward}
"""The same, with the dim of the tensor that the gradient belongs to: (gradient, sizes, dim)."""
WORKS_WITHOUT_ELEMENTS = {
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.view, aten._unsafe_view, aten.reshape,
    aten.t, aten.transpose, aten.permute, aten.unsqueeze, aten.squeeze, aten.expand,
}  # fmt: skip
"""Operations that a rank without elements runs like the others; others may raise there."""
BATCH_NORMS = {aten.native_batch_norm, aten.cudnn_batch_norm, aten.miopen_batch_norm}
"""Operations that write into their running statistics, which their schemas do not say."""
STATISTICS, TRAINING = slice(3, 5), 5
"""The places of their statistics, and of the flag whether they update them."""

Op = torch._ops.OpOverload
Value = Any
"""One argument or result of an operation, or a list of them."""
Args = Sequence[Value]
Kwargs = dict[str, Value]


def each_value(args: Iterable[Value]) -> Iterator[Value]:
    """All values of arguments, those in lists as well."""
    for value in args:
        if isinstance(value, list | tuple):
            yield from each_value(value)
        else:
            yield value


def first_content(args: Args, kwargs: Kwargs) -> Content:
    values = each_value((*args, *kwargs.values()))
    return next(value for value in values if isinstance(value, Content))


def written(func: Op, args: Args, kwargs: Kwargs) -> list[Value]:
    """The arguments that an operation writes to."""
    if func.overloadpacket in BATCH_NORMS:
        return [*args[STATISTICS]] if args[TRAINING] else []
    return [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def unsupported(func: object, content: Content, why: str) -> OperationError:
    return OperationError(
        f'the operation {func} is not supported for ShardedTensor of layout "{content.layout}" and '
        f"shape {list(content.shape)}{why}"
    )


_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[str, DeviceMesh]] = WeakKeyDictionary()


def _mesh_of(content: Content) -> DeviceMesh:
    """The DeviceMesh that the layout was read from, or the group as a mesh of one dim."""
    if content.mesh is not None:
        return content.mesh
    group = content.group or dist.group.WORLD
    if group is None:
        raise OperationError(
            "operations that mix elements of a ShardedTensor need a process group: call "
            "torch.distributed.init_process_group first, or take full_tensor()"
        )
    meshes, kind = _meshes.setdefault(group, {}), content.device.type
    if kind not in meshes:
        meshes[kind] = DeviceMesh.from_group(group, kind)
    return meshes[kind]


def _dtensor_from(content: Content, mesh: DeviceMesh) -> DTensor:
    placements = _placements(content.layout, mesh, content.shape)
    if placements is None:
        raise OperationError(
            f'DTensor cannot express the layout "{content.layout}" of a tensor '
            f"{list(content.shape)} on ranks {list(members(content.group))}: reshard it first, to "
            "a ChunkShardingSpec with one placement per rank of its group, in order"
        )
    shape, local = content.shape, content.local
    if local is not None and local.numel():
        if local.ndim != len(shape):  # several parts, or a range of the flattened tensor
            local = local.reshape(
                layout_from(mesh, placements, shape).local_shape(this_rank(), shape)
            )
        local = _with_dim_order(local, content.stride)
    else:
        local = None  # DTensor may want another empty shape
    return dtensor_of(local, mesh, placements, shape, stride=content.stride, dtype=content.dtype)


_placements = per_layout(placements_of)


def _with_dim_order(local: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A local tensor with its dims in the order of these strides: views then work on all ranks."""
    ordered = strides_like(tuple(local.shape), stride)
    dims = [dim for dim, size in enumerate(local.shape) if size > 1]
    own = local.stride()
    if sorted(dims, key=lambda dim: (own[dim], -dim)) == sorted(dims, key=lambda dim: ordered[dim]):
        return local
    copy = torch.empty_strided(local.shape, ordered, dtype=local.dtype, device=local.device)
    return copy.copy_(local)


def fits_dtensor(content: Content) -> bool:
    """Whether placements of DTensor express the layout; never without a process group."""
    return (
        dist.is_initialized()
        and _placements(content.layout, _mesh_of(content), content.shape) is not None
    )


def _content_of(tensor: DTensor, group: Group) -> Content:
    # Without placements that only DTensor knows: of masked lookups, of norms.
    known = (Shard, Replicate, _StridedShard, Partial)
    kept = [one if type(one) in known else Replicate() for one in tensor.placements]
    if kept != list(tensor.placements):
        tensor = tensor.redistribute(placements=kept)
    local, mesh = dtensor_local(tensor), tensor.device_mesh
    parts = () if local is None else (local,)
    device = torch.device(mesh.device_type) if local is None else local.device
    layout, shape, stride = dtensor_layout(tensor), tuple(tensor.shape), tuple(tensor.stride())
    return Content(
        layout, shape, tensor.dtype, parts, device, group, mesh=mesh, stated_stride=stride
    )


def run_in_dtensor(func: Op, args: Args, kwargs: Kwargs) -> Value:
    """Run an operation with DTensors, for contents of one group."""
    first = first_content(args, kwargs)
    mesh, targets = _mesh_of(first), written(func, args, kwargs)
    sources: list[tuple[DTensor, Content]] = []

    def lend(value: torch.Tensor | Content) -> DTensor:
        if isinstance(value, Content):
            prepared = _prepared(func, value, mesh)
            if prepared is not value and any(value is one for one in targets):
                raise OperationError("it would write into a copy, because a rank has no elements")
            dtensor = _dtensor_from(prepared, mesh)
            sources.append((dtensor, value))
            return dtensor
        if isinstance(value, DTensor):
            return value
        own = materialize(value.detach())
        return dtensor_of(own, mesh, [Replicate()] * mesh.ndim, own.shape, stride=own.stride())

    def result_of(result: DTensor) -> Content:
        own = next((content for dtensor, content in sources if dtensor is result), None)
        # A sum is done once, in the order of ranks and before anything rounds it; otherwise each
        # operation that uses the tensor would do it again.
        return own or reduced(_content_of(result, first.group))

    try:
        positional, named = map_nested(
            lend, (_normalized_dims(func, args), kwargs), torch.Tensor | Content
        )
        return map_nested(result_of, func(*positional, **named), DTensor)
    except LiveError:
        raise
    except (ReshardError, NotImplementedError, RuntimeError, AssertionError) as error:
        why = (
            f" ({first_line(error)}): reshard the tensor so that DTensor has it, or take "
            "full_tensor() or local_tensor()"
        )
        raise unsupported(func, first, why) from error


def _normalized_dims(func: Op, args: Args) -> Args:
    """Arguments with dims as DTensor's rules read them: from the front, and all by number."""
    first = args[0] if args else None
    if func.overloadpacket in VIEW_GRADIENTS:
        gradient, sizes, dim, *rest = args
        return [gradient, sizes, dim % len(sizes), *rest]
    if not isinstance(first, torch.Tensor | Content) or not first.ndim:
        return args
    ndim = first.ndim
    is_scan, reduces = func.overloadpacket in SCANS, torch.Tag.reduction in func.tags

    def normalized(name: str, value: Value) -> Value:
        if name == "dim" and is_scan and type(value) is int:
            return value % ndim
        # An empty list means all dims; DTensor would take it for none.
        return list(range(ndim)) if name == "dim" and reduces and value == [] else value

    pairs = zip(func._schema.arguments, args, strict=False)
    return [normalized(one.name, value) for one, value in pairs]


def _prepared(func: Op, content: Content, mesh: DeviceMesh) -> Content:
    """A content that DTensor can use on every rank: gathered, if its own layout does not work.

    All ranks decide alike, from the layout: an error on one would leave the others waiting.
    """
    ranks, shape, packet = members(content.group), content.shape, func.overloadpacket
    if _placements(content.layout, mesh, shape) is None:
        # The result of a reduction is small; for other operations the user should reshard.
        is_gathered = torch.Tag.reduction in func.tags
    else:
        is_gathered = packet in NEED_WHOLE or (
            prod(shape) > 0
            and packet not in WORKS_WITHOUT_ELEMENTS
            and _has_empty_rank(content.layout, shape, ranks)
        )
    return move_to(content, whole_on(ranks)) if is_gathered else content


@per_layout
def _has_empty_rank(layout: Layout, shape: tuple[int, ...], ranks: Sequence[int]) -> bool:
    return any(
        layout.holds(rank) is None or not prod(layout.local_shape(rank, shape)) for rank in ranks
    )


def to_dtensor(tensor: ContentTensor, device_mesh: DeviceMesh | None = None) -> DTensor:
    """The same memory as a DTensor, if placements can express the layout; gradients flow back."""
    content, source = tensor._content, tensor._content.without_parts()
    mesh = device_mesh or _mesh_of(content)

    def back(gradient: DTensor) -> ContentTensor:
        return lay_out_gradient(source, from_dtensor(gradient, source.group))

    return linear(lambda: _dtensor_from(content, mesh), back, tensor)


def from_dtensor(tensor: DTensor, group: Group = None) -> ContentTensor:
    """The ShardedTensor with the memory of a DTensor; gradients flow back."""
    mesh, kept = tensor.device_mesh, gradient_placements(tensor.placements)
    group = _group_of(mesh) if group is None else group

    def back(gradient: ContentTensor) -> DTensor:
        layout = layout_from(mesh, kept, gradient.shape)
        target = replace(gradient._content, layout=layout, spec=None, stated=None)
        return to_dtensor(to_layout(gradient, target), mesh)

    return linear(lambda: wrap(_content_of(tensor, group)), back, tensor)


def _group_of(mesh: DeviceMesh) -> Group:
    """The process group of all ranks of a mesh; None is the default one."""
    long = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    if mesh.ndim == 1 or len(long) == 1:
        return mesh.get_group(*long)
    if mesh.size() == dist.get_world_size():
        return None
    raise ArgumentError(
        f"the DTensor is on ranks {mesh.mesh.tolist()}, some of the {dist.get_world_size()} of "
        "this job, and no axis has all of them: give process_group=, the group of these ranks"
    )
