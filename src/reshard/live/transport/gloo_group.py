"""A session's own gloo group, and the workers that wait for its messages.

The group belongs to the session alone: when a call fails while messages are under way, the group is
closed, and the next call makes a new one. The epoch decides which group a call uses: it is the
number of the first call after the last failure.

gloo offers no poll, only a wait, so a worker waits and calls back. Nor can a single message be
cancelled: where one may still be received into tensors of a failed call, all connections are cut.
Every call in flight has its own worker. A worker that waited for several calls in turn could hold
back the messages of one call while another receives nothing, and two ranks that do so in different
orders would deadlock.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from math import inf
from typing import Any, cast

import torch
import torch.distributed as dist

from reshard.errors import PeerLostError
from reshard.live.failure.agreement import await_all, delete_keys
from reshard.live.failure.watch import Watch, abort_key
from reshard.live.session.control import Cause
from reshard.live.session.rendezvous import Connections
from reshard.live.session.store import OwnedLock, PrefixStore, Store, Task, Work, Worker, clone_of

END_SECONDS = 1.0
"""Seconds that an idle worker may take to end: none may be left when the process exits."""

GRACE = 5.0
"""Seconds that gloo tries longer to connect than the call may: the watch should time out first."""

UNUSED_TAG = 1 << 24  # A tag that no call uses
MAX_KEPT = 256 << 20  # bytes of message buffers that a group keeps between calls
UNWATCHED = 0.05  # seconds that a task of another thread may take before the wait for it is watched
EPOCHS_KEPT = 64  # calls whose epoch is kept in the store


Pending = Callable[[timedelta], object]
"""Waits until a message is complete, at most so long; raises a RuntimeError if it fails."""


def await_task(watch: Watch, peers: Collection[int], what: str, task: Task[Any]) -> None:
    """Wait for a task as a call waits for these peers: lost ranks, aborts and timeouts raise."""
    if not task.wait(UNWATCHED):
        watch.wait(lambda: () if task.done else peers, lambda peer: what, UNWATCHED)


def begin_epoch(watch: Watch) -> Task[tuple[int, bytes | None]]:
    """Request the epoch of a call from the store: the first request decides for all ranks.

    Some ranks may learn of a failure before their request, and others only after it.
    """
    call, leads = watch.call, watch.connections.rank == watch.connections.leader

    def decide(store: Store) -> tuple[int, bytes | None]:
        decided: Any = store.compare_set(f"epoch/{call}", "", str(store.add("epoch", 0)))
        if leads:
            store.delete_key(f"epoch/{call - EPOCHS_KEPT}")
        failed = abort_key(call)
        return int(decided), store.get(failed) if store.check([failed]) else None

    return watch.connections.client.begin(decide)


def finish_epoch(watch: Watch, asked: Task[tuple[int, bytes | None]] | None) -> int | None:
    """The epoch of the call; None if the store does not answer. Fails if the call has failed."""
    leader = watch.connections.leader
    # The rank that serves the store may have left, all done: then there is no answer.
    try:
        task = asked or begin_epoch(watch)
    except PeerLostError:
        return None
    if leader != watch.connections.rank and not task.wait(UNWATCHED):
        # Peers, which have no Hello of this rank yet, learn that it waits for the leader.
        watch.wait(
            lambda: () if task.done or leader in watch.mailbox.lost else (leader,),
            lambda peer: "it to answer: it serves the store of the session",
            UNWATCHED,
        )
    try:
        epoch, failed = watch.connections.client.finish(task)
    except PeerLostError:
        return None
    if failed is not None:
        watch.fail(Cause.from_json(failed))
    return epoch


class GlooGroups:
    """The gloo groups of a session, by epoch."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._groups: dict[int, GlooGroup] = {}
        self._making: dict[int, OwnedLock] = {}
        self._lock = OwnedLock()

    def group(self, watch: Watch) -> GlooGroup:
        """The group of a call; if there is none, all ranks of the session create it together.

        Earlier groups are kept for the calls that are still in flight on them.
        """
        decided = finish_epoch(watch, None)
        epoch = max(self._groups, default=0) if decided is None else decided
        with self._lock:
            making = self._making.setdefault(epoch, OwnedLock())
        with making:
            if epoch not in self._groups:
                if epoch < max(self._groups, default=0):
                    # Other ranks use connections in this call that this rank has closed.
                    rank = self._connections.rank
                    text = f"rank {rank} closed its connections in an earlier move"
                    watch.fail(Cause("lost", text))
                self._groups[epoch] = self._make(watch, f"wire/{epoch}")
                self._drop(before=epoch)
            return self._groups[epoch]

    def _make(self, watch: Watch, key: str) -> GlooGroup:
        connections = self._connections
        used = await_all(watch, key, lambda peer: f"it to make a connection for {watch.what}")
        index, size = connections.ranks.index(connections.rank), len(connections.ranks)

        def connect() -> GlooGroup:
            try:
                store = PrefixStore(key, clone_of(connections.store))
                return GlooGroup(store, index, size, watch.timeout + GRACE)
            finally:
                connections.mailbox.wake()

        # In a worker: gloo does not notice lost ranks meanwhile, and retries.
        worker = Worker()
        task = worker.submit(connect)
        worker.end()
        others = frozenset(connections.ranks) - {connections.rank}
        await_task(watch, others, f"it to connect for {watch.what}", task)
        try:
            group = task.result()
        except RuntimeError as error:
            lost = f"rank {connections.rank} cannot connect to all others ({in_short(error)})"
            watch.fail(Cause("lost", lost))
        delete_keys(watch, f"{key}/made", used)
        return group

    def _drop(self, before: float = inf) -> None:
        """Close the groups of earlier epochs that no call uses; or all, at the end."""
        with self._lock:
            unused = {e for e, one in self._groups.items() if not one.num_calls and e < before}
            old = list(self._groups) if before == inf else unused
            groups = [self._groups.pop(epoch) for epoch in old]
        for group in groups:
            group.close()

    def release(self) -> None:
        """Free the message buffers that are kept."""
        for group in tuple(self._groups.values()):
            group.buffers.clear()

    def end_threads(self) -> None:
        """Close all groups: a thread that waits in gloo at exit would abort the process."""
        self._drop()

    close = end_threads


