"""Sessions: the ranks of a move in one process group, and the numbers of the calls they make.

Ranks match calls by number: the k-th call that a rank makes in a session meets the k-th call of the
other ranks. So every call uses exactly one number, however it ends: a result, an error, Ctrl-C, an
exception of a signal handler. A call has a `Ticket` from its first statement on;
``failure/cleanup.py`` ends the calls that an exception has interrupted.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from _thread import allocate_lock, get_ident
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist

from reshard.errors import LiveError
from reshard.layout.mesh import format_ranks
from reshard.live.session.control import Calls, Cause, Tag
from reshard.live.session.mailbox import MAX_AHEAD
from reshard.live.session.rendezvous import CONNECTED, Connections, Rendezvous, decide
from reshard.live.session.store import (
    Member,
    OwnedLock,
    Store,
    UndecidedError,
    Worker,
    holders,
    own_connection,
)
from reshard.text import count, log

TURN_PAUSE = 0.002
"""Seconds between two checks whether earlier calls have connected the session or given up."""

open_tickets: dict[Ticket, None] = {}
"""The calls of this process that are not over, in the order in which they began."""

Key = tuple[bytes, str, bool]
"""The digest of a plan, and the options that all ranks must share: transport, atomic."""


class Ticket:
    """One call of the user; when it is over it has used one number of its session."""

    session: Session | None = None
    number = -1
    tag: Tag | None = None
    watch: Any = None
    """The call's `Watch`, once it has one."""
    undo: Callable[[], None] | None = None
    """Frees the resources of an interrupted call, after the other ranks know of it."""
    over = False
    abandoned = False
    """Whether an exception has interrupted the call, and the cleanup thread ends it."""
    in_thread = False
    """Whether a thread of reshard makes the call, which closes it when it learns of an abort."""
    entered = False
    """Whether its thread has entered the call."""
    enqueues = True
    """Whether the call may still enqueue GPU work, as far as is known."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ranks: Callable[..., Iterable[int]] | None = None,
        arguments: tuple[object, ...] = (),
    ) -> None:
        self.group = group
        self.ranks, self.arguments = ranks, arguments
        """Finds the ranks that the arguments of the call name; None: those of the group."""
        self.owner: int | None = get_ident()
        """The user's thread that makes the call; None if a thread of reshard does."""
        self.inside = allocate_lock()
        """Locked while the thread is inside the call. The interpreter releases it when an exception
        leaves the call, before a signal handler can raise another one."""
        open_tickets[self] = None

    def finish(self) -> None:
        """The call is over: it has its result, or all ranks know that it failed."""
        self.over = True
        open_tickets.pop(self, None)
        # The call and its ticket refer to each other: its tensors must not wait for the collector.
        self.undo = self.watch = self.ranks = None
        self.arguments = ()


