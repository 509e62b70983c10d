"""Inside a rank: moves that are made to fail, and what came of them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import reshard as rs
from tests.ranks.live import local_of, numbered
from tests.soak import within

FOUR = rs.Mesh(x=4)
ROWS, COLUMNS = rs.Layout(FOUR, "x -"), rs.Layout(FOUR, "- x")

TRANSPORTS = ["auto", "shared", "network"]


@dataclass(frozen=True)
class Tried:
    """What came of a call that may fail."""

    kind: str
    """The name of the error, or "moved"."""
    message: str
    called: float
    ended: float
    """By the clock that all processes of a host share."""

    @property
    def cause(self) -> str:
        """The message without how far this rank had come."""
        return re.sub(r" \(on rank \d.*\)$", "", self.message)

    @property
    def seconds(self) -> float:
        return self.ended - self.called


def tried(action: Callable[[], Any]) -> Tried:
    """Call it, whatever comes."""
    called = time.monotonic()
    try:
        action()
    except (rs.LiveError, KeyboardInterrupt) as error:
        return Tried(type(error).__name__, str(error), called, time.monotonic())
    return Tried("moved", "", called, time.monotonic())


def plan_of(shape: tuple[int, ...] = (16, 24), **options: Any) -> rs.Plan:
    """Rows to columns on four ranks."""
    return rs.plan(ROWS, COLUMNS, shape=shape, **{"dtype": "float32", **options})


def source_of(plan: rs.Plan, rank: int, first: int = 0) -> dict[str, torch.Tensor]:
    """This rank's part of numbered tensors."""
    return {
        name: local_of(numbered(spec.shape, first=first), spec.layout, rank)
        for name, spec in plan.have.items()
    }


def moves_well(rank: int, group: Any, transport: str = "auto", plan: rs.Plan | None = None) -> None:
    """A move that nothing keeps from being right, and the caller's own group works as well."""
    plan = plan or plan_of((8, 20))
    result = plan.run(source_of(plan, rank, 7), group=group, transport=transport, timeout=15)
    for name, spec in plan.want.items():
        expected = local_of(numbered(spec.shape, first=7), spec.layout, rank)
        assert torch.equal(result[name], expected)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == dist.get_world_size(group)


def check_same(all_tried: list[Tried], kind: str, *words: str) -> None:
    """All ranks raise the same error, which says these words."""
    assert {one.kind for one in all_tried} == {kind}, all_tried
    assert len({one.cause for one in all_tried}) == 1, all_tried
    assert all("\n" not in one.message for one in all_tried)
    for word in words:
        assert word in all_tried[0].cause, (word, all_tried[0])


def check_soon(all_tried: list[Tried], seconds: float) -> None:
    """All ranks raise so soon after the last of them has called."""
    last = max(one.called for one in all_tried)
    late = [one.ended - last for one in all_tried if one.ended - last > within(seconds)]
    assert not late, all_tried
