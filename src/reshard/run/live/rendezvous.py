"""Rendezvous: connect the ranks of a session, all of them or none.

Every rank announces itself in the store of the caller's group, under the number of the call that
needs the session. When all have come, they connect to a store of the session's own, which its
lowest rank serves, and the ranks of one host to each other. A rank that is done says so; the last
one writes into the store that the session is made. A rank that gives up writes why. Both go to the
same key, of which only the first value stands, so all ranks come to the same conclusion.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from reshard.errors import DisagreementError, MoveTimeoutError, PeerLostError, ReshardError
from reshard.run.live.c10d import Store, TCPStore
from reshard.run.live.cause import Cause
from reshard.run.live.crossing import Crossing
from reshard.run.live.host import host_identity
from reshard.run.live.line import Line
from reshard.run.live.links import Door, closed_by
from reshard.run.live.meeting import connect_store, missing_keys, not_called, serve_store
from reshard.run.live.team import Team, outcome_key

if TYPE_CHECKING:
    from reshard.run.live.session import Session

__all__ = ["MADE", "Rendezvous", "decide"]

MADE = "made"

LOOK_EVERY = 0.1
"""Seconds between two looks for ranks that are gone, while others are waited for."""

_given_up: deque[TCPStore] = deque(maxlen=4)
"""Stores of sessions that were not made: other ranks may still ask them for an answer."""


def decide(store: Store, number: int, text: str) -> str:
    """Propose what becomes of a rendezvous; gives what was decided first: `MADE`, or a cause."""
    found: bytes = store.compare_set(outcome_key(number), "", text)
    return found.decode()


class Rendezvous:
    """One attempt to connect a session, in the call with this number."""

    def __init__(self, session: Session, number: int, timeout: float, what: str) -> None:
        self.session, self.number, self.timeout, self.what = session, number, timeout, what
        self.rank, self.ranks, self.caller = session.rank, session.ranks, session.caller
        self.leader = self.ranks[0]
        self.store: TCPStore | None = None
        self.line: Line | None = None
        self.crossing = Crossing(session.home, self.rank, self.ranks, what, number)
        self.door = Door(self.rank)
        self._looked = time.monotonic()

    def run(self) -> Team:
        """Connect; raises the same error on all ranks if one of them cannot."""
        session = self.session
        try:
            return self._connect_or_raise()
        except dist.DistNetworkError as error:
            self.give_up()
            reason = str(error).splitlines()[0]
            raise PeerLostError(
                f"the store of the process group does not answer ({reason}): the process that "
                f"serves it has ended, before {self.what}; end the job {self._status}"
            ) from None
        finally:
            self.crossing.close()
            session.skip_calls(self.crossing.given_up)

    def _connect_or_raise(self) -> Team:
        try:
            return self._connect()
        except ReshardError as error:
            cause = replace(Cause.of_any(error, self.rank), calls=tuple(self.crossing.given_up))
            outcome = decide(self.caller, self.number, cause.to_json())
            candidate = self.session.candidate
            if outcome == MADE and candidate is not None:
                return candidate
            self.give_up()
            self._raise(Cause.from_json(outcome.encode()))

    def _raise(self, cause: Cause) -> NoReturn:
        self.session.skip_calls(cause.calls)
        said = "(on rank" in cause.text
        text = cause.text if said or cause.kind != "lost" else f"{cause.text}, before {self.what}"
        raise Cause(cause.kind, text).error("" if said else self._status[1:-1])

    def give_up(self) -> None:
        """Close what was opened. Not before the outcome is decided: a socket that is closed without
        an outcome means a process that has ended."""
        self.door.close()
        self.crossing.close()
        candidate = self.session.candidate
        if candidate is not None and candidate.first_call == self.number:
            self.session.candidate = None
            candidate.close()
        if self.store is not None:
            _given_up.append(self.store)
        if self.line is not None:
            self.line.close()

    @property
    def _status(self) -> str:
        return f"(on rank {self.rank}: no round begun)"

    def _connect(self) -> Team:
        door = self.door
        known = self._await_all(door)
        store = self.store = self.store or self._connect_store(known[self.leader])
        line = self.line = Line(store, self.leader, self.timeout)
        hosts = {rank: str(who["host"]) for rank, who in known.items()}
        here = [rank for rank in self.ranks if hosts[rank] == hosts[self.rank]]
        doors = {rank: str(known[rank]["door"]) for rank in here}
        links = door.meet(doors, self.timeout, self._look_up)
        session = self.session
        args = (store, line, hosts, door, links, session.home, session.skip_calls)
        session.candidate = Team(self.rank, self.ranks, *args, self.number, self.caller)
        self._conclude(session.candidate)
        door.close()
        return session.candidate

    def _announce(self, door: Door) -> None:
        said: dict[str, Any] = {"host": host_identity(), "door": door.name}
        if self.rank == self.leader:
            self.store, said["store"] = serve_store()
        self.caller.set(self._who(self.rank), json.dumps(said))

    def _who(self, rank: int) -> str:
        return f"{self.number}/who/{rank}"

    def _await_all(self, door: Door) -> dict[int, dict[str, Any]]:
        """What every rank says of itself. A rank of this host that ends meanwhile is noticed."""
        self._announce(door)
        known: dict[int, dict[str, Any]] = {}
        end, pause = time.monotonic() + self.timeout, 0.0002
        while True:
            asked = {rank: self._who(rank) for rank in self.ranks if rank not in known}
            absent = missing_keys(self.caller, asked)
            for rank in asked.keys() - set(absent):
                known[rank] = json.loads(self.caller.get(self._who(rank)))
            if not absent:
                return known
            if time.monotonic() > end:
                raise MoveTimeoutError(not_called(absent, self.timeout, self.rank, self.what))
            if time.monotonic() - self._looked > LOOK_EVERY:
                self._look_up()
                self._look_across(absent)
                door.check_alive(_doors_here(known, self.rank))
                self._looked = time.monotonic()
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def _connect_store(self, leader: Mapping[str, Any]) -> TCPStore:
        args = (self.rank, self.leader, self.timeout, self.what)
        return connect_store(leader["store"], str(leader["host"]), *args, self._look_up)

    def _conclude(self, team: Team) -> None:
        """Say that this rank is connected, and wait for what becomes of the session."""
        if int(self.caller.add(f"{self.number}/done", 1)) == len(self.ranks):
            decide(self.caller, self.number, MADE)
        end, pause = time.monotonic() + self.timeout, 0.0002
        while not self._is_made():
            gone = closed_by(team.links)
            if gone:
                raise PeerLostError(f"rank {gone[0]} is gone (its process ended)")
            if time.monotonic() > end:
                raise MoveTimeoutError(
                    f"not all ranks have connected within {self.timeout:g} s for {self.what}"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        if self.rank == self.leader:
            for rank in self.ranks:
                self.caller.delete_key(self._who(rank))
            self.caller.delete_key(f"{self.number}/done")

    def _is_made(self) -> bool:
        """Whether the session is made; raises why not, once that is decided."""
        key = outcome_key(self.number)
        if not self.caller.check([key]):
            return False
        outcome = self.caller.get(key)
        if outcome.decode() == MADE:
            return True
        raise Cause.from_json(outcome).error("")

    def _look_up(self) -> None:
        """Raise what made another rank give up."""
        self._is_made()

    def _look_across(self, absent: Sequence[int]) -> None:
        found = self.crossing.look(absent)
        if found is not None:
            raise DisagreementError(found)


def _doors_here(known: Mapping[int, Mapping[str, Any]], rank: int) -> dict[int, str]:
    """The sockets of the other ranks of this host that have come."""
    here = host_identity()
    return {r: str(who["door"]) for r, who in known.items() if r != rank and who["host"] == here}
