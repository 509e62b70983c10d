"""What the thread that watches GPU work takes for complete, failed and late; without a GPU."""

import weakref
from unittest import mock

import pytest
import torch

from reshard.errors import LiveError
from reshard.live.session.shared_memory import DONE, REACHED, AbortFlags, CallSignals, Signals
from reshard.live.transport import gpu_memory
from reshard.live.transport.gpu_memory import GpuMemory
from reshard.live.transport.gpu_pulls import ENTERED, GpuWork, done_step
from tests.device.stand_in import StandInDriver

CALL = 7


def signals_of(num_peers: int) -> CallSignals:
    driver = StandInDriver()
    found = CallSignals(CALL, Signals.create(driver))  # type: ignore[arg-type]
    found.peers = {n: Signals.create(driver) for n in range(1, num_peers + 1)}  # type: ignore[arg-type]
    return found


def test_peers_are_late_until_their_last_awaited_signal_has_come() -> None:
    """Rank 1 only sends, rank 2 also reads: rank 1 may exit before rank 2 has read."""
    signals = signals_of(2)
    waits = [(1, REACHED, ENTERED), (2, REACHED, ENTERED), (2, DONE, done_step(1))]
    work = GpuWork(signals, lambda: False, waits, [], lambda: None)
    assert work.late([1, 2]) == [1, 2]
    signals.peers[1].write(0, REACHED, CALL, ENTERED)
    signals.peers[2].write(0, REACHED, CALL, ENTERED)
    signals.peers[2].write(0, DONE, CALL, done_step(0))
    assert work.late([1, 2]) == [2]
    signals.peers[2].write(0, DONE, CALL, done_step(1))
    assert work.late([1, 2]) == []


def test_a_stream_that_a_failed_peer_released_is_not_complete() -> None:
    flags = AbortFlags.create()
    work = GpuWork(signals_of(1), lambda: True, [], [flags], lambda: None)
    flags.mark_failed(CALL - 1)
    assert work.done()
    flags.mark_failed(CALL)
    with pytest.raises(LiveError, match="aborted"):
        work.done()


class Event:
    """An event that notes calls of the driver, which block while another thread frees memory."""

    def __init__(self) -> None:
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return True


def test_the_driver_is_not_called_while_a_signal_is_missing() -> None:
    """A thread that frees memory holds the driver's lock until this thread releases its stream."""
    signals, event = signals_of(1), Event()
    work = GpuWork(signals, event.query, [(1, DONE, done_step(0))], [], lambda: None)
    assert not work.done()
    assert not event.asked
    signals.abort()
    with pytest.raises(LiveError, match="aborted"):
        work.done()
    signals = signals_of(1)
    work = GpuWork(signals, event.query, [(1, DONE, done_step(0))], [], lambda: None)
    signals.peers[1].write(0, DONE, CALL, done_step(0))
    assert work.done()
    assert event.asked


def test_an_event_outlives_the_work_that_it_belongs_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Destroying it is a call of the driver as well: the thread that records events does that."""
    monkeypatch.setattr(gpu_memory, "cuda_driver", StandInDriver)
    memory, event = GpuMemory(mock.MagicMock()), Event()
    alive = weakref.ref(event)
    work = GpuWork(signals_of(1), event.query, [], [], memory.lend(event.query))
    del event
    assert work.done()
    assert work.done()
    del work
    assert alive() is not None
    memory.mark(torch.device("cpu"))
    assert alive() is None
