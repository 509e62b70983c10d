"""Ranks on two hosts, which torchrun starts: memory within a host, the network between.

The hosts are network namespaces of this machine; where none can be made the tests are skipped, and
say why.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.namespaces import Host, NotPermittedError, two_hosts
from tests.ranks.two_hosts_worker import TIMEOUT

ROOT = Path(__file__).parents[2]
RANKS = range(4)
START_SECONDS, END_SECONDS = 40.0, 30.0
FEW_SECONDS = 4.0
"""How much later than its timeout a rank may notice that it is cut off."""

Told = dict[str, Any]

SLOW_LINE = pytest.mark.xfail(
    strict=True,
    reason="every question to a store that is out of reach takes 5 s, one after another",
)
OLD_LINE = pytest.mark.xfail(
    strict=True,
    reason="the store is asked over the old connection, which TCP tries ever more rarely",
)


@dataclass
class Job:
    """Four ranks, two on each host, with one launcher per host, as a user starts them."""

    hosts: tuple[Host, Host]
    folder: Path
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, task: str) -> None:
        for number, host in enumerate(self.hosts):
            self.launchers.append(self._launch(task, number, host))

    def _launch(self, task: str, number: int, host: Host) -> subprocess.Popen[bytes]:
        where = ["--master-addr", self.hosts[0].address, "--master-port", "29500"]
        size = ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(number)]
        what = ["-m", "tests.ranks.two_hosts_worker", task, str(self.folder)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *size, *where, *what]
        network = {"GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1"}
        paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        with (self.folder / f"output.{number}").open("w") as output:
            return subprocess.Popen(
                host.command(torchrun),
                cwd=ROOT,
                env=os.environ | network | {"PYTHONPATH": os.pathsep.join(paths)},
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
            assert time.monotonic() < end, f"not in {seconds:g} s: {what}\n{self.output()}"
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

    def is_over(self) -> bool:
        return all(launcher.poll() is not None for launcher in self.launchers)

    def end(self) -> None:
        """End what is left of it, by process ids; nothing but this job runs on these hosts."""
        for host in self.hosts:
            host.end_processes()
        for launcher in self.launchers:
            launcher.wait(10)


@contextmanager
def job_of(task: str, folder: Path) -> Iterator[Job]:
    """A job that has been started, on hosts of its own."""
    try:
        with two_hosts() as hosts:
            job = Job(hosts, folder)
            try:
                job.start(task)
                yield job
            finally:
                job.end()
    except NotPermittedError as reason:
        pytest.skip(f"NOT TESTED: no two hosts here, as there are no network namespaces: {reason}")


def others(rank: int) -> list[int]:
    """The ranks of the other host."""
    return [2, 3] if rank in (0, 1) else [0, 1]


def test_memory_within_a_host_and_the_network_between(tmp_path: Path) -> None:
    with job_of("moves", tmp_path) as job:
        told = job.told("moved", START_SECONDS)
        job.until("the launchers end", job.is_over, END_SECONDS)
    for one in told:
        assert one["problems"] == {}
        for name, reached in one["reached"].items():
            assert len(reached) >= 2, (name, reached)
            for peer, way in reached.items():
                far = int(peer) in others(one["rank"])
                ways = ("network (gloo)",) if far else ("peer memory", "shared memory")
                assert way in ways, (name, one["rank"], reached)


def test_a_link_that_comes_back_in_time_costs_only_time(tmp_path: Path) -> None:
    with job_of("long", tmp_path) as job:
        job.told("moving", START_SECONDS)
        job.hosts[1].set_link("down")
        time.sleep(1.0)
        back = time.monotonic()
        job.hosts[1].set_link("up")
        told = job.told("moved", END_SECONDS)
        job.until("the launchers end", job.is_over, END_SECONDS)
    for one in told:
        assert one.get("right") is True, one
        assert one["ended"] > back, f"the move was over before the link was back: {one}"


@dataclass(frozen=True)
class Cut:
    """What came of a move whose link was cut, rank by rank."""

    at: float
    moved: list[Told]
    again: list[Told]
    """Of another move, when the link was back."""
    left: list[int]
    """Ranks that did not end when it was cut again."""


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cut]:
    with job_of("cut", tmp_path_factory.mktemp("cut")) as job:
        job.told("moving", START_SECONDS)
        job.hosts[1].set_link("down")
        at = time.monotonic()
        moved = job.told("moved", END_SECONDS)
        job.hosts[1].set_link("up")
        job.tell("link is back")
        again = job.told("again", END_SECONDS)
        job.hosts[1].set_link("down")
        job.tell("link is cut")
        left = remaining([told["pid"] for told in moved], FEW_SECONDS)
        yield Cut(at, moved, again, left)


def remaining(pids: list[int], seconds: float) -> list[int]:
    """The ranks whose process has not ended after so long."""
    end, left = time.monotonic() + seconds, pids
    while left and time.monotonic() < end:
        time.sleep(0.05)
        left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    return [pids.index(pid) for pid in left]


@pytest.mark.parametrize("rank", RANKS)
def test_a_cut_link_is_an_error_that_names_who_is_out_of_reach(cut: Cut, rank: int) -> None:
    """Ranks 2 and 3 do not reach the store either: rank 0 serves it."""
    told = cut.moved[rank]
    assert told.get("kind") in ("PeerLostError", "MoveTimeoutError"), told
    first, second = others(rank)
    assert re.search(rf"^rank [{first}{second}] .*\"weight\" in round \d+ of \d+ ", told["message"])
    status = rf"\(on rank {rank}: round (\d+) of (\d+), \d.* of \d.* done\)$"
    assert re.search(status, told["message"]), told


@pytest.mark.parametrize(
    "rank", [0, 1, pytest.param(2, marks=SLOW_LINE), pytest.param(3, marks=SLOW_LINE)]
)
def test_a_cut_link_is_noticed_soon_after_the_timeout(cut: Cut, rank: int) -> None:
    seconds = cut.moved[rank]["ended"] - cut.at
    assert TIMEOUT - 1 < seconds < TIMEOUT + FEW_SECONDS, cut.moved[rank]


@OLD_LINE
def test_the_next_move_works_when_the_link_is_back(cut: Cut) -> None:
    assert [told.get("right") for told in cut.again] == [True] * 4, cut.again


def test_ranks_end_without_the_link(cut: Cut) -> None:
    assert cut.left == []
