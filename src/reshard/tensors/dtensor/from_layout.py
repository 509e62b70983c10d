"""The placements on a DeviceMesh that express a layout, where DTensor can express it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice, permutations, product
from math import prod

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from reshard.errors import LayoutError
from reshard.layout.box import Box
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.layout.notation import Chunk, Cuts, Cyclic, Packed, Segment
from reshard.tensors.dtensor.placements import OPS, Order, mesh_of, read_placements

__all__ = ["placements_of"]

MAX_TRIED = 20_000
"""How many placements are compared with a layout that is spelled in another way."""

_TORCH_OPS = {ours: theirs for theirs, ours in OPS.items()}


def placements_of(
    layout: Layout, device_mesh: DeviceMesh, shape: Sequence[int]
) -> tuple[Placement, ...] | None:
    """The placements on a mesh that express a layout, or None if DTensor has none for it.

    Axis names and spelling do not matter: what counts is that every rank holds the same elements.
    """
    return _find(layout, mesh_of(device_mesh), tuple(shape))


@lru_cache(maxsize=1024)
def _find(layout: Layout, mesh: Mesh, shape: tuple[int, ...]) -> tuple[Placement, ...] | None:
    layout.dims(shape)
    probes = _probes(layout, mesh, shape)
    for placements in islice(_candidates(layout, mesh, shape), MAX_TRIED):
        found = _read(mesh, placements, shape)
        if found is None or any(_boxes(found, rank, shape) != mine for rank, mine in probes):
            continue
        if found.same_as(layout, shape):
            return placements
    return None


def _read(mesh: Mesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> Layout | None:
    try:
        return read_placements(mesh, placements, None, shape)
    except LayoutError:
        return None


def _probes(layout: Layout, mesh: Mesh, shape: tuple[int, ...]) -> list[tuple[int, list[Box]]]:
    """What a few ranks hold, to tell most candidates apart without looking at all ranks."""
    ranks = mesh.ranks
    some = {ranks[0], ranks[len(ranks) // 2], ranks[-1]}
    return [(rank, _boxes(layout, rank, shape)) for rank in some]


def _boxes(layout: Layout, rank: int, shape: tuple[int, ...]) -> list[Box]:
    return [piece.box for piece in layout.pieces(rank, shape)]


def _candidates(
    layout: Layout, mesh: Mesh, shape: tuple[int, ...]
) -> Iterator[tuple[Placement, ...]]:
    """First the placements of the layout's own words, then all assignments of axes to dims."""
    spelled = _as_spelled(layout, mesh, shape)
    if spelled is not None:
        yield spelled
    op = layout.reduce[0] if layout.reduce else None
    jobs: list[int | None] = [None, *range(len(shape)), *([-1] if op else [])]
    for given in product(jobs, repeat=len(mesh.axes)):
        partial = [at for at, job in enumerate(given) if job == -1]
        cut = [[at for at, job in enumerate(given) if job == dim] for dim in range(len(shape))]
        for order in product(*map(permutations, cut)):
            yield _placed(mesh, dict(enumerate(order)), partial, op)


def _placed(
    mesh: Mesh, order: Order, partial: Sequence[int], op: str | None
) -> tuple[Placement, ...]:
    """Placements that nest mesh dims in this order; a split factor counts earlier mesh dims."""
    sizes = tuple(mesh.axes.values())
    placements: list[Placement] = [Replicate() for _ in sizes]
    for at in partial:
        placements[at] = Partial(_TORCH_OPS[op or "sum"])
    for dim, axes in order.items():
        for number, at in enumerate(axes):
            factor = prod(sizes[earlier] for earlier in axes[:number] if earlier > at)
            placements[at] = _shard(dim, factor)
    return tuple(placements)


def _shard(dim: int, factor: int) -> Placement:
    return Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)


def _as_spelled(layout: Layout, mesh: Mesh, shape: tuple[int, ...]) -> tuple[Placement, ...] | None:
    """The placements that stand for the words, if the axes are the mesh's by place."""
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
                strided[at[axis]] = _shard(dim, factor)
    op, axes = layout.reduce or (None, ())
    placed = _placed(mesh, order, [at[axis] for axis in axes], op)
    return tuple(strided.get(number, one) for number, one in enumerate(placed))


def _factors(cuts: Cuts, mesh: Mesh, length: int) -> Iterator[tuple[str, int]]:
    """Each axis that cuts a dim, and the split factor its word stands for; 1 for plain chunks."""
    for cut in cuts:
        match cut:
            case Chunk(axis=axis):
                yield axis, 1
                length = -(-length // mesh.axes[axis])
            case Cyclic(axis=axis, block=block):
                yield axis, max(1, length // (block * mesh.axes[axis]))
                length //= mesh.axes[axis]
            case Packed(segments=[Segment(cuts=(Chunk(axis=axis),)), *_]):
                yield axis, len(cut.segments)
