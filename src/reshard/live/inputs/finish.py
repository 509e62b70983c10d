"""What a move does besides moving: zeros where nothing comes, and sources that are given away."""

from __future__ import annotations

from collections.abc import Sequence

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
                start = inside.shift([-low for low in piece.box.start]).start
                steps = zip(start, piece.strides, strict=True)
                offset = piece.offset + sum(low * stride for low, stride in steps)
                _view(tensor, offset, piece.strides, inside.shape).zero_()


def _view(
    tensor: torch.Tensor, offset: int, strides: Sequence[int], shape: Sequence[int]
) -> torch.Tensor:
    """A block of a tensor, by where it would be if the tensor were contiguous."""
    if not tensor.is_contiguous():
        at = np.array([offset, *strides], dtype=np.int64)
        offset, *strides = as_strided(at, tuple(tensor.shape), tensor.stride()).tolist()
    return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


class Donation:
    """Source tensors that are freed as soon as their last element has been read."""

    def __init__(self, program: Program, bound: BoundTensors) -> None:
        last: dict[int, int] = {}
        steps = (program.part.sends, program.part.copies)
        for rows in (rows for one in steps for rows in one.rows if rows.transfers.hop == 0):
            end = max(n for n in rows.rounds() if rows.slot.turn(n, 0) is not None)
            for number in program.numbers_of(rows.flow.stack, HAVE).tolist():
                last[number] = max(last.get(number, 0), end)
        sources = {n: tensor for n, tensor in bound.tensors.items() if n < bound.num_have}
        ends: dict[int, int] = {}
        """By the address of a storage: tied tensors are free when the last of them is."""
        for number, tensor in sources.items():
            at = tensor.untyped_storage().data_ptr()
            ends[at] = max(ends.get(at, 0), last.get(number, 0))
        self._after: dict[int, list[torch.Tensor]] = {}
        for tensor in sources.values():
            end = ends[tensor.untyped_storage().data_ptr()]
            self._after.setdefault(end, []).append(tensor)

    def after(self, number: int) -> None:
        """Free what no later round reads; memory shared with tensors that were not given stays."""
        for tensor in self._after.pop(number, []):
            storage = tensor.untyped_storage()
            whole = storage.nbytes() == tensor.numel() * tensor.element_size()
            if whole and storage.resizable():
                storage.resize_(0)
