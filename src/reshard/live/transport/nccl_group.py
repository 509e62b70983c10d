"""A session's own NCCL group, beside the caller's.

All messages of a round go in one group call, or they are one all-gather. NCCL runs on a stream of
its own: an exchange starts after the work that was enqueued before it on the current stream, and
`NcclWork.join` makes the current stream wait for it. The host waits only for the first messages
between two ranks, and for the first all-gather, which connect them.

torch's watchdog ends the process when a peer of a NCCL group is lost or late. This group is made
without a watchdog: the session's watcher thread polls `NcclWork.done`, keeps the deadline, and
calls `NcclGroup.abort`, which any thread may do. The caller's group and its watchdog are not
affected.

A worker of the group makes all calls of NCCL, so that one that waits for a lost rank cannot block
the caller. A call that fails leaves its thread inside an open NCCL group call, where no other group
could be made any more: that worker is abandoned together with the group.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from reshard.errors import LiveError, MoveTimeoutError, PeerLostError
from reshard.live.session.store import PrefixStore, Store, Task, Worker

PeerTensors = Sequence[tuple[int, torch.Tensor]]
"""Ranks of the group, each with a contiguous tensor that is sent to it or received from it."""

WaitForTask = Callable[[Task[Any]], None]
"""Waits until a task is done, or raises if it cannot be."""

NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"
ABORT_SECONDS = 30
GRACE_SECONDS = 0.1
_environment = threading.Lock()
_cuda: Any = torch.cuda  # its streams and events have no types

T = TypeVar("T")


class NcclGroup:
    """Exchanges messages among ``size`` ranks, each with one GPU.

    Its creation is collective: all ranks must take part within ``timeout`` seconds, or as long as
    ``wait`` waits. ``store`` must be new for each group, such as a ``PrefixStore`` with a number
    that is the same on all ranks.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        *,
        timeout: float = 60.0,
        wait: WaitForTask | None = None,
    ) -> None:
        self.rank, self.size, self.device, self.timeout = rank, size, device, timeout
        self.aborted = False
        self._aborting = threading.Lock()
        self._side_stream = _cuda.Stream(device)
        self._backend = _new_backend(store, rank, size)
        self._worker = Worker()
        self._worker.submit(lambda: _cuda.set_device(device))
        self._do(lambda: self._backend.eager_connect_single_device(device), "open NCCL", wait)

    def exchange(
        self, sends: PeerTensors, receives: PeerTensors, wait: WaitForTask | None = None
    ) -> NcclWork:
        """Start all messages at once; several to one rank arrive in this order."""

        def start() -> Any:
            self._backend._start_coalescing()
            for rank, tensor in receives:
                self._backend.recv([tensor], rank, 0)
            for rank, tensor in sends:
                self._backend.send([tensor], rank, 0)
            return self._backend._end_coalescing()

        return self._start(start, [*sends, *receives], wait)

    def all_gather(self, slots: torch.Tensor, wait: WaitForTask | None = None) -> NcclWork:
        """Start to copy the slot of every rank, which are as large as each other, to all ranks."""
        own = slots.chunk(self.size)[self.rank]
        start = self._backend._allgather_base
        return self._start(lambda: start(slots, own), [(self.rank, slots)], wait)

    def abort(self) -> None:
        """End all exchanges in flight within a second; what they received is undefined."""
        with self._aborting:
            if not self.aborted:
                self.aborted = True
                self._worker.end()
                self._backend.abort()

    def close(self, wait: WaitForTask | None = None) -> None:
        """Close the group; collective, and only after all exchanges of all ranks are done."""
        if not self.aborted:
            self._do(self._backend.shutdown, "close NCCL", wait)
            self.aborted = True
            self._worker.end()

    def _start(
        self, start: Callable[[], Any], messages: PeerTensors, wait: WaitForTask | None
    ) -> NcclWork:
        """Let the worker start an exchange after the work on the current stream."""
        stream = _cuda.current_stream(self.device)
        reached = stream.record_event()

        def act() -> tuple[Any, Any]:
            with _cuda.stream(stream):
                work = start()
            arrived = _cuda.Event()
            with _cuda.stream(self._side_stream):
                _join(work)
                arrived.record()
            return work, arrived

        work, arrived = self._do(act, "connect", wait)
        return NcclWork(self, work, (reached, arrived), messages)

    def _do(self, action: Callable[[], T], purpose: str, wait: WaitForTask | None) -> T:
        """Let the worker act, and wait for it with a timeout."""
        if self.aborted:
            raise LiveError(f"rank {self.rank} uses a NCCL group that is closed: make a new one")
        task = self._worker.submit(action)
        try:
            if wait is not None:
                wait(task)
            elif not task.wait(self.timeout):
                raise MoveTimeoutError(
                    f"rank {self.rank} waited {self.timeout} s for the other {self.size - 1} ranks "
                    f"to {purpose}: is one of them late, or out of reach?"
                )
        except BaseException:
            self.abort()
            raise
        error = task.error
        if error is not None:
            text = str(error).partition("\n")[0]
            lost = LiveError if self.aborted else PeerLostError
            self.abort()
            raise lost(f"NCCL failed on rank {self.rank} of {self.size}: {text}") from error
        return task.result()


class NcclWork:
    """Messages in flight. Keep it until it is done: it holds the tensors."""

    def __init__(
        self, group: NcclGroup, work: Any, events: tuple[Any, Any], messages: PeerTensors
    ) -> None:
        self.group, self._work = group, work
        self._reached, self._arrived = events
        self._messages = messages

    def join(self) -> None:
        _join(self._work)

    def begun(self) -> bool:
        return bool(self._reached.query())

    def late(self, peers: object) -> None:
        """NCCL does not say which peers are late."""

    def done(self) -> bool:
        """Whether all messages arrived; raises once the group has failed."""
        arrived = self._arrived.query()
        # In this order: an abort makes everything arrive.
        if self.group.aborted:
            raise LiveError(f"an exchange of rank {self.group.rank} was aborted")
        if arrived:
            return True
        if self._work is None or not self._work.is_completed():
            return False
        # torch also calls failed work completed. Or it completed between the two queries.
        start = time.monotonic()
        while not self._arrived.query():
            if time.monotonic() - start > GRACE_SECONDS:
                raise PeerLostError(f"NCCL lost the connection of rank {self.group.rank} to a peer")
            time.sleep(0.001)
        return True


def _join(work: Any) -> None:
    """Let the current stream wait for NCCL's; the host goes on."""
    if work is not None:
        # torch deprecates the older of the two names.
        getattr(work, "block_current_stream", work.synchronize)()


def _new_backend(store: Store, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    # It only bounds how long an abort may take.
    options._timeout = timedelta(seconds=ABORT_SECONDS)
    # NCCL's keys are plain numbers: a prefix keeps them apart from other keys of the store.
    with _without_watchdog():
        return dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)


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
