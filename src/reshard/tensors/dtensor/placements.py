"""Meshes and placements of DTensors, such as ``[Shard(0), Partial()]``, as meshes and layouts.

``Shard``s of one tensor dim nest in the order of the mesh dims, so ``[Shard(0), Shard(0)]`` on a
mesh (dp, tp) is ``(dp tp)``. ``_StridedShard`` means another order: its split factor is the number
of shards that were there before it, made by mesh dims to its right. FSDP2 over tensor parallelism
is ``[_StridedShard(0, split_factor=2), Shard(0)]``, tp first and then dp: ``(tp dp)``.

A split factor that no order explains (views produce them) is read as torch shards it: split into
that many parts, each part chunked.

`placements_of` goes the other way: the placements on a mesh that express a layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice, permutations, product
from math import prod
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from reshard.errors import LayoutError
from reshard.layout.box import Box, length_of
from reshard.layout.layout import Layout
from reshard.layout.mesh import RESERVED, Mesh
from reshard.layout.words import (
    Chunk,
    Cut,
    Cuts,
    Cyclic,
    Packed,
    Segment,
    Words,
    check_shape,
    held_intervals,
)
from reshard.tensors.kinds import this_rank

_REFUSED = RESERVED | {"self"}
"""Names that become others: words of the notation, and ``self``, which no axis could have once."""

_known: WeakKeyDictionary[DeviceMesh, tuple[int, Mesh]] = WeakKeyDictionary()
"""The mesh of each DeviceMesh, and the rank that it was read on; weak, so that groups can go."""


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """The same axes and the same global ranks; a sub-mesh is the one this rank is in."""
    rank, known = this_rank(), _known.get(device_mesh)
    # Sub-meshes of different ranks compare equal, so the rank counts as well.
    if known is None or known[0] != rank:
        places = device_mesh.mesh
        names = axis_names(device_mesh.mesh_dim_names, places.ndim)
        axes = dict(zip(names, places.shape, strict=True))
        mesh = Mesh(ranks=places.flatten().tolist(), **axes)
        known = _known[device_mesh] = rank, mesh
    return known[1]


def axis_names(names: Sequence[str] | None, num_axes: int) -> tuple[str, ...]:
    """Names that the notation allows, one per axis, as close to the given ones as can be.

    >>> axis_names(("dp-shard", "sum", "tp"), 3), axis_names(None, 2)
    (('dp_shard', 'sum_', 'tp'), ('d0', 'd1'))
    """
    if names is None:
        return tuple(f"d{axis}" for axis in range(num_axes))
    taken: list[str] = []
    for name in names:
        safe = re.sub(r"[^A-Za-z0-9_]", "_", str(name))
        if not safe or safe[0].isdigit():
            safe = f"_{safe}"
        while safe in _REFUSED or safe in taken:
            safe += "_"
        taken.append(safe)
    return tuple(taken)


OPS = {"sum": "sum", "avg": "avg", "max": "max", "min": "min", "product": "prod"}

ShardOrder = tuple[tuple[int, tuple[int, ...]], ...] | None
"""DTensor's own shard order, where it has one."""

Order = Mapping[int, Sequence[int]]
"""For each sharded tensor dim, the mesh dims that shard it, first to last."""

MAX_PARTS = 1 << 16
"""Parts of an uneven strided dim are listed one by one."""


