"""What the ranks of `test_nccl_group` do: 4 processes that share one GPU.

NCCL takes them for 4 hosts because each has a ``NCCL_HOSTID`` of its own.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import unittest
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from reshard.errors import LiveError, MoveTimeoutError, PeerLostError
from reshard.live.transport.nccl_group import NcclGroup, NcclWork

SIZE = 4
RANK = int(os.environ.get("RANK", "0"))
DEVICE = torch.device("cuda", 0)
Messages = list[tuple[int, torch.Tensor]]


class Job:
    """The caller's NCCL group, and another connection to its store beside it."""

    def __init__(self) -> None:
        port = int(os.environ["PORT"])
        torch.cuda.set_device(DEVICE)
        store = dist.TCPStore("127.0.0.1", port, SIZE, RANK == 0, timeout=timedelta(seconds=30))
        dist.init_process_group("nccl", rank=RANK, world_size=SIZE, store=store)
        self.store = dist.PrefixStore("beside", store.clone())
        self.check_callers_group()

    def group(self, name: str, ranks: range = range(SIZE), timeout: float = 20) -> NcclGroup:
        self.meet(name, ranks)
        store = dist.PrefixStore(name, self.store)
        return NcclGroup(store, ranks.index(RANK), len(ranks), DEVICE, timeout=timeout)

    def meet(self, name: str, ranks: range = range(SIZE)) -> None:
        self.store.set(f"{name}/{RANK}", "here")
        self.store.wait([f"{name}/{rank}" for rank in ranks])

    def check_callers_group(self) -> None:
        ones = torch.ones(1, device=DEVICE)
        dist.all_reduce(ones)
        assert ones.item() == SIZE


def messages(num_bytes: int, seed: int = 0, size: int = SIZE) -> tuple[Messages, Messages]:
    peers = [peer for peer in range(size) if peer != RANK]
    sends = [(peer, gpu_bytes(num_bytes, (RANK * 16 + peer + seed) % 251)) for peer in peers]
    return sends, [(peer, gpu_bytes(num_bytes, 0)) for peer in peers]


def gpu_bytes(count: int, value: int) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.uint8, device=DEVICE)


def right(receives: Messages, seed: int = 0) -> bool:
    return all(bool((tensor == (peer * 16 + RANK + seed) % 251).all()) for peer, tensor in receives)


def outcome(work: NcclWork, limit: float = 15) -> str:
    start = time.monotonic()
    while time.monotonic() - start < limit:
        try:
            if work.done():
                return "done"
        except LiveError as error:
            return type(error).__name__
        time.sleep(0.005)
    return "running"


def abort_after(group: NcclGroup, seconds: float) -> threading.Thread:
    thread = threading.Thread(target=lambda: (time.sleep(seconds), group.abort()))
    thread.start()
    return thread


def values(job: Job) -> None:
    """Messages arrive; the exchange keeps its place between the kernels around it."""
    group = job.group("values")
    for number_of_bytes in (1, 1000, 1 << 20, 32 << 20):
        sends, receives = messages(number_of_bytes, seed=3)
        group.exchange(sends, receives).join()
        assert right(receives, seed=3)
    for _, tensor in sends:
        tensor.zero_()
    torch.cuda._sleep(100_000_000)
    for peer, tensor in sends:
        tensor.fill_((RANK * 16 + peer + 7) % 251)
    work = group.exchange(sends, receives)
    assert not work.done()
    work.join()
    copies = [(peer, tensor.clone()) for peer, tensor in receives]
    assert right(copies, seed=7)
    assert outcome(work) == "done"
    job.meet("all done")
    group.close()
    job.check_callers_group()


def late_at_first(job: Job) -> None:
    """A rank that is late when the others connect; they abort, and all start anew."""
    group = job.group("first")
    sends, receives = messages(4 << 20)
    if RANK == 3:
        time.sleep(4)
        group.abort()
    else:
        thread, start = abort_after(group, 1.5), time.monotonic()
        with contextlib.suppress(LiveError):
            assert outcome(group.exchange(sends, receives)) == "LiveError"
        assert time.monotonic() - start < 3
        thread.join()
    job.check_callers_group()
    start_anew(job)


