"""Ranks compare the checksums of what they take to be equal, and name what differs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from reshard.errors import DisagreementError
from reshard.nn.activations.region import bytes_of
from reshard.sharded.making import home_of
from reshard.sharded.telling import all_told
from reshard.tensors.kinds import ready

__all__ = ["Checked", "checksum", "checksum_of", "compare"]

Checked = tuple[str, tuple[int, int]]
"""What a tensor is called, and its checksum."""


def checksum(memory: torch.Tensor) -> tuple[int, int]:
    """Two sums over the bytes, of which one depends on where each byte is.

    >>> one = torch.tensor([1, 2], dtype=torch.uint8)
    >>> checksum(one) == checksum(one.flip(0))
    False
    """
    words = torch.zeros(-(-memory.numel() // 8) * 8, dtype=torch.uint8, device=memory.device)
    words[: memory.numel()] = memory
    numbers = words.view(torch.int64)
    # Odd factors: no bit of a number can get lost.
    weights = torch.arange(1, 2 * numbers.numel(), 2, device=memory.device)
    return int(numbers.sum()), int((numbers * weights).sum())


def checksum_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The checksum of a tensor, or of the local tensor of a DTensor."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return checksum(bytes_of(ready(local), None))


def compare(mine: Sequence[Checked], group: object) -> None:
    """Raise on all ranks if one of them has something else; all ranks of the group call this."""
    told = all_told([[label, list(sums)] for label, sums in mine], group, home_of(group))
    ranks = range(len(told))
    if len({len(one) for one in told}) > 1:
        counts = {rank: len(told[rank]) for rank in ranks}
        raise DisagreementError(
            f"ranks of the group keep different numbers of tensors, {counts}: all must run the "
            "same modules with inputs of the same shapes"
        )
    for number, (label, sums) in enumerate(told[0]):
        odd = [rank for rank in ranks if told[rank][number] != [label, sums]]
        if odd:
            raise DisagreementError(
                f"{label} is not the same on all ranks: ranks {odd} of the group have other values "
                "than rank 0, so it must not be kept as shares; do not reshard this module, or "
                "make its inputs equal"
            )
