"""Calls that end before the ranks are connected use their number, whatever the store does."""

import signal
import threading
import time
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from reshard.errors import MoveTimeoutError
from reshard.live.api import Handle
from reshard.live.call import Call
from reshard.live.failure import cleanup
from reshard.live.session.session import Ticket, sessions
from reshard.live.session.shared_memory import BufferPool
from reshard.live.session.store import GroupStore, StoreGoneError, UndecidedError
from reshard.live.transport.host import HostTransport
from reshard.show.run_report import RunReport
from tests.live.failure.faults import Tried, plan_of, source_of, tried
from tests.ranks.pool import fresh_ranks
from tests.ranks.rank import tell
from tests.soak import within


def wait_for_ever() -> None:
    """Another thread of the user waits on the connection of the group's store."""
    with suppress(Exception):
        dist.distributed_c10d._get_default_store().wait(["never"], timedelta(seconds=20))


def call_wrongly_while_the_store_is_busy(rank: int) -> list[Any]:
    """Three calls with other values each; rank 1 gives the first two an unknown option."""
    plan = plan_of((8, 8))
    if rank == 1:
        threading.Thread(target=wait_for_ever, daemon=True).start()
        time.sleep(0.3)
    found: list[Any] = []
    for number in range(3):
        wrong = {"nonsense": 1} if rank == 1 and number < 2 else {}
        given = {
            name: torch.full_like(local, 100.0 * number + rank)
            for name, local in source_of(plan, rank).items()
        }
        got: dict[str, torch.Tensor] = {}
        one = tried(lambda: got.update(plan.run(given, timeout=20, **wrong)))  # noqa: B023
        found.append((one, sorted({*got["tensor"].flatten().tolist()}) if got else []))
    return found


def test_a_busy_store_swaps_no_calls() -> None:
    with fresh_ranks(4) as ranks:
        for calls in ranks.run(call_wrongly_while_the_store_is_busy, timeout=60):
            (first, _), (second, _), (third, values) = calls
            assert "no option nonsense=" in first.cause
            assert "no option nonsense=" in second.cause
            assert third.kind == "moved", third
            assert values == [200.0, 201.0, 202.0, 203.0]
            assert first.seconds < within(4.0), first


def interrupt_the_second_call(rank: int) -> tuple[Tried, Tried, int, int]:
    """The first call connects in a thread, and waits for rank 3; the second waits for the first."""
    plan = plan_of((64, 64))
    if rank == 3:
        time.sleep(1.5)
    handle = plan.start(source_of(plan, rank), timeout=20)
    tell("calling")
    second = tried(lambda: plan.run(source_of(plan, rank), timeout=20))
    first = tried(handle.wait)
    dist.barrier()
    for _ in range(5):
        plan.run(source_of(plan, rank), timeout=20)
    (session,) = sessions()
    assert session.connections is not None
    mailbox = session.connections.mailbox
    return first, second, session.next_number - mailbox.num_finished, len(mailbox._over)


def test_a_call_that_is_interrupted_while_an_earlier_one_connects_is_counted() -> None:
    """Otherwise peers would keep its buffers, and those of all later calls."""
    with fresh_ranks(4) as ranks:
        job = ranks.begin(interrupt_the_second_call)
        job.hear(1)
        time.sleep(0.5)
        ranks.kill(1, signal.SIGINT)
        outcomes = [outcome.value for outcome in job.outcomes(60)]
    for rank, (first, second, open_calls, over) in enumerate(outcomes):
        assert first.kind == "moved", first
        assert second.kind == ("KeyboardInterrupt" if rank == 1 else "LiveError"), second
        assert (open_calls, over) == (0, 0)


def test_a_store_that_was_given_up_answers_at_once() -> None:
    """A thread that still waits in a rendezvous must not wait for a thread that has ended."""
    store = GroupStore(dist.HashStore(), 0, 20.0, "a move")
    store.set("key", "value")
    assert store.values({1: "key", 2: "other"}) == {1: b"value"}
    store.close()
    began = time.monotonic()
    with pytest.raises(StoreGoneError, match="given up"):
        store.set("key", "other")
    assert not store.is_stuck
    assert time.monotonic() - began < 1.0


class SlowTransport:
    """Two threads are in its `close` at the same time."""

    def __init__(self) -> None:
        self.both = threading.Barrier(2, timeout=10)

    def close(self, ok: bool) -> None:
        assert not ok
        self.both.wait()


def test_two_threads_may_close_a_call() -> None:
    """After an interrupted `Handle.wait`: the thread of the move, and the cleanup thread."""
    call = object.__new__(Call)
    call._transports = [SlowTransport()]  # type: ignore[list-item]
    with ThreadPoolExecutor(2) as threads:
        for closed in [threads.submit(call._close_transports) for _ in range(2)]:
            closed.result()
    assert not call._transports


class WatchedBuffer:
    """Another thread comes while this buffer is lent."""

    def __init__(self, other: Callable[[], None]) -> None:
        self.other: Callable[[], None] | None = other

    @property
    def loans(self) -> dict[int, int]:
        other, self.other = self.other, None
        if other is not None:
            other()
        return {}

    @loans.setter
    def loans(self, loans: dict[int, int]) -> None:
        assert loans == {1: 0}


def test_two_threads_may_give_buffers_back() -> None:
    pool = BufferPool(lambda _: None, lambda *_: True)
    used: list[Any] = []
    given = [WatchedBuffer(lambda: pool.end_call(used, 0, [1], ok=True)) for _ in range(3)]
    used += given
    pool.end_call(used, 0, [1], ok=True)
    assert sorted(map(id, pool._free)) == sorted(map(id, given))
    assert used == []


