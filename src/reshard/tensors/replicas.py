"""Join the layouts that different ranks give for one tensor into one layout.

A rank knows only the mesh that its tensor is on. Where FSDP shards a tensor that tensor parallelism
leaves alone, that is a sub-mesh, and the ranks of the other sub-meshes have replicas:

    dp=2 @ 0,2   "dp -"
    dp=2 @ 1,3   "dp -"     ->     dp=2 tp=2   "dp -"
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from reshard.layout.box import Box
from reshard.layout.layout import BoxLayout, Layout
from reshard.layout.mesh import Mesh
from reshard.layout.spec import holds_alike
from reshard.tensors.reading import whole_on

__all__ = ["Contradiction", "in_boxes", "in_words", "without_repeats"]

REPLICA = "replica"
"""The name of an axis over sub-meshes that no mesh of the job has a name for."""


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Two layouts of one tensor that differ in what a rank holds."""

    one: Layout
    other: Layout
    rank: int


def without_repeats(
    layouts: Sequence[Layout], shape: tuple[int, ...]
) -> tuple[Layout, ...] | Contradiction:
    """Drop layouts whose ranks are all described by larger ones; both must agree on each rank."""
    if sum(len(layout.ranks) for layout in layouts) == len(_ranks(layouts)):
        return tuple(layouts)
    by_rank: dict[int, Layout] = {}
    kept = set()
    for layout in sorted(layouts, key=lambda layout: -len(layout.ranks)):
        for rank in layout.ranks:
            other = by_rank.get(rank)
            if other is not None and not holds_alike(layout, other, rank, shape):
                return Contradiction(other, layout, rank)
        if not by_rank.keys() >= set(layout.ranks):
            kept.add(layout)
            for rank in layout.ranks:
                by_rank.setdefault(rank, layout)
    return tuple(layout for layout in layouts if layout in kept)


def in_words(layouts: Sequence[Layout], meshes: Iterable[Mesh]) -> Layout | None:
    """One layout in words, on one of the given meshes if it has these sub-meshes; else None.

    The layouts must be whole, or the same words on sub-meshes that have no rank in common.
    """
    if len(layouts) == 1:
        return layouts[0]
    ranks = _ranks(layouts)
    if sum(len(layout.ranks) for layout in layouts) > len(ranks):
        return None
    candidates = [
        mesh for mesh in meshes if len(mesh.ranks) == len(ranks) and ranks >= set(mesh.ranks)
    ]
    if all(map(_is_whole, layouts)):
        return Layout(candidates[0], "...") if candidates else whole_on(tuple(sorted(ranks)))
    first = layouts[0]
    if isinstance(first, BoxLayout) or first.words.without:
        return None
    if any(_signature(layout) != _signature(first) for layout in layouts):
        return None
    subs = [layout.mesh for layout in layouts]
    mesh = next((mesh for mesh in candidates if _has_slices(mesh, subs)), None)
    return Layout(mesh or _stacked(subs), first.words)


def in_boxes(layouts: Sequence[Layout], shape: tuple[int, ...]) -> Layout | None:
    """The boxes of all ranks; None where a local tensor is not its boxes, one after another."""
    by_rank = {
        rank: layout
        for layout in layouts
        for rank in layout.ranks
        if layout.holds(rank) is not None
    }
    boxes = {rank: _boxes(layout, rank, shape) for rank, layout in by_rank.items()}
    union = Layout.from_boxes(shape, boxes)
    fits = all(holds_alike(layout, union, rank, shape) for rank, layout in by_rank.items())
    return union if fits else None


def _ranks(layouts: Iterable[Layout]) -> set[int]:
    return set().union(*(layout.ranks for layout in layouts))


def _is_whole(layout: Layout) -> bool:
    """Whether every rank of the layout holds the whole of any tensor."""
    words = layout.words
    parts = (*words.dims, words.on, words.reduce, words.flat, words.without)
    return not isinstance(layout, BoxLayout) and not any(parts)


def _signature(layout: Layout) -> tuple[object, ...]:
    """What sub-meshes that are replicas of each other have in common."""
    return type(layout), str(layout), tuple(layout.mesh.axes.items())


def _has_slices(mesh: Mesh, subs: Sequence[Mesh]) -> bool:
    """Whether these are the slices of a mesh along some of its axes."""
    sizes = subs[0].axes
    if any(mesh.axes.get(axis) != size for axis, size in sizes.items()):
        return False
    names = list(mesh.axes)
    last = [names.index(axis) for axis in sizes]
    order = [at for at in range(len(names)) if at not in last] + last
    places = np.array(mesh.ranks).reshape(tuple(mesh.axes.values())).transpose(order)
    slices = set(map(tuple, places.reshape(len(subs), prod(sizes.values())).tolist()))
    return slices == {tuple(sub.ranks) for sub in subs}


def _stacked(subs: Sequence[Mesh]) -> Mesh:
    """A mesh with one more axis over sub-meshes, where it makes ranks count upwards, or first."""
    rising = sorted((tuple(sub.ranks) for sub in subs), key=min)
    axes = dict(subs[0].axes)
    name = REPLICA
    while name in axes:
        name += "_"
    places = np.array(rising).reshape(len(subs), *axes.values())
    for at in reversed(range(len(axes) + 1)):
        ranks = np.moveaxis(places, 0, at).ravel()
        if at == 0 or bool((np.diff(ranks) > 0).all()):
            break
    items = list(axes.items())
    return Mesh(ranks=ranks.tolist(), **dict([*items[:at], (name, len(subs)), *items[at:]]))


def _boxes(layout: Layout, rank: int, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """A rank's boxes in the order of its local tensor; an empty one keeps its local shape."""
    if isinstance(layout, BoxLayout):
        return layout.boxes[rank]
    boxes = tuple(piece.box for piece in layout.pieces(rank, shape))
    local = layout.local_shape(rank, shape)
    if boxes or len(local) != len(shape):
        return boxes
    return (Box((0,) * len(shape), local),)
