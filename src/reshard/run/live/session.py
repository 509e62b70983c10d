"""Sessions: the ranks of a move in one process group, and the calls that this rank makes on them.

Ranks match calls by number: the k-th call that a rank makes on a session meets the k-th call of the
other ranks. So every call uses up exactly one number, whatever ends it: a result, an error, Ctrl-C,
an exception out of a signal handler. Such an exception can come between any two bytecodes of the
main thread, our own error handling included. Therefore a call has a `Ticket` from its first
statement on, and a thread of our own, which no signal handler interrupts, cleans up after calls
that an exception has left: it takes the call's number if that had not happened yet, and tells the
other ranks.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import hashlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch.distributed as dist

from reshard.errors import LiveError, ReshardError
from reshard.run.live.c10d import PrefixStore, Store
from reshard.run.live.cause import Cause
from reshard.run.live.faults import Watch
from reshard.run.live.gate import Gate
from reshard.run.live.mailbox import FAR
from reshard.run.live.rendezvous import MADE, Rendezvous, decide
from reshard.run.live.tags import AheadError, Tag
from reshard.run.live.team import Calls, Team

__all__ = ["ABANDONED", "Session", "Ticket", "counted", "session_of", "sessions", "teams"]

TURN_PAUSE = 0.002
"""Seconds between two looks whether earlier calls have connected the session or given up."""

SETTLE_SECONDS = 5.0
"""The longest that a call which an exception has left waits for the cleanup thread."""

_open: list[Ticket] = []
"""The calls of this process that are not over."""

ABANDONED: queue.SimpleQueue[tuple[Ticket, BaseException] | None] = queue.SimpleQueue()
"""Calls that an exception has left, for the cleanup thread. `put` is one step for signal handlers:
the exception that comes next finds the call in the queue."""


class Ticket:
    """One call of the user: it has used up a number of its session when it is over.

    Every public function that moves something does all of its work inside `counted`.
    """

    __slots__ = (
        "_settled", "group", "number", "over", "owner", "ranks", "session", "tag", "undo",
        "watch_of",
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
        self.watch_of: Callable[[], Watch] | None = None
        """The watch of the call; None while there is none."""
        self.undo: Callable[[], None] | None = None
        """What is to be done with a call that was left, when the other ranks have been told."""
        self.over = False
        self.owner: int | None = _thread.get_ident()
        """The thread that makes the call; None once a thread of ours has taken it over."""
        self._settled = _thread.allocate_lock()
        self._settled.acquire()
        _open.append(self)

    def finish(self) -> None:
        """The call is over: it has its result, or all ranks have been told of its failure."""
        self.over = True
        with contextlib.suppress(ValueError):
            _open.remove(self)
        # The call refers to its ticket: its tensors should go with their last user.
        self.undo = self.watch_of = self.ranks = None

    def await_cleanup(self) -> None:
        """Wait until the other ranks know: nothing of the call may go on after it has raised."""
        if not self.over:
            self._settled.acquire(timeout=SETTLE_SECONDS)

    def settle(self, error: BaseException) -> None:
        """Account for a call that an exception has left: use up its number, tell other ranks."""
        try:
            if not self.over:
                session = self.session or self._session()
                if session is not None:
                    session.abandon(self, error)
                if self.undo is not None:
                    self.undo()
        finally:
            self.finish()
            with contextlib.suppress(RuntimeError):
                self._settled.release()

    def _session(self) -> Session | None:
        """The session that a call was meant for which failed before it had one."""
        if not dist.is_initialized():
            return None
        group = self.group or dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            return None
        members = dist.get_process_group_ranks(group)
        meant: set[int] = set()
        if self.ranks is not None:
            # The arguments are wrong: whatever they raise says so.
            with contextlib.suppress(Exception):
                meant = set(self.ranks())
        ranks = sorted(meant) if meant and meant <= set(members) else sorted(members)
        if len(ranks) < 2 or dist.get_rank() not in ranks:
            return None
        return session_of(group, ranks)


T = TypeVar("T")


def counted(
    group: dist.ProcessGroup | None,
    ranks: Callable[[], Iterable[int]] | None,
    action: Callable[[Ticket], T],
) -> T:
    """Make a call, and account for it whatever is raised; see `Ticket` for ``ranks``."""
    if not _cleanup:
        _start_cleanup()
    ticket = Ticket(group, ranks)
    try:
        return action(ticket)
    except BaseException as error:
        if not ticket.over:
            ABANDONED.put((ticket, error))
            ticket.await_cleanup()
        raise


class Session:
    """A set of ranks of one process group. It connects them when the first call needs that."""

    def __init__(
        self, home: Store, rank: int, ranks: tuple[int, ...], others: dict[tuple[int, ...], Session]
    ) -> None:
        self.rank, self.ranks, self.others = rank, ranks, others
        self.home = home
        name = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
        self.caller: Store = PrefixStore(f"reshard/{name}", home)
        """Our part of the store of the caller's group."""
        self.team: Team | None = None
        self.candidate: Team | None = None
        """Connected here; whether all ranks are connected is decided in the store."""
        self.rendezvous: Rendezvous | None = None
        """The attempt to connect that is under way."""
        self.lock = Gate()
        self.next_number = 0
        self.agreed: set[tuple[bytes, str]] = set()
        """Plans that all ranks have compared, by digest and transport."""
        self._comparing: dict[tuple[bytes, str], Ticket] = {}
        """The calls in which such plans are being compared."""
        self.routes: dict[tuple[bytes, str], bool] = {}
        """Whether such a plan goes from GPU to GPU, for those that were compared."""
        self._tags: dict[object, int] = {}
        """How many calls were made with the latest tag."""

    def begin(self, ticket: Ticket, tag: object = None) -> int:
        """Give a call its number. Calls that an exception has left get theirs first."""
        if len(_open) > 1:
            self._settle_left(ticket)
        with self.lock:
            ticket.session = self
            if tag is not None:
                ticket.tag = self._tagged(tag)
            ticket.number = number = self.next_number
            self.next_number = number + 1
        if self.team is not None:
            self.team.line.renew()
        return number

    def pass_by(self, ticket: Ticket, tag: object = None) -> None:
        """Count a call that exchanges nothing."""
        self.close(self.begin(ticket, tag))

    def close(self, number: int) -> None:
        """A call is over that has had no watch."""
        if self.team is not None:
            self.team.mailbox.close(number)

    def is_new(self, ticket: Ticket, key: tuple[bytes, str]) -> bool:
        """Whether a call is to compare a plan: none has done so, and none in flight is doing so."""
        with self.lock:
            if key in self.agreed or self.is_comparing(key):
                return False
            self._comparing[key] = ticket
            return True

    def is_comparing(self, key: tuple[bytes, str]) -> bool:
        """Whether a call that is in flight compares a plan."""
        ticket = self._comparing.get(key)
        return ticket is not None and not ticket.over

    def has_compared(self, key: tuple[bytes, str]) -> None:
        """A plan was compared, and is the same on all ranks."""
        self.agreed.add(key)
        self._comparing.pop(key, None)

    def _tagged(self, tag: object) -> Tag:
        """A tag, and how many calls before this one had the same."""
        count = self._tags.get(tag, 0)
        self._tags = {tag: count + 1}
        return Tag.of(tag, count)

    def _settle_left(self, ticket: Ticket) -> None:
        """Account for calls of this thread that were left, their own error handling included."""
        for other in _open.copy():  # the cleanup thread takes them out meanwhile
            if other is not ticket and other.owner == ticket.owner:
                ABANDONED.put((other, LiveError(f"rank {self.rank} was interrupted twice")))
                other.await_cleanup()

    def number_of(self, ticket: Ticket) -> int:
        """The number of a call that was left, given now if an exception came before that."""
        with self.lock:
            if ticket.number < 0:
                ticket.number = self.next_number
            self.next_number = max(self.next_number, ticket.number + 1)
            return ticket.number

    def skip_calls(self, calls: Calls) -> None:
        """Count calls as made that were given up because a rank was in another session."""
        for ranks, call in calls:
            if self.rank in ranks:
                with _registering:
                    if ranks not in self.others:
                        self.others[ranks] = Session(self.home, self.rank, ranks, self.others)
                self.others[ranks].skip(call)

    def skip(self, call: int) -> None:
        """Others have given up a call that this rank may never make: it counts as made."""
        with self.lock:
            if call > self.next_number + FAR:
                return  # no rank can be that far ahead: the peer is broken
            skipped = range(self.next_number, call + 1)
            self.next_number = max(self.next_number, call + 1)
        if self.team is not None:
            for number in skipped:
                self.team.mailbox.open(number)
                self.team.mailbox.close(number)

    def move_up(self, ticket: Ticket) -> bool:
        """Give a call the next number, if no call has been made after it; whether it was done."""
        with self.lock:
            if self.next_number != ticket.number + 1:
                return False
            ticket.number += 1
            self.next_number = ticket.number + 1
            return True

    def connect(self, ticket: Ticket, timeout: float, what: str) -> Team:
        """The connected ranks; ``what`` is what the call does, for errors."""
        if self.team is None:
            self._await_turn(ticket)
        if self.team is None:
            self.rendezvous = Rendezvous(self, ticket.number, timeout, what)
            self.team = self.rendezvous.run()
            self.rendezvous = None
        return self.team

    def _await_turn(self, ticket: Ticket) -> None:
        """All ranks must connect in the same call: the first that has not given up."""
        while self.team is None and any(
            other.session is self and 0 <= other.number < ticket.number for other in list(_open)
        ):
            time.sleep(TURN_PAUSE)

    def abandon(self, ticket: Ticket, error: BaseException) -> None:
        """Tell the other ranks that this one has left a call."""
        self.lock.open_for(ticket.owner)
        _registering.open_for(ticket.owner)
        number, cause = self.number_of(ticket), Cause.of_any(error, self.rank)
        if ticket.watch_of is None and self.team is None:
            outcome = ""
            with contextlib.suppress(RuntimeError):  # a store that is gone tells the others itself
                outcome = decide(self.caller, number, cause.to_json())
            if outcome != MADE:
                if self.rendezvous is not None and self.rendezvous.number == number:
                    self.rendezvous.give_up()
                return
            self.team = self.candidate
        assert self.team is not None
        self.team.release_for(ticket.owner)
        watch = self._watch(ticket, self.team)
        try:
            if not watch.is_over:
                with contextlib.suppress(ReshardError, AheadError):
                    watch.fail(cause)
        finally:
            watch.close()

    def _watch(self, ticket: Ticket, team: Team) -> Watch:
        if ticket.watch_of is not None:
            return ticket.watch_of()
        args = (team, ticket.number, b"")
        return Watch(*args, timeout=1.0, deadline=None, status=lambda: "", tag=ticket.tag)


