"""Stand-ins for a NCCL group and for the CUDA driver: moves between GPUs where there is none.

Tensors stay on the host. Instead of NCCL messages go over gloo; instead of mapped GPU memory the
kernel reads the memory of the other process. All else is what runs with a GPU: the handshake, the
order of calls, the tables of copies (copied by torch), sums, signals, the watching thread.
"""

import contextlib
import ctypes
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from reshard.errors import LiveError
from reshard.live import call
from reshard.live.copy.cuda_driver import WRITE, Allocation, CudaError, Operation
from reshard.live.copy.host import read_memory
from reshard.live.inputs.bound import BoundTensors
from reshard.live.program.messages import IovecCall
from reshard.live.transport import gpu_memory, nccl


class StandInWork:
    """What `NcclWork` does: messages in flight, and a thread that waits for them."""

    def __init__(self, group: "StandInGroup", begin: Callable[[], list[Any]], lag: float) -> None:
        self.group = group
        self.over = threading.Event()
        self._reached = threading.Event()
        self._begin, self._lag = begin, lag
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        time.sleep(self._lag)
        self._reached.set()
        with contextlib.suppress(RuntimeError):
            for work in [] if self.group.aborted else self._begin():
                work.wait()
            self.over.set()

    def join(self) -> None:
        """A stream would wait now; the host is its own stream."""
        while not self.over.wait(0.001) and not self.group.aborted:
            pass

    def begun(self) -> bool:
        return self._reached.is_set()

    def late(self, peers: Any) -> None:
        return None

    def done(self) -> bool:
        if self.group.aborted:
            raise LiveError("aborted")
        return self.over.is_set()


class StandInGroup:
    """What `NcclGroup` does, over gloo."""

    lag = 0.0
    """Seconds by which the next exchange begins too late."""
    num_gathers = 0
    """All-gathers so far."""

    def __init__(
        self, store: Any, rank: int, size: int, device: torch.device, *, wait: Any
    ) -> None:
        self.device = device
        self.aborted = False
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))

    def all_gather(self, slots: torch.Tensor, wait: Any) -> StandInWork:
        rank, size = self._group.rank(), self._group.size()
        parts = list(enumerate(slots.chunk(size)))
        others = [part for part in parts if part[0] != rank]
        StandInGroup.num_gathers += 1
        return self.exchange([(peer, parts[rank][1]) for peer, _ in others], others, wait)

    def exchange(self, sends: Any, receives: Any, wait: Any) -> StandInWork:
        if self.aborted:
            raise LiveError("a closed group")

        def begin() -> list[Any]:
            works = [self._group.recv([tensor], rank, 0) for rank, tensor in receives]
            return works + [self._group.send([tensor], rank, 0) for rank, tensor in sends]

        lag, StandInGroup.lag = StandInGroup.lag, 0.0
        return StandInWork(self, begin, lag)

    def abort(self) -> None:
        self.aborted = True

    def close(self, wait: Any = None) -> None:
        self.aborted = True


