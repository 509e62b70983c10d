"""Device memory that the processes of one host share: exported, mapped, and ordered by signals.

exports    allocations of this process; a handle is made once per allocation, and an allocation
           that was freed is noticed by its number
tables     what a rank tells its peers in every call: handles, and the addresses of its tensors
mappings   allocations of peers, mapped once and unmapped when their owner has freed them
signals    how far the stream of a rank has come in a call, in memory of the host that peers map

The driver keeps mapped memory alive: a reader never faults, not even if the owner has freed the
memory or was killed. In turn, memory that the owner frees is free only when readers have unmapped
it, which they do in their next call, in `plan.release()`, and at the end of the session.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from reshard.errors import LiveError
from reshard.layout.columns import Ints, distinct, drop_oldest
from reshard.live.copy.cuda_driver import (
    HANDLE_BYTES,
    WAIT,
    Allocation,
    CudaError,
    Driver,
    cuda_driver,
)
from reshard.live.copy.host import array_at
from reshard.live.session.rendezvous import Connections, Resource
from reshard.live.session.shared_memory import (
    LAST_STEP,
    OVER,
    CallSignals,
    SharedBuffer,
    Signals,
)
from reshard.live.transport.in_flight import InFlight

Export = tuple[Allocation, bytes]
"""An allocation and its handle."""


class Exports:
    """The allocations of this process that peers have been given handles of."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._known: list[Export] = []  # by address
        self._bases = self._ends = np.zeros(0, np.int64)

    def refresh(self) -> None:
        """Forget allocations that were freed."""
        number = self._driver.number
        live = [one for one in self._known if number(one[0].base) == one[0].number]
        if len(live) < len(self._known):
            self._keep(live)

    @property
    def numbers(self) -> list[int]:
        """The numbers of the allocations that have been exported and not freed."""
        return [allocation.number for allocation, _ in self._known]

    def of(self, starts: Ints, ends: Ints) -> list[Export]:
        """The allocations that ranges of memory are in; a `CudaError` says why one has none."""
        while True:
            rows = np.searchsorted(self._bases, starts, side="right") - 1
            inside = (rows >= 0) & (ends <= np.append(self._ends, 0)[rows])
            if inside.all():
                return [self._known[row] for row in distinct(rows).tolist()]
            first = int(np.argmin(inside))
            allocation = self._driver.allocation(int(starts[first]))
            if ends[first] > allocation.base + allocation.num_bytes:
                raise CudaError("the tensor is in several allocations, as expandable segments are")
            self._keep([*self._known, (allocation, self._driver.export(allocation.base))])

    def _keep(self, exports: Sequence[Export]) -> None:
        self._known = sorted(exports, key=lambda one: one[0].base)
        places = [allocation[:2] for allocation, _ in self._known]
        self._bases, sizes = np.array(places, np.int64).reshape(-1, 2).T
        self._ends = self._bases + sizes


EXPORT_WORDS = 3 + HANDLE_BYTES // 8
HEADER_WORDS = 4
MAGIC = 0x7273_6770_7501


