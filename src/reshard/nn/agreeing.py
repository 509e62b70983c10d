"""Do all ranks want the same, and did it work on all of them? One small collective to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from reshard.errors import DisagreementError
from reshard.layout.mesh import format_ranks
from reshard.live.inputs.bound import default_device
from reshard.sharded.fingerprints import digest
from reshard.sharded.telling import numbers_of_all, raise_together

__all__ = ["agree"]


def agree(group: Any, wanted: Sequence[str], error: Exception | None = None) -> None:
    """Return if no rank has an error and all want the same; else raise on every rank.

    A rank that raised alone would leave the others waiting for it in their next collective.
    """
    if not dist.is_initialized():
        if error is not None:
            raise error
        return
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the process group that was given: call this on the "
            "ranks of the group only"
        )
    mine = [int(error is not None), digest(repr(tuple(wanted)))]
    told = numbers_of_all(mine, group, default_device(group))
    if any(failed for failed, _ in told):
        raise_together(error, group, default_device(group))
    digests = [one for _, one in told]
    if len(set(digests)) > 1:
        raise DisagreementError(_odd_ranks(group, digests))


def _odd_ranks(group: Any, digests: Sequence[int]) -> str:
    usual = max(digests, key=digests.count)
    ranks = zip(dist.get_process_group_ranks(group), digests, strict=True)
    odd = tuple(rank for rank, one in ranks if one != usual)
    return (
        f"the sharding plan names other paths on rank {format_ranks(odd)} than on the others: give "
        "every rank the same plan and the same module"
    )
