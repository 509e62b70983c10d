"""Small moves of one tensor between the ranks of one host, with all that never changes made before.

What such a move costs is the steps around it. Here a call is: pack, say hello, hear the others'
hellos, unpack. Messages are those of `Neighbours`, so that each rank chooses for itself whether it
takes this way; when anything is not as usual, the ordinary watch takes over and says what is wrong.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from reshard.bytesize import format_bytes
from reshard.planning.plan import Plan
from reshard.run.live import neighbours
from reshard.run.live.agreement import Terms, check_words, raise_disagreement, suspect_comparing
from reshard.run.live.arena import Arena
from reshard.run.live.call import told
from reshard.run.live.cause import Cause
from reshard.run.live.faults import Watch
from reshard.run.live.greeting import greetings_of
from reshard.run.live.holding import Local
from reshard.run.live.lots import HAVE, WANT
from reshard.run.live.mailbox import Kind, packed
from reshard.run.live.options import GRAD_CODES, Options
from reshard.run.live.prepared import Prepared, find_prepared
from reshard.run.live.swift_steps import Script, script_of
from reshard.run.live.team import Team

__all__ = ["moved"]

AUTO = "auto"

GLANCES = 16
GLANCE_SECONDS = 0.05
"""How often and how long a call just waits, before somebody is watched for."""


def moved(
    plan: Plan, local: torch.Tensor, group: dist.ProcessGroup | None, wanted: bool
) -> torch.Tensor | None:
    """The result of a move on this rank, if it is one that can go this way; else None."""
    prepared = find_prepared(plan)
    if prepared is None or os.environ.get("RESHARD_TRANSPORT", AUTO) != AUTO:
        return None
    swift: Swift | None = prepared.swift  # type: ignore[assignment]
    if swift is None or not swift.is_of(group):
        swift = prepared.swift = _swift_of(plan, prepared, group or dist.group.WORLD)
    if swift is None or not swift.takes(local):
        return None
    result = torch.empty(swift.want.shape, dtype=swift.want.kind)
    addresses = (local.data_ptr(), result.data_ptr())
    if swift.team is None:
        for made in swift.script.rounds:
            made.copy(addresses)
    else:
        _Call(swift, swift.team, GRAD_CODES[wanted], addresses).run()
    return result


def _swift_of(plan: Plan, prepared: Prepared, group: dist.ProcessGroup | None) -> Swift | None:
    """What is kept for the calls of a plan; None before its first call, and for other moves."""
    if group is None or len(plan.have) != 1 or len(plan.want) != 1:
        return None
    if [len(side) for side in prepared.locals] != [1, 1] or prepared.program.part.fills:
        return None
    rank = prepared.program.rank
    more = greetings_of(plan) if prepared.greetings is None else prepared.greetings
    team = None
    if prepared.talks or more:
        from reshard.run.live.teams import team_of

        if (prepared.digest, AUTO) not in _agreed_anywhere(group):
            return None
        team = team_of(group, prepared.ranks, Options().timeout, prepared.what)
    peers = frozenset.union(*prepared.program.peers, more.get(rank, frozenset()))
    if team is not None and not peers <= team.links.keys():
        return None
    script = script_of(prepared.program)
    return None if script is None else Swift(plan, prepared, script, team, peers, group)


def _agreed_anywhere(group: dist.ProcessGroup) -> set[tuple[bytes, str]]:
    """The plans that a team of a group has compared: only then is there a team to look for."""
    from reshard.run.live.teams import teams

    return {key for team in teams(group) for key in team.routes}


class Swift:
    """What is kept between the calls of one plan in one group."""

    def __init__(
        self,
        plan: Plan,
        prepared: Prepared,
        script: Script,
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
        self.script = script
        self.team = team
        self.peers = tuple(sorted(peers))
        self.key = (self.digest, AUTO)
        first = script.rounds[0].sends if script.rounds else ()
        self.greeting = {peer: at for peer, at, _ in first}
        """Where the first message to each peer lies in the arena."""

    def is_of(self, group: dist.ProcessGroup | None) -> bool:
        """Whether it was made for a group."""
        mine = self._group()  # None once it is gone, as is the default group
        return mine is not None and mine is (dist.group.WORLD if group is None else group)

    def takes(self, local: torch.Tensor) -> bool:
        """Whether a tensor is as usual, and the plan was compared on its way through the host."""
        team = self.team
        if team is not None and (team.routes.get(self.key) is not False or team.gpus is not None):
            return False
        return (
            self.script.largest <= neighbours.SMALL
            and type(local) in _PLAIN
            and local.shape == self.have.shape
            and local.dtype is self.have.kind
            and local.is_cpu
            and local.layout is torch.strided
            and local.is_contiguous()
            and not (local.is_conj() or local.is_neg())
        )

    def terms(self, word: int) -> Terms:
        """What ranks compare if they differ."""
        plan = self._plan()
        assert plan is not None
        return Terms(plan, {"transport": AUTO}, "cpu", word)


_PLAIN = {torch.Tensor, torch.nn.Parameter}


class _Call:
    """One call on one rank."""

    def __init__(self, swift: Swift, team: Team, word: int, addresses: tuple[int, int]) -> None:
        self.swift = swift
        self.team = team
        self.word = word
        self.addresses = addresses
        self.number = team.next_call()
        self.inbox = team.mailbox.open(self.number)
        self.arena: Arena | None = None
        self.round = -1
        self._watch: Watch | None = None

    @property
    def watch(self) -> Watch:
        """Who looks after this call, now that it does not go as usual."""
        if self._watch is None:
            self._watch = Watch(
                self.team,
                self.number,
                self.swift.digest,
                timeout=Options().timeout,
                deadline=None,
                status=self._status,
                word=self.word,
                move=f'the move of "{self.swift.want.name}"',
            )
        return self._watch

    def run(self) -> None:
        """Do all of it; on any error everyone is told."""
        arenas, size = self.team.arenas, self.swift.script.num_bytes
        try:
            self.arena = arenas.take(size) if size else None
            self._greet()
            self._wait(self._unmet, self._meet_slowly)
            for number in range(len(self.swift.script.rounds)):
                self.round = number
                self._round(number)
            self._lend()
        except BaseException:
            if self.arena is not None:
                arenas.retire(self.arena)
            with told(self.watch):
                raise
        finally:
            if self._watch is None:
                self.team.mailbox.close(self.number)
            else:
                self._watch.close()

    def _greet(self) -> None:
        swift, mailbox, arena = self.swift, self.team.mailbox, self.arena
        if swift.script.rounds and arena is not None:
            swift.script.rounds[0].pack(self.addresses, arena.address)
        for peer in swift.peers:
            at = swift.greeting.get(peer)
            about = (0, 0) if at is None or arena is None else (1 + arena.number, at)
            numbers = (self.word, 0, 0, *about, mailbox.num_over)
            data = packed(Kind.HELLO, self.number, swift.digest, *numbers)
            mailbox.send_bytes(peer, data, self._new_to(peer) if about[0] else None)

    def _round(self, number: int) -> None:
        made = self.swift.script.rounds[number]
        if number:
            self._put(number)
        made.copy(self.addresses)
        ready = self.inbox.ready

        def missing() -> list[int]:
            return [peer for peer, _, _ in made.receives if (peer, number) not in ready]

        self._wait(missing, lambda: self.watch.wait(missing, self._its_part))
        found = {peer: self._where(peer, number, size) for peer, size, _ in made.receives}
        made.unpack(self.addresses, found)

    def _put(self, number: int) -> None:
        """Pack what this rank passes on, and say so."""
        made, arena = self.swift.script.rounds[number], self.arena
        if arena is None or not made.sends:
            return
        made.pack(self.addresses, arena.address)
        for peer, at, _ in made.sends:
            numbers = (number, arena.number, at, 0, 0, 0)
            data = packed(Kind.READY, self.number, self.swift.digest, *numbers)
            self.team.mailbox.send_bytes(peer, data, self._new_to(peer))

    def _where(self, peer: int, number: int, size: int) -> int:
        """The address of what a peer has packed for this rank."""
        ready = self.inbox.ready[peer, number]
        arena = self.inbox.arenas.get((peer, ready.a))
        if arena is None or ready.b + size > arena.num_bytes:
            room = "none" if arena is None else f"{arena.num_bytes}"
            self.watch.fail(
                Cause(
                    "error",
                    f"rank {peer} says that {size} bytes for rank {self.swift.rank} begin at "
                    f"{ready.b} of shared memory that has {room}",
                )
            )
        return arena.address + ready.b

    def _new_to(self, peer: int) -> int | None:
        """The descriptor of the arena, for a peer that does not have it yet."""
        if self.arena is None or peer in self.arena.known_to:
            return None
        self.arena.known_to.add(peer)
        return self.arena.fd

    def _lend(self) -> None:
        """Leave messages where they are: that peers have read them, their next hello tells."""
        if self.arena is not None:
            for peer in self.swift.script.takers:
                self.team.mailbox.lend(self.arena, peer, self.number)
            self.team.arenas.give_back(self.arena)

    def _wait(self, missing: Callable[[], object], slowly: Callable[[], object]) -> None:
        """Wait as if nothing could go wrong, for a while."""
        mailbox, inbox = self.team.mailbox, self.inbox
        for _ in range(GLANCES):
            if inbox.aborted_by is not None or not missing():
                break
            if mailbox.lost:
                break
            mailbox.step(GLANCE_SECONDS)
        if inbox.aborted_by is not None:
            self.watch.check()
        if missing():
            slowly()

    def _unmet(self) -> list[int]:
        """Peers that have not said hello; those that have must mean the same move."""
        hellos, digest, word = self.inbox.hellos, self.swift.digest, self.word
        for hello in hellos.values():
            if hello.digest != digest:
                raise_disagreement(self.watch, self.swift.terms(word))
            if hello.round not in (0, word):
                said = {peer: hello.round for peer, hello in hellos.items()}
                check_words(self.watch, {**said, self.swift.rank: word})
        return [peer for peer in self.swift.peers if peer not in hellos]

    def _meet_slowly(self) -> None:
        watch, terms = self.watch, self.swift.terms(self.word)
        watch.suspect = lambda: suspect_comparing(watch, terms)
        watch.wait(self._unmet, lambda peer: f'it to begin the move of "{self.swift.want.name}"')
        watch.has_met()

    def _its_part(self, peer: int) -> str:
        which = f"round {self.round + 1} of {len(self.swift.script.rounds)}"
        return f'its part of "{self.swift.want.name}" in {which}'

    def _status(self) -> str:
        which = f"round {self.round + 1} of {len(self.swift.script.rounds)}"
        where = which if self.round >= 0 else "no round begun"
        rounds = self.swift.script.rounds[: max(self.round, 0)]
        done = sum(size for made in rounds for _, size, _ in made.receives)
        amount = f"{format_bytes(done)} of {format_bytes(self.swift.num_bytes)} done"
        return f"on rank {self.swift.rank}: {where}, {amount}"
