"""The ranks of a move that know each other: one store, and sockets between those on one host.

A team is made the first time that a set of ranks of a process group moves anything, and lives as
long as the group. Ranks outside the set have no part in it.
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from reshard.errors import LiveError, MoveTimeoutError
from reshard.run.live.arena import Arena, Arenas
from reshard.run.live.c10d import PrefixStore, Store, TCPStore
from reshard.run.live.host import host_identity
from reshard.run.live.line import Line
from reshard.run.live.links import Door, Link
from reshard.run.live.mailbox import Kind, Mailbox, Message
from reshard.run.live.meeting import await_keys, own_store
from reshard.run.live.turns import Turns
from reshard.run.live.wire import Wire

if TYPE_CHECKING:
    from reshard.run.live.device_wires import DeviceWires
    from reshard.run.live.faults import Watch

__all__ = ["Team", "team_of", "teams"]


@dataclass(eq=False)
class Team:
    """This rank's view of its team."""

    rank: int
    ranks: tuple[int, ...]
    store: TCPStore
    hosts: dict[int, str]
    """The host identity of each rank."""
    door: Door
    links: dict[int, Link]
    """The other ranks of this host."""

    def __post_init__(self) -> None:
        self.mailbox = Mailbox({peer: link.socket for peer, link in self.links.items()})
        self.line = Line(self.store, self.leader)
        self.arenas = Arenas(self._retire)
        self.agreed: set[tuple[bytes, str]] = set()
        """Plans that all ranks have compared or are comparing, by digest and transport."""
        self.routes: dict[tuple[bytes, str], bool] = {}
        """Whether such a plan goes from GPU to GPU, for those that were compared."""
        self.turns = Turns()
        self.gpus: DeviceWires | None = None
        """What is kept for moves between GPUs."""
        self._making_wire = threading.Lock()
        self._wire: Wire | None = None
        self._epoch = 0
        self.num_calls = 0
        self.last_failed = -1
        """The last call that this rank knows to have failed."""
        self.lock = threading.Lock()

    @property
    def leader(self) -> int:
        """The rank that serves the store."""
        return self.ranks[0]

    def next_call(self) -> int:
        """The number of a call that begins; all ranks count alike."""
        with self.lock:
            self.num_calls += 1
            return self.num_calls - 1

    def is_new(self, key: tuple[bytes, str]) -> bool:
        """Whether a plan is to be compared: it never was, and no call before is doing so."""
        with self.lock:
            new = key not in self.agreed
            self.agreed.add(key)
            return new

    def forget(self, name: str, keys: Sequence[str]) -> None:
        """Delete keys of the store once every rank has said that it needs them no more."""
        size = len(self.ranks)

        def count_and_delete(store: Store) -> None:
            if store.add(name, 1) == size:
                for key in (*keys, name):
                    store.delete_key(key)

        self.line.ask(count_and_delete)

    @property
    def spans_hosts(self) -> bool:
        """Whether any two ranks can only talk over the network."""
        return len(set(self.hosts.values())) > 1

    def wire(self, watch: Watch, forced: bool) -> Wire | None:
        """The team's process group for the network, made anew after a failure; None on one host.

        All ranks make it together, also those that have nothing to send.
        """
        if not (self.spans_hosts or forced):
            return None
        with self._making_wire:
            epoch = self.epoch()
            if self._wire is None or self._epoch != epoch:
                self.drop_wire()
                self._epoch = epoch
                self._wire = self._make_wire(watch, f"wire/{epoch}")
            return self._wire

    def _make_wire(self, watch: Watch, key: str) -> Wire:
        self.meet(watch, key, "it to make a connection")
        prefix = PrefixStore(key, self.own_connection())
        return Wire(prefix, self.ranks.index(self.rank), len(self.ranks), watch.timeout)

    def meet(self, watch: Watch, key: str, what: str) -> None:
        """Wait in the store for all ranks; the key is of this meeting alone."""
        self.line.ask(lambda store: store.set(f"{key}/{self.rank}", "here"))
        watch.wait(lambda: self._not_at(key), lambda peer: what)

    def own_connection(self) -> Store:
        """Another connection to the store, for a group that keeps using it."""
        clone: Store = self.store.clone()  # type: ignore[attr-defined]
        return clone

    def _not_at(self, key: str) -> list[int]:
        left = await_keys(self.line, [f"{key}/{rank}" for rank in self.ranks], 0.2)
        return [int(name.rpartition("/")[2]) for name in left]

    def epoch(self) -> int:
        """Grows when a call has failed: process groups from before are not used any more.

        It is one more than the number of that call, so that ranks of which several tell of a
        failure, and ranks that have not heard of it yet, come to the same.
        """
        told = int(self.line.ask(lambda store: store.add("epoch", 0)))
        return max(told, self.last_failed + 1)

    def end_epoch(self, call: int) -> None:
        """A call has failed: all ranks are to make process groups anew."""

        def tell(store: Store) -> None:
            if store.add("epoch", 0) <= call:
                store.set("epoch", str(call + 1))

        self.line.ask(tell)

    def drop_wire(self) -> None:
        """Throw the network group away."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def _retire(self, arena: Arena) -> None:
        for peer in arena.known_to:
            self.mailbox.send(peer, Message(Kind.GONE, 0, b"", a=arena.number))
        arena.close()

    def close(self) -> None:
        """Close sockets and free memory."""
        if self.gpus is not None:
            self.gpus.close()
        self.drop_wire()
        self.mailbox.shut()
        self.arenas.release()
        self.line.close()


_teams: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Team]] = (
    weakref.WeakKeyDictionary()
)
_making = threading.Lock()


def team_of(group: dist.ProcessGroup, ranks: Sequence[int], timeout: float) -> Team:
    """The team of these ranks, made at the first call, which all of them must make."""
    key = tuple(sorted(ranks))
    with _making:
        teams = _teams.get(group)
        if teams is None:
            teams = _teams[group] = {}
            weakref.finalize(group, _close_all, teams).atexit = False
        if key not in teams:
            teams[key] = _make(group, key, timeout)
        return teams[key]


def _close_all(teams: dict[tuple[int, ...], Team]) -> None:
    """A group is gone, and its teams go with it."""
    while teams:
        teams.popitem()[1].close()


def teams(group: dist.ProcessGroup | None = None) -> list[Team]:
    """Every team of this process, or of a group."""
    chosen = list(_teams.values()) if group is None else [_teams.get(group, {})]
    return [team for of_group in chosen for team in of_group.values()]


def _make(group: dist.ProcessGroup, ranks: tuple[int, ...], timeout: float) -> Team:
    rank = dist.get_rank()
    _check_members(group, ranks)
    name = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
    caller = PrefixStore(f"reshard/{name}", group.get_group_store())
    store = own_store(caller, rank, ranks[0], timeout)
    door = Door(rank)
    store.set(f"who/{rank}", json.dumps({"host": host_identity(), "door": door.name}))
    missing = await_keys(store, [f"who/{other}" for other in ranks], timeout)
    if rank == ranks[0]:
        # All who come have come: a later team of these ranks must not find this one's store.
        caller.delete_key("address")
    if missing:
        absent = [int(key.removeprefix("who/")) for key in missing]
        raise MoveTimeoutError(
            f"ranks {absent} have not called within {timeout:g} s: every rank of the two layouts "
            "calls a move; if they are only late, give a longer timeout="
        )
    known = {other: json.loads(store.get(f"who/{other}")) for other in ranks}
    hosts = {other: str(who["host"]) for other, who in known.items()}
    doors = {other: str(who["door"]) for other, who in known.items() if hosts[other] == hosts[rank]}
    links = door.meet(doors, direct=True, seconds=timeout)
    return Team(rank, ranks, store, hosts, door, links)


def _check_members(group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    members = dist.get_process_group_ranks(group)
    outside = sorted(set(ranks) - set(members))
    if outside:
        raise LiveError(
            f"the layouts name ranks {outside} and the process group has {sorted(members)}: "
            "layouts speak of global ranks; give the group that has them all"
        )