class Session(Member):
    """A set of ranks of one process group; the first call that needs it connects them."""

    is_over = False
    """Whether its process group was destroyed, or belongs to the process that forked this one."""

    def __init__(self, store: Store, rank: int, ranks: tuple[int, ...], group: Sessions) -> None:
        super().__init__(store, rank, ranks)
        self._group = group
        """All sessions of the process group."""
        self.connections: Connections | None = None
        self._rendezvous: Rendezvous | None = None
        """The attempt to connect that is under way."""
        self.lock = OwnedLock()
        self.next_number = 0
        self.agreed: set[Key] = set()
        """Plans that all ranks have compared."""
        self.routes: dict[Key, Any] = {}
        """How each of these plans moves from GPU to GPU (`GpuRoutes`); None if it does not."""
        self.cleanup_worker: Worker | None = None
        """Ends calls that were interrupted, one after the other; the cleanup thread makes it."""
        self._closed_early: set[int] = set()
        """Calls that ended before this rank knew that an earlier one had connected the ranks."""
        self._comparing: dict[Key, Ticket] = {}
        """The calls in which plans are being compared."""
        self._tags: dict[object, int] = {}
        """The latest tag, and the number of calls with it."""

    def begin(self, ticket: Ticket, tag: object = None) -> int:
        """Give a call its number."""
        ticket.session = self
        me = get_ident()
        while holders.setdefault(self.lock, me) != me:  # `with self.lock`, without two calls
            time.sleep(TURN_PAUSE)
        if tag is not None:
            count = self._tags.get(tag, 0)
            self._tags = {tag: count + 1}
            ticket.tag = Tag.of(tag, count)
        ticket.number = number = self.next_number
        self.next_number = number + 1
        holders.pop(self.lock, None)
        return number

    def close_call(self, number: int) -> None:
        """End a call that has exchanged nothing."""
        if self.connections is not None:
            self.connections.mailbox.skip(number)
            return
        self._closed_early.add(number)
        if self.connections is not None:  # since just now, by another thread
            self._connected(self.connections)

    def _connected(self, connections: Connections) -> Connections:
        """The ranks are connected: earlier calls did not count in the mailbox, later ones do."""
        self.connections = connections
        for number in tuple(self._closed_early):
            connections.mailbox.close(number)
            self._closed_early.discard(number)
        return connections

    def must_compare(self, ticket: Ticket, key: Key) -> bool:
        """Whether a call has to compare a plan: no call has done so, and no other is doing so."""
        with self.lock:
            if key in self.agreed or self.is_comparing(key):
                return False
            self._comparing[key] = ticket
            return True

    def is_comparing(self, key: Key) -> bool:
        ticket = self._comparing.get(key)
        return ticket is not None and not ticket.over

    def has_compared(self, key: Key) -> None:
        self.agreed.add(key)
        self._comparing.pop(key, None)

    def may_enqueue(self, ticket: Ticket) -> bool:
        """Whether no call before this one may still enqueue GPU work.

        NCCL matches messages by the order in which they are enqueued, so all ranks must enqueue in
        the same order: that of the calls.
        """
        return not any(earlier.enqueues for earlier in self._calls_before(ticket))

    def _calls_before(self, ticket: Ticket) -> list[Ticket]:
        """The calls of this session with lower numbers that are not over."""
        open_ = tuple(open_tickets)
        return [one for one in open_ if one.session is self and 0 <= one.number < ticket.number]

    def number_of(self, ticket: Ticket) -> int:
        """The number of an interrupted call, taken now if the exception came before that."""
        with self.lock:
            if ticket.number < 0:
                ticket.number = self.next_number
            self.next_number = max(self.next_number, ticket.number + 1)
            return ticket.number

    def skip_calls(self, calls: Calls) -> None:
        """Skip calls that failed because ranks waited in different sessions, also of others.

        Their numbers are used: other ranks gave them up, and this one may never make them.
        """
        for ranks, call in calls:
            if self.rank not in ranks:
                continue
            made = Session(self.group_store, self.rank, ranks, self._group)
            session = self._group.setdefault(ranks, made)
            with session.lock:
                if call > session.next_number + MAX_AHEAD:
                    continue  # no rank can be that far ahead: the peer is broken
                skipped = range(session.next_number, call + 1)
                session.next_number = max(session.next_number, call + 1)
            if session.connections is not None:
                for number in skipped:
                    session.connections.mailbox.open(number)
                    session.connections.mailbox.close(number)

    def advance(self, ticket: Ticket) -> bool:
        """Give a call the next number, unless a later call has it; whether that was possible."""
        with self.lock:
            if self.next_number != ticket.number + 1:
                return False
            ticket.number += 1
            self.next_number = ticket.number + 1
            return True

    def connect(self, ticket: Ticket, timeout: float, what: str) -> Connections:
        """Connect the ranks; ``what`` is what the call does, for errors."""
        connections = self.connections
        if connections is not None:
            if connections.client.was_stuck:
                connections.client.renew()
            return connections
        began = time.monotonic()
        # All ranks must connect in the same call: the first that has not given up.
        while self.connections is None and (earlier := self._calls_before(ticket)):
            is_late = time.monotonic() - began > timeout
            if is_late and any(one.abandoned for one in earlier):
                raise UndecidedError(self.rank, timeout, what)
            time.sleep(TURN_PAUSE)
        if self.connections is None:
            rendezvous = self._rendezvous = Rendezvous(self, ticket.number, timeout, what)
            try:
                connections = self._connected(rendezvous.run())
            finally:
                self.skip_calls(rendezvous.skipped)
            self._rendezvous = None
            hosts = count(len(set(connections.hosts.values())), "host")
            log.info(
                "rank %d: connected ranks %s on %s in %.3f s", self.rank,
                format_ranks(self.ranks), hosts, time.monotonic() - began,
            )  # fmt: skip
        assert self.connections is not None
        return self.connections

    def give_up_connecting(self, number: int, cause: Cause) -> bool:
        """End a call that was interrupted before this rank was connected.

        False if the ranks are connected nevertheless: then the call fails like any other.
        """
        rendezvous, outcome = self._rendezvous, ""
        with contextlib.suppress(RuntimeError):  # without the store, the other ranks fail as well
            store = own_connection(self.group_store)
            outcome = decide(store, self.key(number, "outcome"), cause.to_json())
        if rendezvous is not None and rendezvous.number == number:
            if outcome == CONNECTED and rendezvous.candidate is not None:
                self._connected(rendezvous.candidate)
                rendezvous.listener.close()
                rendezvous.store.close()
                self._rendezvous = None
                return False
            rendezvous.give_up()
        return True


