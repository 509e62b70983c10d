"""Messages between GPUs: a NCCL group of our own, beside the caller's.

All messages of a round go in one group call. NCCL runs on a stream of its own: an exchange starts
after what the current stream was given before, and `Exchange.join` makes the current stream wait
for it. The host waits for nothing, but for the first messages between two ranks: those connect.

torch's watchdog ends the process when a peer of a NCCL group is lost, or late. Our group is made
without a watchdog: whoever waits asks `Exchange.done`, keeps the deadline, and calls
`DeviceWire.abort`, from any thread. The caller's group and its watchdog are not touched.

All calls of NCCL are made by a thread of the wire. One that waits for a lost rank cannot hold up
the caller then, and one that fails leaves its thread inside an open NCCL group, where no other
group could be made any more: that thread is given up together with the wire.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from reshard.errors import LiveError, MoveTimeoutError, PeerLostError
from reshard.run.live.c10d import PrefixStore

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["DeviceWire", "Exchange", "Message", "Wait"]

Message = tuple[int, torch.Tensor]
"""A rank of the group, and the contiguous tensor that goes there or comes from there."""

Wait = Callable[[threading.Event], None]
"""Waits until something has happened, or raises because it will not."""

NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"
ABORT_SECONDS = 30
GRACE_SECONDS = 0.1
_environment = threading.Lock()
_cuda: Any = torch.cuda  # its streams and events have no types


class DeviceWire:
    """Exchanges messages among ``size`` ranks, each with one GPU.

    Making one is collective: all ranks must come within ``timeout`` seconds. ``store`` must be new
    for each wire, such as a ``PrefixStore`` with a number that all ranks count alike. Whoever knows
    better than a clock whether others will still come gives ``wait``.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        *,
        timeout: float = 60.0,
        wait: Wait | None = None,
    ) -> None:
        self.rank, self.size, self.device, self.timeout = rank, size, device, timeout
        self.aborted = False
        self._aborting = threading.Lock()
        self._aside = _cuda.Stream(device)
        self._backend = _new_backend(store, rank, size)
        self._hand = _Hand(lambda: _cuda.set_device(device))
        self._do(lambda: self._backend.eager_connect_single_device(device), "open NCCL", wait)

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], wait: Wait | None = None
    ) -> Exchange:
        """Start all messages at once; several to one rank arrive in the order given."""
        stream = _cuda.current_stream(self.device)
        reached = stream.record_event()
        work, arrived = self._do(lambda: self._start(sends, receives, stream), "connect", wait)
        return Exchange(self, work, (reached, arrived), [*sends, *receives])

    def abort(self) -> None:
        """End all exchanges under way, within a second; what they received is undefined."""
        with self._aborting:
            if not self.aborted:
                self.aborted = True
                self._hand.leave()
                self._backend.abort()

    def close(self, wait: Wait | None = None) -> None:
        """Give the group back; collective, and only after all exchanges of all ranks are done."""
        if not self.aborted:
            self._do(self._backend.shutdown, "close NCCL", wait)
            self.aborted = True
            self._hand.leave()

    def _start(
        self, sends: Sequence[Message], receives: Sequence[Message], stream: Any
    ) -> tuple[Any, Any]:
        with _cuda.stream(stream):
            self._backend._start_coalescing()
            for rank, tensor in receives:
                self._backend.recv([tensor], rank, 0)
            for rank, tensor in sends:
                self._backend.send([tensor], rank, 0)
            work = self._backend._end_coalescing()
        arrived = _cuda.Event()
        with _cuda.stream(self._aside):
            _await(work)
            arrived.record()
        return work, arrived

    def _do(self, action: Callable[[], Any], purpose: str, wait: Wait | None) -> Any:
        """Let the wire's thread act, and wait for it, but not forever."""
        if self.aborted:
            raise LiveError(f"rank {self.rank} uses a NCCL group that is closed: make a new one")
        task = self._hand.give(action)
        try:
            if wait is not None:
                wait(task.finished)
            elif not task.finished.wait(self.timeout):
                raise MoveTimeoutError(
                    f"rank {self.rank} waited {self.timeout} s for the other {self.size - 1} ranks "
                    f"to {purpose}: is one of them late, or out of reach?"
                )
        except BaseException:
            self.abort()
            raise
        if task.error is not None:
            text = str(task.error).partition("\n")[0]
            lost = LiveError if self.aborted else PeerLostError
            self.abort()
            raise lost(f"NCCL failed on rank {self.rank} of {self.size}: {text}") from task.error
        return task.result


class Exchange:
    """Messages under way. Keep it until it is done: it holds the tensors."""

    def __init__(
        self, wire: DeviceWire, work: Any, events: tuple[Any, Any], messages: Sequence[Message]
    ) -> None:
        self.wire, self._work = wire, work
        self._reached, self._arrived = events
        self._messages = messages

    def join(self) -> None:
        """Let the current stream wait for the messages."""
        _await(self._work)

    def begun(self) -> bool:
        """Whether this rank's GPU has come as far as the exchange."""
        return bool(self._reached.query())

    def done(self) -> bool:
        """Whether all messages arrived; raises once the group has failed."""
        arrived = self._arrived.query()
        # Asked in this order: an abort makes everything arrive.
        if self.wire.aborted:
            raise LiveError(f"an exchange of rank {self.wire.rank} was aborted")
        if arrived:
            return True
        if self._work is None or not self._work.is_completed():
            return False
        # torch calls completed what has failed, too. Or it completed between the two questions.
        start = time.monotonic()
        while not self._arrived.query():
            if time.monotonic() - start > GRACE_SECONDS:
                raise PeerLostError(f"NCCL lost the connection of rank {self.wire.rank} to a peer")
            time.sleep(0.001)
        return True


class _Task:
    """Something to do, and what came of it."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action = action
        self.finished = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.result = self.action()
        except Exception as error:
            self.error = error
        self.finished.set()


class _Hand:
    """A thread that does one thing after the other; it does not keep the process alive."""

    def __init__(self, first: Callable[[], Any]) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self.give(first)
        threading.Thread(target=self._work, name="reshard-nccl", daemon=True).start()

    def give(self, action: Callable[[], Any]) -> _Task:
        task = _Task(action)
        self._tasks.put(task)
        return task

    def leave(self) -> None:
        """No more tasks: the thread ends after those it has."""
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()


def _await(work: Any) -> None:
    """Let the current stream wait for NCCL's; the host goes on."""
    if work is not None:
        # The older of the two names is going to go.
        getattr(work, "block_current_stream", work.synchronize)()


def _new_backend(store: Store, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    # All that this bounds is how long an abort may take.
    options._timeout = timedelta(seconds=ABORT_SECONDS)
    # NCCL's keys are plain numbers: apart from whatever else is in the store.
    apart = PrefixStore("nccl", store)
    with _without_watchdog():
        return dist.ProcessGroupNCCL(apart, rank, size, options)


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Groups made inside have none: torch reads this variable only when it makes a group."""
    with _environment:
        before = os.environ.get(NO_WATCHDOG)
        os.environ[NO_WATCHDOG] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[NO_WATCHDOG]
            else:
                os.environ[NO_WATCHDOG] = before
