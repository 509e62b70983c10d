"""Placements of a DTensor as a layout, and back: what do ``[Shard(0), Partial()]`` say?

``Shard``s of one tensor dim nest in the order of the mesh dims, so ``[Shard(0), Shard(0)]`` on a
mesh (dp, tp) is ``(dp tp)``. ``_StridedShard`` says another order: its split factor is the number
of shards that were there before it, made by mesh dims to its right. FSDP2 over tensor parallelism
is ``[_StridedShard(0, split_factor=2), Shard(0)]``, tp first and then dp: ``(tp dp)``.

A split factor that no order explains (views make them) is read as torch cuts it: split into that
many parts, each part chunked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import index

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from reshard.errors import LayoutError
from reshard.layout.layout import Layout, check_shape
from reshard.layout.mesh import Mesh
from reshard.layout.notation import Chunk, Cut, Cuts, Cyclic, Packed, Segment, Words
from reshard.layout.tiling import held, length_of
from reshard.tensors.meshes import mesh_of

__all__ = [
    "OPS",
    "Order",
    "acting",
    "as_placed",
    "check_placements",
    "layout_from",
    "nesting_of",
    "read_placements",
    "shard_order",
]

OPS = {"sum": "sum", "avg": "avg", "max": "max", "min": "min", "product": "prod"}
"""What torch calls a reduction, and what the notation calls it."""

Order = Mapping[int, Sequence[int]]
"""For each tensor dim that is cut, the mesh dims that cut it, first to last."""

MAX_PARTS = 1 << 16
"""Parts of an uneven strided dim are listed one by one."""


def layout_from(
    device_mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> Layout:
    """The layout that placements on a mesh give a tensor of this shape."""
    sizes = tuple(map(index, shape))
    check_shape(sizes)
    return read_placements(mesh_of(device_mesh), as_placed(placements, sizes), None, sizes)


def as_placed(placements: Sequence[Placement], shape: Sequence[int]) -> tuple[Placement, ...]:
    """The placements with dims counted from the front."""
    return tuple(_from_front(placement, len(shape)) for placement in placements)


def _from_front(placement: Placement, num_dims: int) -> Placement:
    if isinstance(placement, _StridedShard) and placement.dim < 0:
        return _StridedShard(placement.dim + num_dims, split_factor=placement.split_factor)
    if isinstance(placement, Shard) and placement.dim < 0:
        return Shard(placement.dim + num_dims)
    return placement


@lru_cache(maxsize=8192)
def read_placements(
    mesh: Mesh,
    placements: tuple[Placement, ...],
    order: tuple[tuple[int, tuple[int, ...]], ...] | None,
    shape: tuple[int, ...],
    nested: bool = True,
) -> Layout:
    """The layout that placements say.

    ``order`` is DTensor's own shard order, where it has one. ``nested=False`` reads strided shards
    left to right, as torch cuts them, and not as an order of nesting.
    """
    check_placements(mesh, placements, shape)
    cutting = nesting_of(mesh, placements, order, nested)
    if cutting is None:
        dims = _one_by_one(mesh, placements, acting(placements, order), shape)
    else:
        axes = tuple(mesh.axes)
        dims = [tuple(Chunk(axes[at]) for at in cutting.get(d, ())) for d in range(len(shape))]
    rest = None if shape else 0
    return _layout(mesh, Words(tuple(dims), rest, reduce=_reduction(mesh, placements)))


def nesting_of(
    mesh: Mesh,
    placements: Sequence[Placement],
    order: tuple[tuple[int, tuple[int, ...]], ...] | None,
    nested: bool,
) -> Order | None:
    """The mesh dims that cut each tensor dim in plain chunks; None where strides say otherwise."""
    strided = any(isinstance(placement, _StridedShard) for placement in placements)
    if strided and not nested:
        return None
    if order and not strided:
        return dict(order)
    return shard_order(placements, tuple(mesh.axes.values()))


@lru_cache(maxsize=1024)
def _layout(mesh: Mesh, words: Words) -> Layout:
    """One object per layout, whatever the shape, so that later comparisons are quick."""
    return Layout(mesh, words)


def check_placements(mesh: Mesh, placements: Sequence[Placement], shape: Sequence[int]) -> None:
    """Refuse placements that a mesh or a shape cannot have, and reductions of other kinds."""
    if len(placements) != len(mesh.axes):
        raise LayoutError(
            f"{len(placements)} placements {list(placements)} on mesh {mesh}, which has "
            f"{len(mesh.axes)} axes: give one placement per axis"
        )
    for placement in placements:
        known = isinstance(placement, Shard | _StridedShard | Replicate)
        # A subclass of Partial finishes its sum in a way of its own, so it is not a plain sum.
        if not known and type(placement) is not Partial:
            raise LayoutError(
                f"placement {placement!r} of {list(placements)} on mesh {mesh} has no word: "
                "redistribute to Shard, Replicate or Partial first"
            )
        if isinstance(placement, Shard | _StridedShard) and not 0 <= placement.dim < len(shape):
            raise LayoutError(
                f"placement {placement!r} cuts dim {placement.dim} and shape {tuple(shape)} has "
                f"{len(shape)} dims: shard a dim that exists"
            )


def _reduction(mesh: Mesh, placements: Sequence[Placement]) -> tuple[str, tuple[str, ...]] | None:
    pairs = zip(mesh.axes, placements, strict=True)
    partial = [(axis, p.reduce_op) for axis, p in pairs if isinstance(p, Partial)]
    if not partial:
        return None
    ops = sorted({op for _, op in partial})
    if len(ops) > 1 or ops[0] not in OPS:
        raise LayoutError(
            f"placements {list(placements)} on mesh {mesh} are pending {' and '.join(ops)}: "
            f"one of {' '.join(OPS)} can be moved; redistribute the others first"
        )
    return OPS[ops[0]], tuple(axis for axis, _ in partial)


def shard_order(
    placements: Sequence[Placement], sizes: Sequence[int]
) -> dict[int, list[int]] | None:
    """The mesh dims that cut each tensor dim, first to last; None if strides say no order.

    Right to left, each mesh dim goes behind as many of those already placed as its split factor
    counts shards of.
    """
    order: dict[int, list[int]] = {}
    for at in reversed(range(len(placements))):
        placement = placements[at]
        if not isinstance(placement, Shard | _StridedShard):
            continue
        later = order.setdefault(placement.dim, [])
        factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        before, shards = 0, 1
        while shards != factor and before < len(later):
            shards *= sizes[later[before]]
            before += 1
        if shards != factor:
            return None
        later.insert(before, at)
    return order


def acting(
    placements: Sequence[Placement], order: tuple[tuple[int, tuple[int, ...]], ...] | None
) -> list[int]:
    """The mesh dims in the order in which they cut: DTensor's own, or left to right."""
    if order:
        return [at for _, axes in order for at in axes]
    return [at for at, one in enumerate(placements) if isinstance(one, Shard | _StridedShard)]


