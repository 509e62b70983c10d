"""Where an output is built, and how it takes its place all at once.

Beside the target lies, while a conversion runs or waits to be resumed,

    .NAME.reshard-partial/
        lock            held by the process that works here
        request.json    what is being made of what
        journal.RANK    what is done
        data/           the output, in the making

and when all is written, ``data`` is renamed to the target. With ``overwrite`` the two are exchanged
in one step where the system can; else the old one is moved to ``old`` and the new one in its place.
Until then the old one is as it was, and a crash at any point can be finished by ``resume``.

What is done with goes at once, by a rename to ``.NAME.reshard-gone-...``, and is deleted then: a
crash in the middle of that leaves nothing that could be taken for a conversion to be resumed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.checkpoint.checksums import SIDECAR
from reshard.checkpoint.storage import COMMITTED, TENSOR_FILES
from reshard.errors import TargetError, UnfinishedError

__all__ = ["Workplace", "check_places", "replace_file"]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def check_places(source: str, target: Path) -> None:
    """Refuse a target that is the source, lies in it, or holds it."""
    if "://" in source:
        return
    have, want = Path(source).resolve(), target.resolve()
    if have == want or have in want.parents or want in have.parents:
        raise TargetError(
            f"{target} and the source {source} lie in each other: "
            "choose a target outside of the source"
        )


@dataclass(slots=True)
class Workplace:
    """The hidden folder beside a target in which its output is built."""

    target: Path
    folder: Path
    _lock: int | None = None

    @classmethod
    def beside(cls, target: Path) -> Workplace:
        """The workplace of a target."""
        # A link at the target itself stays one; those on the way to it lead where the system goes.
        is_named = target.name not in ("", "..")
        target = target.parent.resolve() / target.name if is_named else target.resolve()
        return cls(target, target.parent / f".{target.name}.reshard-partial")

    @property
    def data(self) -> Path:
        """The output in the making."""
        return self.folder / "data"

    @property
    def old(self) -> Path:
        """What stood at the target, once it is moved aside."""
        return self.folder / "old"

    def check_target(self, overwrite: bool) -> None:
        """Refuse what stands at the target, unless it is a checkpoint that may be overwritten."""
        if not os.path.lexists(self.target):
            return
        if not self.target.is_dir():
            raise TargetError(f"{self.target} is not a folder: choose another target")
        if not any(self.target.iterdir()):
            if self.target.is_symlink():
                raise TargetError(f"{self.target} is a link: give the folder that it leads to")
            return
        if not overwrite:
            raise TargetError(
                f"{self.target} exists: choose another target, or give --overwrite "
                "(overwrite=True); the old one is kept until the new one is complete"
            )
        if not _holds_tensors(self.target):
            raise TargetError(
                f"{self.target} holds no checkpoint, and only a checkpoint is overwritten: choose "
                "another target, or move the folder away"
            )

    def check_writable(self) -> None:
        """Ask the system, without writing, whether the target's folder can be made and written."""
        folder = self.target.parent
        exists = next(path for path in (folder, *folder.parents) if path.exists())
        if not exists.is_dir() or not os.access(exists, os.W_OK | os.X_OK):
            raise TargetError(f"{exists} cannot be written to: choose another target")

    def enter(self) -> None:
        """Make the folder and take its lock; a second conversion is refused at once."""
        if self.folder.is_symlink() or self.data.is_symlink():
            raise TargetError(f"{self.folder} leads elsewhere by a link: remove it")
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(exist_ok=True)
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise TargetError(
                f"nothing can be written beside {self.target}: {error.strerror}"
            ) from None
        if not _locked(lock):
            os.close(lock)
            raise TargetError(
                f"another conversion is writing {self.target}: wait for it, or end it"
            )
        self._lock = lock
        if not (self.folder / "lock").exists():  # the one before us finished just now
            self.leave()
            self.enter()
        for gone in self.target.parent.glob(f"{glob.escape(self._gone)}*"):
            shutil.rmtree(gone, ignore_errors=True)

    @property
    def _gone(self) -> str:
        """How the name of a folder begins that waits to be deleted."""
        return f".{self.target.name}.reshard-gone-"

    def begin_anew(self) -> None:
        """Remove whatever lies here, of which nobody knows what it was."""
        self._keep_old()
        for path in self.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def is_held(self) -> bool:
        """Whether some process works here; also where locks cannot tell."""
        try:
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(lock)
        return False

    def leave(self) -> None:
        """Give the lock back; what is there can be resumed."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def request(self) -> dict[str, Any] | None:
        """What an earlier conversion was making here, if one did not finish."""
        try:
            found = json.loads((self.folder / "request.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def note_request(self, request: Mapping[str, Any]) -> None:
        """Write down what is being made."""
        replace_file(self.folder / "request.json", json.dumps(request).encode())

    def discard(self) -> None:
        """Remove all that was built here."""
        self._keep_old()
        self._remove()

    def _keep_old(self) -> None:
        if self.old.exists():
            raise UnfinishedError(
                f"{self.old} holds what stood at {self.target}: move it to a safe place first"
            )

    def _remove(self) -> None:
        """Let all go in one step, and then delete it."""
        gone = self.folder.with_name(f"{self._gone}{secrets.token_hex(4)}")
        try:
            self.folder.rename(gone)
        except OSError:
            gone = self.folder
        shutil.rmtree(gone, ignore_errors=True)
        self.leave()

    def publish(self, overwrite: bool, note: Callable[[dict[str, Any]], None]) -> None:
        """Put the finished output in its place."""
        note({"publishing": self.data.stat().st_ino})
        _sync_folder(self.folder)
        try:
            if not os.path.lexists(self.target) or not overwrite:
                self.data.rename(self.target)
            elif not exchange(self.data, self.target):
                self.target.rename(self.old)
                self.data.rename(self.target)
        except OSError as error:
            raise self._in_the_way(error) from None
        self.finish()

    def _in_the_way(self, error: OSError) -> Exception:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return UnfinishedError(
                f"{self.target} came to be while it was converted: move it away and give --resume, "
                "or give --resume --overwrite"
            )
        return UnfinishedError(
            f"{self.data} cannot be renamed to {self.target}: {error.strerror}; "
            "--resume tries again"
        )

    def was_published(self, inode: int) -> bool:
        """Whether a crash came after the output took its place."""
        return self.target.exists() and self.target.stat().st_ino == inode

    def finish(self) -> None:
        """Make the rename durable and clean up; the old output, if any, goes now."""
        _sync_folder(self.target.parent)
        self._remove()


def _holds_tensors(folder: Path) -> bool:
    """Whether some file of a folder is of a checkpoint, finished or not."""
    ours = (SIDECAR, COMMITTED, ".metadata")
    return any(
        name.endswith((*TENSOR_FILES, ".distcp")) or name in ours
        for _, _, names in os.walk(folder)
        for name in names
    )


def _locked(lock: int) -> bool:
    """Take a lock; more than once, because a rank that looks whether it is held has it then."""
    for _ in range(5):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.02)
        else:
            return True
    return False


def exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step; False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    paths = os.fsencode(one), os.fsencode(other)
    if rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file so that it is there whole or not at all."""
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
