"""Small tensors that several ranks want: the first rank reads them and says them to all.

Norms and biases of tensor parallel models are replicated. Where nothing larger is, their bytes
travel with what the ranks tell each other at the end of a load anyway. A move for some KiB would
take a plan, a handshake and another round: a third of the time of such a load.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from reshard.checkpoint.live.read_shares import Wish
from reshard.checkpoint.live.views import View, part_of
from reshard.checkpoint.transfer.copying import SourceFiles
from reshard.checkpoint.transfer.windows import Buffers, fill
from reshard.layout.box import Box

__all__ = ["are_small", "place_small", "read_small"]

MOST = 512 << 10
"""Bytes of all of them together."""


def are_small(wishes: Mapping[str, Wish]) -> bool:
    """Whether these can be said: they are small, and nothing is to be compared before."""
    total = 0
    for wish in wishes.values():
        if wish.is_whole or len(wish.transfer.replicas):
            return False
        total += int(wish.transfer.source.num_bytes.sum())
    return total <= MOST


def read_small(wishes: Mapping[str, Wish], source: SourceFiles) -> dict[str, str]:
    """The bytes of these tensors, as text."""
    return {name: b64encode(_read(wish, source)).decode() for name, wish in wishes.items()}


def _read(wish: Wish, source: SourceFiles) -> bytes:
    transfer = wish.transfer
    buffers = Buffers(max(int(transfer.source.num_bytes.sum()), 1), casts=False)
    return fill(transfer, Box.whole(transfer.shape), buffers, source).tobytes()


def place_small(
    wishes: Mapping[str, Wish], said: Mapping[str, str], views: Mapping[str, Sequence[View]]
) -> None:
    """Copy what was said into this rank's tensors."""
    for name, tensor in _tensors(wishes, said):
        whole = Box.whole(wishes[name].transfer.shape)
        for view in views.get(name, ()):
            view[1].copy_(part_of((whole, tensor), view[0]))


def _tensors(
    wishes: Mapping[str, Wish], said: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, wish in wishes.items():
        transfer = wish.transfer
        data = np.frombuffer(bytearray(b64decode(said[name])), dtype=np.uint8)
        kind: torch.dtype = getattr(torch, transfer.have)
        yield name, torch.from_numpy(data).view(kind).reshape(transfer.shape)