@dataclass(frozen=True, eq=False)
class Table:
    """What a rank tells its peers in a call: its exported allocations, and where its tensors are.

    As words of 8 bytes: a header; the numbers of all allocations that exist; number, base, size and
    handle of those that the call uses; start and end of each tensor, 0 if peers do not read it.
    """

    live: Ints
    exports: Ints  # one row per allocation, by their base
    ranges: Ints  # start and end of tensors, by base number: 2 columns

    def words(self) -> Ints:
        """All of it, as it is in shared memory."""
        header = np.array([MAGIC, len(self.live), len(self.exports), len(self.ranges)])
        parts = [header, self.live, self.exports.reshape(-1), self.ranges.reshape(-1)]
        return np.concatenate(parts)

    @classmethod
    def read(cls, address: int, num_bytes: int, num_tensors: int) -> Table:
        """A peer's table in shared memory of this size; ValueError if it is malformed."""
        words = array_at(address, (num_bytes // 8,), np.dtype(np.int64), (8,))
        magic, live, exports, tensors = words[:HEADER_WORDS].tolist()
        total = HEADER_WORDS + live + EXPORT_WORDS * exports + 2 * tensors
        sensible = min(live, exports) >= 0 and max(live, exports) < len(words)
        if magic != MAGIC or not sensible or tensors != num_tensors or total > len(words):
            raise ValueError("a table of GPU memory that cannot be read")
        words = words[HEADER_WORDS:total].copy()
        first, second = live, live + EXPORT_WORDS * exports
        rows = words[first:second].reshape(exports, EXPORT_WORDS)
        return cls(words[:first], rows, words[second:].reshape(tensors, 2))


class Mappings:
    """Allocations of peers that this process has mapped."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._mapped: dict[int, dict[int, tuple[bytes, int]]] = {}
        """By peer and number of the allocation, its handle and its address here."""
        self._unused: list[tuple[Callable[[], bool], int]] = []
        """Mappings to close, each once no GPU work reads it any more."""
        self.generation = 0  # changes whenever something was unmapped

    def update(self, peer: int, table: Table, is_idle: Callable[[], bool]) -> None:
        """Map what a peer has exported, and unmap what it has freed.

        ``is_idle`` says whether all GPU work that was enqueued before this call is done.
        """
        mapped, live = self._mapped.setdefault(peer, {}), set(table.live.tolist())
        for number in mapped.keys() - live:
            self._unused.append((is_idle, mapped.pop(number)[1]))
            self.generation += 1
        self.sweep()
        for row in table.exports:
            number, handle = int(row[0]), row[3:].tobytes()
            if number in mapped and mapped[number][0] == handle:
                continue
            if number in mapped:
                self._unused.append((is_idle, mapped.pop(number)[1]))
            address, num_bytes = self._driver.open(handle), int(row[2])
            there = self._driver.allocation(address)
            if there.base + there.num_bytes < address + num_bytes:
                self._driver.close(address)
                raise ValueError(f"an allocation of {there.num_bytes} bytes instead of {num_bytes}")
            mapped[number] = handle, address

    def addresses(self, peer: int, table: Table, numbers: Ints) -> Ints:
        """Where tensors of a peer are in this process; ValueError if they are nowhere."""
        starts, ends = table.ranges[numbers].T
        bases, sizes = table.exports[:, 1], table.exports[:, 2]
        rows = np.searchsorted(bases, starts, side="right") - 1
        outside = not len(bases) or rows.min(initial=0) < 0
        if outside or ((starts < bases[rows]) | (ends > (bases + sizes)[rows])).any():
            raise ValueError("tensors outside the memory that was exported")
        here = [self._mapped[peer][number][1] for number in table.exports[:, 0].tolist()]
        addresses: Ints = starts - bases[rows] + np.array(here, np.int64)[rows]
        return addresses

    def sweep(self) -> None:
        """Close unused mappings that no GPU work reads any more."""
        waiting = []
        for is_idle, address in self._unused:
            if is_idle():
                with contextlib.suppress(CudaError):
                    self._driver.close(address)
            else:
                waiting.append((is_idle, address))
        self._unused = waiting

    def drop(self, is_idle: Callable[[], bool]) -> None:
        for mapped in self._mapped.values():
            self._unused += [(is_idle, address) for _, address in mapped.values()]
        self._mapped.clear()
        self.generation += 1
        self.sweep()


class StagingBuffer:
    """A buffer on a GPU that is kept between calls, as long as all are on one stream.

    Another stream gets memory of its own: the first one may still read what it staged.
    """

    _tensor: torch.Tensor | None = None
    _stream = 0

    def take(self, num_bytes: int, device: torch.device, stream: int) -> torch.Tensor:
        """The buffer, with at least so many bytes."""
        kept = self._tensor
        same = kept is not None and (kept.device, self._stream) == (device, stream)
        if kept is None or not same or kept.numel() < num_bytes:
            self._tensor = kept = None  # freed before more is allocated
            kept = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self._tensor, self._stream = kept, stream
        return kept

    def release(self) -> None:
        self._tensor = None


Published = tuple[int, SharedBuffer, bool]
"""A table of this rank in shared memory: its version, its buffer, and whether it has no tensors but
a buffer in which this rank packs its messages."""

MAX_PUBLISHED = 8  # tables that are kept for the next calls


def has_gpu() -> bool:
    """Whether this process can use a GPU."""
    driver = cuda_driver()
    return driver is not None and driver.is_usable()


def has_spare_cores(num_ranks: int) -> bool:
    """Whether so many ranks of this host leave cores idle, as far as this process may use them."""
    return len(os.sched_getaffinity(0)) >= 2 * num_ranks


class GpuMemory(Resource):
    """What a session keeps for moves between GPUs of one host."""

    def __init__(self, connections: Connections) -> None:
        driver = cuda_driver()
        if driver is None:
            raise LiveError("this machine has no CUDA driver, or one older than 12")
        self.driver = driver
        self.exports, self.mappings = Exports(driver), Mappings(driver)
        self.addends = StagingBuffer()  # addends that this rank has read from peers
        self._running: dict[int, int] = {}
        """Calls whose GPU work may not be done yet, and their streams."""
        self.packing: tuple[int, int] | None = None
        """Address and size of the buffer in which this rank packs what peers cannot read."""
        self._published: dict[tuple[bytes, tuple[int, ...], bool], Published] = {}
        self._version = 0
        self._device: torch.device | None = None
        self._own: Signals | None = None
        self.peers: dict[int, Signals] = {}  # the signals of peers
        self._connections = connections
        self.may_poll = has_spare_cores(1 + len(connections.peers))
        """Whether a rank may poll for messages before it sleeps."""
        self._buffers: Mapping[tuple[int, int], SharedBuffer] = connections.mailbox.buffers

    def using(self, device: torch.device | None) -> AbstractContextManager[None]:
        """Calls of the driver inside are for a device."""
        self._device = device
        if device is None or device.type != "cuda" or device.index == torch.cuda.current_device():
            return contextlib.nullcontext()
        other: AbstractContextManager[None] = torch.cuda.device(device)
        return other

    @property
    def signals(self) -> Signals:
        if self._own is None:
            self._own = Signals.create(self.driver)
        return self._own

    def map_signals(self, peer: int, number: int) -> Signals:
        """Map the signals of a peer, on the shared page with this number; KeyError without it."""
        signals = self.peers[peer] = Signals(self._buffers[peer, number], self.driver)
        return signals

    def publish(self, ranges: Ints, packs: bool) -> Published:
        """A table with these tensors in shared memory; an equal one of an earlier call if there is.

        Only calls of this rank that are over may have used the tables that are dropped.
        """
        used = ranges[ranges[:, 1] > 0]
        exports = self.exports.of(used[:, 0], used[:, 1])
        live = self.exports.numbers
        key = (ranges.tobytes(), tuple(live), packs)
        published = self._published.get(key)
        if published is None:
            rows = np.zeros((len(exports), EXPORT_WORDS), np.int64)
            for row, (allocation, handle) in zip(rows, exports, strict=True):
                row[:3] = allocation.number, allocation.base, allocation.num_bytes
                row[3:] = np.frombuffer(handle, np.int64)
            words = Table(np.array(live, np.int64), rows, ranges).words()
            pool = self._connections.buffers
            for _, oldest, _ in drop_oldest(self._published, MAX_PUBLISHED - 1):
                pool.give_back(oldest)
            buffer = pool.take(words.nbytes)
            array_at(buffer.address, words.shape, words.dtype, words.strides)[:] = words
            self._version += 1
            published = self._published[key] = self._version, buffer, packs
        return published

    def keeps(self, published: Published) -> bool:
        """Whether a table of an earlier call is still in shared memory."""
        return any(one is published for one in self._published.values())

    def packing_buffer(self, num_bytes: int) -> int:
        """The address of a buffer that can be exported, with at least so many bytes."""
        if self.packing is None or self.packing[1] < num_bytes:
            self._free_packing()
            self.packing = self.driver.allocate(num_bytes), num_bytes
        return self.packing[0]

    def _free_packing(self) -> None:
        if self.packing is not None:
            address, self.packing = self.packing[0], None
            with contextlib.suppress(CudaError):
                self.driver.free(address)

    def enqueue_end(
        self, signals: CallSignals, stream: int, waits: Iterable[tuple[int, int, int]] = ()
    ) -> None:
        """Let a stream wait for signals, and then signal that it has nothing left to do."""
        signals.enqueue(stream, waits, [(OVER, LAST_STEP)])
        for call in tuple(self._running):
            if signals.own.is_over(call):
                self._running.pop(call, None)
        self._running[signals.call] = stream

    @property
    def is_idle(self) -> Callable[[], bool]:
        """A function that says whether the GPU work of all calls so far is done."""
        running, own = tuple(self._running), self._own
        return lambda: own is None or all(map(own.is_over, running))

    def after_last_call(self, stream: int) -> None:
        """Let a stream wait for the GPU work of all calls so far, on other streams."""
        own, running = self.signals, self._running.copy()
        calls = [one for one, by in running.items() if by != stream and not own.is_over(one)]
        waits = [(WAIT, own.address_of(OVER, call), call << 32 | LAST_STEP) for call in calls]
        if waits:
            self.driver.enqueue(stream, waits)

    def release(self) -> None:
        self.addends.release()
        while self._published:
            self._connections.buffers.give_back(self._published.popitem()[1][1])
        with self.using(self._device):
            self._free_packing()
            self.mappings.drop(self.is_idle)

    def close(self) -> None:
        """Free everything; pages on which GPU work still waits stay."""
        self._connections.resource(InFlight).settle()
        self.release()
        if not self.is_idle():
            return
        with self.using(self._device):
            for signals in self.peers.values():
                signals.close()
            if self._own is not None:
                self._own.close()
                self._own.page.close()
        self.peers, self._own = {}, None