def _one_by_one(
    mesh: Mesh, placements: Sequence[Placement], order: Sequence[int], shape: Sequence[int]
) -> list[Cuts]:
    """Each placement acts on what the one before left, strided ones as torch splits them."""
    dims: list[list[Cut]] = [[] for _ in shape]
    names = tuple(mesh.axes)
    for axis, placement in ((names[at], placements[at]) for at in order):
        if isinstance(placement, _StridedShard):
            lengths = _lengths(mesh, dims[placement.dim], shape[placement.dim])
            dims[placement.dim].append(_strided(mesh, axis, placement, lengths))
        elif isinstance(placement, Shard):
            dims[placement.dim].append(Chunk(axis))
    return [tuple(cuts) for cuts in dims]


def _lengths(mesh: Mesh, cuts: Sequence[Cut], length: int) -> set[int]:
    """How long the dim is, over all ranks, after these cuts."""
    return {length_of(held(tuple(cuts), length, mesh.axes, mesh.coords(r))) for r in mesh.ranks}


def _strided(mesh: Mesh, axis: str, placement: _StridedShard, lengths: set[int]) -> Cut:
    """``_StridedShard`` on a dim that has these lengths: blocks dealt in turn, or listed parts."""
    factor, num = int(placement.split_factor), mesh.axes[axis]
    if factor == 1 or not any(lengths):
        return Chunk(axis)
    if len(lengths) > 1:
        raise LayoutError(
            f"{placement!r} on axis {axis} of mesh {mesh} cuts parts of different lengths "
            f"{sorted(lengths)}: no word says that; redistribute to Shard first"
        )
    (length,) = lengths
    if length % (factor * num) == 0:
        return Cyclic(axis, length // (factor * num))
    part = -(-length // factor)
    if length > part * MAX_PARTS:
        raise LayoutError(
            f"{placement!r} cuts a dim of {length} unevenly in {-(-length // part)} parts: "
            f"at most {MAX_PARTS} work; redistribute to Shard first"
        )
    sizes = [min(part, length - start) for start in range(0, length, part)]
    return Packed(tuple(Segment(size, (Chunk(axis),)) for size in sizes))