Sessions = dict[tuple[int, ...], Session]
_sessions: weakref.WeakKeyDictionary[dist.ProcessGroup, Sessions] = weakref.WeakKeyDictionary()
_registering = OwnedLock()
_inherited: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Session]]
_inherited = weakref.WeakKeyDictionary()
"""Process groups, and their sessions, that belong to the process which forked this one."""


def is_inherited(group: dist.ProcessGroup) -> bool:
    """Whether a group belongs to the process that forked this one."""
    return group in _inherited


def _leave_in_child() -> None:
    """In a forked process: close the sockets, so that peers notice when the parent ends.

    Calls raise here. On connections that two processes share, their messages would be mixed up.
    """
    world: Any = getattr(dist.distributed_c10d, "_world", None)  # private to torch: all its groups
    for group in {*_sessions, *getattr(world, "pg_map", ())}:
        of_group = _sessions.get(group, {})
        for session in of_group.values():
            session.is_over = True
            if session.connections is not None:
                for link in session.connections.mailbox.sockets.values():
                    link.close()  # without locks, whose holders do not exist here
        _inherited.setdefault(group, []).extend(of_group.values())
        of_group.clear()
    open_tickets.clear()


os.register_at_fork(after_in_child=_leave_in_child)


def session_of(group: dist.ProcessGroup, ranks: Sequence[int]) -> Session:
    """The session of these ranks; it connects them only when a call needs that."""
    session = _sessions.get(group, {}).get(tuple(ranks))
    if session is not None:
        return session
    if is_inherited(group):
        raise LiveError(
            "this process was forked from a rank and shares its connections, so it is no rank "
            "itself: call in the parent, or start the process by spawn and let it join a group"
        )
    members = dist.get_process_group_ranks(group)
    outside = sorted(set(ranks) - set(members))
    if outside:
        raise LiveError(
            f"the layouts name ranks {outside} and the process group has {sorted(members)}: "
            "layouts name global ranks; give the group that has them all"
        )
    with _registering:
        of_group = _sessions.get(group)
        if of_group is None:
            of_group = _sessions[group] = {}
            weakref.finalize(group, _close_all, of_group).atexit = False
    ordered = tuple(sorted(ranks))
    made = Session(group.get_group_store(), dist.get_rank(), ordered, of_group)
    return of_group.setdefault(ordered, made)


def sessions(group: dist.ProcessGroup | None = None) -> list[Session]:
    """All sessions of this process, or of a group."""
    chosen = list(_sessions.values()) if group is None else [_sessions.get(group, {})]
    return [session for of_group in chosen for session in list(of_group.values())]


def all_connections(group: dist.ProcessGroup | None = None) -> list[Connections]:
    """The connections of these sessions, where their ranks are connected."""
    return [one.connections for one in sessions(group) if one.connections is not None]


def _close_all(of_group: Sessions) -> None:
    """Close the sessions of a process group that was destroyed."""
    while of_group:
        session = of_group.popitem()[1]
        session.is_over = True
        if session.cleanup_worker is not None:
            session.cleanup_worker.end()
        if session.connections is not None:
            session.connections.close()
