"""What is kept of a plan between its calls."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch.distributed as dist

from reshard.planning.plan import Plan
from reshard.run.live.greeting import Greetings
from reshard.run.live.holding import locals_of
from reshard.run.live.lots import HAVE, WANT, Program
from reshard.run.live.pages import Returning

if TYPE_CHECKING:
    from reshard.run.live.swift import Swift

__all__ = ["Prepared", "find_prepared", "prepared_of"]


class Prepared:
    """What is kept of a plan between its calls."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.program = Program(plan, rank)
        self.locals = (locals_of(plan, HAVE, rank), locals_of(plan, WANT, rank))
        self.digest = bytes.fromhex(plan.digest)
        self.ranks = plan.parties
        self.what = f'the move of "{next(iter(plan.want), "nothing")}"'
        """What its calls do, for errors."""
        self.talks = plan.summary().num_messages > 0
        """Whether any rank sends anything: a move without messages communicates nothing."""
        self.greetings: Greetings | None = None
        """Who greets whom only to tell whether gradients are wanted; once somebody asks."""
        self.apart: object = None
        """The addresses that were last found not to overlap."""
        self.returning = (Returning(), Returning())
        """Whether the tensors of either side come again."""
        self.swift: Swift | None = None
        """What small moves keep besides."""


_prepared: dict[int, Prepared] = {}
"""By the identity of plans: equal ones may differ in who holds empty tensors."""


def prepared_of(plan: Plan) -> Prepared:
    """The addresses of a plan, worked out once."""
    found = _prepared.get(id(plan))
    if found is None:
        weakref.finalize(plan, _prepared.pop, id(plan), None)
    if found is None or found.program.rank != dist.get_rank():
        found = _prepared[id(plan)] = Prepared(plan, dist.get_rank())
    return found


def find_prepared(plan: Plan) -> Prepared | None:
    """The same, if it was ever run."""
    return _prepared.get(id(plan))
