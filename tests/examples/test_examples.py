"""Every example does what it says, and checks itself.

One is started with its own command; the others run on forked ranks, which have imported torch.
"""

import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.ranks.outcome import Returned
from tests.ranks.pool import fresh_ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.name for path in ROOT.glob("examples/*.py"))
TORCHRUN = [sys.executable, "-X", "faulthandler", "-m", "torch.distributed.run"]
SECONDS = 240.0
# Shares of one machine: nothing here is large enough for two threads.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONFAULTHANDLER": "1"}


def launched(arguments: Sequence[str], folder: Path) -> str:
    """What torchrun and its ranks print; their stacks if they do not end."""
    output = folder / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            [*TORCHRUN, "--standalone", *arguments],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        time.sleep(1.0)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, output.read_text()
    return output.read_text()


def as_rank(rank: int, path: str, size: int, port: int, folder: str, *arguments: str) -> None:
    """Run a program as torchrun starts it on one rank, writing to a file."""
    log = os.open(f"{folder}/{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
    sys.stdout.flush()


def on_ranks(name: str, folder: Path, *arguments: str, size: int = 4) -> str:
    """What the ranks of an example print."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with fresh_ranks(size, init=False) as ranks:
        path = str(ROOT / "examples" / name)
        outcomes = ranks.outcomes(as_rank, path, size, port, str(folder), *arguments)
    text = "".join((folder / f"{rank}.txt").read_text() for rank in range(size))
    assert all(isinstance(one, Returned) for one in outcomes), f"{outcomes}\n{text}"
    return text


def test_one_host(tmp_path: Path) -> None:
    text = on_ranks("one_host.py", tmp_path)
    assert sorted(re.findall(r"rank (\d): .* became \(4096, 512\)", text)) == list("0123")
    assert "12.0 MiB sent, 12.0 MiB received, 4.0 MiB kept" in text
    assert re.search(r"(peer|shared) memory  to and from ranks", text)


def test_two_hosts(tmp_path: Path) -> None:
    trace = tmp_path / "move.trace"
    text = launched(["--nproc-per-node", "2", "examples/two_hosts.py", str(trace)], tmp_path)
    assert re.search(r"rank 0 reaches ranks \[1\] through (peer|shared) memory", text)
    assert '"rank 1"' in trace.read_text()


def test_trainer_to_inference(tmp_path: Path) -> None:
    text = on_ranks("trainer_to_inference.py", tmp_path)
    assert "qkv.weight <- q_proj.weight" in text
    assert re.findall(r"step (\d): ", text) == ["0", "1", "2"]


def test_fsdp_tp_to_tp(tmp_path: Path) -> None:
    text = on_ranks("fsdp_tp_to_tp.py", tmp_path)
    assert "from mesh dp=2 tp=2 to mesh tp=2" in text
    assert "Both models give the same logits (2, 12, 96)." in text
    assert "Warning" not in text


def test_a_wrong_example_is_noticed(tmp_path: Path) -> None:
    """An example that finds its result wrong ends with an error."""
    (tmp_path / "wrong.py").write_text("assert False, 'not what was expected'")
    with pytest.raises(AssertionError, match="not what was expected"):
        on_ranks(str(tmp_path / "wrong.py"), tmp_path, size=1)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_says_how_to_start_it(name: str) -> None:
    text = (ROOT / "examples" / name).read_text()
    assert re.search(rf"^    torchrun .*(\n.*)?examples/{name}$", text, re.MULTILINE)
    assert f"def test_{name.removesuffix('.py')}(" in Path(__file__).read_text()
