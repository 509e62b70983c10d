"""Several processes convert together over the file system, with the same bytes as one process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random

import pytest

from reshard import checkpoint
from reshard.checkpoint.publish.journal import Team, team_of
from reshard.checkpoint.publish.workplace import Workplace
from reshard.errors import CheckpointError, ReshardError, UnfinishedError
from tests.checkpoint.converting import Tensors, assert_equal, small_windows, write_source
from tests.checkpoint.making import random_array


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, Tensors]:
    tensors: Tensors = {
        f"w{i}": ("float32", random_array("float32", (64, 32), i)) for i in range(4)
    }
    write_source(tmp_path / "src", tensors, Random(0))
    return tmp_path / "src", tensors


def together(src: Path, dst: Path, size: int, timeout: float = 20, **options: bool) -> list:
    """Convert in as many threads as there are ranks, and what each gave or raised."""
    results: list = [None] * size

    def work(rank: int) -> None:
        try:
            team = Team(rank, size, timeout)
            results[rank] = checkpoint.convert(src, dst, team=team, **options)
        except ReshardError as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in reversed(range(size))]
    for thread in threads:
        thread.start()
        time.sleep(0.01)
    for thread in threads:
        thread.join()
    return results


def test_ranks_share_the_work(source: tuple[Path, Tensors]) -> None:
    here, tensors = source
    with small_windows(1024):
        reports = together(here, here.parent / "three", 3)
        checkpoint.convert(here, here.parent / "one")
    assert [report.rank for report in reports] == [0, 1, 2]
    assert all(report.bytes_read < report.unique_bytes / 2 for report in reports)
    assert sum(report.bytes_read for report in reports) == reports[0].unique_bytes
    assert_equal(here.parent / "three", tensors)
    for path in (here.parent / "one").iterdir():
        if path.suffix == ".safetensors":
            assert path.read_bytes() == (here.parent / "three" / path.name).read_bytes()
    assert checkpoint.verify(here.parent / "three").ok


def test_a_rank_that_never_comes_is_named(source: tuple[Path, Tensors]) -> None:
    here, tensors = source
    with small_windows(1024):
        with pytest.raises(UnfinishedError, match=r"ranks 1 have not finished.*--resume"):
            checkpoint.convert(here, here.parent / "out", team=Team(0, 2, 0.5))
        with pytest.raises(UnfinishedError, match="rank 0 has not"):
            checkpoint.convert(here, here.parent / "other", team=Team(1, 2, 0.5))
        reports = together(here, here.parent / "out", 2, resume=True)
    assert not [report for report in reports if isinstance(report, Exception)]
    assert reports[0].bytes_resumed > 0
    assert_equal(here.parent / "out", tensors)


def test_a_rank_that_fails_tells_the_others(
    source: tuple[Path, Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    from reshard.checkpoint.transfer import copying

    here, _ = source
    real = copying.Copier.copy

    def copy(self: copying.Copier, chunk: copying.CopyChunk, *args: object) -> object:
        if chunk.number % 3 == 2:
            raise CheckpointError("the disk of rank 2 broke")
        return real(self, chunk, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, small_windows(1024):
        patch.setattr(copying.Copier, "copy", copy)
        results = together(here, here.parent / "out", 3)
    assert all("the disk of rank 2 broke" in str(result) for result in results)
    with small_windows(1024):
        results = together(here, here.parent / "out", 3, resume=True)
    assert not [result for result in results if isinstance(result, Exception)]
    assert not Workplace(here.parent / "out").folder.exists()


def test_processes_that_a_launcher_started(source: tuple[Path, Tensors]) -> None:
    here, tensors = source
    words = [sys.executable, "-m", "reshard", "convert", str(here), str(here.parent / "out")]
    processes = [
        subprocess.Popen(
            words,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert "wrote 4 tensors" in told[0]
    assert told[1] == ""
    assert_equal(here.parent / "out", tensors)


@pytest.mark.parametrize(
    "environment", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}]
)
def test_a_rank_that_cannot_be(environment: dict[str, str]) -> None:
    with pytest.raises(CheckpointError, match="is no rank"):
        team_of(environment)


def test_alone_without_a_launcher() -> None:
    assert team_of({}).size == 1
    assert team_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}).size == 1
