"""Find the team of a move, or make it: the ranks meet in a store, then shake hands on each host."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from reshard.errors import DisagreementError, LiveError, MoveTimeoutError, PeerLostError
from reshard.run.live.c10d import PrefixStore, Store, TCPStore
from reshard.run.live.cause import Cause
from reshard.run.live.crossing import Crossing
from reshard.run.live.host import host_identity
from reshard.run.live.line import Line
from reshard.run.live.links import Door
from reshard.run.live.meeting import await_keys, not_called, own_store, serve_store
from reshard.run.live.team import Team, skip_calls

__all__ = ["team_of", "teams"]

_teams: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Team]] = (
    weakref.WeakKeyDictionary()
)
_making = threading.Lock()

_attempts: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)
"""How often a team could not be made: as calls are, attempts are counted alike on all ranks."""


_given_up: deque[TCPStore] = deque(maxlen=4)
"""Stores of teams that were not made: others may still ask them, and should hear an answer."""


TELL_SECONDS = 1.5
"""How long one who gives up may take to say why: others see at once that it is gone."""


def team_of(group: dist.ProcessGroup, ranks: Sequence[int], timeout: float, what: str) -> Team:
    """The team of these ranks, made at the first call, which all of them must make.

    ``what`` is what the call does, for errors.
    """
    key = tuple(sorted(ranks))
    with _making:
        teams = _teams.get(group)
        if teams is None:
            teams = _teams[group] = {}
            weakref.finalize(group, _close_all, teams).atexit = False
        if key not in teams:
            _check_members(group, key)
            teams[key] = _made(group, key, timeout, what)
        return teams[key]


def _made(group: dist.ProcessGroup, ranks: tuple[int, ...], timeout: float, what: str) -> Team:
    teams, attempts = _teams[group], _attempts.setdefault(group, Counter())
    making = _Making(group, ranks, timeout, what, attempts[ranks], teams)
    try:
        return making.run()
    except BaseException:
        attempts[ranks] = making.attempt + 1
        raise
    finally:
        making.crossing.close()
        given_up = making.crossing.given_up
        skip_calls(given_up, teams)
        for others, call in given_up:
            attempts[others] = max(attempts[others], -call)


def teams(group: dist.ProcessGroup | None = None) -> list[Team]:
    """Every team of this process, or of a group."""
    chosen = list(_teams.values()) if group is None else [_teams.get(group, {})]
    return [team for of_group in chosen for team in of_group.values()]


def _close_all(teams: dict[tuple[int, ...], Team]) -> None:
    """A group is gone, and its teams go with it."""
    while teams:
        teams.popitem()[1].close()


def _leave_at_exit() -> None:
    """No thread of ours may be about while Python ends: torch's objects cannot end in one then."""
    for team in teams():
        team.end_threads()


atexit.register(_leave_at_exit)


def _leave_in_child() -> None:
    """A forked process is no rank: while it held sockets, nobody would see its parent die."""
    for team in teams():
        team.mailbox.abandon()


os.register_at_fork(after_in_child=_leave_in_child)


