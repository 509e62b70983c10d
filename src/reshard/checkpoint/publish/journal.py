"""The journal of a conversion: the chunks that are done, so that a crash loses little work.

One line per record, each with its own checksum: ``8a3f01c2 {"chunk": 7, ...}``. A line is written
after the bytes that it describes. A line that a crash truncated ends the journal.

When a process dies, its writes survive: every line is valid. When the machine dies, lines may have
reached the disk before the bytes that they describe. So each process records the boot id of its
machine, and after another boot only lines before a ``synced`` line are valid.

>>> import tempfile, pathlib
>>> folder = pathlib.Path(tempfile.mkdtemp())
>>> with Journal(folder, rank=0) as journal:
...     journal.append({"chunk": 7})
>>> with (folder / "journal.0").open("ab") as torn:
...     _ = torn.write(b'0000 {"chu')
>>> read_journals(folder)
[{'chunk': 7}]
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self
from zlib import crc32

from reshard.checkpoint.storage.durable import named

__all__ = ["Journal", "boot_id", "read_journals"]

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
        line = _line(record)
        with self._lock, named(self.path):
            while line:
                line = line[os.write(self._descriptor, line) :]
            self.num_records += 1

    def synced(self, num_records: int) -> None:
        """Record that the bytes of the first records are on disk, and sync the journal."""
        self.append({"synced": num_records})
        with named(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_journals(folder: Path) -> list[Record]:
    """The valid records of all ranks."""
    paths = sorted(folder.glob("journal.*"), key=lambda path: path.name)
    return [record for path in paths for record in _reliable(list(_records(path)))]


def boot_id() -> str:
    """The id of this boot of this machine, equal for all processes until it restarts."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"unknown-{os.getpid()}"


def _reliable(records: list[Record]) -> Iterator[Record]:
    """Records of this boot, and those of others that were synced before the machine went down.

    A record that was not synced then stays invalid, whatever a later boot has synced.
    """
    here, boot, waiting = boot_id(), None, list[tuple[int, Record]]()
    for at, record in enumerate(records):
        if "boot" in record:
            waiting = waiting if record["boot"] == boot else []
            boot = record["boot"]
        elif "synced" in record:
            yield from (one for place, one in waiting if place < record["synced"])
            waiting = [each for each in waiting if each[0] >= record["synced"]]
        else:
            waiting.append((at, record))
    if boot == here:
        yield from (one for _, one in waiting)


def _line(record: Record) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return f"{crc32(text):08x} ".encode() + text + b"\n"


def _records(path: Path) -> Iterator[Record]:
    for line in _good_lines(path):
        yield json.loads(line[9:])


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
