"""Moves between "GPUs" that are the host, over a stand-in for NCCL; these run on any machine."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.test_nccl_group import ROOT, free_port
from tests.device.test_nccl_moves import run_ranks
from tests.ranks.outcome import Died, Outcome
from tests.ranks.pool import fresh_ranks
from tests.soak import cases, soaking

SECONDS = 240


def as_rank(
    rank: int, scenarios: tuple[str, ...], port: int, num_cases: int, folder: str, transport: str
) -> None:
    """Be one rank of ``move_ranks``, which reads its environment when it is imported."""
    log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "PORT": str(port), "NUM_CASES": str(num_cases)}
    os.environ |= {"BACKEND": "gloo", "STAND_IN": "1", "RESHARD_TRANSPORT": transport}
    sys.argv = ["move_ranks", *scenarios]
    from tests.device import move_ranks

    move_ranks.main()


def run_forked(
    folder: Path,
    *scenarios: str,
    codes: tuple[int, ...] = (0,) * 4,
    transport: str = "nccl",
) -> None:
    """Four ranks of the fork server, which has imported torch: each must end as it should."""
    with fresh_ranks(4, init=False) as ranks:
        args = (scenarios, free_port(), cases(12, 40), str(folder), transport)
        outcomes = ranks.outcomes(as_rank, *args, timeout=SECONDS)
    logs = "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))
    assert [exit_code(outcome) for outcome in outcomes] == [*codes], f"{outcomes}\n{logs}"


def exit_code(outcome: Outcome) -> int | None:
    return outcome.exit_code if isinstance(outcome, Died) else None


@pytest.mark.parametrize("transport", ["nccl", "gpu_peer"])
def test_moves_over_a_stand_in(tmp_path: Path, transport: str) -> None:
    """Values first, then what fails; the last scenario kills a rank."""
    right = ("casts", "sums", "given_ways", "disjoint", "in_flight", "overtaken", "gradients")
    own = ("behind",) if transport == "nccl" else ("crossed", "released", "gives_up")
    names = (*right, "gathers", "pairs", "states", "refusals", "absent", *own, "killed")
    run_forked(tmp_path, *names, codes=(0, 0, 0, -9), transport=transport)


FORKED = """
import os
import sys
from importlib import reload

from tests.device import move_ranks

ranks = []
for rank in range(4):
    ranks.append(os.fork())
    if not ranks[-1]:
        os.environ["RANK"] = str(rank)
        reload(move_ranks).main()
        sys.exit()
codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
sys.exit(f"ranks ended with {codes}" if any(codes) else 0)
"""
"""Interpreters that end the usual way; one has imported torch for all."""


def test_processes_that_end_over_a_stand_in(tmp_path: Path) -> None:
    """Processes of their own: how an interpreter ends is what is tested."""
    settings = {"BACKEND": "gloo", "STAND_IN": "1", "RESHARD_TRANSPORT": "gpu_peer"}
    if soaking():
        run_ranks("leave", **settings)
        return
    settings |= {"PORT": str(free_port()), "PYTHONPATH": str(ROOT / "src")}
    output = tmp_path / "output.txt"
    with output.open("w") as file:
        job = subprocess.Popen(
            [sys.executable, "-u", "-c", FORKED, "leave"],
            env={**os.environ, **settings},
            cwd=ROOT,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        job.wait(SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    text = output.read_text()
    assert job.returncode == 0, text
    assert text.count("leave is fine") == 4, text
