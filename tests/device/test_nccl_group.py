"""A session's own NCCL group: messages arrive, and a lost or late rank harms no other process."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from reshard.errors import LiveError, MoveTimeoutError, PeerLostError
from reshard.live.transport import nccl_group
from reshard.live.transport.nccl_group import NcclGroup

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda", 0)
expects = unittest.TestCase()


class StandIn:
    """A backend of torch that does what a test wants, on a machine without a GPU."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.threads: list[int] = []
        self.blocked: str | None = None
        self.arrived = True
        self.completed = True
        self.released = threading.Event()

    def __getattr__(self, name: str) -> Any:
        def call(*_: object) -> Any:
            self.calls.append(name)
            self.threads.append(threading.get_ident())
            if name == self.blocked:
                assert self.released.wait(10)
                raise RuntimeError("internal error\nand a long stack")
            return self

        return call

    def abort(self) -> None:
        self.calls.append("abort")
        self.released.set()

    def query(self) -> bool:
        return self.arrived

    def is_completed(self) -> bool:
        return self.completed


@contextmanager
def group_over(backend: StandIn, timeout: float = 5) -> Any:
    cuda = mock.MagicMock()
    cuda.stream.return_value = nullcontext()
    cuda.Event.return_value = backend
    made = mock.patch.object(nccl_group, "_new_backend", return_value=backend)
    with mock.patch.object(nccl_group, "_cuda", cuda), made:
        yield NcclGroup(None, 0, 2, DEVICE, timeout=timeout)  # type: ignore[arg-type]


def test_one_group_call_per_exchange() -> None:
    backend, tensor = StandIn(), torch.zeros(1)
    with group_over(backend) as group:
        work = group.exchange([(1, tensor), (1, tensor)], [(1, tensor)])
        work.join()
        assert work.done()
    assert backend.calls[:6] == [
        *("eager_connect_single_device", "_start_coalescing", "recv", "send", "send"),
        "_end_coalescing",
    ]
    assert set(backend.threads[:6]) == {group._worker._ident} != {threading.get_ident()}


def test_an_abort_ends_a_call_that_hangs() -> None:
    backend = StandIn()
    with group_over(backend) as group:
        backend.blocked = "_end_coalescing"
        threading.Timer(0.2, group.abort).start()
        start = time.monotonic()
        with expects.assertRaisesRegex(LiveError, "internal error$"):  # noqa: PT027
            group.exchange([], [])
        assert time.monotonic() - start < 3
        with expects.assertRaisesRegex(LiveError, "make a new one"):  # noqa: PT027
            group.exchange([], [])


def test_a_call_that_hangs_ends_in_time() -> None:
    backend = StandIn()
    with group_over(backend, timeout=0.3) as group:
        backend.blocked = "_end_coalescing"
        with expects.assertRaisesRegex(MoveTimeoutError, r"0\.3 s .* connect"):  # noqa: PT027
            group.exchange([], [])
        assert group.aborted
        assert "abort" in backend.calls


def test_completed_without_having_arrived_is_lost() -> None:
    backend = StandIn()
    with group_over(backend) as group:
        backend.arrived = False
        work = group.exchange([], [])
        with expects.assertRaises(PeerLostError):  # noqa: PT027
            work.done()
        backend.completed = False
        assert not work.done()
        group.abort()
        with expects.assertRaisesRegex(LiveError, "aborted"):  # noqa: PT027
            work.done()


def test_the_environment_is_put_back() -> None:
    for before in (None, "0"):
        changed = {} if before is None else {nccl_group.NO_WATCHDOG: before}
        with mock.patch.dict(os.environ, changed):
            with nccl_group._without_watchdog():
                assert os.environ[nccl_group.NO_WATCHDOG] == "1"
            assert os.environ.get(nccl_group.NO_WATCHDOG) == before


def run_ranks(scenario: str, codes: tuple[int, ...] = (0, 0, 0, 0)) -> None:
    """Four ranks on one GPU; each must end as it should, and in time."""
    if not torch.cuda.is_available():
        raise unittest.SkipTest("needs a CUDA device, and torch sees none")
    command = [sys.executable, "-m", "tests.device.nccl_group_ranks", scenario]
    port = free_port()
    ranks = []
    logs = [tempfile.TemporaryFile() for _ in range(4)]  # noqa: SIM115 - `read` closes them
    for rank, log in enumerate(logs):
        env = {**os.environ, "RANK": str(rank), "PORT": str(port), "NCCL_HOSTID": f"host{rank}"}
        env |= {"NCCL_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT / "src")}
        # A watchdog that found something amiss would end the process this much sooner.
        env |= {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500"}
        ranks.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log))
    stop = time.monotonic() + 60
    while time.monotonic() < stop and any(one.poll() is None for one in ranks):
        time.sleep(0.1)
    for one in ranks:
        one.kill()
        one.wait()
    outputs = [read(log) for log in logs]
    found = tuple(one.returncode for one in ranks)
    assert found == codes, f"{found}\n" + "\n".join(outputs)


def read(log: Any) -> str:
    with log:
        log.seek(0)
        return str(log.read().decode())


def free_port() -> int:
    """A port that is free, and so is the next one, most likely."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_values_on_a_gpu() -> None:
    run_ranks("values")


def test_a_late_rank_at_first_on_a_gpu() -> None:
    run_ranks("late_at_first")


def test_a_late_rank_when_warm_on_a_gpu() -> None:
    run_ranks("late_when_warm")


def test_an_all_gather_on_a_gpu() -> None:
    run_ranks("gathered")


def test_a_killed_rank_on_a_gpu() -> None:
    run_ranks("killed", (0, 0, 0, -9))


def test_a_missing_rank_on_a_gpu() -> None:
    run_ranks("missing")


def test_many_groups_on_a_gpu() -> None:
    run_ranks("many")
