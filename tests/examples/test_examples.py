"""Every example does what it says: it is started with its own command, and checks itself."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.name for path in ROOT.glob("examples/*.py"))
TORCHRUN = [sys.executable, "-X", "faulthandler", "-m", "torch.distributed.run"]
SECONDS = 80.0
# Shares of one machine: nothing here is large enough for two threads.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def started(arguments: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    """A launcher with its ranks, in a session of their own, writing to a file."""
    with output.open("w") as file:
        return subprocess.Popen(
            [*TORCHRUN, *arguments],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run(launches: Iterable[Sequence[str]], folder: Path) -> str:
    """What launchers that belong together print; their ranks' stacks if they do not end."""
    outputs = []
    processes = []
    try:
        for number, arguments in enumerate(launches):
            outputs.append(folder / f"{number}.txt")
            processes.append(started(arguments, outputs[-1]))
        end = time.monotonic() + SECONDS
        codes = [wait(process, end) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = "".join(output.read_text() for output in outputs)
    assert codes == [0] * len(codes), text
    return text


def wait(process: subprocess.Popen[bytes], end: float) -> int | None:
    """How a launcher ended; one that does not end in time has all its ranks print their stacks."""
    try:
        return process.wait(max(end - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        time.sleep(1.0)
        return process.poll()


def on_one_host(name: str, folder: Path, num_ranks: int = 4) -> str:
    return run([["--standalone", "--nproc-per-node", str(num_ranks), f"examples/{name}"]], folder)


def test_one_host(tmp_path: Path) -> None:
    text = on_one_host("one_host.py", tmp_path)
    assert sorted(re.findall(r"rank (\d): .* became \(4096, 512\)", text)) == list("0123")
    assert "12.0 MiB sent, 12.0 MiB received, 4.0 MiB kept" in text
    assert re.search(r"(peer|shared) memory  to and from ranks", text)


def test_two_hosts(tmp_path: Path) -> None:
    """Two launchers that meet at a file: no port is chosen beforehand."""
    common = ["--nnodes", "2", "--nproc-per-node", "1", "--local-addr", "127.0.0.1"]
    meet = ["--rdzv-backend", "c10d", "--rdzv-id", "two", "--rdzv-conf", "store_type=file"]
    where = ["--rdzv-endpoint", str(tmp_path / "meet")]
    trace = tmp_path / "move.trace"
    launch = [*common, *meet, *where, "examples/two_hosts.py", str(trace)]
    text = run([launch, launch], tmp_path)
    assert re.search(r"rank 0 reaches ranks \[1\] through (peer|shared) memory", text)
    assert '"rank 1"' in trace.read_text()


def test_trainer_to_inference(tmp_path: Path) -> None:
    text = on_one_host("trainer_to_inference.py", tmp_path)
    assert "qkv.weight <- q_proj.weight" in text
    assert re.findall(r"step (\d): ", text) == ["0", "1", "2"]


def test_fsdp_tp_to_tp(tmp_path: Path) -> None:
    text = on_one_host("fsdp_tp_to_tp.py", tmp_path)
    assert "from mesh dp=2 tp=2 to mesh tp=2" in text
    assert "Both models give the same logits (2, 12, 96)." in text
    assert "Warning" not in text


def test_a_wrong_example_is_noticed(tmp_path: Path) -> None:
    """An example that finds its result wrong ends with an error, and so does its launcher."""
    (tmp_path / "wrong.py").write_text("assert False, 'not what was expected'")
    with pytest.raises(AssertionError, match="not what was expected"):
        run([["--standalone", "--nproc-per-node", "1", str(tmp_path / "wrong.py")]], tmp_path)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_says_how_to_start_it(name: str) -> None:
    text = (ROOT / "examples" / name).read_text()
    assert re.search(rf"^    torchrun .*(\n.*)?examples/{name}$", text, re.MULTILINE)
    assert f"def test_{name.removesuffix('.py')}(" in Path(__file__).read_text()
