"""The way back of gradients: the sum over all holders of a value goes to all that had it.

A tensor is one logical value and the loss is the sum of all ranks' losses. So the gradient of a
value is the sum of the gradients of all its replicas, and every rank that brought the value, as a
replica or as an addend, gets that sum. Where replicas are along axes of a mesh this is one move
whose source has a sum pending. Elsewhere (explicit boxes, lost ranks) it is two: replicas send to
the first holder of each box, which adds up; then the sums go where they are wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from reshard.dtypes import accumulator
from reshard.layout.box import Box
from reshard.layout.boxlist import listed_of
from reshard.layout.columns import sized_cache
from reshard.layout.layout import BoxLayout, Layout
from reshard.layout.spec import TensorSpec
from reshard.layout.words import axes_of, is_mixed
from reshard.planning.plans import ONE, Plan, plan

Boxes = dict[int, tuple[Box, ...]]


def unreduced(layout: Layout) -> Layout:
    """The same layout without a pending reduction: ranks that held addends hold the value.

    >>> from reshard.layout.mesh import Mesh
    >>> str(unreduced(Layout(Mesh(dp=2, tp=2), "tp - | sum dp")))
    'tp -'
    """
    if layout.reduce is None:
        return layout
    return Layout(layout.mesh, replace(layout.words, reduce=None))


def summed(layout: Layout, shape: tuple[int, ...]) -> Layout | None:
    """The same layout with replicas as addends of a sum; None where words cannot express that.

    >>> from reshard.layout.mesh import Mesh
    >>> str(summed(Layout(Mesh(dp=2, tp=2), "tp -"), (4, 4)))
    'tp - | sum dp'
    """
    words = layout.words
    if isinstance(layout, BoxLayout) or words.without or words.reduce:
        return None
    per_dim = [*layout.dims(shape), words.flat]
    if any(map(is_mixed, per_dim)) or any(len(at) > 1 for _, at in words.on):
        return None
    used = {axis for cuts in (*words.dims, words.flat) for axis in axes_of(cuts)}
    free = tuple(axis for axis in layout.mesh.axes if axis not in used | dict(words.on).keys())
    return Layout(layout.mesh, replace(words, reduce=("sum", free))) if free else layout


@dataclass(frozen=True, eq=False)
class Spread:
    """Replicas that no axis explains: the first holder of each box adds up what others hold."""

    gather: Plan | None  # from later holders of each box to the first; one name per number
    spread: Plan  # from first holders to everyone who wants the sums
    holding: tuple[Boxes, ...]  # for the first, second, ... holder: the boxes that each rank brings
    wanting: Boxes  # the boxes of sums that each rank gets; what is in none of them is zero

    @staticmethod
    def name(number: int) -> str:
        """The name under which the holders of this number send; sorted as numbers are."""
        return f"{number:09d}"


@dataclass(frozen=True)
class SumMove:
    """From one layout to another, adding up the replicas of the first.

    Ranks that hold no element have no part in it: they may not know that it happens.
    """

    have: Layout
    want: Layout
    shape: tuple[int, ...]
    dtype: str  # the dtype of what is added up
    memory: int
    adds: bool = True  # whether replicas are added up; otherwise all of them have the sum already
    cast: str | None = None  # the dtype of the sums; that of the addends, if none is given

    @property
    def back(self) -> SumMove:
        """The other way round: also the gradient of a gradient adds up replicas."""
        return replace(self, have=self.want, want=self.have)

    @cached_property
    def direct(self) -> Plan | None:
        """The one plan that does it, where words can say so."""
        return _direct(self)

    @cached_property
    def spread(self) -> Spread:
        """The two plans that do it anywhere."""
        return _spread(self)


def _plan_bytes(*plans: Plan | None) -> int:
    """About how much memory plans take: a few tables with a row per rank or box."""
    specs = [spec for p in plans if p for side in (p.have, p.want) for spec in side.values()]
    return 4096 + sum(8 * spec.layout.num_bytes for spec in specs)


@sized_cache(64 << 20, lambda plan, _: _plan_bytes(plan))
def _direct(move: SumMove) -> Plan | None:
    have = summed(move.have, move.shape)
    if have is None:
        return None
    have = _with_elements(have if move.adds else move.have, move.shape)
    want = _with_elements(move.want, move.shape)
    return plan(
        {ONE: TensorSpec(move.shape, move.dtype, have)},
        {ONE: TensorSpec(move.shape, move.cast or move.dtype, want)},
        memory=move.memory,
    )


def _with_elements(layout: Layout, shape: tuple[int, ...]) -> Layout:
    empty = [rank for rank in layout.ranks if not prod(layout.local_shape(rank, shape))]
    return layout.without(empty) if empty else layout


@sized_cache(64 << 20, lambda spread, _: _plan_bytes(spread.gather, spread.spread))
def _spread(move: SumMove) -> Spread:
    holding = _holders(move.have, move.shape)
    first = holding[0] if holding else {}
    wanting = _inside(move.want, move.shape, [box for boxes in first.values() for box in boxes])
    owner = {box: rank for rank, boxes in first.items() for box in boxes}
    later = {Spread.name(n): boxes for n, boxes in enumerate(holding) if n and move.adds}
    to_owner = {name: _regrouped(boxes, owner) for name, boxes in later.items()}
    addends = [_specs(move, boxes, move.dtype) for boxes in (later, to_owner)]
    sums = _specs(move, {"sum": first}, accumulator(move.dtype))
    wanted = _specs(move, {"sum": wanting}, move.cast or move.dtype)
    gather = plan(*addends, memory=move.memory) if later else None
    return Spread(gather, plan(sums, wanted, memory=move.memory), holding, wanting)


def _specs(move: SumMove, boxes: Mapping[str, Boxes], dtype: str) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(move.shape, dtype, Layout.from_boxes(move.shape, by_rank))
        for name, by_rank in boxes.items()
    }


def _holders(layout: Layout, shape: tuple[int, ...]) -> tuple[Boxes, ...]:
    """For the first, the second, ... holder of each box: the boxes of every rank that is one."""
    listed = listed_of(layout, shape)
    pairs: list[list[tuple[int, Box]]] = []
    for number, edges in enumerate(zip(listed.starts.tolist(), listed.stops.tolist(), strict=True)):
        box = Box(*map(tuple, edges))
        for place, rank in enumerate(listed.of(number).tolist()):
            if place == len(pairs):
                pairs.append([])
            pairs[place].append((rank, box))
    return tuple(map(_by_rank, pairs))


def _by_rank(pairs: Iterable[tuple[int, Box]]) -> Boxes:
    lists: dict[int, list[Box]] = {}
    for rank, box in pairs:
        lists.setdefault(rank, []).append(box)
    return {rank: tuple(boxes) for rank, boxes in lists.items()}


def _regrouped(boxes: Boxes, owner: Mapping[Box, int]) -> Boxes:
    """The same boxes, by their first holder."""
    return _by_rank(sorted((owner[box], box) for of_rank in boxes.values() for box in of_rank))


def _inside(layout: Layout, shape: tuple[int, ...], covered: list[Box]) -> Boxes:
    """What each rank of a layout holds of these boxes, none of which overlap."""
    pieces = ((rank, piece.box) for rank in layout.ranks for piece in layout.pieces(rank, shape))
    both = ((rank, piece & box) for rank, piece in pieces for box in covered)
    return _by_rank((rank, box) for rank, box in both if box.size)
