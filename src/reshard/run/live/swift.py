"""Moves of one tensor between the ranks of one host, with all that never changes made before.

What a small move costs is the steps around it, and they are still half of a move of a few
megabytes. Messages are those of `Neighbours`, so that each rank chooses for itself whether it takes
this way. There are two: small messages and addends are packed, all others go from tensor to tensor.
"""

from __future__ import annotations

import os
import weakref

import torch
import torch.distributed as dist

from reshard.planning.plan import Plan
from reshard.run.live import neighbours
from reshard.run.live.agreement import Terms
from reshard.run.live.greeting import greetings_of
from reshard.run.live.holding import Local
from reshard.run.live.lots import HAVE, WANT
from reshard.run.live.options import GRAD_CODES, Options
from reshard.run.live.prepared import Prepared, find_prepared
from reshard.run.live.session import Session, Ticket, session_of
from reshard.run.live.swift_direct import Direct, DirectCall, direct_of
from reshard.run.live.swift_packed import PackedCall
from reshard.run.live.swift_steps import Script, script_of
from reshard.run.live.team import Team

__all__ = ["moved"]

AUTO = "auto"

MOST_ADDED = 64 << 20
"""Bytes of addends that are packed: of more, what is around the copies does not matter."""


def moved(
    ticket: Ticket,
    plan: Plan,
    local: torch.Tensor,
    into: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    wanted: bool,
) -> torch.Tensor | None:
    """The result of a move on this rank, if it is one that can go this way; else None."""
    prepared = find_prepared(plan)
    # Bytes, because to look for a text costs three times as much.
    if prepared is None or os.environb.get(b"RESHARD_TRANSPORT", b"auto") != b"auto":
        return None
    swift = prepared.swift
    if swift is None or not swift.is_of(group):
        swift = prepared.swift = _swift_of(plan, prepared, group or dist.group.WORLD)
    if swift is None or not swift.takes(local, into):
        return None
    result = torch.empty(swift.want.shape, dtype=swift.want.kind) if into is None else into
    if isinstance(swift.way, Direct):
        prepared.returning[HAVE].see(local.data_ptr(), (local,))
        if into is not None:
            prepared.returning[WANT].see(into.data_ptr(), (into,))
    swift.run(ticket, local, result, GRAD_CODES[wanted])
    return result


def _swift_of(plan: Plan, prepared: Prepared, group: dist.ProcessGroup | None) -> Swift | None:
    """What is kept for the calls of a plan; None before its first call, and for other moves."""
    if not isinstance(group, dist.ProcessGroup) or len(plan.have) != 1 or len(plan.want) != 1:
        return None
    if [len(side) for side in prepared.locals] != [1, 1] or prepared.program.part.fills:
        return None
    rank = prepared.program.rank
    more = greetings_of(plan) if prepared.greetings is None else prepared.greetings
    session = session_of(group, prepared.ranks) if len(prepared.ranks) > 1 else None
    # Compared before: only then is it known that no GPU takes part, and the ranks are connected.
    if session is not None and session.routes.get((prepared.digest, AUTO)) is not False:
        return None
    team = session.team if session is not None and (prepared.talks or more) else None
    peers = frozenset.union(*prepared.program.peers, more.get(rank, frozenset()))
    if team is not None and not peers <= team.links.keys():
        return None
    way = _way_of(prepared, team)
    return None if way is None else Swift(plan, prepared, way, session, team, peers, group)


def _way_of(prepared: Prepared, team: Team | None) -> Script | Direct | None:
    """All packed, or none; a mixture is for the ordinary call."""
    program = prepared.program
    script = script_of(program)
    if script is not None and script.largest <= neighbours.SMALL and script.lends:
        return script
    if script is not None and script.adds and script.num_bytes <= MOST_ADDED:
        return script
    if team is None:
        return None
    return direct_of(program, (peer for peer, link in team.links.items() if link.direct))


class Swift:
    """What is kept between the calls of one plan in one group."""

    def __init__(
        self,
        plan: Plan,
        prepared: Prepared,
        way: Script | Direct,
        session: Session | None,
        team: Team | None,
        peers: frozenset[int],
        group: dist.ProcessGroup,
    ) -> None:
        self._plan = weakref.ref(plan)
        self._group = weakref.ref(group)
        self.have: Local = prepared.locals[HAVE][0]
        self.want: Local = prepared.locals[WANT][0]
        self.digest = prepared.digest
        self.rank = prepared.program.rank
        self.num_bytes = prepared.program.num_bytes
        self.num_rounds = prepared.program.num_rounds
        self.way = way
        self.session = session
        self.team = team
        self.peers = tuple(sorted(peers))
        self.key = (self.digest, AUTO)

    def is_of(self, group: dist.ProcessGroup | None) -> bool:
        """Whether it was made for a group."""
        mine = self._group()  # None once it is gone, as is the default group
        return mine is not None and mine is (dist.group.WORLD if group is None else group)

    def takes(self, local: torch.Tensor, into: torch.Tensor | None) -> bool:
        """Whether tensors are as usual, and the plan was compared on its way through the host."""
        team, session = self.team, self.session
        if session is not None and (
            session.routes.get(self.key) is not False or self.key not in session.agreed
        ):
            return False
        if team is not None and team.gpus is not None:
            return False
        if into is None:
            return _is_usual(local, self.have)
        return _is_usual(local, self.have) and _is_usual(into, self.want) and _apart(local, into)

    def run(self, ticket: Ticket, local: torch.Tensor, result: torch.Tensor, word: int) -> None:
        """Move, from one tensor into the other."""
        way, addresses = self.way, (local.data_ptr(), result.data_ptr())
        if self.team is None:
            assert isinstance(way, Script)
            if self.session is not None:
                self.session.pass_by(ticket)
            for made in way.rounds:
                made.copy(addresses)
            ticket.finish()
        elif isinstance(way, Script):
            PackedCall(self, ticket, self.team, word, way, addresses).run()
        else:
            DirectCall(self, ticket, self.team, word, way, (local, result)).run()

    def terms(self, word: int) -> Terms:
        """What ranks compare if they differ."""
        plan = self._plan()
        assert plan is not None
        return Terms(plan, Options().shared, "cpu", word)


_PLAIN = {torch.Tensor, torch.nn.Parameter}


def _is_usual(tensor: torch.Tensor, local: Local) -> bool:
    """Whether a tensor is what the plan says, in ordinary memory."""
    return (
        type(tensor) in _PLAIN
        and tensor.shape == local.shape
        and tensor.dtype is local.kind
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = one.data_ptr(), other.data_ptr()
    return first + one.nbytes <= second or second + other.nbytes <= first
