"""Conversions that are killed, or lack space or permissions: no output is lost or partial."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import count, takewhile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from reshard import checkpoint
from reshard.checkpoint.integrity.checksums import SIDECAR
from reshard.checkpoint.publish import workplace
from reshard.checkpoint.publish.journal import Journal, read_journals
from reshard.checkpoint.publish.workplace import Workplace
from reshard.checkpoint.storage import output_files
from reshard.checkpoint.transfer import copying
from reshard.cli import run
from reshard.errors import DamageError, TargetError, UnfinishedError
from reshard.layout.box import Box
from tests.checkpoint.converting import Tensors, assert_equal, small_windows, write_source
from tests.checkpoint.making import random_array, write_sharded
from tests.soak import cases

Source = tuple[Path, Tensors]


@pytest.fixture
def source(tmp_path: Path) -> Source:
    tensors: Tensors = {
        f"w{i}": ("float32", random_array("float32", (64, 32), i)) for i in range(4)
    }
    write_source(tmp_path / "src", tensors, Random(0))
    return tmp_path / "src", tensors


def stop_after(monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException) -> None:
    """Make the copy fail after so many chunks."""
    real, done = copying.Copier.copy, []

    def copy(self: copying.Copier, *args: Any) -> Any:
        if len(done) >= count:
            raise error
        done.append(1)
        return real(self, *args)

    monkeypatch.setattr(copying.Copier, "copy", copy)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_interrupted_conversion_goes_on(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    here, tensors = source
    out = here.parent / "out"
    with small_windows(1024, workers=1):
        with monkeypatch.context() as patch:
            stop_after(patch, 5, OSError(5, "the cable was pulled"))
            with pytest.raises(OSError, match="cable"):
                checkpoint.convert(here, out)
        assert names(here.parent) == [".out.reshard-partial", "src"]
        with pytest.raises(UnfinishedError, match="--resume"):
            checkpoint.convert(here, out)
        with pytest.raises(TargetError, match="asked for something else"):
            checkpoint.convert(here, out, dtype="bfloat16", resume=True)
        with pytest.raises(TargetError, match="asked for something else"):
            checkpoint.convert(here, out, checksums=False, resume=True)
        report = checkpoint.convert(here, out, resume=True)
    assert report.bytes_resumed == 5 * 1024
    assert report.bytes_read == report.unique_bytes - 5 * 1024
    assert names(here.parent) == ["out", "src"]
    assert_equal(out, tensors)
    assert checkpoint.verify(out).ok


def test_a_changed_source_is_not_resumed(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    here, _ = source
    with small_windows(1024), monkeypatch.context() as patch:
        stop_after(patch, 3, OSError(5, "gone"))
        with pytest.raises(OSError, match="gone"):
            checkpoint.convert(here, here.parent / "out")
    path = next(here.glob("*.safetensors"))
    os.utime(path, ns=(1, 1))
    with pytest.raises(TargetError, match="another source"):
        checkpoint.convert(here, here.parent / "out", resume=True)


def test_damaged_checksums_of_the_source_leave_nothing_behind(source: Source) -> None:
    here, tensors = source
    checkpoint.convert(here, here.parent / "a")
    sidecar = here.parent / "a" / SIDECAR
    sidecar.write_bytes(sidecar.read_bytes().replace(b"1", b"2"))
    with pytest.raises(DamageError, match=SIDECAR):
        checkpoint.convert(here.parent / "a", here.parent / "b")
    assert names(here.parent) == ["a", "src"]
    sidecar.unlink()
    checkpoint.convert(here.parent / "a", here.parent / "b")
    assert_equal(here.parent / "b", tensors)


def test_a_full_disk_is_noticed_before_any_work(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _ = source
    monkeypatch.setattr(workplace, "free_bytes", lambda _: 100)
    with pytest.raises(TargetError, match=r"KiB are needed.*100 B are free"):
        checkpoint.convert(here, here.parent / "out")
    assert names(here.parent) == ["src"]


def test_room_that_cannot_be_set_aside(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    here, _ = source

    def fallocate(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(output_files.os, "posix_fallocate", fallocate)
    with pytest.raises(TargetError, match="no room for"):
        checkpoint.convert(here, here.parent / "out")
    assert names(here.parent) == ["src"]


def test_a_disk_that_fills_up_midway_can_be_resumed(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, tensors = source
    real, calls = os.pwrite, []

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        calls.append(1)
        if len(calls) > 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    with small_windows(1024):
        with monkeypatch.context() as patch:
            patch.setattr(output_files.os, "pwrite", pwrite)
            with pytest.raises(UnfinishedError, match=r"No space left on device.*--resume"):
                checkpoint.convert(here, here.parent / "out")
        assert not (here.parent / "out").exists()
        checkpoint.convert(here, here.parent / "out", resume=True)
    assert_equal(here.parent / "out", tensors)


def test_after_a_disk_failed_to_sync_everything_is_copied_again(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, tensors = source

    def broken(_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(output_files.OutputFiles, "sync", broken)
        with pytest.raises(UnfinishedError, match="cannot be put on disk: Input/output error"):
            checkpoint.convert(here, here.parent / "out")
    report = checkpoint.convert(here, here.parent / "out", resume=True)
    assert report.bytes_resumed == 0
    assert_equal(here.parent / "out", tensors)


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_errors_of_the_system_name_the_path(
    source: Source, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """Also those of the journal and of small files, which the system does not name."""
    here, tensors = source
    out, real = here.parent / "out", getattr(os, call)

    def error_of(nth: int) -> str:
        """What a conversion says whose nth call fails; nothing if there are fewer calls."""
        calls = count()

        def failing(descriptor: int, *rest: Any) -> Any:
            if next(calls) >= nth:
                raise OSError(code, os.strerror(code))
            return real(descriptor, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                checkpoint.convert(here, out, resume=True)
            except OSError as error:
                return str(error)
        return ""

    errors = list(takewhile(bool, map(error_of, range(30))))
    assert len(errors) > 1
    for text in errors:
        assert str(here.parent) in text
        assert os.strerror(code) in text
    checkpoint.convert(here, out, resume=True)
    assert_equal(out, tensors)


def test_short_writes_are_continued(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    here, tensors = source
    real = os.pwrite
    monkeypatch.setattr(
        output_files.os, "pwrite", lambda fd, data, at: real(fd, memoryview(data)[:100], at)
    )
    checkpoint.convert(here, here.parent / "out")
    assert_equal(here.parent / "out", tensors)


def test_a_place_that_may_not_be_written(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    here, _ = source
    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(TargetError, match="nothing can be written next to"):
        checkpoint.convert(here, here.parent / "out")


def denied(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, "Read-only file system")


def test_what_exists_is_refused_or_kept_until_the_end(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, tensors = source
    out = here.parent / "out"
    out.mkdir()
    save_file({"old": np.zeros(3)}, out / "old.safetensors")
    with pytest.raises(TargetError, match="--overwrite"):
        checkpoint.convert(here, out)
    with small_windows(1024), monkeypatch.context() as patch:
        stop_after(patch, 3, OSError(5, "gone"))
        with pytest.raises(OSError, match="gone"):
            checkpoint.convert(here, out, overwrite=True)
    assert names(out) == ["old.safetensors"]
    checkpoint.convert(here, out, overwrite=True, resume=True)
    assert "old.safetensors" not in names(out)
    assert names(here.parent) == ["out", "src"]
    assert_equal(out, tensors)
    (here.parent / "file").write_text("x")
    with pytest.raises(TargetError, match="not a folder"):
        checkpoint.convert(here, here.parent / "file", overwrite=True)
    (here.parent / "empty").mkdir()
    checkpoint.convert(here, here.parent / "empty")
    assert_equal(here.parent / "empty", tensors)


def test_two_conversions_into_one_target(source: Source) -> None:
    here, tensors = source
    place = Workplace(here.parent / "out")
    place.enter()
    with pytest.raises(TargetError, match="another conversion"):
        checkpoint.convert(here, here.parent / "out")
    place.leave()
    checkpoint.convert(here, here.parent / "out")
    assert_equal(here.parent / "out", tensors)


@pytest.mark.parametrize("target", ["src", "src/inside", "."])
def test_a_target_within_the_source_is_refused(source: Source, target: str) -> None:
    here, tensors = source
    with pytest.raises(TargetError, match="contain each other"):
        checkpoint.convert(here, here.parent / target, overwrite=True)
    checkpoint.convert(here, here.parent / "out")
    assert_equal(here.parent / "out", tensors)


SLOWLY = """
import sys, time
from reshard.checkpoint.transfer import copying
from reshard.checkpoint.transfer.windows import Budget
Budget.of = classmethod(lambda cls, *_: Budget(2, 4096))
real = copying.Copier.copy
copying.Copier.copy = lambda self, *args: (real(self, *args), time.sleep(0.002))[0]
from reshard.cli import run
sys.exit(run(sys.argv[1:]))
"""


def start(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SLOWLY, *map(str, words)], stderr=subprocess.PIPE, text=True
    )


def test_killed_at_random_moments_and_resumed(tmp_path: Path) -> None:
    tensors: Tensors = {
        f"w{i}": ("bfloat16", random_array("bfloat16", (128, 96), i)) for i in range(8)
    }
    write_source(tmp_path / "src", tensors, Random(5), checksums=1000)
    rng = Random(time.time_ns())
    words = ["convert", tmp_path / "src", tmp_path / "out", "--mesh", "x=3", "--layout", "*=- x"]
    for _ in range(cases(2, 20)):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.rmtree(tmp_path / ".out.reshard-partial", ignore_errors=True)
        process = start(*words)
        deadline = time.monotonic() + 30
        while process.poll() is None and not list(tmp_path.glob(".out.*/journal.0")):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(rng.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        again = start(*words, "--resume")  # also where it was killed after it had published
        _, errors = again.communicate(timeout=60)
        assert again.returncode == 0, errors
        assert checkpoint.verify(tmp_path / "src", tmp_path / "out").ok
        assert names(tmp_path) == ["out", "src"]


def test_a_resumed_run_redoes_at_most_one_chunk_per_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = random_array("float32", (64, 64))
    write_sharded(tmp_path / "src", {"w": ("float32", array)}, {"w": [Box.whole((64, 64))]})
    with small_windows(1024, workers=3):
        with monkeypatch.context() as patch:
            stop_after(patch, 7, OSError(5, "gone"))
            with pytest.raises(OSError, match="gone"):
                checkpoint.convert(tmp_path / "src", tmp_path / "out")
        report = checkpoint.convert(tmp_path / "src", tmp_path / "out", resume=True)
    assert report.bytes_resumed == 7 * 1024


def test_the_command_says_how_to_go_on(
    source: Source, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, _ = source
    words = ["convert", str(here), str(here.parent / "my out")]
    monkeypatch.setattr(sys, "argv", ["reshard", *words])
    stop_after(monkeypatch, 0, UnfinishedError("the disk is full"))
    assert run(words) == 3
    told = capsys.readouterr().err
    assert told.startswith("reshard: the disk is full")
    assert told.strip().endswith(f"reshard convert {here} '{here.parent}/my out' --resume")
    assert run(["convert", str(here / "absent"), "out"]) == 2
    assert run(["convert", str(here), str(here)]) == 2


def test_the_command_converts_and_reports(
    source: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    here, tensors = source
    out = str(here.parent / "out")
    assert run(["convert", str(here), out, "--json", "--workers", "1", "--memory", "8MiB"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_tensors"] == 4
    assert report["memory"] <= 8 << 20
    assert_equal(here.parent / "out", tensors)
    assert run(["verify", str(here), out]) == 0


def test_journals_after_another_boot_count_what_was_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal(tmp_path, 0) as journal:
        journal.append({"chunk": 1})
        count = journal.num_records
        journal.append({"chunk": 2})
        journal.synced(count)
        journal.append({"chunk": 3})
    assert [record["chunk"] for record in read_journals(tmp_path)] == [1, 2, 3]
    monkeypatch.setattr("reshard.checkpoint.publish.journal.boot_id", lambda: "another")
    assert [record["chunk"] for record in read_journals(tmp_path)] == [1]
    with Journal(tmp_path, 0) as journal:
        journal.append({"chunk": 4})
    assert [record["chunk"] for record in read_journals(tmp_path)] == [1, 4]


def test_a_torn_or_changed_line_ends_the_journal(tmp_path: Path) -> None:
    with Journal(tmp_path, 2) as journal:
        for number in range(5):
            journal.append({"chunk": number})
    path = tmp_path / "journal.2"
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        found = [record["chunk"] for record in read_journals(tmp_path)]
        assert found == list(range(len(found)))
    data = np.frombuffer(whole, np.uint8).copy()
    data[-30] ^= 4
    path.write_bytes(data.tobytes())
    assert len(read_journals(tmp_path)) < 5
    with Journal(tmp_path, 2) as journal:  # goes on behind the last good line
        journal.append({"chunk": 99})
    assert read_journals(tmp_path)[-1] == {"chunk": 99}


def test_a_lock_goes_with_its_process(source: Source) -> None:
    here, tensors = source
    place = Workplace(here.parent / "out")
    code = (
        "import fcntl, os, sys, time; os.makedirs(sys.argv[1], exist_ok=True); "
        "f = open(sys.argv[1] + '/lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held'); "
        "sys.stdout.flush(); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, place.folder], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(TargetError, match="another conversion"):
        checkpoint.convert(here, here.parent / "out")
    holder.kill()
    holder.communicate()
    checkpoint.convert(here, here.parent / "out")
    assert_equal(here.parent / "out", tensors)
