"""Add up addends on a GPU: the same numbers in the same order as on the host, so the same bits.

Every addend is a line of elements, in a message or in this rank's own tensor, and the lines are
added up one after the other, halves in float32. What a GPU cannot add (unsigned integers of more
than a byte) is added up on the host.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from reshard.columns import Ints, distinct
from reshard.dtypes import accumulator
from reshard.run.live.adding import TORCH_OPS
from reshard.run.live.addresses import own_offsets, own_views, view_of
from reshard.run.live.copying import packed_strides
from reshard.run.live.device_copy import CopyTable
from reshard.run.live.device_table import CopyBlocks
from reshard.run.live.holding import Held
from reshard.run.live.lots import WANT, Lot
from reshard.run.live.summing import Line, Sum, stretches

__all__ = ["DeviceSum"]

ON_HOST = ("uint16", "uint32", "uint64", "complex32")
"""What torch does not add up on a GPU."""


class DeviceSum(Sum):
    """The addends of one stack in one round; those that came are numbered by place in the room."""

    def run_in(self, room: torch.Tensor, held: tuple[Held, Held]) -> None:
        """Add up, and put the sums into the destination tensors, on the current stream."""
        lots = self._of_first_addend()
        if not _adds(self.op, lots[0].stack.have.dtype):
            self._run_on_host(room, held)
            return
        line, addend = Line(lots), lots[0].addend
        total = _Total(self.op, lots[0].stack.have.dtype, line.length, room.device)
        both = [*self.arrived, *((lot, -1) for lot in self.own)]
        for lot, place in sorted(both, key=lambda pair: pair[0].addend):
            places = line.places(lot)
            if place < 0:
                total.add_blocks(lot, held, places, lot.addend == addend)
            else:
                message = room[place : place + lot.num_bytes]
                total.add_message(lot, message, places, lot.addend == addend)
        total.finish(self.num_addends)
        total.put(lots, line, held[WANT])

    def _run_on_host(self, room: torch.Tensor, held: tuple[Held, Held]) -> None:
        kept = [room[at : at + lot.num_bytes].cpu() for lot, at in self.arrived]
        arrived = [(lot, kept[n].data_ptr()) for n, (lot, _) in enumerate(self.arrived)]
        Sum(self.op, arrived, self.own).run(
            lambda lot: own_views(lot.source, lot.width, held),
            lambda lot: own_views(lot.target, lot.width, held),
        )


def _adds(op: str, dtype: str) -> bool:
    """Whether torch does it on a GPU as numpy does on the host."""
    ordered = op not in ("max", "min") or not dtype.startswith("complex")
    return dtype not in ON_HOST and ordered and (op, dtype) != ("avg", "bool")


class _Total:
    """The accumulator: a line of elements, wide enough for halves."""

    def __init__(self, op: str, dtype: str, length: int, device: torch.device) -> None:
        self.op = op
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.wide: torch.dtype = getattr(torch, accumulator(dtype))
        self.values = torch.empty(length, dtype=self.wide, device=device)
        any_of = dtype == "bool" and op in ("sum", "avg")
        self._act: Callable[[torch.Tensor, torch.Tensor], object] = (
            (lambda total, addend: total.logical_or_(addend)) if any_of else TORCH_OPS[op]
        )

    def add_message(self, lot: Lot, message: torch.Tensor, places: Ints, first: bool) -> None:
        """Add a lot that lies in a message: whole stretches at a time."""
        elements = message.view(self.dtype)
        for low, high, at in stretches(lot, places):
            self._add(self.values[low:high], elements[at : at + high - low], first)

    def add_blocks(self, lot: Lot, held: tuple[Held, Held], places: Ints, first: bool) -> None:
        """Add a lot of this rank's own tensors, block by block."""
        end, widths = lot.source, lot.width.tolist()
        tensors = held[end.side].tensors
        columns = (end.tensor, end.offset, end.strides, places, lot.sizes)
        for n, (number, offset, strides, low, size) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            block = view_of(tensors[number], offset, strides, widths[n])
            self._add(self.values[low : low + size].view(widths[n]), block, first)

    def _add(self, total: torch.Tensor, addend: torch.Tensor, first: bool) -> None:
        if first:
            total.copy_(addend)
        else:
            # torch widens halves as it adds, but knows no sum of a float8 and a float32.
            self._act(total, addend.to(self.wide) if self.dtype.itemsize == 1 else addend)

    def finish(self, count: int) -> None:
        """Divide, for a mean. Nothing is rounded before the sums go into the destination."""
        if self.op == "avg":
            whole = not (self.wide.is_floating_point or self.wide.is_complex)
            # As a tensor: by a number torch would multiply with its rounded inverse.
            by = torch.full((), count, dtype=self.wide, device=self.values.device)
            self.values.div_(by, rounding_mode="floor" if whole else None)

    def put(self, lots: list[Lot], line: Line, want: Held) -> None:
        """Copy the sums into the destination tensors, in one launch."""
        kind: torch.dtype = getattr(torch, lots[0].stack.want.dtype)
        numbers = distinct(np.concatenate([lot.target.tensor for lot in lots]))
        parts = []
        for lot in lots:
            spot = own_offsets(lot.target, want)
            source = line.places(lot) * self.wide.itemsize
            zeros, item = np.zeros_like(source), np.full(len(source), self.wide.itemsize)
            target = np.searchsorted(numbers, lot.target.tensor)
            columns = (zeros, target, source, spot.address, lot.width)
            parts.append([*columns, packed_strides(lot.width), spot.strides, item])
        blocks = CopyBlocks(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        table = CopyTable(_with_dims(blocks), cast=(self.wide, kind))
        table.launch([self.values], [want.tensors[number] for number in numbers.tolist()])


def _with_dims(blocks: CopyBlocks) -> CopyBlocks:
    """The same blocks, those without dims as blocks of one."""
    if blocks.widths.shape[1]:
        return blocks
    ones = np.ones((len(blocks.source), 1), dtype=np.int64)
    offsets = (blocks.source_offset, blocks.destination_offset)
    return CopyBlocks(
        blocks.source, blocks.destination, *offsets, ones, ones, ones, blocks.itemsize
    )
