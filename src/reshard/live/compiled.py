"""What is compiled from a plan for one rank, and kept between calls.

It hangs on the plan, so it goes with it; `plan.release()` frees it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cached_property
from math import prod

import torch.distributed as dist

from reshard.errors import LiveError
from reshard.layout.spec import TensorSpec
from reshard.live.inputs.bound import BoundTensors, Locals, locals_of
from reshard.live.program.rounds import HAVE, WANT, Program
from reshard.planning.plans import Plan

__all__ = ["CompiledPlan", "compiled_plan"]

MAX_PROGRAMS = 2
"""Programs that are kept for tensors of different strides."""

DIFFERENTIABLE = ("float", "bfloat", "complex")


class CompiledPlan:
    """What one rank keeps of a plan."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.rank, self.ranks = rank, plan.parties
        self.digest = bytes.fromhex(plan.digest)
        self.what = f'the move of "{next(iter(plan.want), "nothing")}"'
        """What its calls do, for errors."""
        self.exchanges = plan.summary().num_messages > 0
        """Whether any rank sends anything: a move without messages communicates nothing."""
        self.plan = plan
        self.locals = Locals(
            (locals_of(plan, HAVE, rank), locals_of(plan, WANT, rank)), (plan.have, plan.want)
        )
        self.program = Program(plan, rank, {})
        """For tensors that are contiguous."""
        self._programs: dict[tuple[object, ...], Program] = {}
        self.group: Callable[[], dist.ProcessGroup | None] = lambda: None
        """The group of the last call."""

    def program_for(self, bound: BoundTensors) -> Program:
        """The program for tensors of these strides."""
        if not bound.strides:
            return self.program
        key = tuple(bound.strides.items())
        found = self._programs.get(key)
        if found is None:
            while len(self._programs) >= MAX_PROGRAMS:
                self._programs.pop(next(iter(self._programs)), None)
            made = Program(self.plan, self.rank, dict(bound.strides))
            found = self._programs.setdefault(key, made)
        return found

    @cached_property
    def grad_hellos(self) -> dict[int, frozenset[int]]:
        """For each rank, those it exchanges a Hello with only to learn of gradients; {} if none.

        A rank that brings a part of the tensor knows whether gradients are wanted. A rank that gets
        its part from other destinations alone, or whose part is empty, would not hear it from one
        that knows: the first rank that brings something exchanges a Hello with it besides.
        """
        plan = self.plan
        sources = [spec for spec in plan.have.values() if spec.dtype.startswith(DIFFERENTIABLE)]
        # Of a tensor without elements every rank brings an empty part.
        least = 1 if any(prod(spec.shape) for spec in sources) else 0
        knowing = [r for r in plan.parties if any(_brings(spec, r, least) for spec in sources)]
        if not knowing:
            return {}
        ends = (plan.traffic.source.tolist(), plan.traffic.destination.tolist())
        told = {to for by, to in zip(*ends, strict=True) if by in set(knowing)}
        unaware = frozenset(plan.parties) - told - set(knowing)
        first = knowing[0]
        if not unaware:
            return {}
        return {**dict.fromkeys(unaware, frozenset({first})), first: unaware}


def compiled_plan(plan: Plan, group: dist.ProcessGroup) -> CompiledPlan | None:
    """What is compiled from a plan for this rank, once; None if the rank has no part in it."""
    found: CompiledPlan | None = plan.compiled
    # Asking for the rank takes microseconds; it does not change while a group lives.
    if found is not None and found.group() is group:
        return found
    rank = dist.get_rank()
    if rank not in plan.parties:
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise LiveError(
            f"rank {rank} has a part in this move and is not in the group given by group=: "
            "give a group of all ranks of both layouts"
        )
    if found is None or found.rank != rank:
        found = plan.compiled = CompiledPlan(plan, rank)
    found.group = weakref.ref(group)
    return found


def _brings(spec: TensorSpec, rank: int, least: int) -> bool:
    holds = spec.layout.holds(rank) is not None
    return holds and prod(spec.layout.local_shape(rank, spec.shape)) >= least