def layout_from(
    device_mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> Layout:
    sizes = check_shape(shape)
    return placed_on(device_mesh, placements, sizes).layout(sizes)


def placed_on(
    device_mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> Placed:
    """Placements on a mesh, their dims counted from the front."""
    if not isinstance(placements, Sequence):
        kind = type(placements).__name__
        raise LayoutError(f"placements are a {kind}: give one per axis, as [Shard(0), Replicate()]")
    positive = []
    for placement in placements:
        if isinstance(placement, Shard | _StridedShard) and placement.dim < 0:
            dim = placement.dim + len(shape)
            factor = getattr(placement, "split_factor", None)
            placement = _StridedShard(dim, split_factor=factor) if factor else Shard(dim)
        positive.append(placement)
    return Placed(mesh_of(device_mesh), tuple(positive))


class Placed(NamedTuple):
    """Placements on a mesh, and how they are read."""

    mesh: Mesh
    placements: tuple[Placement, ...]
    order: ShardOrder = None
    nested: bool = True
    """Whether strided shards are an order of nesting; if not, they shard from left to right."""

    @property
    def is_strided(self) -> bool:
        return any(isinstance(placement, _StridedShard) for placement in self.placements)

    def layout(self, shape: tuple[int, ...]) -> Layout:
        layout = nested_layout(self, shape)
        if layout is None:
            # Not cached: it may list many parts.
            layout = Layout(self.mesh, _words(self, self.cuts(shape, self.mesh.ranks)))
        return layout

    def cuts(self, shape: Sequence[int], ranks: Sequence[int]) -> list[Cuts]:
        """How each dim is sharded: in plain chunks, or as torch does it, where each placement
        shards what the one before left."""
        names, nesting = tuple(self.mesh.axes), self.nesting()
        if nesting is not None:
            chunked = (nesting.get(dim, ()) for dim in range(len(shape)))
            return [tuple(Chunk(names[at]) for at in axes) for axes in chunked]
        dims: list[list[Cut]] = [[] for _ in shape]
        order = [at for _, axes in self.order for at in axes] if self.order else range(len(names))
        for axis, placement in ((names[at], self.placements[at]) for at in order):
            if isinstance(placement, _StridedShard):
                before, length = tuple(dims[placement.dim]), shape[placement.dim]
                places = map(self.mesh.coords, ranks)
                parts = (held_intervals(before, length, self.mesh.axes, at) for at in places)
                lengths = set(map(length_of, parts))
                dims[placement.dim].append(_strided(self.mesh, axis, placement, lengths))
            elif isinstance(placement, Shard):
                dims[placement.dim].append(Chunk(axis))
        return [tuple(cuts) for cuts in dims]

    def nesting(self) -> Order | None:
        """The mesh dims that shard each dim in plain chunks; None where strides do otherwise."""
        if self.is_strided and not self.nested:
            return None
        if self.order and not self.is_strided:
            return dict(self.order)
        return shard_order(self.placements, tuple(self.mesh.axes.values()))


@lru_cache(maxsize=2048)
def nested_layout(placed: Placed, shape: tuple[int, ...]) -> Layout | None:
    """The layout of plain chunks along each dim, which is small; None where strides differ."""
    check_placements(placed.mesh, placed.placements, shape)
    if placed.nesting() is None:
        return None
    return _layout(placed.mesh, _words(placed, placed.cuts(shape, ())))


@lru_cache(maxsize=1024)
def _layout(mesh: Mesh, words: Words) -> Layout:
    """One object per layout for all shapes: planning groups tensors by it."""
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
                f"placement {placement!r} of {list(placements)} on mesh {mesh} has no "
                "equivalent in a layout: redistribute to Shard, Replicate or Partial first"
            )
        if isinstance(placement, Shard | _StridedShard) and not 0 <= placement.dim < len(shape):
            raise LayoutError(
                f"placement {placement!r} cuts dim {placement.dim} and shape {tuple(shape)} has "
                f"{len(shape)} dims: shard a dim that exists"
            )


def _words(placed: Placed, dims: Sequence[Cuts]) -> Words:
    pairs = zip(placed.mesh.axes, placed.placements, strict=True)
    partial = {axis: one.reduce_op for axis, one in pairs if isinstance(one, Partial)}
    ops = sorted(set(partial.values()))
    if len(ops) > 1 or not OPS.keys() >= set(ops):
        raise LayoutError(
            f"placements {list(placed.placements)} on mesh {placed.mesh} are pending "
            f"{' and '.join(ops)}: one of {' '.join(OPS)} can be moved; redistribute the others "
            "first"
        )
    reduction = (OPS[ops[0]], tuple(partial)) if ops else None
    return Words(tuple(dims), None if dims else 0, reduce=reduction)


def shard_order(
    placements: Sequence[Placement], sizes: Sequence[int]
) -> dict[int, list[int]] | None:
    """The mesh dims that shard each tensor dim, first to last; None if strides are no order.

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


def _strided(mesh: Mesh, axis: str, placement: _StridedShard, lengths: set[int]) -> Cut:
    """``_StridedShard`` on a dim of these lengths: blocks dealt in turn, or listed parts."""
    factor, num = int(placement.split_factor), mesh.axes[axis]
    if factor == 1 or not any(lengths):
        return Chunk(axis)
    if len(lengths) > 1:
        raise LayoutError(
            f"{placement!r} on axis {axis} of mesh {mesh} cuts parts of different lengths "
            f"{sorted(lengths)}: a layout cannot express that; redistribute to Shard first"
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


MAX_TRIED = 20_000
"""Maximum number of candidate placements that are compared with a layout."""

_TORCH_OPS = {ours: theirs for theirs, ours in OPS.items()}


def placements_of(
    layout: Layout, device_mesh: DeviceMesh, shape: Sequence[int]
) -> tuple[Placement, ...] | None:
    """The placements on a mesh that express a layout, or None if DTensor has none for it.

    Axis names and spelling are ignored: the placements must give every rank the same elements.
    """
    return _find(layout, mesh_of(device_mesh), tuple(shape))


@lru_cache(maxsize=1024)
def _find(layout: Layout, mesh: Mesh, shape: tuple[int, ...]) -> tuple[Placement, ...] | None:
    layout.dims(shape)
    ranks = mesh.ranks
    # The boxes of a few ranks rule out most candidates without a look at all ranks.
    some = {ranks[0], ranks[len(ranks) // 2], ranks[-1]}
    probes = [(rank, _boxes(layout, rank, shape)) for rank in some]
    for placements in islice(_candidates(layout, mesh, shape), MAX_TRIED):
        try:
            other = Placed(mesh, placements).layout(shape)
        except LayoutError:
            continue
        matches = all(_boxes(other, rank, shape) == mine for rank, mine in probes)
        if matches and other.same_as(layout, shape):
            return placements
    return None


def _boxes(layout: Layout, rank: int, shape: tuple[int, ...]) -> list[Box]:
    return [piece.box for piece in layout.pieces(rank, shape)]


def _candidates(
    layout: Layout, mesh: Mesh, shape: tuple[int, ...]
) -> Iterator[tuple[Placement, ...]]:
    """Placements to try: first those of the layout's own words, then every assignment of axes."""
    spelled = _as_spelled(layout, mesh, shape)
    if spelled is not None:
        yield spelled
    op = layout.reduce[0] if layout.reduce else None
    jobs: list[int | None] = [None, *range(len(shape)), *([-1] if op else [])]
    for chosen in product(jobs, repeat=len(mesh.axes)):
        axes_of = {job: [at for at, other in enumerate(chosen) if other == job] for job in jobs}
        for order in product(*(permutations(axes_of[dim]) for dim in range(len(shape)))):
            yield _placed(mesh, dict(enumerate(order)), axes_of.get(-1, ()), op)


def _placed(
    mesh: Mesh, order: Order, partial: Sequence[int], op: str | None
) -> tuple[Placement, ...]:
    """Placements that shard in this order of mesh dims; the split factor is the number of shards
    that mesh dims to the right have made before."""
    sizes = tuple(mesh.axes.values())
    placements: list[Placement] = [Replicate() for _ in sizes]
    for at in partial:
        placements[at] = Partial(_TORCH_OPS[op or "sum"])
    for dim, axes in order.items():
        for number, at in enumerate(axes):
            factor = prod(sizes[earlier] for earlier in axes[:number] if earlier > at)
            placements[at] = Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
    return tuple(placements)


def _as_spelled(layout: Layout, mesh: Mesh, shape: tuple[int, ...]) -> tuple[Placement, ...] | None:
    """The placements for a layout's words, if its mesh has the ranks and sizes of this mesh."""
    same = layout.mesh.ranks == mesh.ranks
    if not same or [*layout.mesh.axes.values()] != [*mesh.axes.values()]:
        return None
    at = {axis: number for number, axis in enumerate(layout.mesh.axes)}
    order: dict[int, list[int]] = {}
    strided: dict[int, Placement] = {}
    for dim, cuts in enumerate(layout.dims(shape)):
        for axis, factor in _factors(cuts, layout.mesh, shape[dim]):
            order.setdefault(dim, []).append(at[axis])
            if factor > 1:
                strided[at[axis]] = _StridedShard(dim, split_factor=factor)
    op, axes = layout.reduce or (None, ())
    placed = _placed(mesh, order, [at[axis] for axis in axes], op)
    return tuple(strided.get(number, one) for number, one in enumerate(placed))


def _factors(cuts: Cuts, mesh: Mesh, length: int) -> Iterator[tuple[str, int]]:
    """Each axis that shards a dim, and the split factor of its word; 1 for plain chunks."""
    for split in cuts:
        match split:
            case Chunk(axis=axis, unit=1):
                yield axis, 1
                length = -(-length // mesh.axes[axis])
            case Cyclic(axis=axis, block=block):
                yield axis, max(1, length // (block * mesh.axes[axis]))
                length //= mesh.axes[axis]
            case Packed(segments=[Segment(cuts=(Chunk(axis=axis, unit=1),)), *_] as segments):
                yield axis, len(segments)
