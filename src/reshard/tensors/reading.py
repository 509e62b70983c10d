"""Any tensor: which layout does it have, and where is this rank's part of it?"""

from __future__ import annotations

from functools import lru_cache

import torch

from reshard.errors import TensorError
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.tensors.kinds import is_dtensor, is_laid_out, is_sharded_tensor, ready
from reshard.tensors.meshes import this_rank

__all__ = ["layout_of", "local_of", "parts_of", "whole_on"]


def layout_of(tensor: torch.Tensor) -> Layout:
    """How a DTensor, a ShardedTensor or a plain tensor lies on its ranks.

    Placements are read as nested cuts and compared with the local tensor of this rank; where they
    disagree, the error names both shapes. A plain tensor is whole, and on this rank only.
    """
    if is_dtensor(tensor):
        from reshard.tensors.dtensors import dtensor_layout

        return dtensor_layout(tensor)
    if is_sharded_tensor(tensor):
        from reshard.tensors.shards import sharded_layout

        return sharded_layout(tensor)
    if is_laid_out(tensor):
        return tensor.cut
    if isinstance(tensor, torch.Tensor):
        return whole_on((this_rank(),))
    raise TensorError(
        f"a {type(tensor).__name__} is not a tensor: give a DTensor, a ShardedTensor or a tensor"
    )


@lru_cache(maxsize=1024)
def whole_on(ranks: tuple[int, ...]) -> Layout:
    """The whole tensor on each of these ranks.

    >>> whole_on((3, 5))
    Layout(Mesh(rank=2, ranks=range(3, 6, 2)), '...')
    """
    return Layout(Mesh(rank=len(ranks), ranks=ranks), "...")


def local_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """This rank's part as one tensor of the shape its layout says; None where it has none.

    Shares memory with the tensor, except for a ShardedTensor with several shards on this rank:
    they are flattened and joined into a new 1-d tensor; ``parts_of`` gives them apart.
    """
    parts = parts_of(tensor)
    if len(parts) > 1:
        return torch.cat([part.reshape(-1) for part in parts])
    return parts[0] if parts else None


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """This rank's parts, in the order in which its layout lists their boxes; no autograd."""
    if type(tensor) is torch.Tensor:
        return (tensor,)
    if is_dtensor(tensor):
        from reshard.tensors.dtensors import dtensor_local

        local = dtensor_local(tensor)
        return () if local is None else (local,)
    if is_sharded_tensor(tensor):
        from reshard.tensors.shards import shard_parts

        return shard_parts(tensor)
    if is_laid_out(tensor):
        return tensor._content.parts
    return (ready(tensor),)