SOON = 2.5


def leave_by_two_exceptions(rank: int) -> tuple[Tried, Tried, float]:
    """On rank 1 a second exception comes before the cleanup thread is told of the first."""
    plan = plan_of((8, 8))
    given = source_of(plan, rank)
    plan.run(given)
    began = time.monotonic()
    if rank == 1:
        with mock.patch.object(cleanup, "abandon", side_effect=KeyboardInterrupt):
            left = tried(lambda: plan.run(given, nonsense=1))  # type: ignore[call-arg]
        time.sleep(SOON)  # no further call, for longer than the others may take
        seconds = 0.0
    else:
        left = tried(lambda: plan.run(given, timeout=20))
        seconds = time.monotonic() - began
        time.sleep(max(0.0, SOON - seconds))
    return left, tried(lambda: plan.run(given, timeout=20)), seconds


def test_a_call_that_two_exceptions_leave_is_heard_of() -> None:
    """Although the rank makes no further call: the others do not wait for their timeout."""
    with fresh_ranks(4) as ranks:
        found = ranks.run(leave_by_two_exceptions, timeout=60)
    for rank, (left, then, seconds) in enumerate(found):
        assert left.kind == ("KeyboardInterrupt" if rank == 1 else "LiveError"), left
        assert rank == 1 or "rank 1 was interrupted twice" in left.cause, left
        assert seconds < SOON, (rank, seconds)
        assert then.kind == "moved", then


def interrupt_the_wait_for_a_thread(rank: int) -> tuple[Tried, Tried, Tried]:
    """On rank 1 `wait` is interrupted while the thread of the handle is about to send a message."""
    plan, usual = plan_of((64, 64)), HostTransport._stage
    given = source_of(plan, rank)
    options: Any = {"transport": "shared", "timeout": 20}
    plan.run(given, **options)

    def stage_and_pause(transport: HostTransport, *args: Any) -> None:
        usual(transport, *args)
        time.sleep(0.8)

    if rank == 1:
        HostTransport._stage = stage_and_pause  # type: ignore[method-assign]
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    handle = plan.start(given, **options)
    first, second = tried(handle.wait), tried(handle.wait)
    HostTransport._stage = usual  # type: ignore[method-assign]
    return first, second, tried(lambda: plan.run(given, **options))


def test_a_thread_that_still_uses_buffers_closes_its_call_itself() -> None:
    with fresh_ranks(4) as ranks:
        found = ranks.run(interrupt_the_wait_for_a_thread, timeout=60)
    for rank, (first, second, then) in enumerate(found):
        assert first.kind == ("KeyboardInterrupt" if rank == 1 else "LiveError"), first
        assert "rank 1 was interrupted" in second.cause, second
        assert then.kind == "moved", then


def interrupt_while_a_thread_reads(rank: int) -> tuple[Tried, Tried, bool]:
    """On rank 1 `wait` is interrupted while the thread of the handle copies out of a buffer."""
    # In rounds, so that senders wait until their messages are read.
    plan, usual = plan_of((64, 64), memory=2048), HostTransport.receive
    given = source_of(plan, rank)
    options: Any = {"transport": "shared", "timeout": 20}
    plan.run(given, **options)
    reads, may_go_on, mapped = threading.Event(), threading.Event(), list[bool]()

    def receive_late(
        transport: HostTransport, round_: Any, peers: Collection[int], arrived: Any
    ) -> None:
        buffers = [*map(weakref.ref, transport.watch.inbox.buffers.values())]
        reads.set()
        may_go_on.wait(20)
        mapped.extend(one() is not None for one in buffers)
        usual(transport, round_, peers, arrived)

    if rank == 1:
        HostTransport.receive = receive_late  # type: ignore[method-assign,assignment]
        signal.signal(signal.SIGALRM, signal.default_int_handler)
    handle = plan.start(given, **options)
    if rank == 1:
        reads.wait(20)
        HostTransport.receive = usual  # type: ignore[method-assign]
        signal.setitimer(signal.ITIMER_REAL, 0.05)
    first = tried(handle.wait)
    then = tried(lambda: plan.run(given, **options))
    if rank == 1:
        may_go_on.set()
        tried(handle.wait)
    return first, then, all(mapped) and bool(mapped) == (rank == 1)


def test_a_buffer_stays_mapped_while_the_thread_of_an_abandoned_call_reads_it() -> None:
    """Peers retire it, and the next call takes place meanwhile."""
    with fresh_ranks(4) as ranks:
        found = ranks.run(interrupt_while_a_thread_reads, timeout=60)
    for rank, (first, then, is_right) in enumerate(found):
        assert first.kind == ("KeyboardInterrupt" if rank == 1 else "LiveError"), first
        assert then.kind == "moved", then
        assert is_right, rank


def test_a_call_that_was_ended_meanwhile_raises_the_error_of_the_user() -> None:
    """The store of the group was stopped for longer than the timeout; the call was interrupted."""
    stub = mock.Mock(ticket=Ticket(None), in_flight=None, **{"gpus.return_value": ()})
    stub.all_tensors.return_value = ()

    def run() -> None:
        stub.ticket.finish()
        raise UndecidedError(0, 1.0, "the move")

    stub.run = run
    with pytest.raises(MoveTimeoutError, match="has not answered for 1 s"):
        Handle(stub, RunReport(0, 0, "")).wait()