def _check_members(group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    members = dist.get_process_group_ranks(group)
    outside = sorted(set(ranks) - set(members))
    if outside:
        raise LiveError(
            f"the layouts name ranks {outside} and the process group has {sorted(members)}: "
            "layouts speak of global ranks; give the group that has them all"
        )


class _Making:
    """A team that is being made. Whoever gives up leaves word, and the others give up as well."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: tuple[int, ...],
        timeout: float,
        what: str,
        attempt: int,
        others: Mapping[tuple[int, ...], Team],
    ) -> None:
        self.others, self.attempt = others, attempt
        self.rank, self.ranks, self.timeout, self.what = dist.get_rank(), ranks, timeout, what
        name = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
        self.home: Store = group.get_group_store()
        self.caller: Store = PrefixStore(f"reshard/{name}", self.home)
        self.store: TCPStore | None = None
        self.line: Line | None = None
        self.crossing = Crossing(self.home, self.rank, ranks, what, -1 - attempt)

    @property
    def failed(self) -> str:
        """The key that says why this attempt came to nothing."""
        return f"failed/{self.attempt}"

    @property
    def address(self) -> str:
        """The key that says where the store of this attempt is."""
        return f"address/{self.attempt}"

    @property
    def leader(self) -> int:
        return self.ranks[0]

    def run(self) -> Team:
        """Make it."""
        try:
            return self._make()
        except BaseException as error:
            self._tell(error)
            raise

    def _make(self) -> Team:
        try:
            self.store = self._open_store()
            return self._shake_hands(self.store)
        except dist.DistNetworkError as error:
            reason = str(error).splitlines()[0]
            raise PeerLostError(
                f"the store of the process group does not answer ({reason}): the process that "
                f"serves it has ended, before {self.what}; end the job {self._status}"
            ) from None
        except PeerLostError as error:
            with contextlib.suppress(dist.DistNetworkError):
                self._hear_why()
            if "(on rank" in str(error):
                raise
            raise PeerLostError(f"{error}, before {self.what} {self._status}") from None

    def _hear_why(self) -> None:
        """Give one who left the making of the team a moment to say why, and raise that."""
        end = time.monotonic() + min(TELL_SECONDS, self.timeout)
        while time.monotonic() < end:
            self._look_up()
            time.sleep(0.05)

    @property
    def _status(self) -> str:
        return f"(on rank {self.rank}: no round begun)"

    def _open_store(self) -> TCPStore:
        if self.rank == self.leader:
            return serve_store(self.caller, self.address)
        args = (self.rank, self.leader, self.timeout, self.what)
        return own_store(self.caller, self.address, *args, self._look_for_leader)

    def _shake_hands(self, store: TCPStore) -> Team:
        door = Door(self.rank)
        try:
            return self._gather(store, door)
        finally:
            door.close()
            if self.rank == self.leader:
                with contextlib.suppress(RuntimeError):
                    self.caller.delete_key(self.address)

    def _gather(self, store: TCPStore, door: Door) -> Team:
        line = self.line = Line(store, self.leader, self.timeout)
        said = json.dumps({"host": host_identity(), "door": door.name})
        line.ask(lambda store: store.set(f"who/{self.rank}", said))
        keys = [f"who/{other}" for other in self.ranks]
        missing = await_keys(line, keys, self.timeout, self._look_for_all)
        if missing:
            absent = [int(key.removeprefix("who/")) for key in missing]
            raise MoveTimeoutError(not_called(absent, self.timeout, self.rank, self.what))
        texts = line.ask(lambda store: store.multi_get(keys))
        known = {other: json.loads(text) for other, text in zip(self.ranks, texts, strict=True)}
        hosts = {other: str(who["host"]) for other, who in known.items()}
        here = hosts[self.rank]
        doors = {other: str(who["door"]) for other, who in known.items() if hosts[other] == here}
        links = door.meet(doors, self.timeout, self._look_up)
        args = (store, line, hosts, door, links, self.home, self.others)

        return Team(self.rank, self.ranks, *args, self._why_others_failed)

    def _look_up(self) -> None:
        """Raise what made another rank give up."""
        found = self._why_failed()
        if found is not None:
            raise found.error("" if "(on rank" in found.text else self._status[1:-1])

    def _why_failed(self) -> Cause | None:
        if not self.caller.check([self.failed]):
            return None
        return Cause.from_json(self.caller.get(self.failed))

    def _why_others_failed(self) -> Cause | None:
        """The same for a team that was made here, and without a word of how far another came."""
        with contextlib.suppress(dist.DistNetworkError):
            found = self._why_failed()
            if found is not None:
                return Cause(found.kind, found.text.partition(" (on rank")[0])
        return None

    def _look_for_leader(self) -> None:
        self._look_up()
        self._cross([self.leader])

    def _look_for_all(self) -> None:
        self._look_up()
        if self.crossing.is_due and self.line is not None:
            line = self.line
            self._cross([rank for rank in self.ranks if not line.check([f"who/{rank}"])])

    def _cross(self, awaited: Sequence[int]) -> None:
        found = self.crossing.look(awaited)
        if found is not None:
            raise DisagreementError(f"{found} {self._status}")

    def _tell(self, error: BaseException) -> None:
        """Leave word for those who are making the team, or come later."""
        text = Cause.of_any(error, self.rank).to_json()
        with contextlib.suppress(RuntimeError):
            self.caller.compare_set(self.failed, "", text)
        if self.store is not None:
            _given_up.append(self.store)
        if self.line is not None:
            self.line.close()
