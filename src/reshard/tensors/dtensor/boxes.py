"""Moves between placements that a layout in words cannot express: each rank's part as boxes.

There are two such cases. A ``_StridedShard`` after an uneven ``Shard`` can split the dim into parts
whose sizes differ from rank to rank. And DTensor has reductions that a layout does not have: band,
bor and bxor. Both are moved as boxes of a tensor with one more dim, in front, that numbers the
addends; the destination reduces them. This sends more than a move between layouts, because addends
are not summed on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate, pairwise, product
from math import prod

import torch

from reshard.dtypes import accumulator
from reshard.errors import LayoutError
from reshard.layout.box import Box, Interval, length_of
from reshard.layout.columns import sized_cache
from reshard.layout.layout import BoxLayout, Layout
from reshard.layout.words import held_intervals
from reshard.tensors.dtensor.placements import Placed, check_placements
from reshard.tensors.kinds import joined

Intervals = tuple[Interval, ...]
Dims = tuple[Intervals, ...]
"""Intervals of each dim; every combination of them is a box."""
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
class BoxMove:
    """From placements to placements on the same mesh."""

    have: Placed
    want: Placed
    shape: tuple[int, ...]

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the tensor that is moved, whose first dim numbers the addends."""
        sizes = tuple(self.have.mesh.axes.values())
        return prod(sizes[at] for at in _pending(self.have)), *self.shape

    @property
    def op(self) -> str:
        """The reduction at the destination; reductions that stay pending do not count."""
        kept = _pending(self.want)
        ops = {self.have.placements[at].reduce_op for at in _pending(self.have) if at not in kept}  # type: ignore[attr-defined]
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
    def dims(self) -> tuple[dict[int, Dims], ...]:
        """What each rank holds of each dim, at the source and at the destination."""
        return tuple(_intervals_by_rank(side, self.shape) for side in (self.have, self.want))

    @cached_property
    def layouts(self) -> tuple[BoxLayout, BoxLayout]:
        """The layouts of source and destination, as boxes."""
        ranks = self.have.mesh.ranks
        numbers, results = ({r: _addend(one, r) for r in ranks} for one in (self.have, self.want))
        addends: dict[int, set[int]] = {}
        for rank in ranks:
            addends.setdefault(results[rank], set()).add(numbers[rank])
        wanted = {rank: sorted(addends[results[rank]]) for rank in ranks}
        own = {rank: [numbers[rank]] for rank in ranks}
        have = self._layout(self.have, self.dims[0], own)
        return have, self._layout(self.want, self.dims[1], wanted)

    def _layout(
        self, placed: Placed, dims_of: Mapping[int, Dims], addends: Mapping[int, Sequence[int]]
    ) -> BoxLayout:
        boxes: dict[int, list[Box]] = {}
        for rank, dims in dims_of.items():
            count = prod(map(len, dims)) * len(addends[rank])
            if count > MAX_BOXES:
                raise LayoutError(
                    f"{list(placed.placements)} cut {self.shape} into {count} boxes on rank "
                    f"{rank}: at most {MAX_BOXES} work; redistribute to Shard first"
                )
            numbers = [(at, at + 1) for at in addends[rank]]
            boxes[rank] = [_box(intervals) for intervals in product(numbers, *dims)]
        return Layout.from_boxes(self.whole, boxes)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        return tuple(map(length_of, self.dims[0][rank]))

    def join(self, local: torch.Tensor, rank: int) -> torch.Tensor | None:
        """A rank's local tensor as the source layout of boxes expects it."""
        views = [local[slices].unsqueeze(0) for slices in _places(self.dims[0][rank])]
        return joined(views) if local.numel() else None

    def local(
        self, moved: torch.Tensor | None, rank: int, dtype: torch.dtype, device: str
    ) -> torch.Tensor:
        """The local tensor of the result: the received addends, reduced."""
        dims = self.dims[1][rank]
        result = torch.empty(tuple(map(length_of, dims)), dtype=dtype, device=device)
        if moved is None or not result.numel():
            return result
        boxes = [*map(_box, product(*dims))]
        sizes = [box.size for box in boxes]
        parts = _reduce(moved.reshape(-1, sum(sizes)), self.op).to(dtype).split_with_sizes(sizes)
        for slices, box, part in zip(_places(dims), boxes, parts, strict=True):
            result[slices] = part.view(box.shape)
        return result


@sized_cache(
    MAX_KEPT_BYTES,
    lambda move, *_: BOX_BYTES * (1 + sum(len(b) for o in move.layouts for b in o.boxes.values())),
)
def box_move(have: Placed, want: Placed, shape: tuple[int, ...]) -> BoxMove:
    """The move between placements; equal ones share one object while it is cached."""
    return BoxMove(have, want, shape)


def _pending(placed: Placed) -> list[int]:
    return [at for at, one in enumerate(placed.placements) if one.is_partial()]


def _addend(placed: Placed, rank: int) -> int:
    """The index of a rank's addend among all that are pending."""
    sizes, place = [*placed.mesh.axes.values()], [*placed.mesh.coords(rank).values()]
    number = 0
    for axis in _pending(placed):
        number = number * sizes[axis] + place[axis]
    return number


def _intervals_by_rank(placed: Placed, shape: tuple[int, ...]) -> dict[int, Dims]:
    """The intervals of each dim that each rank holds, in the order of its local tensor."""
    mesh, dims = placed.mesh, {}
    check_placements(mesh, placed.placements, shape)
    for rank in mesh.ranks:
        pairs = zip(placed.cuts(shape, (rank,)), shape, strict=True)
        place = mesh.coords(rank)
        dims[rank] = tuple(
            tuple(held_intervals(cuts, size, mesh.axes, place)) for cuts, size in pairs
        )
    return dims


def _box(intervals: Intervals) -> Box:
    return Box(tuple(start for start, _ in intervals), tuple(stop for _, stop in intervals))


def _places(dims: Dims) -> Iterator[Slices]:
    """The position of each box in the local tensor."""
    ends = ([0, *accumulate(stop - start for start, stop in intervals)] for intervals in dims)
    return product(*([slice(*pair) for pair in pairwise(one)] for one in ends))


def _reduce(rows: torch.Tensor, op: str) -> torch.Tensor:
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
