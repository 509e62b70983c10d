"""Ranks for tests: a pool that all tests share, and fresh ranks for tests that break them.

def add(rank, value):                      # at the top of the test's module
    tensor = torch.tensor([rank + value])
    dist.all_reduce(tensor, group=pool_group(4))
    return tensor.item()

def test_add(pool):
    assert pool.run(add, 1, ranks=range(4)) == [10, 10, 10, 10]
"""

import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.ranks.outcome import (
    HangError,
    Outcome,
    RankError,
    Told,
    describe_exit,
    describe_failures,
    failures,
    name_ranks,
)
from tests.ranks.rank import host_store, join_group
from tests.ranks.worker import Worker, start_fork_server

TIMEOUT = 150.0
# After one rank has failed, the others often wait for it; they are given this long.
GRACE = 5.0
MAX_THREADS = 80
LEAVE_WITHIN = 10.0


class Job:
    """A function that runs on some ranks while the test goes on."""

    def __init__(self, ranks: "Ranks", name: str, workers: dict[int, Worker]) -> None:
        self._ranks = ranks
        self._name = name
        self._workers = workers
        self._ended: dict[int, Outcome] = {}
        self._told: dict[int, list[Any]] = {rank: [] for rank in workers}

    def outcomes(
        self, timeout: float = TIMEOUT, ranks: Iterable[int] | None = None
    ) -> list[Outcome]:
        """What became of the function on each rank, or on those given; errors are values here.

        A rank that has not ended within `timeout` seconds is an error: HangError, with the stacks
        of all ranks, which are then killed.
        """
        awaited = list(self._workers if ranks is None else ranks)
        if not self._collect(awaited, timeout, grace=math.inf):
            raise self._failure(HangError, timeout)
        return [self._ended[rank] for rank in awaited]

    def results(self, timeout: float = TIMEOUT) -> list[Any]:
        """What the function returned on each rank; any other outcome is an error and kills all."""
        complete = self._collect(list(self._workers), timeout, GRACE)
        if failures(self._ended):
            raise self._failure(RankError, timeout)
        if not complete:
            raise self._failure(HangError, timeout)
        return [self._ended[rank].value for rank in self._workers]

    def hear(self, rank: int, timeout: float = TIMEOUT) -> Any:
        """The next value that the function has sent from this rank with `tell`."""
        deadline = time.monotonic() + timeout
        while not self._told[rank]:
            if rank in self._ended:
                raise RankError(f"{self._name}: rank {rank} told nothing, {self._ended[rank]}")
            if not self._receive([rank], deadline - time.monotonic()):
                raise self._failure(HangError, timeout)
        return self._told[rank].pop(0)

    def _collect(self, ranks: list[int], timeout: float, grace: float) -> bool:
        """Waits for the outcomes; true when all have come, false when the time is over."""
        deadline = time.monotonic() + timeout
        while pending := [rank for rank in ranks if rank not in self._ended]:
            ends = [end.ended + grace for end in failures(self._ended).values()]
            if not self._receive(pending, min([deadline, *ends]) - time.monotonic()):
                return False
        return True

    def _receive(self, pending: list[int], seconds: float) -> bool:
        """Takes what comes first; false when nothing comes."""
        signs = [sign for rank in pending for sign in self._workers[rank].signs_of_life]
        if not wait(signs, max(0.0, seconds)):
            return False
        for rank in pending:
            message = self._workers[rank].receive()
            if isinstance(message, Told):
                self._told[rank].append(message.value)
            elif message is not None:
                self._ended[rank] = message
        return True

    def _failure(self, kind: type[RankError], timeout: float) -> RankError:
        """Kills the ranks and makes the error that tells how each failed or where it stands."""
        running = [rank for rank in self._workers if rank not in self._ended]
        failed = sorted(failures(self._ended))
        stacks = self._ranks.stacks() if running else ""
        self._ranks.kill_all()
        parts = [f"{name_ranks(failed)} failed"] if failed else []
        if running:
            parts.append(f"{name_ranks(running)} did not end (timeout {timeout:g} s)")
        details = [text for text in (describe_failures(self._ended), stacks) if text]
        message = "\n\n".join([f"{self._name}: {', '.join(parts)}", *details])
        return kind(message, self._ended)


