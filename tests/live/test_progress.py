"""What real ranks say while they move: one shows a progress bar, all write to the log."""

import contextlib
import logging
import os
import re
import time

import pytest
import torch
import torch.distributed as dist

import reshard as rs
from tests.ranks.pool import Pool
from tests.ranks.rank import local_group

ROWS = 1 << 13


def watch_a_late_rank(rank: int, on_terminal: bool, progress: bool | None) -> str:
    """Move 32 MiB while rank 2 comes a second late; what was written to the rank's terminal."""
    near, far = os.openpty() if on_terminal else os.pipe()
    os.environ["TERM"] = "xterm-256color"
    have, want = rs.Layout(rs.Mesh(dp=3), "dp -"), rs.Layout(rs.Mesh(tp=3), "- tp")
    full = torch.arange(ROWS * 1024, dtype=torch.float32).reshape(ROWS, 1024)
    with os.fdopen(far, "w") as file, contextlib.redirect_stderr(file):
        if rank == 2:
            time.sleep(1.5)
        local = full.chunk(3)[rank]
        moved = rs.move(local, have, want, shape=full.shape, progress=progress)
        assert torch.equal(moved, full.chunk(3, 1)[rank])
        file.flush()
        written = b"" if not on_terminal else drain(near)
    os.close(near)
    return written.decode()


def drain(terminal: int) -> bytes:
    os.set_blocking(terminal, False)
    found = b""
    with contextlib.suppress(BlockingIOError):
        while part := os.read(terminal, 65536):
            found += part
    return found


def words_of(text: str) -> str:
    """What is written, without colours and the moving of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_only_the_lowest_rank_shows_it(pool: Pool) -> None:
    """And without a terminal nobody does, nor where it is refused."""
    for args in ((False, None), (True, False)):
        found = pool.run(watch_a_late_rank, *args, ranks=range(3))
        assert found == [""] * 3
    found = pool.run(watch_a_late_rank, True, None, ranks=range(3))
    shown = [words_of(text) for text in found]
    assert "0 B of 17.8 MiB, round 1 of 1" in shown[0]
    assert shown[1:] == ["", ""]
    assert words_of(found[0].rpartition("\x1b[2K")[2]).strip() == ""


def log_of_two_moves(rank: int) -> tuple[list[str], list[str], list[str]]:
    """What the logger `reshard` says of the first call of a plan, of a second, and of a failure."""
    group = local_group(0, 1, 2)
    assert isinstance(group, dist.ProcessGroup)
    plan = rs.plan("dp=3: dp -", "tp=3: - tp", shape=(6, 6))
    local = torch.ones(2, 6)
    said: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: said.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    log = logging.getLogger("reshard")
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        plan.run({"tensor": local}, group=group)
        first = said[:]
        plan.run({"tensor": local}, group=group)
        second = said[len(first) :]
        with pytest.raises(rs.TensorError):
            plan.run({"tensor": local[: 2 - rank]}, group=group)
    finally:
        log.setLevel(logging.NOTSET)
        log.removeHandler(handler)
    return first, second, said[len(first) :]


def test_the_log_tells_of_connections_plans_and_transports_once(pool: Pool) -> None:
    """An exception says all about a failure, so the log says nothing of it."""
    for rank, (first, second, failed) in enumerate(pool.run(log_of_two_moves, ranks=range(3))):
        others = ["1-2", "0,2", "0-1"][rank]
        assert [re.sub(r"\bplan \w{8}|\d\.\d{3} s", "...", line) for line in first] == [
            f"DEBUG rank {rank}: compiled ... of 1 tensor in ...",
            f"INFO rank {rank}: connected ranks 0-2 on 1 host in ...",
            f"DEBUG rank {rank}: ... is the same on ranks 0-2; peer memory to {others}",
        ]
        assert second == failed == []
