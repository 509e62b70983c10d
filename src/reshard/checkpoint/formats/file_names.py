"""Meaning of file names: the format, the rank whose tensors a file holds, missing parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from reshard.checkpoint.storage.base import StoredFile
from reshard.errors import CheckpointError

if TYPE_CHECKING:
    from reshard.layout.mesh import Mesh

__all__ = ["RANK_METADATA", "is_distcp", "missing_parts", "rank_of"]

RANK_METADATA = re.compile(r"__(\d{1,9})\.metadata\Z")
"""The metadata of one rank, written by ``dcp.save(use_collectives=False)``."""
_PART = re.compile(r"(.*?)(\d{1,9})-of-(\d{1,9}\.(?:safetensors|bin|pt|pth|ckpt))\Z", re.DOTALL)
_MODEL_PARALLEL = re.compile(r"(?:^|/)mp_rank_(\d{1,9})(?:_(\d{1,9}))?(?:_(\d{1,9}))?(?=[/._])")
_RANK = re.compile(r"(?:^|[-_./])rank[-_]?(\d{1,9})(?=[-_./])")
_CONSOLIDATED = re.compile(r"(?:^|/)consolidated\.(\d{1,9})\.pth\Z")
_ZERO = "zero_pp_rank_"
"""DeepSpeed's files of flattened optimizer states, which have no layout of their own."""
_AXES = (("tp", "mp"), ("pp",), ("ep",))
"""The mesh axes that the numbers of ``mp_rank_00_001_002`` index."""


def is_distcp(path: str) -> bool:
    """Whether a file makes its folder one of torch's distributed checkpoints."""
    named = path == ".metadata" or path.endswith(".distcp")
    return named or RANK_METADATA.match(path) is not None


def missing_parts(files: Iterable[StoredFile]) -> Iterator[str]:
    """Files that names such as ``model-00002-of-00004`` imply and the folder lacks.

    >>> [*missing_parts([StoredFile("model-00001-of-00002.safetensors", 9)])]
    ['model-00002-of-00002.safetensors']
    """
    groups: dict[tuple[str, str], tuple[int, set[int]]] = {}
    for file in files:
        match = _PART.match(file.path)
        if match:
            width, have = groups.setdefault((match[1], match[3]), (len(match[2]), set()))
            have.add(int(match[2]))
    for (stem, ending), (width, have) in groups.items():
        total = int(ending.partition(".")[0])
        absent = (number for number in range(1, total + 1) if number not in have)
        for number in islice(absent, 16):
            yield f"{stem}{number:0{width}d}-of-{ending}"


def rank_of(path: str, mesh: Mesh | None) -> int | None:
    """The rank whose tensors a file holds, from its name; None if the name has no rank.

    >>> from reshard.layout.mesh import Mesh
    >>> rank_of("model-rank-3-part-0.safetensors", Mesh(tp=4))
    3
    >>> rank_of("mp_rank_01_002/model_optim_rng.pt", Mesh(pp=4, tp=2))
    5
    """
    if _ZERO in path:
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
    """The rank at these coordinates along tp, pp and ep, and at 0 along all other axes."""
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
