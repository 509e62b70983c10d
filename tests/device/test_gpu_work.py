"""What the thread that watches GPU work takes for complete, failed and late; without a GPU."""

import struct
from types import SimpleNamespace

import pytest

from reshard.errors import LiveError
from reshard.live.copy.cuda_driver import MAX_OPERATIONS, WAIT, WRITE, Driver
from reshard.live.session.shared_memory import (
    DONE,
    LAST_STEP,
    OVER,
    REACHED,
    SIGNAL_SLOTS,
    AbortFlags,
    CallSignals,
    Signals,
)
from reshard.live.transport.gpu_pulls import ENTERED, GpuWork, done_step
from tests.device.stand_in import StandInDriver

CALL = 7


def signals_of(num_peers: int) -> CallSignals:
    driver = StandInDriver()
    found = CallSignals(CALL, Signals.create(driver))  # type: ignore[arg-type]
    found.peers = {n: Signals.create(driver) for n in range(1, num_peers + 1)}  # type: ignore[arg-type]
    return found


def write(signals: Signals, kind: int, step: int) -> None:
    """What the stream of the rank that owns the signals does."""
    CallSignals(CALL, signals).enqueue(0, writes=[(kind, step)])


def test_peers_are_late_until_their_last_awaited_signal_has_come() -> None:
    """Rank 1 only sends, rank 2 also reads: rank 1 may exit before rank 2 has read."""
    signals = signals_of(2)
    waits = [(1, REACHED, ENTERED), (2, REACHED, ENTERED), (2, DONE, done_step(1))]
    work = GpuWork(signals, waits, [])
    assert work.late([1, 2]) == [1, 2]
    write(signals.peers[1], REACHED, ENTERED)
    write(signals.peers[2], REACHED, ENTERED)
    write(signals.peers[2], DONE, done_step(0))
    assert work.late([1, 2]) == [2]
    write(signals.peers[2], DONE, done_step(1))
    assert work.late([1, 2]) == []


def test_work_is_done_when_the_stream_has_nothing_left_to_do() -> None:
    signals = signals_of(1)
    work = GpuWork(signals, [(1, DONE, done_step(0))], [])
    assert not work.begun()
    write(signals.own, REACHED, ENTERED)
    write(signals.peers[1], DONE, done_step(0))
    assert work.begun()
    assert not work.done()
    write(signals.own, OVER, LAST_STEP)
    assert work.done()


def test_an_abort_releases_streams_and_is_not_the_end_of_their_work() -> None:
    signals = signals_of(1)
    work = GpuWork(signals, [(1, DONE, done_step(1))], [])
    signals.abort()
    assert not signals.own.is_over(CALL)
    assert signals.peers[1].has_come(DONE, CALL, done_step(1))
    with pytest.raises(LiveError, match="aborted"):
        work.done()


def test_the_words_of_a_call_are_free_when_its_stream_has_written_all_of_them() -> None:
    signals, later = signals_of(0), CALL + SIGNAL_SLOTS
    assert signals.own.is_free(later)
    for kind in (REACHED, DONE, OVER):
        signals.own.enqueued[kind, CALL] = CALL << 32 | 1
        assert not signals.own.is_free(later)
        write(signals.own, kind, 1)
        assert signals.own.is_free(later)
    assert not signals.own.has_come(DONE, later, 0)


def test_the_driver_gets_signals_in_order_and_at_most_255_at_once() -> None:
    """Six words for each, as CUstreamBatchMemOpParams has them."""
    calls = []

    def enqueue(stream: int, number: int, packed: bytes, flags: int) -> int:
        calls.append((stream, number, flags))
        words.extend(struct.iter_unpack("<6Q", packed))
        return 0

    words: list[tuple[int, ...]] = []
    driver = Driver(SimpleNamespace(cuStreamBatchMemOp_v2=enqueue))
    driver.enqueue(5, [])
    assert not calls
    operations = [(WAIT if n % 2 else WRITE, 8 * n, CALL << 32 | n) for n in range(600)]
    driver.enqueue(5, operations)
    assert calls == [(5, MAX_OPERATIONS, 0), (5, MAX_OPERATIONS, 0), (5, 90, 0)]
    assert words == [(*one, 0, 0, 0) for one in operations]


def test_a_stream_that_a_failed_peer_released_is_not_complete() -> None:
    flags = AbortFlags.create()
    signals = signals_of(1)
    work = GpuWork(signals, [], [flags])
    write(signals.own, OVER, LAST_STEP)
    flags.mark_failed(CALL - 1)
    assert work.done()
    flags.mark_failed(CALL)
    with pytest.raises(LiveError, match="aborted"):
        work.done()
