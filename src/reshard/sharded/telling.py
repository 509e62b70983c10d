"""Ranks of a group tell each other small things, as JSON: nothing that comes is ever executed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from reshard.sharded.content import Group, members

__all__ = ["all_told", "all_told_or_raised", "numbers_of_all"]

MOST_BYTES = 256 << 20
"""More than any rank has to say."""

KINDS = (KeyError, AttributeError, TypeError, ValueError, NotImplementedError, RuntimeError)
"""What an error of one rank may be on the others; a RuntimeError if it is none of these."""


def numbers_of_all(numbers: list[int], group: Group, device: torch.device) -> list[list[int]]:
    """Equally many numbers from each rank, with one small collective."""
    if not dist.is_initialized():
        return [numbers]
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    return [one.tolist() for one in found]


def all_told(said: Any, group: Group, device: torch.device) -> list[Any]:
    """What every rank of the group says, in the order of ranks."""
    if not dist.is_initialized():
        return [said]
    text = json.dumps(said).encode()
    sizes = [size for (size,) in numbers_of_all([len(text)], group, device)]
    if max(sizes) > MOST_BYTES:
        raise ValueError(f"a rank has {max(sizes)} bytes to say, and {MOST_BYTES} is the most")
    padded = np.zeros(max(sizes), dtype=np.uint8)
    padded[: len(text)] = np.frombuffer(text, dtype=np.uint8)
    own = torch.from_numpy(padded).to(device)
    found = [torch.empty_like(own) for _ in sizes]
    dist.all_gather(found, own, group=group)
    pairs = zip(found, sizes, strict=True)
    return [json.loads(bytes(one[:size].cpu().numpy())) for one, size in pairs]


def all_told_or_raised(say: Callable[[], Any], group: Group, device: torch.device) -> list[Any]:
    """What every rank says; if one cannot say it, all raise its error.

    A rank that raised alone would leave the others waiting for it.
    """
    said, problem = None, None
    try:
        said = say()
    except Exception as error:
        problem = error
    told = all_told([said, None if problem is None else _described(problem)], group, device)
    if problem is not None:
        raise problem
    for rank, (_, failed) in zip(members(group), told, strict=True):
        if failed:
            kind, text = failed
            raise KINDS[kind](f"on rank {rank}: {text}")
    return [said for said, _ in told]


def _described(error: Exception) -> tuple[int, str]:
    """An error as data: which of the kinds it is, and its message."""
    kind = next((at for at, kind in enumerate(KINDS) if isinstance(error, kind)), len(KINDS) - 1)
    return kind, str(error)
