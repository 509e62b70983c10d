"""Account for every call, whatever ends it.

A signal handler may raise between any two bytecodes of the main thread, our own error handling
included. So every public function that moves something works inside `with_ticket`, and a thread of our
own, which no signal handler interrupts, cleans up after calls that an exception has left: it uses
up the call's number if that had not happened yet, and tells the other ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Concatenate, ParamSpec, TypeVar

import torch.distributed as dist

from reshard.errors import LiveError, ReshardError
from reshard.live.failure.watch import Watch
from reshard.live.session.cause import Cause
from reshard.live.session.session import (
    Session,
    Ticket,
    all_connections,
    open_tickets,
    session_of,
)
from reshard.live.session.tags import CallAheadError

__all__ = ["abandon", "clean_up", "with_ticket"]

CLEANUP_SECONDS = 5.0
"""The longest that a call which an exception has left waits for the cleanup thread."""

_abandoned: queue.SimpleQueue[tuple[Ticket, BaseException] | None] = queue.SimpleQueue()
"""Calls that an exception has left. `put` is one step for signal handlers: the exception that comes
next finds the call in the queue."""

_thread: list[threading.Thread] = []

T = TypeVar("T")
P = ParamSpec("P")


def with_ticket(
    group: dist.ProcessGroup | None,
    ranks: Callable[[], Iterable[int]] | None,
    action: Callable[Concatenate[Ticket, P], T],
    *args: P.args,
    **options: P.kwargs,
) -> T:
    """Make a call, and account for it whatever is raised; see `Ticket` for ``ranks``."""
    if not _thread:
        _start_thread()
    ticket = Ticket(group, ranks)
    try:
        if len(open_tickets) > 1:
            _abandon_earlier(ticket)
        return action(ticket, *args, **options)
    except BaseException as error:
        if not ticket.over:
            abandon(ticket, error)
        raise


def abandon(ticket: Ticket, error: BaseException) -> None:
    """Hand a call that an exception has left to the cleanup thread, and wait for it.

    Nothing of the call may go on after it has raised.
    """
    _abandoned.put((ticket, error))
    if not ticket.over:
        ticket.cleaned_up.acquire(timeout=CLEANUP_SECONDS)


def _abandon_earlier(ticket: Ticket) -> None:
    """Account for calls of this thread that were left, their own error handling included."""
    for other in open_tickets.copy():  # the cleanup thread takes them out meanwhile
        if other is not ticket and other.owner == ticket.owner:
            abandon(other, LiveError(f"rank {dist.get_rank()} was interrupted twice"))


def clean_up(ticket: Ticket, error: BaseException) -> None:
    """Use up the number of a call that was left, and tell the other ranks."""
    try:
        if not ticket.over:
            session = ticket.session or _intended_session(ticket)
            if session is not None:
                _tell_ranks(session, ticket, error)
            if ticket.undo is not None:
                ticket.undo()
    finally:
        ticket.finish()
        with contextlib.suppress(RuntimeError):
            ticket.cleaned_up.release()


def _tell_ranks(session: Session, ticket: Ticket, error: BaseException) -> None:
    session.release_for(ticket.owner)
    number, cause = session.number_of(ticket), Cause.of(error, session.rank)
    watch: Watch | None = ticket.watch
    if watch is None:
        if session.connections is None and session.give_up_connecting(number, cause):
            return
        assert session.connections is not None
        session.release_for(ticket.owner)
        watch = Watch(session, session.connections, number, b"", timeout=1.0, tag=ticket.tag)
    try:
        if not watch.abort.is_over:
            with contextlib.suppress(ReshardError, CallAheadError):
                watch.fail(cause)
    finally:
        watch.close()


def _intended_session(ticket: Ticket) -> Session | None:
    """The session that a call was meant for which failed before it had one."""
    if not dist.is_initialized():
        return None
    group = ticket.group or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        return None
    members = dist.get_process_group_ranks(group)
    meant: set[int] = set()
    if ticket.ranks is not None:
        # The arguments are wrong: whatever they raise says so.
        with contextlib.suppress(Exception):
            meant = set(ticket.ranks())
    ranks = sorted(meant) if meant and meant <= set(members) else sorted(members)
    if len(ranks) < 2 or dist.get_rank() not in ranks:
        return None
    return session_of(group, ranks)


def _start_thread() -> None:
    thread = threading.Thread(target=_serve, daemon=True, name="reshard-cleanup")
    thread.start()
    _thread[:] = [thread]


def _serve() -> None:
    while (left := _abandoned.get()) is not None:
        with contextlib.suppress(Exception):  # where the store is gone, ranks time out
            clean_up(*left)
        del left  # an idle thread must keep nothing alive


@atexit.register
def _leave_at_exit() -> None:
    """End our threads: torch's objects cannot be freed in a thread while Python ends."""
    if _thread:
        _abandoned.put(None)
        _thread[0].join(CLEANUP_SECONDS)
    for connections in all_connections():
        connections.end_threads()


def _leave_in_child() -> None:
    """A forked process is no rank: while it held sockets, no peer would see its parent die."""
    _thread.clear()
    open_tickets.clear()
    for connections in all_connections():
        connections.mailbox.close_in_child()


os.register_at_fork(after_in_child=_leave_in_child)
