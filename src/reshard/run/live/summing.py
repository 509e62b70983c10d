"""Add up the addends of a pending reduction, in the order of the addends, always.

Where every addend comes in the same blocks, as it does most of the time, they are added up block by
block, straight into the destination. Otherwise the parts that a rank adds up lie one after the
other on a line, and every addend brings all of them: from one sender or several, in messages; or
from the rank's own tensor. So a round is one addition per addend and stretch, whatever the tensors
look like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from reshard.columns import Ints
from reshard.dtypes import accumulator, itemsize
from reshard.run.live.adding import ADDED, OPS, TORCH_OPS, add_up
from reshard.run.live.copying import Copies, Place, Spot, arrays_of, packed_strides, tensor_at
from reshard.run.live.lots import Lot
from reshard.run.live.memory import Array
from reshard.run.live.ways import run_lengths
from reshard.run.numpy_dtypes import storage_dtype

__all__ = ["Line", "Sum", "are_alike", "stretches"]

LEAST_BYTES = 4096
"""Of a block, on the average: smaller ones are quicker along a line."""

Places = Callable[[Lot], Place]


@dataclass(eq=False)
class Sum:
    """The addends of one stack in one round."""

    op: str
    arrived: list[tuple[Lot, int]] = field(default_factory=list)
    """Lots in messages, and the address of each."""
    own: list[Lot] = field(default_factory=list)
    """Lots of this rank's own tensors."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the accumulator."""
        lots = self._of_first_addend()
        count = sum(int(lot.sizes.sum()) for lot in lots)
        return count * itemsize(accumulator(lots[0].stack.have.dtype))

    @property
    def num_addends(self) -> int:
        """How many are added up."""
        return 1 + max(lot.addend for lot in (*(lot for lot, _ in self.arrived), *self.own))

    def _of_first_addend(self) -> list[Lot]:
        lots = [*(lot for lot, _ in self.arrived), *self.own]
        first = min(lot.addend for lot in lots)
        return [lot for lot in lots if lot.addend == first]

    def run(self, source: Places, target: Places) -> int:
        """Add up, and put the sums into the destination tensors; gives the bytes it took."""
        addends = [(lot, at) for lot, at in self.arrived] + [(lot, 0) for lot in self.own]
        addends.sort(key=lambda pair: pair[0].addend)
        blocks = _straight(self.op, addends, source, target)
        if blocks is None:
            self._run_along_a_line(addends, source, target)
            return self.num_bytes
        dtype = addends[0][0].dtype
        return max((add_up(self.op, dtype, total, arrays) for total, arrays in blocks), default=0)

    def _run_along_a_line(
        self, addends: Sequence[tuple[Lot, int]], source: Places, target: Places
    ) -> None:
        lots = self._of_first_addend()
        line = Line(lots)
        dtype = lots[0].stack.have.dtype
        total = _Total(self.op, dtype, line.length)
        for lot, address in addends:
            places = line.places(lot)
            first = lot.addend == lots[0].addend
            if address:
                total.add_message(lot, address, places, first)
            else:
                total.add_blocks(lot, source(lot), places, first)
        total.finish(self.num_addends)
        for lot in lots:
            Copies(lot.width, target(lot), total.spot(lot, line.places(lot))).run()


def are_alike(op: str, lots: Sequence[Lot]) -> bool:
    """Whether lots bring one addend each, in its turn, in the same blocks, of a dtype for that."""
    first = lots[0]
    dtype, stack = first.dtype, first.stack
    if dtype not in ADDED or not dtype == stack.have.dtype == stack.want.dtype or len(lots) < 2:
        return False
    if op == "avg" and dtype.startswith("int"):
        return False
    return all(
        lot.addend == n
        and np.array_equal(lot.part, first.part)
        and np.array_equal(lot.width, first.width)
        for n, lot in enumerate(lots)
    )


def _straight(
    op: str, addends: Sequence[tuple[Lot, int]], source: Places, target: Places
) -> Iterator[tuple[Array, Sequence[Array]]] | None:
    """Block by block, where the sum goes and what is added up; None where it cannot be so."""
    first = addends[0][0]
    if first.num_bytes < LEAST_BYTES * len(first.width):
        return None
    if not are_alike(op, [lot for lot, _ in addends]):
        return None
    into, spots = target(first), [_place(lot, address, source) for lot, address in addends]
    kind, columns = storage_dtype(first.dtype), []
    for place in (into, *spots):
        if not isinstance(place, Spot) or place.dtype != first.dtype:
            return None
        columns.append(arrays_of(first.width, place, kind))
    return ((total, arrays) for total, *arrays in zip(*columns, strict=True))


