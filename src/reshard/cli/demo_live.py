"""The live part of ``reshard demo``: real processes on this machine, started and ended here.

Ranks are forked from one process that has loaded torch, so that twelve of them take as long to
start as one. This process never loads it.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import TYPE_CHECKING, Any

from reshard.errors import LiveError
from reshard.show.run_report import RunReport

if TYPE_CHECKING:
    import numpy as np

    from reshard.planning.plan import Plan

    Array = np.ndarray[Any, Any]
    Arrays = Mapping[int, Mapping[str, Array]]

__all__ = ["Done", "Failed", "Live", "NotLive", "digest", "has_torch", "move_live"]

ANSWER_WITHIN = 60.0
LEAVE_WITHIN = 5.0
# Many ranks share few cores, and a process that has threads is not safe to fork.
ENVIRONMENT = {
    "RESHARD_DEMO_RANKS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True, slots=True)
class Done:
    """What a rank did."""

    reports: tuple[RunReport, ...]
    """One for each time that it moved."""
    digests: dict[str, bytes]
    """Of every tensor that it got."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a rank could not."""

    error: str
    traceback: str


@dataclass(frozen=True, slots=True)
class NotLive:
    """Why nothing was moved between processes."""

    reason: str
    holds: bool
    """Whether that is all right: nobody has to have torch."""

    def to_dict(self) -> dict[str, Any]:
        """The reason as plain data."""
        return {"not_run": self.reason}


@dataclass(frozen=True, slots=True)
class Live:
    """A move between processes, twice: the first call prepares what the second finds ready."""

    stated_wire_bytes: int
    stated_messages: int
    reports: tuple[tuple[RunReport, ...], ...]
    """Of each call, by rank."""
    equal: bool
    """Whether all values on every rank are those that the simulation gives."""
    start_seconds: float
    """What it took until all ranks were there."""

    @property
    def wire_bytes(self) -> int:
        """What all ranks sent in a call."""
        return sum(report.bytes_sent for report in self.reports[-1])

    @property
    def messages(self) -> int:
        """How many messages that took."""
        return sum(report.messages_sent for report in self.reports[-1])

    @property
    def holds(self) -> bool:
        """Whether everything came out as stated."""
        counts = (self.wire_bytes, self.messages)
        return self.equal and counts == (self.stated_wire_bytes, self.stated_messages)

    @property
    def busiest(self) -> RunReport:
        """The report of the rank that the others waited for in the last call."""
        return max(self.reports[-1], key=lambda report: report.packing + report.unpacking)

    def seconds(self, call: int) -> float:
        """How long a call took, on the slowest rank."""
        return max(report.seconds for report in self.reports[call])

    def to_dict(self) -> dict[str, Any]:
        """The run as plain data, with the reports of the last call."""
        return {
            "stated_wire_bytes": self.stated_wire_bytes,
            "wire_bytes": self.wire_bytes,
            "stated_messages": self.stated_messages,
            "messages": self.messages,
            "values_equal": self.equal,
            "seconds": [self.seconds(call) for call in range(len(self.reports))],
            "start_seconds": self.start_seconds,
            "reports": [report.to_dict() for report in self.reports[-1]],
        }


def has_torch() -> bool:
    """Whether ranks can be started at all."""
    return find_spec("torch") is not None


def move_live(plan: Plan, given: Arrays, expected: Arrays) -> Live:
    """Start a process per rank, move the given arrays live, and compare with the expected ones."""
    began = time.perf_counter()
    with _started(plan.ranks) as ranks:
        _introduce(ranks)
        start_seconds = time.perf_counter() - began
        for rank in ranks:
            rank.send((plan, given.get(rank.number, {})))
        wanted = {number: _digests(arrays) for number, arrays in expected.items()}
        done = _answers(ranks)
        for rank in ranks:
            rank.send("leave")
    equal = all(done[number].digests == wanted.get(number, {}) for number in done)
    calls = tuple(zip(*(one.reports for one in done.values()), strict=True))
    stated = plan.summary()
    return Live(stated.wire_bytes, stated.num_messages, calls, equal, start_seconds)


def digest(data: memoryview) -> bytes:
    """A hash by which two processes compare a tensor without sending it."""
    return hashlib.blake2b(data, digest_size=16).digest()


def _digests(arrays: Mapping[str, Array]) -> dict[str, bytes]:
    return {name: digest(array.reshape(-1).data) for name, array in arrays.items()}


class _Rank:
    """The process of a rank, and the pipe to it."""

    def __init__(self, number: int, num_ranks: int) -> None:
        context = multiprocessing.get_context("forkserver")
        self.number = number
        self.pipe, far = context.Pipe()
        self.process: ForkServerProcess = context.Process(
            target=_serve, args=(number, num_ranks, far), name=f"rank {number}", daemon=True
        )
        self.process.start()
        far.close()

    def send(self, message: object) -> None:
        try:
            self.pipe.send(message)
        except OSError as error:
            raise LiveError(f"rank {self.number} of the demo is gone ({error})") from None

    def receive(self, deadline: float) -> Any:
        """The next thing that the rank says, if it does in time."""
        left = max(deadline - time.monotonic(), 0.0)
        try:
            if wait([self.pipe, self.process.sentinel], left):
                return self.pipe.recv()
        except (EOFError, OSError):
            code = self.process.exitcode
            raise LiveError(f"rank {self.number} of the demo ended with code {code}") from None
        raise LiveError(f"rank {self.number} of the demo did not answer in {ANSWER_WITHIN:g} s")


def _serve(number: int, num_ranks: int, pipe: Connection) -> None:
    from reshard.cli.demo_rank import serve

    serve(number, num_ranks, pipe)


@contextmanager
def _started(numbers: Sequence[int]) -> Iterator[list[_Rank]]:
    """Processes for these ranks, all of which are gone afterwards."""
    _start_fork_server()
    ranks: list[_Rank] = []
    try:
        for number in numbers:
            ranks.append(_Rank(number, len(numbers)))  # noqa: PERF401 (an interrupt may come)
        yield ranks
        for rank in ranks:
            rank.process.join(LEAVE_WITHIN)
    finally:
        # The first rank serves the store: it goes last, or torch tells of every question to it.
        for rank in reversed(ranks):
            rank.process.kill()
            rank.process.join()
            rank.pipe.close()


def _start_fork_server() -> None:
    """Start the process that ranks are forked from: it loads torch once for all of them."""
    first = ["reshard.cli.demo_quiet", "reshard.cli.demo_rank"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(first)
    missing = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        forkserver.ensure_running()
    finally:
        for name in missing:
            del os.environ[name]


def _introduce(ranks: Sequence[_Rank]) -> None:
    """Tell all ranks the port at which the first one listens.

    That one waits for it too: a rank that was made when an interrupt came, and that nobody knows
    of, waits at its pipe and nowhere else, and ends with the demo.
    """
    port = ranks[0].receive(time.monotonic() + ANSWER_WITHIN)
    for rank in ranks:
        rank.send(port)


def _answers(ranks: Sequence[_Rank]) -> dict[int, Done]:
    """What every rank did; if one failed, its error with what it was doing."""
    deadline = time.monotonic() + ANSWER_WITHIN
    found: dict[int, Done] = {}
    for rank in ranks:
        answer = rank.receive(deadline)
        if not isinstance(answer, Done):
            raise LiveError(f"rank {rank.number} of the demo failed: {answer.error}")
        found[rank.number] = answer
    return found
