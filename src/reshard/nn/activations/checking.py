"""Ranks compare the checksums of what they take to be equal, and name what differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from zlib import crc32

import torch
from torch.distributed.tensor import DTensor

from reshard.errors import DisagreementError
from reshard.tensors.kinds import ready

if TYPE_CHECKING:
    from reshard.nn.activations.keeping import Keeper

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
    local = ready(tensor._local_tensor) if isinstance(tensor, DTensor) else tensor
    return checksum(local.detach().contiguous().reshape(-1).view(torch.uint8))


def compare(mine: Sequence[Checked], keeper: Keeper) -> None:
    """Raise on all ranks if one of them has something else; all ranks of the group call this."""
    words = [word for label, sums in mine for word in (crc32(label.encode()), *sums)]
    told = keeper.restorer.tell(words, keeper.options.timeout)
    for number, (label, _) in enumerate(mine):
        said = [words[3 * number : 3 * number + 3] for words in told]
        odd = [
            rank for rank, one in zip(keeper.restorer.ranks, said, strict=True) if one != said[0]
        ]
        if odd:
            raise DisagreementError(
                f"{label} is not the same on all ranks: ranks {odd} have other values than rank "
                f"{keeper.restorer.ranks[0]}, so it must not be kept as shares; do not reshard "
                "this module, or make its inputs equal"
            )
