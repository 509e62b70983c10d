"""One process that plays the ranks of a job, one after the other, without communication."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from reshard.layout.layout import Layout

MESHES = [(4,), (2, 2), (2, 2, 2), (3, 2)]


@contextmanager
def playing(rank: int, num_ranks: int) -> Iterator[int]:
    """This process is one rank of a job whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield rank
    finally:
        dist.destroy_process_group()


def ranks_of(num_ranks: int) -> Iterator[int]:
    """Be every rank in turn."""
    for rank in range(num_ranks):
        with playing(rank, num_ranks):
            yield rank


def numbered(*shape: int) -> torch.Tensor:
    """A tensor whose elements tell where they were."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def cut(full: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """What a rank holds of a tensor, piece by piece."""
    local = torch.full(layout.local_shape(rank, full.shape), -1, dtype=full.dtype)
    for piece in layout.pieces(rank, tuple(full.shape)):
        box = tuple(map(slice, piece.box.start, piece.box.stop))
        local.as_strided(piece.box.shape, piece.strides, piece.offset).copy_(full[box])
    return local