def abort_without_rank_3(job: Job, group: NcclGroup, start: Callable[[], NcclWork]) -> None:
    """One rank never joins an exchange; the others abort it, and all start anew."""
    if RANK == 3:
        time.sleep(4)
        group.abort()
    else:
        work, began = start(), time.monotonic()
        work.join()
        thread = abort_after(group, 1.5)
        assert outcome(work) == "LiveError"
        thread.join()
        torch.cuda.synchronize()
        assert time.monotonic() - began < 3.5
    job.check_callers_group()
    start_anew(job)


def late_when_warm(job: Job) -> None:
    """A rank that is late to the second exchange; the others abort from another thread."""
    group = job.group("warm")
    sends, receives = messages(4 << 20)
    group.exchange(sends, receives).join()
    torch.cuda.synchronize()
    job.meet("first is through")
    abort_without_rank_3(job, group, lambda: group.exchange(sends, receives))


def gathered(job: Job) -> None:
    """An all-gather has the values of all ranks; if one never joins it, the others abort."""
    group = job.group("gathered")
    for num_bytes in (16, 1000, 4 << 20):
        slots = gpu_bytes(SIZE * num_bytes, 0)
        slots.chunk(SIZE)[RANK].fill_(RANK + 1)
        group.all_gather(slots).join()
        found = slots.view(SIZE, num_bytes)
        assert all(bool((found[rank] == rank + 1).all()) for rank in range(SIZE)), num_bytes
    torch.cuda.synchronize()
    job.meet("gathered")
    abort_without_rank_3(job, group, lambda: group.all_gather(slots))


def killed(job: Job) -> None:
    """A rank dies; the others learn of it, live on, and go on among themselves."""
    group = job.group("killed")
    sends, receives = messages(4 << 20)
    group.exchange(sends, receives).join()
    torch.cuda.synchronize()
    job.meet("first is through")
    if RANK == 3:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    work = group.exchange(sends, receives)
    assert outcome(work) == PeerLostError.__name__
    group.abort()
    torch.cuda.synchronize()
    start_anew(job, range(3))
    time.sleep(5)  # torch's watchdog would have ended the process by now
    job.meet("end", range(3))


def missing(job: Job) -> None:
    """A rank never opens the group: an error in time, and the next one works."""
    if RANK == 3:
        time.sleep(4)
    else:
        start, store = time.monotonic(), dist.PrefixStore("missing", job.store)
        with unittest.TestCase().assertRaisesRegex(MoveTimeoutError, "late"):  # noqa: PT027
            NcclGroup(store, RANK, SIZE, DEVICE, timeout=2)
        assert time.monotonic() - start < 4
    job.check_callers_group()
    start_anew(job)


def start_anew(job: Job, ranks: range = range(SIZE)) -> None:
    group = job.group("anew", ranks)
    sends, receives = messages(1 << 20, seed=5, size=len(ranks))
    assert outcome(group.exchange(sends, receives)) == "done"
    assert right(receives, seed=5)
    job.meet("anew, done", ranks)


def many(job: Job) -> None:
    """Groups made and given back leave nothing behind."""
    sends, receives = messages(1 << 20)
    open_files = []
    for number in range(6):
        group = job.group(f"many {number}")
        assert outcome(group.exchange(sends, receives)) == "done"
        job.meet(f"many {number}, done")
        if number % 2:
            group.abort()
        else:
            group.close()
        del group
        open_files.append(len(os.listdir("/proc/self/fd")))  # noqa: PTH208
    assert open_files[-1] <= open_files[1] + 4, open_files
    job.check_callers_group()


if __name__ == "__main__":
    globals()[sys.argv[1]](Job())
    print("fine", flush=True)
    if RANK == 0:
        time.sleep(1)  # it serves the stores
    # Leaving the usual way would wait for groups that were broken on purpose.
    os._exit(0)
