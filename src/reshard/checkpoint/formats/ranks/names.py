"""Files of ranks are named after them: whose tensors does this file hold?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from reshard.errors import CheckpointError

if TYPE_CHECKING:
    from reshard.layout.mesh import Mesh

__all__ = ["rank_of"]

_MODEL_PARALLEL = re.compile(r"(?:^|/)mp_rank_(\d{1,9})(?:_(\d{1,9}))?(?:_(\d{1,9}))?(?=[/._])")
_RANK = re.compile(r"(?:^|[-_./])rank[-_]?(\d{1,9})(?=[-_./])")
_CONSOLIDATED = re.compile(r"(?:^|/)consolidated\.(\d{1,9})\.pth\Z")
_FLAT = "zero_pp_rank_"
"""Files of DeepSpeed with flat parts of optimizer states, which have no layout of their own."""
_AXES = (("tp", "mp"), ("pp",), ("ep",))
"""The axes that the numbers of ``mp_rank_00_001_002`` count along."""


def rank_of(path: str, mesh: Mesh | None) -> int | None:
    """The rank whose tensors a file holds, as its name says; None if it does not say.

    >>> from reshard.layout.mesh import Mesh
    >>> rank_of("model-rank-3-part-0.safetensors", Mesh(tp=4))
    3
    >>> rank_of("mp_rank_01_002/model_optim_rng.pt", Mesh(pp=4, tp=2))
    5
    """
    if _FLAT in path:
        return None
    match = _MODEL_PARALLEL.search(path)
    if match and match[2] is not None and mesh is not None:
        return _rank_at([int(group) for group in match.groups() if group is not None], mesh, path)
    if match and mesh is not None and "tp" in mesh.axes:
        return _rank_at([int(match[1])], mesh, path)
    match = match or _RANK.search(path) or _CONSOLIDATED.search(path)
    if match is None:
        return None
    rank = int(match[1])
    if mesh is not None and mesh.index(rank) is None:
        raise CheckpointError(
            f"{path} is of rank {rank}, and mesh {mesh} has the ranks {mesh.ranks_text}: give the "
            "mesh that wrote it"
        )
    return rank


def _rank_at(numbers: Sequence[int], mesh: Mesh, path: str) -> int:
    """The rank at these places along tp, pp and ep, and at 0 along all other axes."""
    index = 0
    for names, number in zip(_AXES, numbers, strict=False):
        axis = next((name for name in names if name in mesh.axes), None)
        size = 1 if axis is None else mesh.axes[axis]
        if number >= size:
            raise CheckpointError(
                f"{path} is at {names[0]}={number}, and mesh {mesh} has {names[0]}={size}: give "
                "the mesh that wrote it"
            )
        index += number * mesh.stride(axis) if axis is not None else 0
    return mesh.ranks[index]