_sessions: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Session]] = (
    weakref.WeakKeyDictionary()
)
_registering = Gate()


def session_of(group: dist.ProcessGroup, ranks: Sequence[int]) -> Session:
    """The session of these ranks; it connects them only when a call needs that."""
    key = tuple(ranks)
    known = _sessions.get(group)
    found = None if known is None else known.get(key)
    return _registered(group, tuple(sorted(ranks))) if found is None else found


def _registered(group: dist.ProcessGroup, ranks: tuple[int, ...]) -> Session:
    _check_members(group, ranks)
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


def teams(group: dist.ProcessGroup | None = None) -> list[Team]:
    """The connected ranks of every session that is connected."""
    return [session.team for session in sessions(group) if session.team is not None]


def _check_members(group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    members = dist.get_process_group_ranks(group)
    outside = sorted(set(ranks) - set(members))
    if outside:
        raise LiveError(
            f"the layouts name ranks {outside} and the process group has {sorted(members)}: "
            "layouts speak of global ranks; give the group that has them all"
        )


def _close_all(known: dict[tuple[int, ...], Session]) -> None:
    """A group is gone, and its sessions go with it."""
    while known:
        team = known.popitem()[1].team
        if team is not None:
            team.close()


_cleanup: list[threading.Thread] = []


def _start_cleanup() -> None:
    thread = threading.Thread(target=_clean_up, daemon=True, name="reshard-cleanup")
    thread.start()
    _cleanup[:] = [thread]


def _clean_up() -> None:
    while (left := ABANDONED.get()) is not None:
        with contextlib.suppress(Exception):  # the ranks time out where the store is gone, too
            left[0].settle(left[1])
        del left  # An idle thread must keep nothing alive.


def _leave_at_exit() -> None:
    """No thread of ours may be about while Python ends: torch's objects cannot end in one then."""
    if _cleanup:
        ABANDONED.put(None)
        _cleanup[0].join(SETTLE_SECONDS)
    for team in teams():
        team.end_threads()


atexit.register(_leave_at_exit)


def _leave_in_child() -> None:
    """A forked process is no rank: while it held sockets, no peer would see its parent die."""
    _cleanup.clear()
    _open.clear()
    for team in teams():
        team.mailbox.abandon()


os.register_at_fork(after_in_child=_leave_in_child)