def _place(lot: Lot, address: int, source: Places) -> Place:
    """Where the blocks of an addend lie: in a message, or in this rank's own tensor."""
    if not address:
        return source(lot)
    at = address + lot.at * lot.itemsize
    return Spot(at, packed_strides(lot.width), lot.dtype)


class Line:
    """Where each part lies on the line of all parts."""

    def __init__(self, lots: Sequence[Lot]) -> None:
        part = np.concatenate([lot.part for lot in lots])
        size = np.concatenate([lot.sizes for lot in lots])
        order = np.argsort(part, kind="stable")
        self.parts = part[order]
        ends = np.cumsum(size[order])
        self.starts = ends - size[order]
        self.length = int(ends[-1])

    def places(self, lot: Lot) -> Ints:
        """Where the blocks of a lot lie; the blocks of a part come in the same order everywhere."""
        first_of_part = np.searchsorted(lot.part, lot.part)
        within = lot.at - lot.at[first_of_part]
        found: Ints = self.starts[np.searchsorted(self.parts, lot.part)] + within
        return found


def stretches(lot: Lot, places: Ints) -> Iterator[tuple[int, int, int]]:
    """What of a packed lot is one run on the line as well: from and to there, and where in the lot.

    ``places`` says where on the line each block lies.
    """
    ends = places + lot.sizes
    new = np.flatnonzero(np.concatenate([[True], places[1:] != ends[:-1]]))
    last = np.append(new[1:], len(places)) - 1
    columns = (places[new], ends[last], lot.at[new])
    yield from zip(*(column.tolist() for column in columns), strict=True)


class _Total:
    """The accumulator: a line of elements, wide enough for halves."""

    def __init__(self, op: str, dtype: str, length: int) -> None:
        self.op = op
        self.dtype = dtype
        self.wide = accumulator(dtype)
        self.values = np.empty(length, storage_dtype(self.wide))

    @property
    def _address(self) -> int:
        return int(self.values.ctypes.data)

    def add_message(self, lot: Lot, address: int, places: Ints, first: bool) -> None:
        """Add a lot that lies in a message: whole stretches at a time."""
        size = itemsize(self.dtype)
        for low, high, at in stretches(lot, places):
            addend = tensor_at(address + at * size, (high - low,), self.dtype)
            self._add(self.values[low:high], addend, first)

    def add_blocks(self, lot: Lot, spot: Place, places: Ints, first: bool) -> None:
        """Add a lot of this rank's own tensor, block by block."""
        if not isinstance(spot, Spot):
            for view, low, size in zip(spot, places.tolist(), lot.sizes.tolist(), strict=True):
                self._add(self.values[low : low + size], view.cpu().reshape(-1), first)
            return
        if (run_lengths(lot.width, spot.strides) == lot.sizes).all():
            for n, (low, size) in enumerate(zip(places.tolist(), lot.sizes.tolist(), strict=True)):
                addend = tensor_at(int(spot.address[n]), (size,), self.dtype)
                self._add(self.values[low : low + size], addend, first)
            return
        for n, (low, size) in enumerate(zip(places.tolist(), lot.sizes.tolist(), strict=True)):
            one = Spot(spot.address[n : n + 1], spot.strides[n : n + 1], spot.dtype)
            block = torch.empty(size, dtype=getattr(torch, self.dtype))
            packed = packed_strides(lot.width[n : n + 1])
            into = Spot(np.array([block.data_ptr()]), packed, self.dtype)
            Copies(lot.width[n : n + 1], into, one).run()
            self._add(self.values[low : low + size], block, first)

    def _add(self, total: Array, addend: torch.Tensor, first: bool) -> None:
        if first:
            torch.from_numpy(total).copy_(addend)
        elif self.wide != self.dtype:
            # torch widens halves as it adds, but knows no sum of a float8 and a float32.
            wide = addend.to(getattr(torch, self.wide)) if addend.itemsize == 1 else addend
            TORCH_OPS[self.op](torch.from_numpy(total), wide)
        else:
            op = (
                np.logical_or if total.dtype == bool and self.op in ("sum", "avg") else OPS[self.op]
            )
            with np.errstate(all="ignore"):
                op(total, addend.numpy(), out=total)

    def finish(self, count: int) -> None:
        """Divide, for a mean. Nothing is rounded before the sums go into the destination."""
        if self.op == "avg":
            whole = np.issubdtype(self.values.dtype, np.integer)
            divide = np.floor_divide if whole else np.divide
            divide(self.values, count, out=self.values, casting="unsafe")

    def spot(self, lot: Lot, places: Ints) -> Spot:
        """Where the sums of a lot's blocks are."""
        size = self.values.itemsize
        return Spot(self._address + places * size, packed_strides(lot.width), self.wide)
