"""Every call uses its number, however it ends.

A signal handler may raise between any two bytecodes of the main thread, error handling included. So
every public function that moves tensors runs inside `with_ticket`. A thread of reshard's own, which
no signal handler interrupts, ends the calls that an exception has interrupted: it takes the call's
number if the call had none yet, and aborts the call on the other ranks. A second exception may come
before the thread is told of the first, so it also looks for calls that their threads have left.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn, TypeVar, TypeVarTuple

import torch.distributed as dist

from reshard.errors import LiveError, ReshardError
from reshard.live.failure.watch import Watch
from reshard.live.session.control import CallAheadError, Cause
from reshard.live.session.session import (
    Session,
    Ticket,
    all_connections,
    is_inherited,
    open_tickets,
    session_of,
    sessions,
)
from reshard.live.session.store import UndecidedError, Worker, release_locks_of

CLEANUP_SECONDS = 5.0
"""The longest that an interrupted call waits for the cleanup thread."""

PAUSE = 0.0005
"""Seconds between two checks whether the cleanup thread has ended a call."""

LOOK_EVERY = 0.3
"""Seconds between two checks whether a second exception took a thread out of its call."""

END_SECONDS = 1.0
"""How long the end of a process waits for calls that are being ended."""

_abandoned: queue.SimpleQueue[tuple[Ticket, BaseException] | None] = queue.SimpleQueue()
"""Interrupted calls. `put` is one call of C, so a second exception finds the call in the queue."""

_thread: list[threading.Thread] = []

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def with_ticket(
    group: dist.ProcessGroup | None,
    ranks: Callable[[*Ts], Iterable[int]] | None,
    action: Callable[[Ticket, *Ts], T],
    *args: *Ts,
) -> T:
    """Run one call of the user, which gets a ticket; ``ranks`` finds those that ``args`` name."""
    if not _thread:
        thread = threading.Thread(target=_serve, daemon=True, name="reshard-cleanup")
        thread.start()
        _thread[:] = [thread]
    ticket = Ticket(group, ranks, args)
    with ticket.inside:
        ticket.entered = True
        try:
            if len(open_tickets) > 1:
                # Earlier calls of this thread whose error handling was interrupted as well; the
                # cleanup thread removes tickets meanwhile.
                for other in open_tickets.copy():
                    if other is not ticket and other.owner == ticket.owner:
                        abandon(other, LiveError(f"rank {dist.get_rank()} was interrupted twice"))
            return action(ticket, *args)
        except UndecidedError as undecided:
            raise abandon(ticket, undecided) from None
        except BaseException as error:
            if not ticket.over:
                abandon(ticket, error)
            raise


def fail_and_close(watch: Watch | None, error: ReshardError, close: Callable[[], None]) -> NoReturn:
    """End a call on which an error was found: all its ranks raise it.

    After any other exception the cleanup thread closes the call.
    """
    try:
        if watch is not None:
            watch.fail_with(error)
        raise error
    except (ReshardError, CallAheadError):
        close()
        raise


def abandon(ticket: Ticket, error: BaseException) -> BaseException:
    """Hand an interrupted call to the cleanup thread, and wait until the call is over.

    After an `UndecidedError` nothing was interrupted and the end of the call is open: this thread
    does not wait, and may hold locks. Returns what the call raises.
    """
    if isinstance(error, UndecidedError):
        ticket.owner = None
        _abandoned.put((ticket, error.error))
        return error.error
    _abandoned.put((ticket, error))
    if not ticket.over:
        end = time.monotonic() + CLEANUP_SECONDS
        while not ticket.over and time.monotonic() < end:
            time.sleep(PAUSE)
        ticket.owner = None
    return error


def _clean_up(ticket: Ticket, error: BaseException) -> None:
    """Abort an interrupted call on the other ranks, and free its resources."""
    try:
        if not ticket.over:
            if ticket.session is not None:
                _abort(ticket.session, ticket, error)
            if ticket.undo is not None and not ticket.in_thread:
                ticket.undo()
    finally:
        ticket.finish()


def _begin_cleanup(ticket: Ticket, error: BaseException) -> None:
    """Take the number of a call at once, before this thread's next call takes it.

    A thread of the session ends the call: that may wait for a store that does not answer.
    """
    ticket.abandoned = True
    session = None if ticket.over else ticket.session or _intended_session(ticket)
    if session is None:
        _clean_up(ticket, error)
        return
    release_locks_of(ticket.owner)
    session.number_of(ticket)
    ticket.session = session
    if session.cleanup_worker is None or not session.cleanup_worker.is_alive:
        session.cleanup_worker = Worker()
    session.cleanup_worker.submit(partial(_clean_up, ticket, error))


def _abort(session: Session, ticket: Ticket, error: BaseException) -> None:
    number, cause = ticket.number, Cause.of(error, session.rank)
    watch: Watch | None = ticket.watch
    if watch is None:
        if session.connections is None and session.give_up_connecting(number, cause):
            session.close_call(number)
            return
        watch = Watch(ticket, b"")
    try:
        if watch.cause is None:
            with contextlib.suppress(ReshardError, CallAheadError):
                watch.fail(cause)
    finally:
        watch.close()


def _intended_session(ticket: Ticket) -> Session | None:
    """The session of a call that failed before it had one, from its arguments."""
    if not dist.is_initialized():
        return None
    group: Any = ticket.group or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
            return None  # the other ranks have a group that this rank is not in
        group = dist.group.WORLD  # the group of ranks that gave none
    ranks = members = set(dist.get_process_group_ranks(group))
    if ticket.ranks is not None:
        with contextlib.suppress(Exception):  # the arguments may be wrong
            ranks = set(ticket.ranks(*ticket.arguments))
    if not ranks or not ranks <= members:
        ranks = members
    is_one = len(ranks) > 1 and dist.get_rank() in ranks and not is_inherited(group)
    return session_of(group, sorted(ranks)) if is_one else None


def _serve() -> None:
    while True:
        with contextlib.suppress(Exception):
            try:
                abandoned = _abandoned.get(timeout=LOOK_EVERY)
            except queue.Empty:
                _abandon_left()
                continue
            if abandoned is None:
                return
            _begin_cleanup(*abandoned)
        abandoned = None  # an idle thread must keep nothing alive


def _abandon_left() -> None:
    """Abandon calls that their thread has left although they are not over.

    Otherwise the other ranks would wait until that thread makes its next call, or for ever.
    """
    for ticket in tuple(open_tickets):
        # Whether it is over is read last: a call is over before its thread leaves it. A call in a
        # thread of reshard has no owner.
        is_left = ticket.entered and not ticket.inside.locked() and ticket.owner is not None
        if is_left and not (ticket.over or ticket.abandoned):
            _begin_cleanup(ticket, LiveError(f"rank {dist.get_rank()} was interrupted twice"))


@atexit.register
def _leave_at_exit() -> None:
    """End all threads: they must not free objects of torch while Python ends."""
    if _thread:
        _abandoned.put(None)
        _thread[0].join(CLEANUP_SECONDS)
    for session in sessions():
        if session.cleanup_worker is not None:
            session.cleanup_worker.end(END_SECONDS)
    for connections in all_connections():
        connections.end_threads()


os.register_at_fork(after_in_child=_thread.clear)
