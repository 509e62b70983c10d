"""A grid cuts several dims of a tensor at once, and each cell is a shard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
import torch

from reshard.sharded.metadata import (
    Placement,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from reshard.sharded.sizes import Part, chunk_parts, sized_parts
from reshard.sharded.spec import AnyPlacement, ShardingSpec, check_placements
from reshard.text import quoted

__all__ = ["GridShardingSpec", "Split", "check_split", "check_sum", "shards_of_cells"]

Split = int | tuple[int, ...]
"""How a dim is cut: into a number of chunks, or into parts of these sizes."""


@dataclass(frozen=True)
class GridShardingSpec(ShardingSpec):
    """Cuts each dim into parts; the cells, last dim fastest, go to the placements in order.

    A dim is cut into a number of chunks as ``torch.chunk`` makes them, or into parts of given
    sizes; a dim of 1 chunk stays whole.

    >>> spec = GridShardingSpec([2, [1, 3]], [f"rank:{rank}/cpu" for rank in range(4)])
    >>> metadata = spec.build_metadata(torch.Size([6, 4]), TensorProperties())
    >>> [f"{shard.box} on {shard.rank}" for shard in metadata.shards_metadata]
    ['[0:3, 0:1] on 0', '[0:3, 1:4] on 1', '[3:6, 0:1] on 2', '[3:6, 1:4] on 3']
    """

    splits: tuple[Split, ...]
    placements: tuple[Placement, ...]

    def __init__(
        self, splits: Iterable[int | Sequence[int]], placements: Iterable[AnyPlacement]
    ) -> None:
        cuts = tuple(check_split(split, dim) for dim, split in enumerate(splits))
        where = check_placements(placements)
        counts = [split if isinstance(split, int) else len(split) for split in cuts]
        if prod(counts) != len(where):
            raise ValueError(
                f"a grid of {' x '.join(map(str, counts)) or 1} has {prod(counts)} cells and there "
                f"are {len(where)} placements: give one placement per cell, last dim fastest"
            )
        object.__setattr__(self, "splits", cuts)
        object.__setattr__(self, "placements", where)

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """The cells of a tensor of this size, in the order of the placements."""
        size = torch.Size(tensor_sizes)
        if len(self.splits) != len(size):
            raise ValueError(
                f"the grid cuts {len(self.splits)} dims and tensor size {list(size)} has "
                f"{len(size)}: give one split per dim, 1 for a dim that stays whole"
            )
        parts = [_parts(split, dim, size) for dim, split in enumerate(self.splits)]
        shards = shards_of_cells(parts, self.placements)
        return ShardedTensorMetadata(shards, size, tensor_properties)

    def __repr__(self) -> str:
        splits = [split if isinstance(split, int) else list(split) for split in self.splits]
        return f"GridShardingSpec({splits}, {list(map(str, self.placements))})"


def check_split(split: int | Sequence[int], dim: int) -> Split:
    """How a dim is cut, as a value that the caller cannot change."""
    if isinstance(split, int | np.integer):
        if split < 1 or isinstance(split, bool):
            raise ValueError(f"dim {dim} is cut into {split!r} chunks: give 1 or more")
        return int(split)
    sizes = tuple(split)
    if not all(isinstance(size, int | np.integer) and size >= 0 for size in sizes):
        raise ValueError(
            f"the sizes of the parts of dim {dim} are {quoted(sizes)}: give whole numbers >= 0"
        )
    return tuple(map(int, sizes))


def check_sum(sizes: Sequence[int], dim: int, tensor_size: torch.Size) -> None:
    """Refuse parts that are more or less than the dim has."""
    if sum(sizes) != tensor_size[dim]:
        raise ValueError(
            f"the parts of dim {dim} have {sum(sizes)} indices and tensor size "
            f"{list(tensor_size)} has {tensor_size[dim]} there: give sizes that add up to it, "
            f"found {quoted(list(sizes))}"
        )


def shards_of_cells(
    parts: Sequence[Sequence[Part]], placements: Sequence[Placement]
) -> tuple[ShardMetadata, ...]:
    """The cells of a grid, last dim fastest, each on its placement."""
    return tuple(
        ShardMetadata([part.offset for part in cell], [part.size for part in cell], placement)
        for cell, placement in zip(product(*parts), placements, strict=True)
    )


def _parts(split: Split, dim: int, tensor_size: torch.Size) -> tuple[Part, ...]:
    if isinstance(split, int):
        return chunk_parts(tensor_size[dim], split)
    check_sum(split, dim, tensor_size)
    return sized_parts(split)
