"""The live part of ``reshard demo``: one process per rank, on this machine.

The demo itself never imports torch. The fork server of multiprocessing imports it once and forks
the ranks, so that twelve of them start as fast as one. The server ends with the demo, and the
kernel kills the ranks when the server ends.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.errors import LiveError
from reshard.show.run_report import RunReport

if TYPE_CHECKING:
    from multiprocessing.pool import Pool

    import numpy as np

    from reshard.planning.plans import Plan

    RankArrays = Mapping[str, np.ndarray[Any, Any]]
    Arrays = Mapping[int, RankArrays]

__all__ = ["LiveRun", "move_live"]

NUM_CALLS = 2
"""The first call connects the ranks, compares and compiles; the second only moves."""
ANSWER_WITHIN = 60.0
PR_SET_PDEATHSIG = 1
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Many ranks share few cores, a process with threads is not safe to fork, and torch would warn when
the rank that serves a store ends before the others."""


@dataclass(frozen=True, slots=True)
class LiveRun:
    """What the plan of a move states, and what it did between processes."""

    stated_wire_bytes: int
    stated_messages: int
    reports: tuple[tuple[RunReport, ...], ...]
    """The reports of all ranks, call by call."""
    equal: bool
    """Whether every rank got exactly the expected arrays."""
    start_seconds: float
    """Seconds until the ranks were connected."""

    @property
    def wire_bytes(self) -> int:
        """Bytes that all ranks sent in a call."""
        return sum(report.bytes_sent for report in self.reports[-1])

    @property
    def messages(self) -> int:
        """Messages that all ranks sent in a call."""
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


def move_live(plan: Plan, given: Arrays, expected: Arrays) -> LiveRun:
    """Start a process per rank, move the given arrays live, and compare with the expected ones."""
    began = time.perf_counter()
    # Made and removed here: the ranks are killed, and could not clean up.
    with tempfile.TemporaryDirectory(prefix="reshard-demo-") as folder, _ranks(plan) as pool:
        address = f"file://{folder}/store"
        tasks = [
            (rank, address, plan, given.get(rank, {}), expected.get(rank, {}))
            for rank in plan.ranks
        ]
        answers = pool.imap_unordered(_run_rank, tasks)
        try:
            outcomes = dict(answers.next(ANSWER_WITHIN) for _ in tasks)
        except multiprocessing.TimeoutError:
            text = f"a rank of the demo did not answer within {ANSWER_WITHIN:g} s"
            raise LiveError(text) from None
    reports, equal, connected = zip(*(outcomes[rank] for rank in plan.ranks), strict=True)
    stated = plan.summary()
    return LiveRun(
        stated.wire_bytes,
        stated.num_messages,
        tuple(zip(*reports, strict=True)),
        all(equal),
        max(max(connected) - began, 0.0),
    )


def _ranks(plan: Plan) -> Pool:
    """A process for each rank; all of them are ended at the end of the ``with`` block."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "reshard.live.api"])
    missing = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(missing)
    # The ranks inherit it: Ctrl-C is for the demo, which then ends its processes.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return context.Pool(len(plan.ranks), _die_with_parent)
    finally:
        signal.signal(signal.SIGINT, handler)
        for name in missing:
            del os.environ[name]


def _die_with_parent() -> None:
    """Be killed when the parent process ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _run_rank(
    task: tuple[int, str, Plan, RankArrays, RankArrays],
) -> tuple[int, tuple[list[RunReport], bool, float]]:
    """Join the other ranks, move and compare: reports, whether the arrays are right, when it was
    connected."""
    import torch
    import torch.distributed as dist

    rank, address, plan, given, expected = task
    try:
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=len(plan.ranks))
        connected = time.perf_counter()
        tensors = {
            name: torch.from_numpy(array).view(getattr(torch, plan.have[name].dtype))
            for name, array in given.items()
        }
        reports = []
        for _ in range(NUM_CALLS):
            handle = plan.start(tensors)
            moved = handle.wait()
            reports.append(handle.report)
    except Exception as error:
        if os.environ.get("RESHARD_TRACEBACK"):
            traceback.print_exc()
        text = f"rank {rank} of the demo failed: {type(error).__name__}: {error}"
        raise LiveError(text) from None
    equal = moved.keys() == expected.keys() and all(
        torch.equal(tensor.view(torch.uint16), torch.from_numpy(expected[name]))
        for name, tensor in moved.items()
    )
    return rank, (reports, equal, connected)
