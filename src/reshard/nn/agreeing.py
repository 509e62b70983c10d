"""Do all ranks want the same, and did it work on all of them? One small collective to know."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from reshard.errors import DisagreementError
from reshard.mesh import format_ranks
from reshard.run.live.routes import default_device
from reshard.sharded.telling import all_told, numbers_of_all

__all__ = ["agree"]

_KINDS = (
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
    NotImplementedError,
    RuntimeError,
)
"""What an error on another rank may be here; the first that fits, else a RuntimeError."""


def agree(group: Any, wanted: Sequence[str], error: Exception | None = None) -> None:
    """Return if no rank has an error and all want the same; else raise on every rank.

    A rank that raised alone would leave the others waiting for it in their next collective.
    """
    if not dist.is_initialized():
        _raise(error)
        return
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the process group that was given: call this on the "
            "ranks of the group only"
        )
    mine = [int(error is not None), _digest(wanted)]
    told = numbers_of_all(mine, group, default_device(group))
    if any(failed for failed, _ in told):
        _raise_together(group, error)
    digests = [digest for _, digest in told]
    if len(set(digests)) > 1:
        raise DisagreementError(_odd_ranks(group, digests))


def _digest(wanted: Sequence[str]) -> int:
    digest = hashlib.blake2b(repr(tuple(wanted)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _raise_together(group: Any, error: Exception | None) -> None:
    """Raise this rank's error, or else that of the first rank that has one."""
    mine = None if error is None else _described(error)
    told = all_told(mine, group, default_device(group))
    _raise(error)
    ranks = dist.get_process_group_ranks(group)
    rank, (kind, text) = next(pair for pair in zip(ranks, told, strict=True) if pair[1])
    raise _KINDS[kind](f"on rank {rank}: {text}")


def _described(error: Exception) -> tuple[int, str]:
    kinds = [number for number, kind in enumerate(_KINDS) if isinstance(error, kind)]
    # str() of a KeyError puts quotes around its message.
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    known = text if kinds else f"{type(error).__name__}: {text}"
    return (kinds or [len(_KINDS) - 1])[0], known


def _odd_ranks(group: Any, digests: Sequence[int]) -> str:
    usual = max(digests, key=digests.count)
    ranks = zip(dist.get_process_group_ranks(group), digests, strict=True)
    odd = tuple(rank for rank, digest in ranks if digest != usual)
    return (
        f"the sharding plan names other paths on rank {format_ranks(odd)} than on the others: give "
        "every rank the same plan and the same module"
    )
