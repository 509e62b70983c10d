"""Were all ranks given the same to shard? Each tells four numbers, and all know."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from reshard.sharded.content import Group, members
from reshard.sharded.making import home_of
from reshard.sharded.telling import all_told, numbers_of_all

__all__ = ["UNKNOWN", "Numbers", "ShardMismatchError", "compare", "digest"]

UNKNOWN = 1 << 40
"""A source rank that is no rank anywhere."""


class ShardMismatchError(ValueError):
    """Ranks were given different tensors, specs or source ranks."""


class Numbers(NamedTuple):
    """What a rank was given."""

    source: int
    problem: int
    """0, or which kind of error it has."""
    kinds: int
    """Names, sizes and dtypes."""
    specs: int


def compare(mine: Numbers, group: Group, problem: Exception | None) -> None:
    """Raise on every rank alike, if they were not given the same."""
    device, ranks = home_of(group), members(group)
    rows = [Numbers(*row) for row in numbers_of_all(list(mine), group, device)]
    sources = [row.source for row in rows]
    _check_alike(sources, f"src_rank of the other ranks: they are {sources}", ranks)
    if len({row.problem for row in rows}) > 1:
        told = all_told(None if problem is None else str(problem), group, device)
        raise ShardMismatchError(_refused(ranks, told)) from problem
    _check_alike(
        [row.kinds for row in rows],
        "the names, sizes, dtypes or requires_grad of the tensors of other ranks",
        ranks,
    )
    _check_alike([row.specs for row in rows], "sharding_spec of the other ranks", ranks)


def _refused(ranks: tuple[int, ...], told: Sequence[str | None]) -> str:
    """Which ranks refused what they were given, and why the first of them did."""
    refused = {rank: text for rank, text in zip(ranks, told, strict=True) if text is not None}
    first = next(iter(refused))
    return (
        f"ranks {list(refused)} of {list(ranks)} refused what they were given, rank {first} "
        f"because: {refused[first]}"
    )


def _check_alike(values: Sequence[int], what: str, ranks: tuple[int, ...]) -> None:
    if len(set(values)) == 1:
        return
    usual = max(values, key=lambda value: (values.count(value), -values.index(value)))
    odd = [rank for rank, value in zip(ranks, values, strict=True) if value != usual]
    raise ShardMismatchError(
        f"what ranks {odd} were given does not match with {what}; give all ranks the same"
    )


def digest(text: str) -> int:
    """A number for a text, of which different ones are different."""
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")
