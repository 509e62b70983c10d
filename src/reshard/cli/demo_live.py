"""The live part of ``reshard demo``: one process per rank, on this machine.

    demo ----> host process, imports torch ----> one forked process per rank

The demo itself never imports torch. The host imports it once and forks the ranks, so that twelve of
them start as fast as one. Each process is killed by the kernel when the one that started it dies.
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
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from reshard.errors import LiveError
from reshard.show.run_report import RunReport

if TYPE_CHECKING:
    import numpy as np

    from reshard.planning.plans import Plan

    Array = np.ndarray[Any, Any]
    Arrays = Mapping[int, Mapping[str, Array]]


NUM_CALLS = 2
"""The first call connects the ranks, compares and compiles; the second only moves."""
ANSWER_WITHIN = 180.0
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

    stated: tuple[int, int]
    """Bytes and messages, as are those that happened."""
    happened: tuple[int, int]
    equal: bool
    """Whether all arrays are those that were expected."""
    seconds: list[float]
    """How long each call took, on the slowest rank."""
    start_seconds: float
    reports: list[tuple[RunReport, ...]]
    """The reports of all ranks, call by call."""

    @property
    def wire_bytes(self) -> int:
        return self.happened[0]

    @property
    def holds(self) -> bool:
        """Whether everything came out as stated."""
        return self.equal and self.happened == self.stated


def move_live(plan: Plan, sources: Arrays, expected: Arrays) -> LiveRun:
    """Start a process per rank, move the source arrays live, and compare with the expected ones."""
    began = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    pipe, far = context.Pipe()
    # Made and removed here: the host is killed, and could not clean up.
    folder = tempfile.TemporaryDirectory(prefix="reshard-demo-")
    arguments = (far, f"file://{folder.name}/store", plan, sources, expected)
    host = context.Process(target=_host, args=arguments, name="reshard-demo")
    missing = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        # The host inherits the mask: Ctrl-C is for the demo, which then ends its processes. One
        # that comes meanwhile is not lost: it is raised when the signal is let through again.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            host.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        far.close()
        answers = dict(_answer(pipe, host.sentinel) for _ in plan.ranks)
    finally:
        for name in missing:
            del os.environ[name]
        if host.pid is not None:
            host.kill()
            host.join()
        pipe.close()
        folder.cleanup()
    reports = list(zip(*(answers[rank][0] for rank in plan.ranks), strict=True))
    cost, last = plan.summary(), reports[-1]
    sent = sum(report.bytes_sent for report in last), sum(report.messages_sent for report in last)
    return LiveRun(
        (cost.wire_bytes, cost.num_messages),
        sent,
        all(equal for _, equal, _ in answers.values()),
        [max(report.seconds for report in call) for call in reports],
        max(0.0, *(at - began for _, _, at in answers.values())),
        reports,
    )


def _answer(pipe: Connection, host: int) -> tuple[int, tuple[list[RunReport], bool, float]]:
    """The next rank's outcome: its reports, whether its arrays are right, when it was connected."""
    if not wait([pipe, host], ANSWER_WITHIN):
        raise LiveError(f"a rank of the demo did not answer within {ANSWER_WITHIN:g} s")
    try:
        rank, outcome = pipe.recv()
    except EOFError:
        raise LiveError("the processes of the demo ended without an answer") from None
    if isinstance(outcome, str):
        raise LiveError(f"rank {rank} of the demo failed: {outcome}")
    return rank, outcome


def _host(pipe: Connection, address: str, plan: Plan, sources: Arrays, expected: Arrays) -> None:
    """Import torch, fork one process per rank, and live until the demo ends this process."""
    _die_with_parent()
    from reshard.live import api  # noqa: F401 - imported once, before the ranks are forked

    context = multiprocessing.get_context("fork")
    lock = context.Lock()
    ranks = []
    for rank in plan.ranks:
        arrays = sources.get(rank, {}), expected.get(rank, {})
        ranks.append(context.Process(target=_rank, args=(rank, address, plan, *arrays, pipe, lock)))
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


def _rank(
    rank: int,
    address: str,
    plan: Plan,
    sources: Mapping[str, Array],
    expected: Mapping[str, Array],
    pipe: Connection,
    lock: Any,
) -> None:
    """Join the other ranks, move, compare and answer."""
    _die_with_parent()
    import torch
    import torch.distributed as dist

    outcome: Any
    try:
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=len(plan.ranks))
        connected = time.perf_counter()
        tensors = {
            name: torch.from_numpy(array).view(getattr(torch, plan.have[name].dtype))
            for name, array in sources.items()
        }
        reports = []
        for _ in range(NUM_CALLS):
            handle = plan.start(tensors)
            moved = handle.wait()
            reports.append(handle.report)
        equal = moved.keys() == expected.keys() and all(
            torch.equal(tensor.view(torch.uint16), torch.from_numpy(expected[name]))
            for name, tensor in moved.items()
        )
        outcome = (reports, equal, connected)
    except Exception as error:
        if os.environ.get("RESHARD_TRACEBACK"):
            traceback.print_exc()
        outcome = f"{type(error).__name__}: {error}"
    with lock:
        pipe.send((rank, outcome))
    if dist.is_initialized() and not isinstance(outcome, str):
        dist.barrier()  # the lowest rank serves the store of the session
    os._exit(0)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
