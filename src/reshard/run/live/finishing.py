"""What a move does besides moving: zeros where nothing comes, and sources given away."""

from __future__ import annotations

import torch

from reshard.run.live.addresses import view_of
from reshard.run.live.holding import Held
from reshard.run.live.lots import Program

__all__ = ["Donation", "fill_zeros"]


def fill_zeros(program: Program, want: Held) -> None:
    """Fill the boxes of destination tensors that no source reaches (padding)."""
    numbers = {name: number for number, name in enumerate(program.names[1])}
    for fill in program.part.fills:
        tensor = want.tensors.get(numbers[fill.name])
        if tensor is None:
            continue
        for piece in fill.spec.layout.pieces(program.rank, fill.spec.shape):
            inside = piece.box & fill.box
            if inside.size:
                start = inside.shift([-low for low in piece.box.start]).start
                steps = zip(start, piece.strides, strict=True)
                offset = piece.offset + sum(low * stride for low, stride in steps)
                view_of(tensor, offset, piece.strides, inside.shape).zero_()


class Donation:
    """Source tensors that are freed as soon as their last element has been read."""

    def __init__(self, program: Program, have: Held) -> None:
        last: dict[int, int] = {}
        steps = (program.part.sends, program.part.copies)
        for rows in (rows for one in steps for rows in one.rows if rows.transfers.hop == 0):
            end = max(n for n in rows.rounds() if rows.slot.turn(n, 0) is not None)
            for number in program.numbers_of(rows.flow.stack, 0).tolist():
                last[number] = max(last.get(number, 0), end)
        ends: dict[int, int] = {}
        """By the address of a storage: tied tensors are free when the last of them is."""
        for number, tensor in have.tensors.items():
            at = tensor.untyped_storage().data_ptr()
            ends[at] = max(ends.get(at, 0), last.get(number, 0))
        self._after: dict[int, list[torch.Tensor]] = {}
        for tensor in have.tensors.values():
            end = ends[tensor.untyped_storage().data_ptr()]
            self._after.setdefault(end, []).append(tensor)

    def after(self, number: int) -> None:
        """Free what no later round reads; memory shared with tensors that were not given stays."""
        for tensor in self._after.pop(number, []):
            storage = tensor.untyped_storage()
            whole = storage.nbytes() == tensor.numel() * tensor.element_size()
            if whole and storage.resizable():
                storage.resize_(0)
