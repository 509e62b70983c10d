"""A source that is replaced during a read by files of the same size and time stamp is noticed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from reshard.checkpoint import convert
from reshard.checkpoint.formats.reader import open_storage
from reshard.checkpoint.storage import local as module
from reshard.checkpoint.transfer import copying
from reshard.errors import DamageError, TargetError

FILES = 6


def write(folder: Path, value: int) -> Path:
    """Several files, all of one size and one time stamp."""
    folder.mkdir()
    for number in range(FILES):
        path = folder / f"model-{number + 1:05d}-of-{FILES:05d}.safetensors"
        save_file({f"w{number}": np.full(64, value, np.float32)}, path)
        os.utime(path, ns=(10**18, 10**18))
    return folder


def replace_by(folder: Path, other: Path, how: str) -> None:
    """Put the files of another folder in the place of these, as ``cp -p`` or ``mv`` do."""
    if how == "folder":
        folder.rename(folder.with_name("away"))
        shutil.copytree(other, folder)
        return
    for path in sorted(other.iterdir()):
        if how == "inode":
            copy = folder / "copy"
            shutil.copy2(path, copy)
            copy.rename(folder / path.name)
        else:
            shutil.copy2(path, folder / path.name)


@pytest.mark.parametrize("how", ["in place", "inode", "folder"])
@pytest.mark.parametrize("open_files", [2, 128])
def test_a_source_that_is_replaced_meanwhile_is_never_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, open_files: int
) -> None:
    """Also where files are closed and opened again."""
    old, new = write(tmp_path / "old", 1), write(tmp_path / "new", 2)
    monkeypatch.setattr(module, "MAX_OPEN", open_files)
    real, calls = copying.Copier.copy, []

    def copy(self: copying.Copier, *arguments: object) -> object:
        if not calls:
            replace_by(old, new, how)
        calls.append(1)
        return real(self, *arguments)

    monkeypatch.setattr(copying.Copier, "copy", copy)
    with pytest.raises(DamageError, match=r"was (replaced|changed)"):
        convert(old, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} <= {"old", "new", "away"}


@pytest.mark.parametrize("how", ["in place", "inode", "folder"])
def test_a_file_is_the_one_that_was_listed(tmp_path: Path, how: str) -> None:
    """The header comes from one file and the data from another otherwise."""
    old, new = write(tmp_path / "old", 1), write(tmp_path / "new", 2)
    with open_storage(old) as files:
        listed = files.list()
        replace_by(old, new, how)
        with pytest.raises(DamageError, match="was replaced or written while it was read"):
            files.read(listed[0].path, 0, 8)
        with pytest.raises(DamageError, match="was replaced or written while it was read"):
            files.versions([listed[0].path])


def test_a_source_that_was_replaced_is_not_resumed(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    old, new = write(tmp_path / "old", 1), write(tmp_path / "new", 2)
    with pytest.raises(KeyboardInterrupt):
        convert(old, tmp_path / "out", progress=stop)
    replace_by(old, new, "in place")
    with pytest.raises(TargetError, match="was of another source"):
        convert(old, tmp_path / "out", resume=True)
