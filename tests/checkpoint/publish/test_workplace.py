"""One process at a time works on a destination."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from reshard.checkpoint.publish import replacing, workplace
from reshard.checkpoint.publish.workplace import Workplace
from reshard.errors import TargetError


def test_a_lock_file_that_was_deleted_and_created_again_is_held_by_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (Workplace(tmp_path / "out") for _ in range(3))
    first.enter()

    def finish_and_begin(_: float) -> None:
        monkeypatch.setattr(workplace.time, "sleep", lambda _: None)
        first.discard()
        third.enter()

    monkeypatch.setattr(workplace.time, "sleep", finish_and_begin)
    with pytest.raises(TargetError, match="another conversion is writing"):
        second.enter()
    third.discard()
    second.enter()
    second.discard()
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_is_removed_while_its_lock_is_opened_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, mkdir = Workplace(tmp_path / "out"), Path.mkdir

    def removed(path: Path, **options: bool) -> None:
        mkdir(path, **options)
        if path == place.folder:
            monkeypatch.undo()
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", removed)
    place.enter()
    with pytest.raises(TargetError, match="another conversion is writing"):
        Workplace(tmp_path / "out").enter()
    place.discard()


def test_a_file_system_that_holds_no_new_folder_is_not_another_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(path: Path, **_: bool) -> None:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(Path, "mkdir", absent)  # as in /proc
    with pytest.raises(TargetError, match=r"nothing can be written next to .*: choose another"):
        Workplace(tmp_path / "out").enter()


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 233, "x" * 300, "d/" * 3000])
def test_a_path_that_no_file_system_can_hold_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(TargetError, match=r"is no path|is too long"):
        Workplace(tmp_path / name)


def test_the_longest_name_that_is_accepted_can_be_written(tmp_path: Path) -> None:
    place = Workplace(tmp_path / ("x" * 232))
    place.enter()
    place.discard()
    assert [*tmp_path.iterdir()] == []


def test_a_destination_that_changes_while_it_is_listed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    (out / "logs").mkdir(parents=True)
    save_file({"w": np.ones(2)}, out / "model.safetensors")
    others = replacing._others

    def moved(folder: Path, *rest: Any) -> Iterator[str]:
        folder.rename(tmp_path / "moved")
        return others(folder, *rest)

    monkeypatch.setattr(replacing, "_others", moved)
    with pytest.raises(TargetError, match=r"out/logs was removed while .*/out was listed"):
        Workplace(out).check_target(overwrite=True, files=["model.safetensors"])


def test_an_old_folder_that_another_process_deletes_first_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / ".out.reshard-gone-1"
    (gone / "old").mkdir(parents=True)
    (gone / workplace.PUBLISHING).write_text('{"inode": 1, "belongs": []}')
    is_dir = Path.is_dir

    def deleted(path: Path) -> bool:
        found = is_dir(path)
        if path == gone / "old":
            path.rmdir()
        return found

    monkeypatch.setattr(Path, "is_dir", deleted)
    Workplace(tmp_path / "out").settle()
    assert [*tmp_path.iterdir()] == []
