"""Steps after the exchange: zeros in padding, and the release of donated source tensors."""

from __future__ import annotations

import numpy as np
import torch

from reshard.live.inputs.bound import BoundTensors
from reshard.live.program.rounds import HAVE, Program, as_strided

__all__ = ["Donation", "fill_zeros"]


def fill_zeros(program: Program, bound: BoundTensors) -> None:
    """Fill the boxes of destination tensors that no source reaches (padding)."""
    numbers = {name: number for number, name in enumerate(program.names[1], program.num_have)}
    for fill in program.part.fills:
        tensor = bound.tensors.get(numbers[fill.name])
        if tensor is None:
            continue
        tensor = tensor.detach()
        for piece in fill.spec.layout.pieces(program.rank, fill.spec.shape):
            inside = piece.box & fill.box
            if inside.size:
                lows = zip(inside.start, piece.box.start, piece.strides, strict=True)
                offset = piece.offset + sum((low - start) * step for low, start, step in lows)
                # Offset and strides in a contiguous tensor, as those in this one.
                at = np.array([offset, *piece.strides], dtype=np.int64)
                first, *strides = as_strided(at, tuple(tensor.shape), tensor.stride()).tolist()
                view = tensor.as_strided(inside.shape, strides, tensor.storage_offset() + first)
                view.zero_()


class Donation:
    """Source tensors that are freed as soon as their last element has been read."""

    def __init__(self, program: Program, bound: BoundTensors) -> None:
        last: dict[int, int] = {}
        steps = (program.part.sends, program.part.copies)
        for rows in (rows for one in steps for rows in one.rows if rows.transfers.hop == 0):
            end = max(n for n in rows.rounds() if rows.slot.turn(n, 0) is not None)
            for number in program.numbers_of(rows.flow.stack, HAVE).tolist():
                last[number] = max(last.get(number, 0), end)
        sources = {n: tensor for n, tensor in bound.tensors.items() if n < program.num_have}
        ends: dict[int, int] = {}
        """By the address of a storage: tied tensors are freed after the last round of any."""
        for number, tensor in sources.items():
            at = tensor.untyped_storage().data_ptr()
            ends[at] = max(ends.get(at, 0), last.get(number, 0))
        self._after: dict[int, list[torch.Tensor]] = {}
        for tensor in sources.values():
            end = ends[tensor.untyped_storage().data_ptr()]
            self._after.setdefault(end, []).append(tensor)

    def after(self, number: int) -> None:
        """Free what no later round reads; memory shared with tensors not given here stays."""
        for tensor in self._after.pop(number, []):
            storage = tensor.untyped_storage()
            whole = storage.nbytes() == tensor.numel() * tensor.element_size()
            if whole and storage.resizable():
                storage.resize_(0)
