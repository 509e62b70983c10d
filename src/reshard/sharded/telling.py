"""Ranks of a group tell each other small things, as JSON: nothing that comes is ever executed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from reshard.sharded.content import Group, members

__all__ = ["all_told", "all_told_or_raised", "numbers_of_all", "raise_together"]

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
    told = all_told([said, _described(problem)], group, device)
    _raise_first(problem, [failed for _, failed in told], group)
    return [said for said, _ in told]


def raise_together(problem: Exception | None, group: Group, device: torch.device) -> NoReturn:
    """Raise this rank's error, or else that of the first rank that has one."""
    _raise_first(problem, all_told(_described(problem), group, device), group)
    raise RuntimeError("a rank said that something is wrong there, and not what")


def _raise_first(
    problem: Exception | None, failures: list[tuple[int, str] | None], group: Group
) -> None:
    if problem is not None:
        raise problem
    for rank, failed in zip(members(group), failures, strict=True):
        if failed is not None:
            kind, text = failed
            raise KINDS[kind](f"on rank {rank}: {text}")


def _described(error: Exception | None) -> tuple[int, str] | None:
    """An error as data: which of the kinds it is, and its message."""
    if error is None:
        return None
    kinds = [number for number, kind in enumerate(KINDS) if isinstance(error, kind)]
    # str() of a KeyError puts quotes around its message.
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return (kinds[0], text) if kinds else (len(KINDS) - 1, f"{type(error).__name__}: {text}")
