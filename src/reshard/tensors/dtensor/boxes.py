"""Moves between placements that a layout in words cannot express: each rank's part as boxes.

There are two such cases. A ``_StridedShard`` after an uneven ``Shard`` can split the dim into parts
whose sizes differ from rank to rank. And DTensor has reductions that a layout does not have: band,
bor and bxor. Both are moved as boxes of a tensor with one more dim, in front, that numbers the
addends; the destination reduces them. This sends more than a move between layouts, because addends
are not summed on the way, but it works for all placements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import product
from math import prod

import torch
from torch.distributed.tensor.placement_types import Placement

from reshard.dtypes import accumulator
from reshard.errors import LayoutError
from reshard.layout.box import Box, Interval
from reshard.layout.columns import SizedCache
from reshard.layout.layout import BoxLayout, Layout
from reshard.layout.mesh import Mesh
from reshard.layout.words import held
from reshard.tensors.dtensor.placements import (
    acting,
    check_placements,
    chunks_of,
    nesting_of,
    shard_in_turn,
)

__all__ = ["BoxMove", "Placed", "box_move"]

Intervals = tuple[Interval, ...]
Slices = tuple[slice, ...]

MAX_BOXES = 1 << 16
"""Boxes that a rank may hold; they are listed one by one."""

MAX_KEPT_BYTES, BOX_BYTES = 64 << 20, 512
"""Bytes of all cached box moves, and the approximate size of one box."""

_BITWISE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


@dataclass(frozen=True)
class Placed:
    """Placements on a mesh, and DTensor's own shard order, if it has one."""

    mesh: Mesh
    placements: tuple[Placement, ...]
    order: tuple[tuple[int, tuple[int, ...]], ...] | None = None
    nested: bool = True
    """Whether strided shards are read as an order of mesh dims, where they express one."""
    _intervals: dict[tuple[tuple[int, ...], int], tuple[Intervals, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def pending(self) -> list[int]:
        """The mesh dims along which a reduction is pending."""
        return [at for at, one in enumerate(self.placements) if one.is_partial()]

    def addend(self, rank: int, axes: Sequence[int]) -> int:
        """The index of a rank's addend among all addends along some mesh dims."""
        sizes, place = tuple(self.mesh.axes.values()), tuple(self.mesh.coords(rank).values())
        number = 0
        for at in axes:
            number = number * sizes[at] + place[at]
        return number

    def local_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """The shape of a rank's local tensor."""
        return tuple(sum(b - a for a, b in dim) for dim in self.intervals(shape, rank))

    def intervals(self, shape: tuple[int, ...], rank: int) -> tuple[Intervals, ...]:
        """The intervals of each dim that a rank holds, in the order of its local tensor."""
        key = (shape, rank)
        if key not in self._intervals:
            self._intervals[key] = self._compute_intervals(shape, rank)
        return self._intervals[key]

    def _compute_intervals(self, shape: tuple[int, ...], rank: int) -> tuple[Intervals, ...]:
        mesh = self.mesh
        check_placements(mesh, self.placements, shape)
        nesting = nesting_of(mesh, self.placements, self.order, self.nested)
        if nesting is not None:
            dims = chunks_of(mesh, nesting, len(shape))
        else:
            order = acting(self.placements, self.order)
            dims = shard_in_turn(mesh, self.placements, order, shape, (rank,))
        place = mesh.coords(rank)
        pairs = zip(dims, shape, strict=True)
        return tuple(tuple(held(cuts, length, mesh.axes, place)) for cuts, length in pairs)


@dataclass(frozen=True)
class BoxMove:
    """From placements to placements on the same mesh."""

    have: Placed
    want: Placed
    shape: tuple[int, ...]

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the moved tensor: all addends, stacked along a first dim."""
        sizes = tuple(self.have.mesh.axes.values())
        return prod(sizes[at] for at in self.have.pending()), *self.shape

    @property
    def op(self) -> str:
        """The reduction at the destination; reductions that stay pending do not count."""
        kept = self.want.pending()
        ops = {self.have.placements[at].reduce_op for at in self.have.pending() if at not in kept}  # type: ignore[attr-defined]
        return str(next(iter(ops), "sum"))

    def check(self, dtype: str) -> None:
        """Refuse a reduction that a dtype does not have."""
        floats, complexes = dtype.startswith(("float", "bfloat")), dtype.startswith("complex")
        is_bitwise, is_ordered = self.op in _BITWISE, self.op in ("max", "min")
        if (is_bitwise and (floats or complexes)) or (is_ordered and complexes):
            raise LayoutError(
                f"{list(self.have.placements)} of {dtype} to {list(self.want.placements)}: there "
                f"is no {self.op} of {dtype}; reduce another dtype"
            )

    @cached_property
    def layouts(self) -> tuple[Layout, Layout]:
        """The layouts of source and destination, as boxes."""
        have, want, shape = self.have, self.want, self.shape
        ranks, kept = have.mesh.ranks, want.pending()
        numbers = {rank: have.addend(rank, have.pending()) for rank in ranks}
        addends: dict[int, set[int]] = {}
        for rank in ranks:
            addends.setdefault(have.addend(rank, kept), set()).add(numbers[rank])
        sources = {rank: _boxes(have, shape, rank, [numbers[rank]]) for rank in ranks}
        results = {
            rank: _boxes(want, shape, rank, sorted(addends[have.addend(rank, kept)]))
            for rank in ranks
        }
        return Layout.from_boxes(self.whole, sources), Layout.from_boxes(self.whole, results)

    def join(self, local: torch.Tensor, rank: int) -> torch.Tensor | None:
        """A rank's local tensor as the source layout of boxes expects it."""
        places = _places(self.have.intervals(self.shape, rank))
        views = [local[slices].unsqueeze(0) for slices in places]
        if not views or not local.numel():
            return None
        return views[0] if len(views) == 1 else torch.cat([view.reshape(-1) for view in views])

    def local(
        self, found: torch.Tensor | None, rank: int, dtype: torch.dtype, device: object
    ) -> torch.Tensor:
        """The local tensor of the result: the received addends, reduced."""
        shape = self.want.local_shape(self.shape, rank)
        made = torch.empty(shape, dtype=dtype, device=device)  # type: ignore[call-overload]
        if found is None or not made.numel():
            return made  # type: ignore[no-any-return]
        boxes = [Box(start, stop) for start, stop in _corners(self.want, self.shape, rank)]
        rows = found.reshape(-1, sum(box.size for box in boxes))
        reduced = _reduced(rows, self.op).to(dtype)
        places, at = _places(self.want.intervals(self.shape, rank)), 0
        for slices, box in zip(places, boxes, strict=True):
            made[slices] = reduced[at : at + box.size].view(box.shape)
            at += box.size
        return made  # type: ignore[no-any-return]


_kept: SizedCache[tuple[Placed, Placed, tuple[int, ...]], BoxMove] = SizedCache(MAX_KEPT_BYTES)


def box_move(have: Placed, want: Placed, shape: tuple[int, ...]) -> BoxMove:
    """The move between placements; equal ones share one object while it is cached."""
    kept = _kept.get((have, want, shape))
    if kept is not None:
        return kept
    move = BoxMove(have, want, shape)
    boxes = (one.boxes for one in move.layouts if isinstance(one, BoxLayout))
    count = sum(len(listed) for by_rank in boxes for listed in by_rank.values())
    return _kept.put((have, want, shape), move, BOX_BYTES * (1 + count))


def _boxes(
    placed: Placed, shape: tuple[int, ...], rank: int, addends: Sequence[int]
) -> tuple[Box, ...]:
    corners = [*_corners(placed, shape, rank)]
    if len(corners) * len(addends) > MAX_BOXES:
        raise LayoutError(
            f"{list(placed.placements)} cut {shape} into {len(corners) * len(addends)} boxes on "
            f"rank {rank}: at most {MAX_BOXES} work; redistribute to Shard first"
        )
    return tuple(
        Box((number, *start), (number + 1, *stop)) for number in addends for start, stop in corners
    )


def _corners(
    placed: Placed, shape: tuple[int, ...], rank: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The first and last corners of a rank's boxes."""
    for chosen in product(*placed.intervals(shape, rank)):
        yield tuple(start for start, _ in chosen), tuple(stop for _, stop in chosen)


def _places(dims: Sequence[Intervals]) -> Iterator[Slices]:
    """The position of each box in the local tensor."""
    starts: list[list[slice]] = []
    for intervals in dims:
        at, found = 0, []
        for start, stop in intervals:
            found.append(slice(at, at + stop - start))
            at += stop - start
        starts.append(found)
    yield from product(*starts)


def _reduced(rows: torch.Tensor, op: str) -> torch.Tensor:
    """The addends, one per row, reduced as the engine does it."""
    if len(rows) == 1:
        return rows[0]
    if op in _BITWISE:
        return reduce(_BITWISE[op], rows.unbind())
    if op in ("max", "min"):
        return rows.amax(0) if op == "max" else rows.amin(0)
    if rows.dtype == torch.bool:
        return rows.all(0) if op == "product" else rows.any(0)
    wide = rows.to(getattr(torch, accumulator(str(rows.dtype).removeprefix("torch."))))
    if op == "product":
        return wide.prod(0)
    total = wide.sum(0, dtype=wide.dtype)
    if op != "avg":
        return total
    floors = not (wide.is_floating_point() or wide.is_complex())
    return torch.div(total, len(rows), rounding_mode="floor" if floors else None)