class GlooGroup:
    """A gloo group of one session, its idle workers and its buffers."""

    def __init__(self, store: Store, index: int, size: int, timeout: float) -> None:
        self._group: Any = dist.ProcessGroupGloo(store, index, size, timedelta(seconds=timeout))
        self._index, self._size = index, size
        self._idle: list[Worker] = []
        self._workers: set[Worker] = set()  # all workers that have not ended, idle or not
        self._closed = False
        self.num_calls = 0  # calls that use it
        self.cut_because: Cause | None = None  # why all connections were cut, if they were
        self.lock = OwnedLock()
        self.buffers: list[torch.Tensor] = []  # message buffers that are kept for the next call

    def send(self, index: int, tensor: torch.Tensor, tag: int) -> Pending:
        return _begin(lambda: self._group.send([tensor], index, tag))

    def receive(self, index: int, tensor: torch.Tensor, tag: int) -> Pending:
        return _begin(lambda: self._group.recv([tensor], index, tag))

    def cut(self, cause: Cause) -> None:
        """Close all connections: waits fail, and nothing is received into any tensor."""
        with self.lock:
            if self.cut_because is not None:
                return
            self.cut_because = cause
        # gloo cuts all connections when a wait times out. No rank sends with this tag.
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        wait = self.receive((self._index + 1) % self._size, nothing, UNUSED_TAG)
        with contextlib.suppress(RuntimeError):
            wait(timedelta(milliseconds=1))

    def take_buffer(self, num_bytes: int) -> torch.Tensor:
        """A buffer of at least this size, for one message."""
        with self.lock:
            fitting = [one for one in self.buffers if one.numel() >= num_bytes]
            if fitting:
                best = min(fitting, key=torch.Tensor.numel)
                self.buffers = [one for one in self.buffers if one is not best]
                return best
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def give_back_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Keep buffers for the next call, the largest first, up to a limit."""
        with self.lock:
            kept, total = [], 0
            for one in sorted([*self.buffers, *buffers], key=lambda buffer: -buffer.numel()):
                total += one.numel()
                if total <= MAX_KEPT:
                    kept.append(one)
            self.buffers = kept

    def worker(self) -> Worker:
        with self.lock:
            self.num_calls += 1
            worker = self._idle.pop() if self._idle else Worker()
            self._workers.add(worker)
            return worker

    def give_back(self, worker: Worker) -> None:
        """Keep the worker of a call that has ended without a failure."""
        with self.lock:
            self.num_calls -= 1
            if not self._closed:
                self._idle.append(worker)
                return
            self._workers.discard(worker)
        worker.end()

    def let_go(self, worker: Worker, seconds: float) -> None:
        """End the worker of a call that has failed, and wait for that at most so long."""
        worker.end(seconds)
        with self.lock:
            self.num_calls -= 1
            self._workers = {one for one in self._workers if one.is_alive}

    def close(self) -> None:
        """End all workers; if one of them still waits, all connections are cut."""
        with self.lock:
            self._closed = True
            idle, self._idle = set(self._idle), []
            workers, self._workers = self._workers, set()
        # A worker that was given back may still send, to a peer that does not receive.
        for waiting in (workers - idle, workers):
            if any(worker.is_alive for worker in waiting):
                self.cut(Cause("error", "the connections of this process group were closed"))
            for worker in workers:
                worker.end(END_SECONDS)


def _begin(begin: Callable[[], Work]) -> Pending:
    """Begin a message; one that cannot begin fails when it is waited for."""
    try:
        work: Any = begin()
        return cast(Pending, work.wait)
    except RuntimeError as error:
        refused = error

    def wait(limit: timedelta) -> object:
        raise refused

    return wait


def in_short(error: RuntimeError) -> str:
    """gloo's error text, without its file names and guesses."""
    text = str(error).splitlines()[0]
    return re.sub(r"^\[[^]]*\] *", "", text).partition(". ")[0]
