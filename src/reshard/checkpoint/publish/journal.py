"""The journal of a conversion: the chunks that are done, so that a crash loses little work.

One line per record, each with its own checksum: ``8a3f01c2 {"chunk": 7, ...}``. A line is written
after the bytes that it describes. A line that a crash truncated ends the journal.

When a process dies, its writes survive: every line is valid. When the machine dies, lines may have
reached the disk before the bytes that they describe. So each process records the boot id of its
machine, and after another boot only lines before a ``synced`` line are valid.

Processes that convert together communicate only through these files: every rank makes the same
plan and copies its share of the chunks; rank 0 publishes when the journals have all chunks.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from zlib import crc32

from reshard.checkpoint.publish.workplace import Workplace
from reshard.checkpoint.storage.output_files import named
from reshard.errors import CheckpointError, UnfinishedError
from reshard.layout.mesh import format_ranks

Record = dict[str, Any]


class Journal:
    """The journal of one rank; safe to use from several threads."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"journal.{rank}"
        self._lock = threading.Lock()
        lines = list(map(len, _good_lines(self.path)))
        self.num_records = len(lines)
        """The number of records so far."""
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._descriptor, sum(lines))
        os.lseek(self._descriptor, sum(lines), os.SEEK_SET)
        self.append({"boot": boot_id()})

    def append(self, record: Record) -> None:
        """Add a record; it survives the end of this process."""
        text = json.dumps(record, separators=(",", ":")).encode()
        line = f"{crc32(text):08x} ".encode() + text + b"\n"
        with self._lock, named(self.path):
            while line:
                line = line[os.write(self._descriptor, line) :]
            self.num_records += 1

    def synced(self, num_records: int) -> None:
        """Record that the bytes of the first records are on disk, and sync the journal."""
        self.append({"synced": num_records})
        with named(self.path):
            os.fsync(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def read_journals(folder: Path) -> list[Record]:
    """The valid records of all ranks."""
    paths = sorted(folder.glob("journal.*"), key=lambda path: path.name)
    return [record for path in paths for record in _reliable(_good_lines(path))]


def boot_id() -> str:
    """The id of this boot of this machine, equal for all processes until it restarts."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"unknown-{os.getpid()}"


def _reliable(lines: Iterable[bytes]) -> Iterator[Record]:
    """Records of this boot, and those of others that were synced before the machine crashed.

    A record that was not synced then stays invalid, whatever a later boot has synced.
    """
    boot, waiting = None, dict[int, Record]()
    for at, record in enumerate(json.loads(line[9:]) for line in lines):
        if "boot" in record:
            waiting = waiting if record["boot"] == boot else {}
            boot = record["boot"]
        elif "synced" in record:
            yield from (waiting.pop(place) for place in [*waiting] if place < record["synced"])
        else:
            waiting[at] = record
    if boot == boot_id():
        yield from waiting.values()


def _good_lines(path: Path) -> Iterator[bytes]:
    """The lines before the first invalid one."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            text = line[9:-1]
            if not line.endswith(b"\n") or line[:9] != f"{crc32(text):08x} ".encode():
                return
            yield line


POLL = 0.25


@dataclass(frozen=True, slots=True)
class Team:
    """The rank of this process, the number of processes, and the longest wait for another."""

    rank: int = 0
    size: int = 1
    timeout: float = 600.0

    @property
    def leads(self) -> bool:
        """Whether this process prepares and publishes."""
        return self.rank == 0

    def note_failure(self, place: Workplace, error: BaseException) -> None:
        """Leave a file that tells the other ranks of a failure, unless one of them has failed."""
        if self.size > 1 and place.folder.exists() and not any(place.folder.glob("failed.*")):
            text = str(error) or type(error).__name__
            (place.folder / f"failed.{self.rank}").write_text(text, encoding="utf-8")

    def forget(self, place: Workplace) -> None:
        """As rank 0, remove the files with which the ranks of an earlier attempt communicated."""
        for pattern in ("prepared", "failed.*", "waits.*"):
            for path in place.folder.glob(pattern):
                path.unlink(missing_ok=True)

    def wait_for_leader(self, place: Workplace, fingerprint: str) -> int:
        """Wait until rank 0 has prepared the files; returns the window size that it chose."""
        patience = _Patience(self.timeout)
        while True:
            request = place.request() or {}
            is_ready = (place.folder / "prepared").exists() and place.is_locked()
            if is_ready and request.get("fingerprint") == fingerprint:
                return int(request["window"])
            patience.sleep(
                "rank 0 has not prepared the output: is it running, with the same arguments?"
            )

    def wait_for_all(self, place: Workplace, num_chunks: int) -> None:
        """Wait until all chunks are in the journals and all other ranks wait for the output."""
        patience = _Patience(self.timeout)
        while True:
            _check_failures(place)
            done = {record["chunk"] for record in read_journals(place.folder)}
            late = {number % self.size for number in range(num_chunks) if number not in done}
            waiting = (place.folder / f"waits.{rank}" for rank in range(1, self.size))
            late |= {int(path.suffix[1:]) for path in waiting if not path.exists()}
            if not late:
                return
            ranks = format_ranks(sorted(late))
            patience.sleep(f"ranks {ranks} have not finished their chunks", len(done))

    def wait_for_publish(self, place: Workplace) -> None:
        """Wait until rank 0 has published the output."""
        patience = _Patience(self.timeout)
        while place.request() is not None:
            _check_failures(place)
            with suppress(FileNotFoundError):
                (place.folder / f"waits.{self.rank}").touch()
            if not place.is_locked() and place.request() is not None:
                raise UnfinishedError("rank 0 has exited; start all ranks again with --resume")
            patience.sleep("rank 0 has not published the output")
        if not place.target.exists():
            raise UnfinishedError(f"{place.target} does not exist: rank 0 did not publish it")


class _Patience:
    """Sleeps between polls, and raises when there was no progress for the timeout."""

    def __init__(self, timeout: float) -> None:
        self._timeout, self._progress, self._since = timeout, 0, time.monotonic()

    def sleep(self, complaint: str, progress: int = 0) -> None:
        """Sleep once; the complaint says what is waited for, if the time is up."""
        if progress != self._progress:
            self._progress, self._since = progress, time.monotonic()
        if time.monotonic() - self._since > self._timeout:
            raise UnfinishedError(
                f"{complaint} (waited {self._timeout:g} s without progress); start all ranks "
                "again with --resume"
            )
        time.sleep(POLL)


ALONE = Team()


def team_of(environment: Mapping[str, str] = os.environ, timeout: float = 600.0) -> Team:
    """The processes that torchrun or Slurm started, or this process alone.

    >>> team_of({"RANK": "3", "WORLD_SIZE": "8"})
    Team(rank=3, size=8, timeout=600.0)
    >>> team_of({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}).rank
    1
    """
    by_slurm = "SLURM_STEP_ID" in environment  # a batch script is not a step: it runs once
    names = [("RANK", "WORLD_SIZE")] + [("SLURM_PROCID", "SLURM_NTASKS")] * by_slurm
    for rank_name, size_name in names:
        if rank_name in environment and size_name in environment:
            try:
                rank, size = int(environment[rank_name]), int(environment[size_name])
            except ValueError:
                rank, size = -1, 0
            if not 0 <= rank < size:
                raise CheckpointError(
                    f"{rank_name}={environment[rank_name]} of {size_name}="
                    f"{environment[size_name]} in the environment is no rank: unset both to "
                    "convert with one process"
                )
            return Team(rank, size, timeout)
    return Team(timeout=timeout)


def _check_failures(place: Workplace) -> None:
    """Raise the failure that another rank reported."""
    for path in sorted(place.folder.glob("failed.*")):
        with suppress(FileNotFoundError):
            text = path.read_text(encoding="utf-8")
            raise UnfinishedError(
                f"rank {path.suffix[1:]} failed: {text}; start all ranks again with --resume"
            )
