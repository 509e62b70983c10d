"""What one rank compiles from a plan and keeps between calls.

It is an attribute of the plan, so it lives as long as the plan; `plan.release()` frees it.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch.distributed as dist

from reshard.errors import LiveError
from reshard.layout.columns import drop_oldest
from reshard.layout.mesh import format_ranks
from reshard.layout.spec import TensorSpec
from reshard.live.inputs.bound import BoundTensors, Locals
from reshard.live.inputs.request import transport_of_environment
from reshard.live.program.rounds import Program
from reshard.live.session.session import Key, Session, session_of
from reshard.live.transport.base import Transport
from reshard.planning.classes import Stack
from reshard.planning.plans import Plan
from reshard.show.progress import MIN_BYTES
from reshard.text import count, log

MAX_PROGRAMS = 2
"""Programs that are kept for tensors of different strides."""

DIFFERENTIABLE = ("float", "bfloat", "complex")


class CompiledPlan:
    def __init__(self, plan: Plan, rank: int) -> None:
        self.rank, self.ranks = rank, plan.parties
        self.digest = bytes.fromhex(plan.digest)
        self.what = f'the move of "{next(iter(plan.want), "nothing")}"'
        """What its calls do, for errors."""
        self.exchanges = plan.summary().num_messages > 0
        """Whether any rank sends a message; if not, calls do not communicate."""
        self.plan = plan
        self.is_alone = len(self.ranks) < 2
        self.transport = transport_of_environment()
        self.key: Key = self.digest, self.transport if self.exchanges else "", False
        """What the ranks compare in calls with default options."""
        self.locals = Locals(plan, rank)
        self.contiguous = Program(plan, rank, {})
        """For contiguous tensors."""
        self._strided: dict[tuple[object, ...], Program] = {}
        """Programs for tensors that are not contiguous."""
        self.shows_progress = rank == plan.parties[0] and self.contiguous.total >= MIN_BYTES
        """Whether this rank shows a progress bar if standard error is a terminal."""
        self.last: tuple[Callable[[], dist.ProcessGroup | None], Session | None]
        self.last = (lambda: None), None
        """The process group of the last call, and the session if a call there needed one; threads
        may use the plan in several groups."""

    def session(self, given: dist.ProcessGroup | None) -> Session:
        """The session of the plan's ranks in a group."""
        group: Any = given or dist.group.WORLD
        session = session_of(group, self.ranks)
        self.last = weakref.ref(group), session
        return session

    def program_for(self, bound: BoundTensors) -> Program:
        """The program for tensors of a call that are not contiguous."""
        key = tuple(bound.strides.items())
        program = self._strided.get(key)
        if program is None:
            drop_oldest(self._strided, MAX_PROGRAMS - 1)
            compiled = Program(self.plan, self.rank, dict(bound.strides))
            program = self._strided.setdefault(key, compiled)
        return program

    def log_transports(self, transports: Sequence[Transport]) -> None:
        """Log how this rank reaches its peers; for the first call, in which ranks compare plans."""
        if not log.isEnabledFor(logging.DEBUG):
            return
        peers: dict[str, list[int]] = {}
        for label, peer in sorted((one.label(p), p) for one in transports for p in one.peers):
            peers.setdefault(label, []).append(peer)
        ways = [f"{label} to {format_ranks(some)}" for label, some in peers.items()]
        log.debug(
            "rank %d: plan %.8s is the same on ranks %s; %s", self.rank, self.plan.digest,
            format_ranks(self.ranks), ", ".join(ways) or "no messages",
        )  # fmt: skip

    @cached_property
    def gathers(self) -> bool:
        """Whether every rank sends the same to all others in every round.

        It does if no two ranks hold the same part of a source, all want the whole, and what is sent
        comes from sources: slices of a round are the same for all receivers.
        """
        plan = self.plan
        at_once = all(slot.hops == 0 and slot.phases == 1 for slot in plan.schedule.slots)
        return at_once and all(_gathers(stack, self.ranks) for stack in plan.stacks)

    @cached_property
    def grad_hellos(self) -> dict[int, frozenset[int]]:
        """By rank, the peers with which it exchanges Hellos only to learn whether the source
        requires gradients.

        A rank with a part of the source knows that. A rank that receives only from ranks without a
        source, or receives nothing, exchanges a Hello with the first rank that has one.
        """
        plan = self.plan
        sources = [spec for spec in plan.have.values() if spec.dtype.startswith(DIFFERENTIABLE)]
        # Of a tensor without elements every rank holds an empty part.
        least = 1 if any(prod(spec.shape) for spec in sources) else 0
        knowing = [r for r in plan.parties if any(_holds(spec, r, least) for spec in sources)]
        if not knowing:
            return {}
        ends = (plan.traffic.source.tolist(), plan.traffic.destination.tolist())
        informed = {to for by, to in zip(*ends, strict=True) if by in set(knowing)}
        unaware = frozenset(plan.parties) - informed - set(knowing)
        pairs = {**dict.fromkeys(unaware, frozenset(knowing[:1])), knowing[0]: unaware}
        return pairs if unaware else {}


def _gathers(stack: Stack, ranks: Sequence[int]) -> bool:
    """Whether whole tensors go from ranks without replicas to all of these ranks."""
    have, want, feed = stack.have, stack.want, stack.feed
    changes = feed.moves or feed.have_insert or feed.want_insert
    if have.layout.reduce or want.layout.reduce or changes:
        return False
    held = sum(prod(have.layout.local_shape(rank, have.shape)) for rank in have.layout.ranks)
    is_whole = all(_holds(want, rank, prod(want.shape)) for rank in ranks)
    return is_whole and held == prod(have.shape)


def _holds(spec: TensorSpec, rank: int, least: int) -> bool:
    """Whether a rank holds at least so many elements."""
    holds = spec.layout.holds(rank) is not None
    return holds and prod(spec.layout.local_shape(rank, spec.shape)) >= least


def compiled_plan(
    plan: Plan, given: dist.ProcessGroup | None
) -> tuple[CompiledPlan | None, Session | None]:
    """The plan compiled for this rank of a group, once, and its session if it has one by now; None
    if the rank has no part in the plan."""
    compiled: CompiledPlan | None = plan.compiled
    group: Any = given or dist.group.WORLD
    # dist.get_rank takes microseconds; the rank does not change while a group lives.
    if compiled is not None and group is not None:
        find_group, session = compiled.last
        if find_group() is group:
            return compiled, None if session is None or session.is_over else session
    if group is None:
        raise LiveError(
            "a live move needs torch.distributed: call init_process_group first, or rs.simulate"
        )
    is_member = isinstance(group, dist.ProcessGroup)
    # new_group returns this to ranks that are not in the group: they may call, without a part.
    if not is_member and group != dist.GroupMember.NON_GROUP_MEMBER:
        raise LiveError(
            f"group= is {group!r}: give a process group of torch.distributed, as new_group makes"
        )
    rank = dist.get_rank()
    if rank not in plan.parties:
        return None, None
    if not is_member:
        raise LiveError(
            f"rank {rank} has a part in this move and is not in the group given by group=: "
            "give a group of all ranks of both layouts"
        )
    if compiled is None or compiled.rank != rank:
        began = time.perf_counter()
        compiled = plan.compiled = CompiledPlan(plan, rank)
        log.debug(
            "rank %d: compiled plan %.8s of %s in %.3f s", rank, plan.digest,
            count(len(plan.want), "tensor"), time.perf_counter() - began,
        )  # fmt: skip
    compiled.last = weakref.ref(group), None
    return compiled, None
