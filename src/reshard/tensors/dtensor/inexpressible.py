"""Redistributions that words of a layout cannot express: local work around a move, moves of boxes.

A layout has one pending reduction (sum, avg, max, min or prod) over some axes. DTensor has more,
which become local work before and after a move between simpler placements:

* sums on some mesh dims and averages on others: one sum over all of them, then a division;
* ``_MaskPartial``, a sum of rows that count on one rank only: the others become zero first;
* ``_NormPartial``, a p-norm: the sum of p-th powers, then the p-th root;
* a replicated tensor that becomes ``Partial``: each rank keeps its share of the value.

Mesh dims of size 1 are ignored, as in torch.

Two cases are moved as boxes: a ``_StridedShard`` after an uneven ``Shard``, which can split the dim
into parts whose sizes differ from rank to rank; and the reductions band, bor and bxor. The boxes
are those of a tensor with one more dim, in front, that numbers the addends; the destination reduces
them. This sends more than a move between layouts, because addends are not summed on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate, pairwise, product
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from reshard.dtypes import accumulator
from reshard.errors import LayoutError, TensorError
from reshard.layout.box import Box, Interval, length_of
from reshard.layout.columns import sized_cache
from reshard.layout.layout import BoxLayout, Layout
from reshard.layout.words import held
from reshard.tensors.dtensor.placements import Placed, check_placements
from reshard.tensors.kinds import joined, this_rank

Placements = tuple[Placement, ...]

_LINEAR = {"sum", "avg"}
"""Reductions whose order does not matter."""


@dataclass(frozen=True)
class LocalWork:
    """What a rank does to its local tensor before and after a move between simpler placements."""

    have: Placements
    want: Placements
    """The simpler placements: at most one kind of pending reduction, and none that is new."""
    masks: tuple[Any, ...] = ()
    """The ``_MaskPartial``s that are reduced."""
    norm: float | None = None
    """The exponent of a p-norm that is reduced."""
    divisor: int = 1
    """The number of addends of averages that are reduced as a part of a sum."""
    shares: tuple[tuple[int, Any], ...] = ()
    """The mesh dims along which the result becomes addends, and their ``Partial``s."""

    def dtypes(self, dtype: str, cast: str) -> tuple[str, str]:
        """The dtypes that are moved, for a source and a destination of these: sums that are divided
        or rooted after the move are not rounded before."""
        if self.norm is not None:
            # Powers are summed in a wide dtype; integers are rounded after the root.
            return (accumulator(dtype) if _is_inexact(dtype) else "float64",) * 2
        if self.divisor == 1:
            return dtype, cast
        if not _is_inexact(dtype):
            raise LayoutError(
                f"sums and averages of {dtype} at once, {list(self.have)}: integers are not "
                "divided here; cast it to a floating-point dtype first"
            )
        return dtype, accumulator(dtype)

    def before(self, local: torch.Tensor) -> torch.Tensor:
        """The addends of the simpler reduction, of a tensor of the dtype that is moved."""
        for mask in self.masks:
            if mask.mask_buffer.data is None:
                raise TensorError(
                    f"rank {this_rank()}: the mask of {mask!r} was used up when the tensor was "
                    "redistributed before: keep that result, or compute the tensor again"
                )
            local = local.clone()
            mask.mask_buffer.apply_mask(local)
        return local if self.norm is None else local**self.norm

    def after(
        self, moved: torch.Tensor, device_mesh: DeviceMesh, dtype: torch.dtype
    ) -> torch.Tensor:
        if self.divisor > 1:
            # By a tensor: by a number a GPU multiplies with its rounded inverse.
            moved = moved / torch.full((), self.divisor, dtype=moved.dtype, device=moved.device)
        if self.norm is not None:
            moved = moved ** (1.0 / self.norm)
        moved = moved.to(dtype)
        for axis, placement in self.shares:
            moved = placement._partition_value(moved, device_mesh, axis)
        # torch drops a mask when it was applied: the next lookup has another.
        for mask in self.masks:
            mask.mask_buffer.release_mask()
        return moved


def work_for(
    sizes: Sequence[int], have: Placements, want: Placements, dtype: str
) -> LocalWork | None:
    """The local work around a move; None if a layout expresses the reductions as they are."""
    partials = [one for one in (*have, *want) if one.is_partial()]
    if not partials:
        return None
    changed = [at for at, old in enumerate(have) if old != want[at]]
    pending = [at for at, old in enumerate(have) if old.is_partial()]
    reduced = [at for at in pending if at in changed and sizes[at] > 1]
    kept = [at for at in pending if at not in changed]
    shares = [at for at in changed if want[at].is_partial()]
    divided = [at for at in shares if sizes[at] > 1]
    kinds = {_kind(have[at]) for at in (*reduced, *kept)}
    if not shares and len(kinds) < 2 and all(type(one) is Partial for one in partials):
        return None
    if len(kinds) > 1 and not kinds <= _LINEAR:
        raise LayoutError(
            f"placements {list(have)} are pending {' and '.join(sorted(kinds))}: which of them is "
            "done first makes a difference; reduce one of them before the other comes up"
        )
    _check_masks(have, want, kept)
    _check_shares(want, divided, dtype)
    words = {_kind(have[at]) for at in reduced} if len(kinds) < 2 else kinds
    op = words.pop() if len(words) == 1 and "norm" not in min(words) else "sum"
    simple = {at: Partial(op) for at in (*kept, *reduced)}
    averages = [at for at in reduced if op == "sum" and _kind(have[at]) == "avg"]
    return LocalWork(
        tuple(simple.get(at, _without_partial(old)) for at, old in enumerate(have)),
        tuple(simple[at] if at in kept else _without_partial(new) for at, new in enumerate(want)),
        tuple(have[at] for at in reduced if hasattr(have[at], "mask_buffer")),
        next((norm for at in reduced if (norm := getattr(have[at], "norm_type", None))), None),
        prod(sizes[at] for at in averages),
        tuple((at, want[at]) for at in divided),
    )


def _without_partial(placement: Placement) -> Placement:
    return Replicate() if placement.is_partial() else placement


def _kind(placement: Any) -> str:
    """The name of a pending reduction; equal names are the same reduction."""
    norm = getattr(placement, "norm_type", None)
    return str(placement.reduce_op) if norm is None else f"{norm}-norm"


def _check_masks(have: Placements, want: Placements, kept: Sequence[int]) -> None:
    """Refuse a mask that stays pending while its rows move to other ranks."""
    masks: list[Any] = [have[at] for at in kept if hasattr(have[at], "mask_buffer")]
    for mask in masks:
        data = mask.mask_buffer.data
        rows = 1 << 30 if data is None else int(data.ndim)  # leading dims that the mask covers
        for old, new in zip(have, want, strict=True):
            if old != new and any(getattr(one, "dim", rows) < rows for one in (old, new)):
                raise LayoutError(
                    f"placements {list(have)} to {list(want)} would cut the rows to which the mask "
                    f"of {mask!r} belongs in another way: reduce it in the same call, to "
                    "Replicate() or Shard"
                )


def _check_shares(want: Placements, axes: Sequence[int], dtype: str) -> None:
    for at in axes:
        kind = _kind(want[at])
        known = "norm" in kind or kind in ("sum", "avg", "max", "min")
        known = known and getattr(want[at], "offset_shape", ()) is not None
        divides = not hasattr(want[at], "mask_buffer") and ("norm" in kind or kind == "sum")
        if not known:
            raise LayoutError(
                f"a value cannot be given as {want[at]!r}: there are no addends of it for every "
                "value; use Partial of sum, avg, max or min, or Replicate()"
            )
        if divides and not _is_inexact(dtype):
            raise LayoutError(
                f"torch.{dtype} cannot be given as {want[at]!r}: each rank would hold its share, "
                "and integers cannot be divided; use Replicate()"
            )


def _is_inexact(dtype: str) -> bool:
    kind: torch.dtype = getattr(torch, dtype)
    return kind.is_floating_point or kind.is_complex


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
        dims[rank] = tuple(tuple(held(cuts, size, mesh.axes, place)) for cuts, size in pairs)
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
