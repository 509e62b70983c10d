"""Sessions: the ranks of a move in one process group, and the numbers of the calls they make.

Ranks match calls by number: the k-th call that a rank makes on a session meets the k-th call of the
other ranks. So every call uses up exactly one number, whatever ends it: a result, an error, Ctrl-C,
an exception out of a signal handler. A call has a `Ticket` from its first statement on;
``failure/cleanup.py`` accounts for calls that an exception has left.
"""

from __future__ import annotations

import _thread
import contextlib
import hashlib
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist

from reshard.errors import LiveError
from reshard.live.session.cause import Calls, Cause
from reshard.live.session.mailbox import MAX_AHEAD
from reshard.live.session.rendezvous import MADE, Connections, Observe, Rendezvous, decide
from reshard.live.session.store import PrefixStore, Store
from reshard.live.session.tags import Tag
from reshard.live.session.worker import OwnedLock

__all__ = [
    "Session",
    "Ticket",
    "all_connections",
    "open_tickets",
    "session_of",
    "sessions",
]


TURN_PAUSE = 0.002
"""Seconds between two looks whether earlier calls have connected the session or given up."""

open_tickets: list[Ticket] = []
"""The calls of this process that are not over."""

Key = tuple[bytes, str]
"""The digest of a plan, and the options that all ranks must share."""


class Ticket:
    """One call of the user: it has used up a number of its session when it is over."""

    __slots__ = (
        "cleaned_up",
        "enqueues",
        "group",
        "number",
        "over",
        "owner",
        "ranks",
        "session",
        "tag",
        "undo",
        "watch",
    )  # fmt: skip

    def __init__(
        self, group: dist.ProcessGroup | None, ranks: Callable[[], Iterable[int]] | None = None
    ) -> None:
        self.group = group
        self.ranks = ranks
        """The ranks of the call as far as the arguments tell; None: those of the group."""
        self.session: Session | None = None
        self.number = -1
        self.tag: Tag | None = None
        self.watch: Any = None
        """The call's `Watch`; None before it has one."""
        self.undo: Callable[[], None] | None = None
        """What is to be done with a call that was left, after the other ranks have been told."""
        self.over = False
        self.enqueues = True
        """Whether the call may still enqueue GPU work, as far as is known."""
        self.owner: int | None = _thread.get_ident()
        """The thread that makes the call; None once a thread of ours has taken it over."""
        self.cleaned_up = _thread.allocate_lock()
        """Released when the cleanup thread has accounted for the call."""
        self.cleaned_up.acquire()
        open_tickets.append(self)

    def finish(self) -> None:
        """The call is over: it has its result, or all ranks have been told of its failure."""
        self.over = True
        with contextlib.suppress(ValueError):
            open_tickets.remove(self)
        # The call refers to its ticket: its tensors should go with their last user.
        self.undo = self.watch = self.ranks = None


