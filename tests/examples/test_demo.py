"""`reshard demo` starts processes, moves between them, and leaves none behind.

Always in a process of its own: it is interrupted, and all of its processes must be gone afterwards.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.processes import hear_interrupts

SECONDS = 240.0

SMALL_MOVES = """
import numpy as np
import reshard as rs
from reshard.cli.demo_live import move_live

have, want = rs.Layout(rs.Mesh(dp=3), "dp -"), rs.Layout(rs.Mesh(tp=2, ranks=[1, 3]), "- tp")
plan = rs.plan(have, want, shape=(6, 8), dtype="bfloat16")

def arrays():
    full = np.arange(48, dtype=np.uint16).reshape(6, 8)
    given = {rank: {"tensor": full[2 * rank : 2 * rank + 2]} for rank in range(3)}
    return given, rs.simulate(plan, given)
"""

OUTCOMES = """
import multiprocessing, os
from reshard.cli.demo_live import ENVIRONMENT

# Before torch is imported, which reads the level of its log only then: when the third move fails,
# the rank that serves the store may end before the others, and torch would warn.
os.environ.update(ENVIRONMENT)
from reshard.live import api

# The usual command starts a new process that imports torch, once for each move.
usual = multiprocessing.get_context
multiprocessing.get_context = lambda how: usual("fork")

if __name__ == "__main__":
    given, expected = arrays()
    ran = move_live(plan, given, expected)
    assert ran.holds and ran.equal and len(ran.reports) == 2 and len(ran.reports[0]) == 4
    assert ran.wire_bytes == plan.summary().wire_bytes

    expected[3]["tensor"][0, 0] += 1
    assert not move_live(plan, given, expected).equal

    try:
        move_live(plan, {**given, 2: {}}, expected)
    except rs.LiveError as error:
        assert "of the demo failed: TensorError: rank 2 holds" in str(error), error
    else:
        raise AssertionError("a rank without its tensor was not noticed")
"""

FOR_EVER = """
if __name__ == "__main__":
    while True:
        move_live(plan, *arrays())
        print("moved", flush=True)
"""

WHILE_STARTING = """
import os, signal
from multiprocessing.context import SpawnProcess

start = SpawnProcess.start

def interrupted(process):
    os.kill(os.getpid(), signal.SIGINT)
    start(process)

if __name__ == "__main__":
    SpawnProcess.start = interrupted
    try:
        move_live(plan, *arrays())
    except KeyboardInterrupt:
        print("heard")
"""


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A command in a session of its own, of which no process is left afterwards."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_interrupts,
        env={name: value for name, value in os.environ.items() if name != "COLUMNS"},
    )
    try:
        yield process
        wait_until_empty(process.pid)
    finally:
        if not is_empty(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def is_empty(session: int) -> bool:
    """Whether all processes have ended; one that no parent has waited for has ended too."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, its_session, *_ = path.read_text().rpartition(")")[2].split()
            if int(its_session) == session and state != "Z":
                return False
    return True


def wait_until_empty(session: int) -> None:
    end = time.monotonic() + 10.0
    while not is_empty(session):
        assert time.monotonic() < end, "processes are left behind"
        time.sleep(0.02)


def test_demo(tmp_path: Path) -> None:
    trace = tmp_path / "demo.trace"
    command = [sys.executable, "-m", "reshard", "demo", "--model", "llama-3.2-1b"]
    with running(*command, "--trace", str(trace)) as process:
        text, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (0, "")
    live = text.partition("Run live on 12 processes of this machine")[2]
    assert "all values on every rank equal the simulated ones" in live
    assert "peer memory" in live or "shared memory" in live
    assert "NOT" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(12))


def test_small_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, temporary = tmp_path / "moves.py", tmp_path / "temporary"
    script.write_text(SMALL_MOVES + OUTCOMES)
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with running(sys.executable, str(script)) as process:
        assert process.communicate(timeout=SECONDS) == ("", "")
    assert process.returncode == 0
    assert not list(temporary.glob("reshard-demo-*")), "a folder is left behind"


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "moves.py"
    script.write_text(SMALL_MOVES + FOR_EVER)
    with running(sys.executable, str(script)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "moved\n"
        time.sleep(0.1)
        # As a terminal does: to all processes of the job.
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    assert errors.count("Traceback") == 1, errors
    assert errors.endswith("KeyboardInterrupt\n")


def test_a_killed_demo_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "moves.py"
    script.write_text(SMALL_MOVES + FOR_EVER)
    with running(sys.executable, str(script)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "moved\n"
        time.sleep(1.0)  # in the middle of the next move
        process.kill()
        process.wait()


def test_an_interrupt_while_processes_start_is_heard(tmp_path: Path) -> None:
    script = tmp_path / "moves.py"
    script.write_text(SMALL_MOVES + WHILE_STARTING)
    with running(sys.executable, str(script)) as process:
        assert process.communicate(timeout=SECONDS) == ("heard\n", "")
