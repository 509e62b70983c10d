"""Find the team of a move, or make it: the ranks meet in a store, then shake hands on each host."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import weakref
from collections.abc import Sequence

import torch.distributed as dist

from reshard.errors import LiveError, MoveTimeoutError, PeerLostError
from reshard.run.live.c10d import PrefixStore, Store
from reshard.run.live.cause import Cause
from reshard.run.live.host import host_identity
from reshard.run.live.line import Line
from reshard.run.live.links import Door
from reshard.run.live.meeting import await_keys, own_store, serve_store
from reshard.run.live.team import Team

__all__ = ["team_of", "teams"]

_teams: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Team]] = (
    weakref.WeakKeyDictionary()
)
_making = threading.Lock()


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
            teams[key] = _Making(group, key, timeout, what).run()
        return teams[key]


def teams(group: dist.ProcessGroup | None = None) -> list[Team]:
    """Every team of this process, or of a group."""
    chosen = list(_teams.values()) if group is None else [_teams.get(group, {})]
    return [team for of_group in chosen for team in of_group.values()]


def _close_all(teams: dict[tuple[int, ...], Team]) -> None:
    """A group is gone, and its teams go with it."""
    while teams:
        teams.popitem()[1].close()


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
        self, group: dist.ProcessGroup, ranks: tuple[int, ...], timeout: float, what: str
    ) -> None:
        self.rank, self.ranks, self.timeout, self.what = dist.get_rank(), ranks, timeout, what
        name = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
        self.caller: Store = PrefixStore(f"reshard/{name}", group.get_group_store())

    @property
    def leader(self) -> int:
        return self.ranks[0]

    def run(self) -> Team:
        """Make it."""
        try:
            if self.rank == self.leader:
                self.store = serve_store(self.caller)
            else:
                args = (self.rank, self.leader, self.timeout, self.what)
                self.store = own_store(self.caller, *args)
        except dist.DistNetworkError as error:
            raise PeerLostError(
                f"the store of the process group does not answer ({str(error).splitlines()[0]}): "
                "the process that serves it has ended; end the job"
            ) from None
        self.line = Line(self.store, self.leader, self.timeout)
        door = Door(self.rank)
        try:
            return self._gather(door)
        except BaseException as error:
            self._tell(error)
            raise
        finally:
            door.close()
            if self.rank == self.leader:
                # Who comes from now on must not find the store of this attempt.
                with contextlib.suppress(RuntimeError):
                    self.caller.delete_key("address")

    def _gather(self, door: Door) -> Team:
        said = json.dumps({"host": host_identity(), "door": door.name})
        self.line.ask(lambda store: store.set(f"who/{self.rank}", said))
        keys = [f"who/{other}" for other in self.ranks]
        missing = await_keys(self.line, keys, self.timeout, self._look_up)
        if missing:
            absent = [int(key.removeprefix("who/")) for key in missing]
            raise MoveTimeoutError(
                f"ranks {absent} have not called within {self.timeout:g} s and rank {self.rank} "
                f"waits for them to begin {self.what}: every rank of the two layouts calls a "
                "move; if they are only late, give a longer timeout="
            )
        texts = self.line.ask(lambda store: store.multi_get(keys))
        known = {other: json.loads(text) for other, text in zip(self.ranks, texts, strict=True)}
        hosts = {other: str(who["host"]) for other, who in known.items()}
        here = hosts[self.rank]
        doors = {other: str(who["door"]) for other, who in known.items() if hosts[other] == here}
        links = door.meet(doors, self.timeout, self._look_up)
        return Team(self.rank, self.ranks, self.store, self.line, hosts, door, links)

    def _look_up(self) -> None:
        """Raise what made another rank give up."""
        if self.line.check(["unmade"]):
            found = Cause.from_json(self.line.ask(lambda store: store.get("unmade")))
            raise found.error(f"on rank {self.rank}: no round begun")

    def _tell(self, error: BaseException) -> None:
        cause = Cause.of_any(error, self.rank)
        with contextlib.suppress(PeerLostError):
            self.line.ask(lambda store: store.compare_set("unmade", "", cause.to_json()))
        self.line.close()
