"""Ranks on two hosts: memory within a host, the network between.

The hosts are network namespaces of this machine; where none can be made the tests are skipped, and
say why.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.live.transport.namespaces import Host, NotPermittedError, two_hosts
from tests.live.transport.two_hosts_worker import TIMEOUT
from tests.soak import soaking, within

ROOT = Path(__file__).parents[3]
NUM_CASES = 6
"""Moves of `two_hosts_worker.cases`."""
RANKS = range(4)
START_SECONDS, END_SECONDS = 240.0, 90.0
FEW_SECONDS = within(4.0)
"""How much later than its timeout a rank may notice that it is cut off."""

FORKS = """
import os
import sys

from tests.live.transport import two_hosts_worker

ranks = []
for rank in (2 * int(sys.argv[1]), 2 * int(sys.argv[1]) + 1):
    ranks.append(os.fork())
    if not ranks[-1]:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4"}
        two_hosts_worker.main(sys.argv[2])
        sys.exit()
sys.exit(any([os.waitpid(rank, 0)[1] for rank in ranks]))
"""
"""A launcher that imports torch once for the ranks of its host; a soak has torchrun."""

Told = dict[str, Any]


@dataclass
class Job:
    """Four ranks, two on each host, with one launcher per host, as a user starts them."""

    hosts: tuple[Host, Host]
    folder: Path
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        for number, host in enumerate(self.hosts):
            self.launchers.append(self._launch(number, host))

    def _launch(self, number: int, host: Host) -> subprocess.Popen[bytes]:
        where = ["--master-addr", self.hosts[0].address, "--master-port", "29500"]
        size = ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(number)]
        what = ["-m", "tests.live.transport.two_hosts_worker", str(self.folder)]
        launcher = [sys.executable, "-m", "torch.distributed.run", *size, *where, *what]
        if not soaking():
            launcher = [sys.executable, "-c", FORKS, str(number), str(self.folder)]
        address = {"MASTER_ADDR": self.hosts[0].address, "MASTER_PORT": "29500"}
        network = {"GLOO_SOCKET_IFNAME": host.interface}
        paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        python = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        python |= {"PYTHONPATH": os.pathsep.join(paths)}
        with (self.folder / f"output.{number}").open("w") as output:
            return subprocess.Popen(
                host.command(launcher),
                cwd=ROOT,
                env=os.environ
                | address
                | network
                | python
                | {"PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def until(self, what: str, done: Callable[[], bool], seconds: float) -> None:
        """Wait for something that ranks do; if it does not happen, say all that they said."""
        end = time.monotonic() + seconds
        while not done():
            codes = [launcher.poll() for launcher in self.launchers]
            assert not any(codes), f"launchers ended with {codes} before {what}\n{self.output()}"
            assert time.monotonic() < end, f"not in {seconds:g} s: {what}\n{self.stacks()}"
            time.sleep(0.01)

    def told(self, word: str, seconds: float) -> list[Told]:
        """What every rank tells under this word, once all have."""
        files = [self.folder / f"{word}.{rank}.json" for rank in RANKS]
        self.until(f'"{word}" of every rank', lambda: all(f.exists() for f in files), seconds)
        return [json.loads(file.read_text()) for file in files]

    def tell(self, word: str) -> None:
        """Say something to all ranks."""
        (self.folder / word).touch()

    def output(self) -> str:
        """What launchers and ranks printed, and what ranks told."""
        files = [*self.folder.glob("output.*"), *self.folder.glob("*.json")]
        return "\n".join(f"{file.name}: {file.read_text()}" for file in sorted(files))

    def stacks(self) -> str:
        """Have all processes print what they are at, and end."""
        for host in self.hosts:
            host.signal(signal.SIGABRT)
        time.sleep(1.0)
        return self.output()

    def is_over(self) -> bool:
        return all(launcher.poll() is not None for launcher in self.launchers)

    def end(self) -> None:
        """End what is left of it, by process ids; nothing but this job runs on these hosts."""
        for host in self.hosts:
            host.end_processes()
        for launcher in self.launchers:
            launcher.wait(10)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """One job for all tests of this file, which take it from phase to phase: it starts slowly."""
    try:
        with two_hosts() as hosts:
            made = Job(hosts, tmp_path_factory.mktemp("job"))
            try:
                made.start()
                yield made
            finally:
                made.end()
    except NotPermittedError as reason:
        pytest.skip(f"NOT TESTED: no two hosts here, as there are no network namespaces: {reason}")


@pytest.fixture(scope="module")
def moved(job: Job) -> list[Told]:
    """What ranks tell of moves while all is well."""
    return job.told("moved", START_SECONDS)


@pytest.fixture(scope="module")
def blinked(job: Job, moved: list[Told]) -> tuple[float, list[Told]]:
    """When the link was back, and what came of a move in the middle of which it was down."""
    job.tell("blink")
    job.told("blink, moving", END_SECONDS)
    job.hosts[1].set_link("down")
    time.sleep(1.0)
    job.hosts[1].set_link("up")
    return time.monotonic(), job.told("blink", END_SECONDS)


@pytest.fixture(scope="module")
def cut(job: Job, blinked: object) -> tuple[float, list[Told]]:
    """When the link was cut in the middle of a move, and what came of it."""
    job.tell("cut")
    job.told("cut, moving", END_SECONDS)
    job.hosts[1].set_link("down")
    return time.monotonic(), job.told("cut", END_SECONDS)


@pytest.fixture(scope="module")
def back(job: Job, cut: object) -> list[Told]:
    """What came of the next move, when the link was up again."""
    job.hosts[1].set_link("up")
    job.tell("back")
    return job.told("back", END_SECONDS)


@pytest.fixture(scope="module")
def chain(job: Job, back: list[Told]) -> list[Told]:
    """What came of a move with a cut link in which not everybody has peers on the other host."""
    assert not any("kind" in told for told in back), "the move before it has not worked"
    job.tell("chain")
    job.told("chain, moving", END_SECONDS)
    job.hosts[1].set_link("down")
    return job.told("chain", END_SECONDS)


def others(rank: int) -> list[int]:
    """The ranks of the other host."""
    return [2, 3] if rank in (0, 1) else [0, 1]


@pytest.mark.parametrize("rank", RANKS)
def test_moves_are_right(moved: list[Told], rank: int) -> None:
    assert moved[rank]["problems"] == {}


@pytest.mark.parametrize("rank", RANKS)
def test_memory_within_a_host_and_the_network_between(moved: list[Told], rank: int) -> None:
    assert len(moved[rank]["reached"]) == NUM_CASES
    for name, reached in moved[rank]["reached"].items():
        assert len(reached) >= 2, (name, reached)
        for peer, way in reached.items():
            far = int(peer) in others(rank)
            ways = ("network (gloo)",) if far else ("peer memory", "shared memory")
            assert way in ways, (name, reached)


@pytest.mark.parametrize("rank", RANKS)
def test_a_link_that_comes_back_in_time_costs_only_time(
    blinked: tuple[float, list[Told]], rank: int
) -> None:
    at, told = blinked
    assert "kind" not in told[rank], told[rank]
    assert told[rank]["ended"] > at, "the move was over before the link was back"


@pytest.mark.parametrize("rank", RANKS)
def test_a_cut_link_is_an_error_that_names_who_is_out_of_reach(
    cut: tuple[float, list[Told]], rank: int
) -> None:
    """Ranks 2 and 3 do not reach the store either: rank 0 serves it."""
    check_names(cut[1][rank], f"[{'23' if rank in (0, 1) else '01'}]", "weight")


def check_names(told: Told, peer: object, tensor: str) -> None:
    """The error says who is waited for and for what; and no process has ended."""
    assert told.get("kind") in ("PeerLostError", "MoveTimeoutError"), told
    cause = rf'^rank {peer} .*"{tensor}" in round \d+ of \d+ '
    status = rf"\(on rank {told['rank']}: round \d+ of \d+, \d.* of \d.* done\)$"
    assert re.search(cause + status, told["message"]), told
    assert "ended" not in told["message"], told


@pytest.mark.parametrize("rank", RANKS)
def test_a_cut_link_is_noticed_soon_after_the_timeout(
    cut: tuple[float, list[Told]], rank: int
) -> None:
    at, told = cut
    assert TIMEOUT - 1 < told[rank]["ended"] - at < TIMEOUT + FEW_SECONDS, told[rank]


def test_the_next_move_works_when_the_link_is_back(back: list[Told]) -> None:
    assert not any("kind" in told for told in back), back


@pytest.mark.parametrize("rank", RANKS)
def test_ranks_without_peers_out_of_reach_name_them_as_well(chain: list[Told], rank: int) -> None:
    """Rank 2 waits for rank 3, which is well but waits for rank 1, on the other host."""
    check_names(chain[rank], 1 if rank in (2, 3) else 3, "between")


def test_ranks_end_well_without_the_link(job: Job, back: list[Told]) -> None:
    job.hosts[1].set_link("down")
    job.tell("end")
    pids = [Path(f"/proc/{told['pid']}") for told in back]
    job.until("all ranks end", lambda: not any(pid.exists() for pid in pids), END_SECONDS)
    job.hosts[1].set_link("up")  # the launchers wait for each other
    job.until("the launchers end", job.is_over, END_SECONDS)
    assert [launcher.poll() for launcher in job.launchers] == [0, 0], job.output()