class StandInDriver:
    """What `Driver` does, with the memory of the host."""

    refused: ClassVar[set[int]] = set()
    """Processes whose memory cannot be opened."""
    exportable = True
    gpu: ClassVar[str] = ""
    """The GPU of this process; by default one of its own."""
    opened: ClassVar[dict[int, int]] = {}
    """Mappings that are not closed, and how often each was opened."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}
        """Memory that was allocated here."""
        self._handles: dict[bytes, int] = {}
        self._ranges: list[tuple[int, int, int, int]] = []
        """Address here, size, process, address there."""
        self._next = 1 << 60

    def is_usable(self) -> bool:
        return True

    def gpu_of(self, device: torch.device) -> str:
        return self.gpu or f"stand-in {os.getpid()}"

    def allocation(self, address: int) -> Allocation:
        for here, size, _, _ in self._ranges:
            if here <= address < here + size:
                return Allocation(here, size, 1)
        for line in Path("/proc/self/maps").read_text().splitlines():
            low, high = (int(part, 16) for part in line.split()[0].split("-"))
            if low <= address < high:
                return Allocation(low, high - low, zlib.crc32(f"{low} {high}".encode()) + 1)
        raise CudaError("STAND_IN_NOT_ALLOCATED")

    def number(self, address: int) -> int:
        try:
            return self.allocation(address).number
        except CudaError:
            return 0

    def export(self, base: int) -> bytes:
        if not self.exportable and base not in self._kept:
            raise CudaError("STAND_IN_NOT_EXPORTABLE")
        size = self.allocation(base).num_bytes
        return struct.pack("<3Q", os.getpid(), base, size).ljust(64, b"\0")

    def open(self, handle: bytes) -> int:
        pid, base, size = struct.unpack_from("<3Q", handle)
        if pid in self.refused:
            raise CudaError("STAND_IN_REFUSED")
        if handle not in self._handles:
            # Above all memory of the process: nothing is there, all access is by `view`.
            self._handles[handle] = self._next
            self._ranges.append((self._next, size, pid, base))
            self._next += size + (1 << 30)
        address = self._handles[handle]
        self.opened[address] = self.opened.get(address, 0) + 1
        return address

    def close(self, address: int) -> None:
        self.opened[address] -= 1
        if not self.opened[address]:
            del self.opened[address]

    def allocate(self, num_bytes: int) -> int:
        memory = mmap.mmap(-1, num_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._kept[address] = memory
        return address

    def free(self, address: int) -> None:
        del self._kept[address]

    def write_word(self, address: int, value: int) -> None:
        ctypes.c_uint64.from_address(address).value = value

    def read_word(self, address: int) -> int:
        found = self.view(address, 8, torch.device("cpu"))
        return int.from_bytes(found.numpy().tobytes(), "little")

    def register(self, address: int, num_bytes: int) -> int:
        return address

    def unregister(self, address: int) -> None:
        pass

    def enqueue(self, stream: int, operations: Iterable[Operation]) -> None:
        """The host is its own stream. A signal was written before anybody was told of it."""
        for kind, address, value in operations:
            word = ctypes.c_uint64.from_address(address)
            if kind == WRITE:
                word.value = value
            assert word.value >= value, "a signal is missing"

    def view(self, address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        if address in self._kept:
            array = np.frombuffer(self._kept[address], np.uint8)[:num_bytes]
            return torch.from_numpy(array)
        for here, size, pid, there in self._ranges:
            if here <= address and address + num_bytes <= here + size and here in self.opened:
                found = torch.empty(num_bytes, dtype=torch.uint8)
                start = there + address - here
                # CUDA keeps mapped memory of a process that was killed; here it is gone.
                with contextlib.suppress(ProcessLookupError):
                    read_memory(pid, IovecCall.single(found.data_ptr(), start, num_bytes))
                return found
        raise AssertionError(f"{address:x} is not mapped")


def use(peer_memory: bool = False) -> None:
    """From now on this process takes the host for a GPU."""
    nccl.NcclGroup = StandInGroup  # type: ignore[misc, assignment]
    call.placement_of = _placement  # type: ignore[assignment]
    call.device_of = lambda bound: torch.device("cpu")  # type: ignore[assignment]
    call.has_nccl = lambda group: True  # type: ignore[assignment]
    driver = StandInDriver() if peer_memory else None
    gpu_memory.cuda_driver = lambda: driver  # type: ignore[assignment]
    # Both ways in every test, however many cores there are.
    gpu_memory.has_spare_cores = lambda num_ranks: os.environ.get("RANK") == "0"  # type: ignore[assignment]


def _placement(bound: BoundTensors) -> str:
    """What a rank tells the others: its tensors are on a GPU, or it has none."""
    return "cuda" if bound.tensors else "none"
