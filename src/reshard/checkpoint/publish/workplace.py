"""The temporary folder in which an output is built, and its publication in one step.

While a conversion runs or waits to be resumed, there is next to the destination

    .NAME.reshard-partial/
        lock             held by the process that works here
        request.json     the conversion that is in progress
        journal.RANK     the chunks that are done
        data/            the output so far
        publishing.json  the inode of data, and which files of the destination it replaces

When everything is written, ``data`` replaces the destination:

    1. write publishing.json
    2. rename data to the destination; to overwrite, exchange the two in one step. If the system
       cannot exchange folders: rename the destination to old, then data to the destination
    3. move files that are not part of the old checkpoint from the old folder to the new one
    4. rename the partial folder to .NAME.reshard-gone-..., and delete it: in the old folder only
       the files that are part of the old checkpoint

A process may be killed at any point. Before step 2 the old checkpoint is complete, after it the new
one is; between the two renames the old one is complete in ``old``. The next process that works on
this destination begins with ``settle``: it renames ``old`` back, or does the last two steps.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from reshard.checkpoint.formats.reader import open_storage
from reshard.checkpoint.integrity.checksums import load_checksums
from reshard.checkpoint.publish.replacing import Replaced, delete_files, move_kept, replaced_by
from reshard.checkpoint.storage.local import REQUEST, StoredFile
from reshard.checkpoint.storage.output_files import exchange, replace_file, sync_folder
from reshard.errors import TargetError, UnfinishedError
from reshard.text import format_bytes, quoted

PUBLISHING = "publishing.json"


class Workplace:
    """The hidden folder next to a destination in which its output is built."""

    def __init__(self, target: Path) -> None:
        """Refuse a path that is too long, or is none; names of temporary folders must fit, too."""
        try:
            os.lstat(target.parent / f".{target.name}.reshard-gone-{'0' * 8}")
        except ValueError:  # a null byte, or a character that no path can have
            raise TargetError(f"{quoted(target)} is no path: choose another target") from None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise TargetError(
                    f"{quoted(target)} is too long: its name has {len(os.fsencode(target.name))} "
                    "bytes and 23 are added while it is written: choose a shorter target"
                ) from None
        # A link at the destination itself is kept; links in its parents are resolved.
        is_named = target.name not in ("", "..")
        self.target = target.parent.resolve() / target.name if is_named else target.resolve()
        self.folder = self.target.parent / f".{self.target.name}.reshard-partial"
        self.data = self.folder / "data"
        self.old = self.folder / "old"
        """The old content of the destination, after it was moved aside."""
        self._gone = f".{self.target.name}.reshard-gone-"
        """The beginning of the names of folders that wait to be deleted."""
        self._lock: int | None = None

    def check_target(self, overwrite: bool, files: Collection[str]) -> Replaced:
        """Refuse a destination that exists, unless these files may replace a checkpoint there."""
        if not os.path.lexists(self.target):
            return Replaced()
        if not self.target.is_dir():
            raise TargetError(f"{self.target} is not a folder: choose another target")
        if self.target.is_symlink():
            raise TargetError(f"{self.target} is a link: give the folder that it leads to")
        if os.path.ismount(self.target):
            raise TargetError(f"{self.target} is a mount point: name a folder in it")
        if not any(self.target.iterdir()):
            return Replaced()
        if not overwrite:
            raise TargetError(
                f"{self.target} exists: choose another target, or give --overwrite "
                "(overwrite=True); the old one is kept until the new one is complete"
            )
        try:
            return replaced_by(self.target, files)
        except FileNotFoundError as error:
            raise TargetError(
                f"{error.filename} was removed while {self.target} was listed: try again when no "
                "other process writes there"
            ) from None

    def settle(self) -> None:
        """Finish or undo a publication during which an earlier process was killed."""
        if (self.folder / PUBLISHING).exists():
            self._take_lock()
            try:
                self.recover()
            finally:
                self.leave()
        for gone in self.target.parent.glob(f"{glob.escape(self._gone)}*"):
            _delete(gone)

    def recover(self) -> bool:
        """Do what ``settle`` does, with the lock held; whether the new output is published."""
        state = _publishing(self.folder)
        if state and self.target.is_dir() and self.target.stat().st_ino == state["inode"]:
            self.finish()
            return True
        if state and self.old.exists() and not os.path.lexists(self.target):
            self.old.rename(self.target)
        return False

    def check_writable(self) -> None:
        """Refuse a destination that permissions do not allow to create; writes nothing."""
        exists = _nearest(self.target.parent)
        if not exists.is_dir() or not os.access(exists, os.W_OK | os.X_OK):
            raise TargetError(f"{exists} cannot be written to: choose another target")

    def check_room(self, needed: int) -> None:
        """Refuse to begin an output for which the disk has no room."""
        files = (path for path in self.data.rglob("*") if path.is_file())
        present, free = sum(file.stat().st_blocks * 512 for file in files), free_bytes(self.folder)
        if needed - present > free:
            raise TargetError(
                f"{format_bytes(needed)} are needed at {self.target.parent} and "
                f"{format_bytes(free)} are free: free some space, or choose another target"
            )

    def enter(self) -> None:
        """Create the folder and take its lock; refuse a second conversion."""
        self.settle()
        self._take_lock()

    def _take_lock(self) -> None:
        if self.folder.is_symlink() or self.data.is_symlink():
            raise TargetError(f"{self.folder} is a symbolic link: remove it")
        path, reason = self.folder / "lock", ""
        for _ in range(5):  # a rank that tests the lock holds it for a moment
            try:
                self.target.parent.mkdir(parents=True, exist_ok=True)
                self.folder.mkdir(exist_ok=True)
                lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                reason = error.strerror or str(error)
                if error.errno != errno.ENOENT:
                    break  # else another process removes the folder, or it is in /proc
            else:
                reason = ""
                with suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # Its last holder may have deleted the file, and another one created it again.
                    if os.path.samestat(os.fstat(lock), path.stat()):
                        self._lock = lock
                        return
                os.close(lock)
            time.sleep(0.02)
        if reason:
            text = f"nothing can be written next to {self.target}: {reason}: choose another target"
        else:
            text = f"another conversion is writing {self.target}: wait for it, or end it"
        raise TargetError(text)

    def begin_anew(self) -> None:
        """Remove the unknown content of the folder."""
        if any(path.name != "lock" for path in self.folder.iterdir()):
            self.discard()
            self.enter()

    def is_locked(self) -> bool:
        """Whether a process works here; also true if locks do not show it."""
        try:
            with (self.folder / "lock").open("r+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        return False

    def leave(self) -> None:
        """Release the lock; the content can be resumed."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def request(self) -> dict[str, Any] | None:
        """The request of an earlier conversion that did not finish, if there is one."""
        try:
            request = json.loads((self.folder / "request.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            return {}
        return request if isinstance(request, dict) else {}

    def note_request(self, request: Mapping[str, Any]) -> None:
        replace_file(self.folder / "request.json", json.dumps(request).encode())

    def is_result(self, request: Mapping[str, Any], files: Collection[StoredFile]) -> bool:
        """Whether the destination is the result of this request, with all of its files."""
        try:
            sizes = [(self.target / file.path).stat().st_size for file in files]
            with open_storage(self.target) as storage:
                sums = load_checksums(storage)
            if sums is not None:
                recorded = sums.request
            else:
                recorded = json.loads((self.target / REQUEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # includes damaged checksums
            return False
        return recorded == request and sizes == [file.size for file in files]

    def discard(self) -> None:
        """Remove everything that was built here."""
        if self.old.exists():
            raise UnfinishedError(
                f"{self.old} holds the old content of {self.target}: move it to a safe place first"
            )
        self._remove()

    def _remove(self) -> None:
        """Rename the folder in one step, then delete it."""
        gone = self.folder.with_name(f"{self._gone}{secrets.token_hex(4)}")
        try:
            self.folder.rename(gone)
        except OSError:
            gone = self.folder
        _delete(gone)
        self.leave()

    def publish(self, overwrite: bool, files: Collection[str]) -> tuple[str, ...]:
        """Publish the finished output, which has these files.

        Returns the names of other files at the destination, which are kept.
        """
        replaces, replaced = overwrite and os.path.lexists(self.target), Replaced()
        if replaces:  # it may have changed since the conversion began
            try:
                replaced = self.check_target(True, files)
            except TargetError as error:
                raise UnfinishedError(f"{error}; then continue with --resume") from None
        state = {"inode": self.data.stat().st_ino, "belongs": sorted(replaced.belongs)}
        replace_file(self.folder / PUBLISHING, json.dumps(state).encode())
        try:
            if replaces:  # the owner and permissions of the folder that is replaced
                old = self.target.stat()
                with suppress(PermissionError):
                    os.chown(self.data, old.st_uid, old.st_gid)
                self.data.chmod(stat.S_IMODE(old.st_mode))
            if not (replaces and exchange(self.data, self.target)):
                if replaces:
                    self.target.rename(self.old)
                self.data.rename(self.target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise UnfinishedError(
                    f"{self.target} was created during the conversion: move it away and give "
                    "--resume, or give --resume --overwrite"
                ) from None
            raise UnfinishedError(
                f"{self.data} cannot be renamed to {self.target}: {error.strerror}; "
                "--resume tries again"
            ) from None
        self.finish()
        return replaced.kept

    def finish(self) -> None:
        """Make the rename durable, move kept files to the new folder, and remove the old one."""
        sync_folder(self.target.parent)
        for old, belongs in _replaced_folders(self.folder):
            move_kept(old, self.target, belongs)
            sync_folder(self.target)
        self._remove()


def free_bytes(folder: Path) -> int:
    """Bytes that can still be written to a folder, or to the nearest one above that exists."""
    stats = os.statvfs(_nearest(folder))
    return stats.f_bavail * stats.f_frsize


def _nearest(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def _publishing(folder: Path) -> dict[str, Any]:
    """The publishing.json of a partial folder; empty if publication had not begun."""
    path = folder / PUBLISHING
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        state = None
    match state:
        case {"inode": int(), "belongs": list()}:
            return state  # type: ignore[no-any-return]
    raise UnfinishedError(f"{path} cannot be read: see what {folder} holds, and move it away")


def _replaced_folders(folder: Path) -> Iterator[tuple[Path, Collection[str]]]:
    """The old folder of the destination, wherever the exchange has put it, and which of its files
    are part of the old checkpoint."""
    state = _publishing(folder)
    for old in (folder / "old", folder / "data") if state else ():
        try:
            status = old.lstat()
        except FileNotFoundError:  # never created, or another process has just deleted it
            continue
        if stat.S_ISDIR(status.st_mode) and status.st_ino != state["inode"]:
            yield old, frozenset(state["belongs"])


def _delete(folder: Path) -> None:
    """Delete a partial folder, and of an old folder in it only the old checkpoint."""
    try:
        if not all(delete_files(*replaced) for replaced in _replaced_folders(folder)):
            return
    except UnfinishedError:
        return
    shutil.rmtree(folder, ignore_errors=True)
