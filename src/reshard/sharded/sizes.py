"""How long is each part of a dim, and where does it begin?

Chunks are those of ``torch.chunk``: all as long as the first, the last ones shorter or empty.

    10 rows over 4:   0 1 2|3 4 5|6 7 8|9        3, 3, 3 and 1 from 0, 3, 6 and 9
     5 rows over 4:   0 1|2 3|4|                 2, 2, 1 and 0 from 0, 2, 4 and 5
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from reshard.text import quoted

if TYPE_CHECKING:
    from reshard.sharded.chunk import ChunkShardingSpec

__all__ = [
    "Part",
    "chunk_parts",
    "cut_along",
    "get_chunk_sharding_params",
    "get_chunked_dim_size",
    "get_split_size",
    "sized_parts",
]


class Part(NamedTuple):
    """Some consecutive indices of a dim."""

    offset: int
    size: int


def get_split_size(dim_size: int, chunks: int) -> int:
    """How long the chunks of a dim are, but for the last ones.

    >>> get_split_size(10, 4)
    3
    """
    return -(-dim_size // chunks)


def get_chunked_dim_size(dim_size: int, split_size: int, idx: int) -> int:
    """How long the chunk number ``idx`` is: 0 once nothing is left.

    >>> [get_chunked_dim_size(5, 2, idx) for idx in range(4)]
    [2, 2, 1, 0]
    """
    return max(min(dim_size - split_size * idx, split_size), 0)


def get_chunk_sharding_params(
    sharding_dim_size: int, world_size: int, spec: ChunkShardingSpec, rank: int
) -> tuple[int, int]:
    """Where the chunk of a rank begins, and how long it is.

    There are as many chunks as the spec has placements, which may be fewer than ``world_size``.

    >>> from reshard.sharded.chunk import ChunkShardingSpec
    >>> get_chunk_sharding_params(10, 2, ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"]), 0)
    (5, 5)
    """
    held = [at for at, placement in enumerate(spec.placements) if placement.rank() == rank]
    if len(held) != 1:
        placements = quoted(", ".join(map(str, spec.placements)))
        raise ValueError(
            f"rank {rank} of {world_size} holds {len(held)} chunks under placements {placements} "
            "and not 1: ask a rank that holds 1, or read all chunks from spec.build_metadata"
        )
    start, size = chunk_parts(sharding_dim_size, len(spec.placements))[held[0]]
    return start, size


def chunk_parts(dim_size: int, num_chunks: int) -> tuple[Part, ...]:
    """A dim cut as ``torch.chunk`` does, with empty parts at the end where it gives fewer.

    >>> [tuple(part) for part in chunk_parts(5, 4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    split = get_split_size(dim_size, num_chunks)
    # Clamped: an empty part that began beyond the end could not be cut from any tensor.
    return tuple(
        Part(min(split * idx, dim_size), get_chunked_dim_size(dim_size, split, idx))
        for idx in range(num_chunks)
    )


def cut_along(
    dim: int, parts: tuple[Part, ...], tensor_size: Sequence[int]
) -> list[tuple[Part, ...]]:
    """The parts of every dim of a tensor that is cut in one dim only."""
    whole = [(Part(0, length),) for length in tensor_size]
    return [*whole[:dim], parts, *whole[dim + 1 :]]


def sized_parts(sizes: Iterable[int]) -> tuple[Part, ...]:
    """Consecutive parts of these sizes.

    >>> [tuple(part) for part in sized_parts([3, 0, 2])]
    [(0, 3), (3, 0), (3, 2)]
    """
    lengths = tuple(sizes)
    return tuple(map(Part, accumulate(lengths, initial=0), lengths))