class Session:
    """A set of ranks of one process group. It connects them when the first call needs that."""

    def __init__(
        self, home: Store, rank: int, ranks: tuple[int, ...], others: dict[tuple[int, ...], Session]
    ) -> None:
        self.rank, self.ranks, self.others = rank, ranks, others
        self.home = home
        """The store of the caller's group."""
        name = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
        self.caller: Store = PrefixStore(f"reshard/{name}", home)
        """This session's part of it."""
        self.connections: Connections | None = None
        self.candidate: Connections | None = None
        """Connected here; whether all ranks are connected is decided in the store."""
        self.rendezvous: Rendezvous | None = None
        """The attempt to connect that is under way."""
        self.lock = OwnedLock()
        self.next_number = 0
        self.agreed: set[Key] = set()
        """Plans that all ranks have compared."""
        self.on_gpus: dict[Key, bool] = {}
        """Whether such a plan goes from GPU to GPU, for those that were compared."""
        self._comparing: dict[Key, Ticket] = {}
        """The calls in which plans are being compared."""
        self._tags: dict[object, int] = {}
        """How many calls were made with the latest tag."""

    def begin(self, ticket: Ticket, tag: object = None) -> int:
        """Give a call its number."""
        with self.lock:
            ticket.session = self
            if tag is not None:
                count = self._tags.get(tag, 0)
                self._tags = {tag: count + 1}
                ticket.tag = Tag.of(tag, count)
            ticket.number = number = self.next_number
            self.next_number = number + 1
        if self.connections is not None:
            self.connections.client.renew()
        return number

    def close_call(self, number: int) -> None:
        """A call is over that has exchanged nothing."""
        if self.connections is not None:
            self.connections.mailbox.close(number)

    def must_compare(self, ticket: Ticket, key: Key) -> bool:
        """Whether a call has to compare a plan: no call has done so, and none is doing so."""
        if key in self.agreed:
            return False
        with self.lock:
            if key in self.agreed or self.is_comparing(key):
                return False
            self._comparing[key] = ticket
            return True

    def is_comparing(self, key: Key) -> bool:
        """Whether a call that is in flight compares a plan."""
        ticket = self._comparing.get(key)
        return ticket is not None and not ticket.over

    def has_compared(self, key: Key) -> None:
        """A plan was compared, and is the same on all ranks."""
        self.agreed.add(key)
        self._comparing.pop(key, None)

    def may_enqueue(self, ticket: Ticket) -> bool:
        """Whether no call before this one may still enqueue GPU work.

        NCCL matches messages by the order in which they are enqueued, so all ranks must enqueue in
        the same order: that of the calls.
        """
        return not any(
            one.session is self and one.enqueues and 0 <= one.number < ticket.number
            for one in tuple(open_tickets)
        )

    def number_of(self, ticket: Ticket) -> int:
        """The number of a call that was left, given now if an exception came before that."""
        with self.lock:
            if ticket.number < 0:
                ticket.number = self.next_number
            self.next_number = max(self.next_number, ticket.number + 1)
            return ticket.number

    def skip_calls(self, calls: Calls) -> None:
        """Count calls as made that were given up because ranks waited in different sessions."""
        for ranks, call in calls:
            if self.rank in ranks:
                with _registering:
                    if ranks not in self.others:
                        self.others[ranks] = Session(self.home, self.rank, ranks, self.others)
                self.others[ranks]._skip(call)

    def _skip(self, call: int) -> None:
        """Other ranks have given up a call that this rank may never make: it counts as made."""
        with self.lock:
            if call > self.next_number + MAX_AHEAD:
                return  # no rank can be that far ahead: the peer is broken
            skipped = range(self.next_number, call + 1)
            self.next_number = max(self.next_number, call + 1)
        if self.connections is not None:
            for number in skipped:
                self.connections.mailbox.open(number)
                self.connections.mailbox.close(number)

    def advance(self, ticket: Ticket) -> bool:
        """Give a call the next number, if no call has been made after it; whether it was done."""
        with self.lock:
            if self.next_number != ticket.number + 1:
                return False
            ticket.number += 1
            self.next_number = ticket.number + 1
            return True

    def connect(self, ticket: Ticket, timeout: float, what: str, observe: Observe) -> Connections:
        """Connect the ranks; ``what`` is what the call does, for errors."""
        # All ranks must connect in the same call: the first that has not given up.
        while self.connections is None and any(
            other.session is self and 0 <= other.number < ticket.number
            for other in list(open_tickets)
        ):
            time.sleep(TURN_PAUSE)
        if self.connections is None:
            self.rendezvous = Rendezvous(self, ticket.number, timeout, what, observe)
            self.connections = self.rendezvous.run()
            self.rendezvous = None
        return self.connections

    def give_up_connecting(self, number: int, cause: Cause) -> bool:
        """A call was left before this rank was connected; whether the session is not made."""
        outcome = ""
        with contextlib.suppress(RuntimeError):  # a store that is gone tells the others itself
            outcome = decide(self.caller, number, cause.to_json())
        if outcome == MADE:
            self.connections = self.candidate
            return False
        if self.rendezvous is not None and self.rendezvous.number == number:
            self.rendezvous.give_up()
        return True

    def release_for(self, thread: int | None) -> None:
        """Release the locks of a thread that an exception has taken out of its call."""
        self.lock.release_for(thread)
        _registering.release_for(thread)
        if self.connections is not None:
            self.connections.release_for(thread)


_sessions: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Session]] = (
    weakref.WeakKeyDictionary()
)
_registering = OwnedLock()


def session_of(group: dist.ProcessGroup, ranks: Sequence[int]) -> Session:
    """The session of these ranks; it connects them only when a call needs that."""
    known = _sessions.get(group)
    found = None if known is None else known.get(tuple(ranks))
    return _registered(group, tuple(sorted(ranks))) if found is None else found


def _registered(group: dist.ProcessGroup, ranks: tuple[int, ...]) -> Session:
    members = dist.get_process_group_ranks(group)
    outside = sorted(set(ranks) - set(members))
    if outside:
        raise LiveError(
            f"the layouts name ranks {outside} and the process group has {sorted(members)}: "
            "layouts name global ranks; give the group that has them all"
        )
    with _registering:
        known = _sessions.get(group)
        if known is None:
            known = _sessions[group] = {}
            weakref.finalize(group, _close_all, known).atexit = False
        if ranks not in known:
            known[ranks] = Session(group.get_group_store(), dist.get_rank(), ranks, known)
        return known[ranks]


def sessions(group: dist.ProcessGroup | None = None) -> list[Session]:
    """Every session of this process, or of a group."""
    chosen = list(_sessions.values()) if group is None else [_sessions.get(group, {})]
    return [session for of_group in chosen for session in list(of_group.values())]


def all_connections(group: dist.ProcessGroup | None = None) -> list[Connections]:
    """The connections of every session that is connected."""
    return [one.connections for one in sessions(group) if one.connections is not None]


def _close_all(known: dict[tuple[int, ...], Session]) -> None:
    """A group is gone, and its sessions go with it."""
    while known:
        connections = known.popitem()[1].connections
        if connections is not None:
            connections.close()
