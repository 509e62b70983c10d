"""Ranks of a group tell each other small things, as JSON: nothing that comes is ever executed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from reshard.sharded.content import Group

__all__ = ["all_told", "numbers_of_all"]

MOST_BYTES = 256 << 20
"""More than any rank has to say."""


def numbers_of_all(numbers: list[int], group: Group, device: torch.device) -> list[list[int]]:
    """Equally many numbers from each rank, with one small collective."""
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    return [one.tolist() for one in found]


def all_told(said: Any, group: Group, device: torch.device) -> list[Any]:
    """What every rank of the group says, in the order of ranks."""
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
