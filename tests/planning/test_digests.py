"""Digests are equal for equal rows, and only for these; blocks that are too many are refused."""

from __future__ import annotations

import pytest

import reshard as rs

SERVERS = rs.Layout(rs.Mesh(tp=2, ranks=[8, 9]), "tp -")


def spec(shape: tuple[int, ...], dtype: str, layout: rs.Layout) -> rs.TensorSpec:
    return rs.TensorSpec(shape=shape, dtype=dtype, layout=layout)


def boxes_sent(plan: rs.Plan, rank: int) -> list[tuple[int, str]]:
    return [(step.destination, str(step.box)) for step in plan.for_rank(rank).sends]


def test_plans_with_one_digest_have_the_same_rows() -> None:
    """The order of replicas in a mesh does not matter, neither for the digest nor for the rows."""
    one, other = (rs.Layout(rs.Mesh(r=2, ranks=ranks), "...") for ranks in ([0, 1], [1, 0]))
    first, second = (rs.plan(have, SERVERS, shape=(8, 4)) for have in (one, other))
    assert first.digest == second.digest
    for rank in first.ranks:
        assert boxes_sent(first, rank) == boxes_sent(second, rank)


def test_names_with_separators_do_not_collide() -> None:
    have, want = spec((4, 4), "int8", SERVERS), spec((4, 4), "int8", rs.Layout(rs.Mesh(), "..."))
    two = rs.plan({"a": have, "b": have}, {"a": want, "b": want})
    one = rs.plan({"a\0a\0b": have}, {"b": want}, names={"b": "a\0a\0b"})
    assert two.digest != one.digest


def test_too_many_blocks_are_refused() -> None:
    have = rs.Layout(rs.Mesh(a=2, b=2), "a:1 b:1")
    want = rs.Layout(rs.Mesh(a=3, b=2), "a:1 b:1")
    with pytest.raises(rs.ReshardError, match="larger blocks"):
        rs.plan(have, want, shape=(10**5, 10**5)).for_rank(0)
    with pytest.raises(rs.ReshardError, match="larger blocks"):
        have.pieces(0, (10**5, 10**5))