class Ranks:
    """Started ranks, each a process that runs one function after another.

    `init=False` leaves `torch.distributed` alone, for tests that set it up themselves.
    """

    def __init__(self, size: int, *, init: bool = True) -> None:
        start_fork_server()
        self._num_jobs = 0
        self._workers = [Worker(rank) for rank in range(size)]
        try:
            for worker in self._workers:
                worker.wait_until_ready()
            if init:
                (port,) = self.run(host_store, ranks=[0])
                self.run(join_group, size, port)
        except BaseException:
            self.kill_all()
            raise

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    @property
    def usable(self) -> bool:
        """Whether every rank lives and waits for a function."""
        return bool(self._workers) and all(w.alive and not w.busy for w in self._workers)

    def begin(
        self, function: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None
    ) -> Job:
        """Starts `function(rank, *args)` on every rank, or on those given, and does not wait.

        The function stands at the top of a module, so that a rank can import it.
        """
        chosen = range(len(self._workers)) if ranks is None else ranks
        workers = {rank: self._workers[rank] for rank in chosen}
        if busy := [rank for rank, worker in workers.items() if worker.busy]:
            raise RuntimeError(f"{name_ranks(busy)} still busy; take that job's outcomes first")
        self._num_jobs += 1
        for worker in workers.values():
            worker.send(function, args, self._num_jobs)
        return Job(self, getattr(function, "__name__", repr(function)), workers)

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout: float = TIMEOUT,
    ) -> list[Outcome]:
        """Runs `function(rank, *args)` and tells how it ended on each rank; see `Job.outcomes`."""
        return self.begin(function, *args, ranks=ranks).outcomes(timeout)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout: float = TIMEOUT,
    ) -> list[Any]:
        """Runs `function(rank, *args)` and gives what each rank returned; see `Job.results`."""
        return self.begin(function, *args, ranks=ranks).results(timeout)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a rank; an idle one takes no notice of SIGINT."""
        worker = self._workers[rank]
        if not worker.alive:
            raise ProcessLookupError(f"rank {rank} {describe_exit(worker.exit_code)} already")
        os.kill(worker.pid, number)

    def stacks(self) -> str:
        """The stacks of all threads of all ranks, as they stand now."""
        for worker in self._workers:
            worker.ask_for_stacks()
        texts = [(worker.rank, worker.read_stacks()) for worker in self._workers]
        return "\n\n".join(f"stacks of rank {rank}:\n{text or '(none)'}" for rank, text in texts)

    def close(self) -> None:
        """Lets idle ranks leave, kills the others; a rank that does not leave well is an error."""
        leaving = [worker for worker in self._workers if worker.alive and not worker.busy]
        for worker in leaving:
            worker.hang_up()
        deadline = time.monotonic() + LEAVE_WITHIN
        left = [worker.gone_within(deadline - time.monotonic()) for worker in leaving]
        stacks = "" if all(left) else self.stacks()
        unwell = [
            f"rank {w.rank} {describe_exit(w.exit_code)}" for w in leaving if w.exit_code != 0
        ]
        self.kill_all()
        if unwell:
            raise RankError(f"told to leave, {', '.join(unwell)}\n\n{stacks}")

    def kill_all(self) -> None:
        """Ends every rank at once; nothing can be run afterwards."""
        for worker in self._workers:
            worker.release()
        self._workers = []


class Pool:
    """Ranks that tests share: started when first used, and again after a test has broken them."""

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self._ranks: Ranks | None = None

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout: float = TIMEOUT,
    ) -> list[Any]:
        """Runs `function(rank, *args)` and gives what each rank returned, in the order of ranks.

        An exception, a death or a hang on any rank is one RankError that tells all of them. The
        next test gets new ranks then: the old ones may disagree on what they have exchanged.
        """
        return self._living().run(function, *args, ranks=ranks, timeout=timeout)

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout: float = TIMEOUT,
    ) -> list[Outcome]:
        """The same for functions that may fail: Returned, Raised or Died for each rank.

        The ranks that are left go on: use it where the process group must survive the error.
        """
        return self._living().outcomes(function, *args, ranks=ranks, timeout=timeout)

    def renew(self) -> None:
        """Start new ranks if the old ones have many threads, before a test.

        A group of gloo has three threads as long as its rank lives, one of which wakes up a hundred
        times a second: with a hundred groups, eight idle ranks take two thirds of a core. New ranks
        take half a second.
        """
        if self._ranks is not None and self._ranks.usable:
            counts = [len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in self._ranks.pids]
            if max(counts) > MAX_THREADS:
                self.close()

    def close(self) -> None:
        """Ends the ranks; the next run starts new ones."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def _living(self) -> Ranks:
        if self._ranks is not None and not self._ranks.usable:
            self._ranks.kill_all()
            self._ranks = None
        if self._ranks is None:
            self._ranks = Ranks(self.size)
        return self._ranks


@contextmanager
def fresh_ranks(size: int, *, init: bool = True) -> Iterator[Ranks]:
    """New ranks for one test, which may kill, stop and interrupt them; all are ended after it."""
    ranks = Ranks(size, init=init)
    try:
        yield ranks
    except BaseException:
        ranks.kill_all()
        raise
    ranks.close()
