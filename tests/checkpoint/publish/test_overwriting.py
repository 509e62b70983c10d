"""Overwriting replaces a checkpoint and nothing else, also if it is killed at any step."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from reshard.checkpoint import convert, save, verify
from reshard.checkpoint.integrity.checksums import SIDECAR
from reshard.checkpoint.publish import replacing, workplace
from reshard.checkpoint.publish.workplace import Workplace
from reshard.errors import TargetError, UnfinishedError
from tests.soak import cases

torch = pytest.importorskip("torch")

OWN = {"notes.txt": "my notes", "logs/a.log": "a log", ".git/config": "git", "deep/mine.txt": "m"}
"""Files of the user beside a checkpoint."""


def write(folder: Path, value: int, **files: str) -> Path:
    """A checkpoint of one file with these values, and other files beside it."""
    folder.mkdir(parents=True)
    arrays = {name: np.full(64, value, np.float32) for name in "ab"}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    put(folder, {"config.json": f"{{}}{value}", "deep/tokens.txt": str(value), **files})
    return folder


def put(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def value_of(folder: Path) -> int:
    """The value that all elements of a complete checkpoint have."""
    found = load_file(folder / "model.safetensors")
    assert set(found) == {"a", "b"}
    [value] = {int(one) for array in found.values() for one in array}
    assert (folder / "config.json").read_text() == f"{{}}{value}"
    assert (folder / "deep" / "tokens.txt").read_text() == str(value)
    return value


def own_files(folder: Path) -> dict[str, str]:
    return {path: (folder / path).read_text() for path in OWN if (folder / path).exists()}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A source with 2s, and a target that reshard wrote, with 1s and files of the user."""
    convert(write(tmp_path / "one", 1), tmp_path / "out")
    shutil.rmtree(tmp_path / "one")
    put(tmp_path / "out", OWN)
    return write(tmp_path / "src", 2), tmp_path / "out"


def test_own_files_are_kept_and_named(folders: tuple[Path, Path]) -> None:
    source, out = folders
    out.chmod(0o2770)
    with suppress(PermissionError):  # only root may give a folder away
        os.chown(out, 12, 34)
    owner = out.stat().st_uid, out.stat().st_gid
    (out / "empty").mkdir()
    (out / "link").symlink_to("/nowhere")
    (out / "\udcff\n").mkdir()
    report = convert(source, out, overwrite=True)
    str(report).encode()
    assert value_of(out) == 2
    assert own_files(out) == OWN
    assert (out / "empty").is_dir()
    assert (out / "link").is_symlink()
    expected = (".git/", "deep/", "empty/", "link", "logs/", "notes.txt", "\udcff\n/")
    assert report.left_alone == expected
    assert "kept     .git/, deep/, empty/" in str(report)
    assert (out.stat().st_uid, out.stat().st_gid) == owner
    assert out.stat().st_mode & 0o777 == 0o770
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "src"]
    assert verify(source, out).ok


@pytest.mark.parametrize("written", ["full", "sharded", "distcp", "ranks", "torch", "hub"])
@pytest.mark.parametrize("form", ["full", "distcp"])
def test_any_checkpoint_is_replaced_by_any(tmp_path: Path, written: str, form: str) -> None:
    """No file of the old one stays that a reader would take for a part of the new one."""
    one, two, out = write(tmp_path / "one", 1), write(tmp_path / "two", 2), tmp_path / "out"
    cut: dict[str, Any] = {"mesh": "x=2", "layouts": {"*": "x"}}
    if written == "torch":
        out.mkdir()
        torch.save({"a": torch.ones(3)}, out / "pytorch_model.bin")
    elif written == "hub":
        shutil.copytree(one, out)
        shutil.rmtree(out / "deep")
    else:
        convert(one, out, format=written, **({} if written == "full" else cut))
    put(out, OWN)
    report = convert(two, out, format=form, overwrite=True, **({} if form == "full" else cut))
    assert own_files(out) == OWN
    stale = ["pytorch_model.bin", "shard-00001-model-00001-of-00001.safetensors"]
    assert not any((out / name).exists() for name in stale)
    assert verify(two, out).ok
    assert verify(out).ok
    assert set(report.left_alone) >= {"notes.txt", "logs/"}


@pytest.mark.parametrize("door", ["convert", "save"])
@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"main.py": "x", "firmware.bin": "bits", ".git/config": "c"}, "holds no checkpoint"),
        ({"main.py": "x", "build/firmware.bin": "bits"}, "holds no checkpoint"),
        ({"main.py": "x", "model.safetensors": "no header"}, "holds no checkpoint"),
        ({"notes.txt": "x", SIDECAR: "{}"}, "holds no checkpoint"),
        ({"runs/a/model.safetensors": "", "runs/b/model.safetensors": ""}, "holds no checkpoint"),
        ({"a/.metadata": "x", "b/.metadata": "y"}, "holds no checkpoint"),
        ({".metadata": "x"}, "holds no checkpoint"),
    ],
)
def test_folders_that_are_no_checkpoint_are_refused(
    tmp_path: Path, door: str, files: dict[str, str], reason: str
) -> None:
    source, out = write(tmp_path / "src", 2), tmp_path / "out"
    put(out, files)
    for path in out.rglob("runs/*/model.safetensors"):
        shutil.copy(source / "model.safetensors", path)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    doors: dict[str, Callable[[], object]] = {
        "convert": lambda: convert(source, out, overwrite=True),
        "save": lambda: save({"w": torch.ones(4)}, out, overwrite=True),
    }
    with pytest.raises(TargetError, match=reason):
        doors[door]()
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


def test_a_folder_of_several_checkpoints_is_refused(tmp_path: Path) -> None:
    """Whether they are folders, or files side by side as adapters of one model are."""
    source, runs = write(tmp_path / "src", 2), tmp_path / "runs"
    write(runs / "step1", 1)
    with pytest.raises(TargetError, match="holds no checkpoint"):
        convert(source, runs, overwrite=True)
    for name in ("cat", "dog"):
        save_file({f"{name}.w": np.ones(4)}, runs / f"{name}.safetensors")
    with pytest.raises(TargetError, match=r'"cat\.safetensors" and "dog\.safetensors"'):
        convert(source, runs, overwrite=True)
    for name in ("cat", "dog"):
        (runs / f"{name}.safetensors").unlink()
        torch.save({f"{name}.w": torch.ones(4)}, runs / f"{name}.pt")
    with pytest.raises(TargetError, match="nothing says that they are one checkpoint"):
        convert(source, runs, overwrite=True)


def test_files_in_the_way_are_not_replaced(folders: tuple[Path, Path]) -> None:
    source, out = folders
    (source / "notes.txt").write_text("of the source")
    with pytest.raises(TargetError, match=r"out/notes\.txt is no part of the checkpoint there"):
        convert(source, out, overwrite=True)
    (source / "notes.txt").unlink()
    save_file({"mine": np.ones(3)}, out / "mine.safetensors")
    with pytest.raises(TargetError, match=r"mine\.safetensors is no part .* would be read"):
        convert(source, out, overwrite=True)
    (out / "mine.safetensors").unlink()
    (out / "deep").rename(out.parent / "elsewhere")
    (out / "deep").symlink_to(out.parent / "elsewhere")
    with pytest.raises(TargetError, match="out/deep is no part of the checkpoint there"):
        convert(source, out, overwrite=True)
    assert (out.parent / "elsewhere" / "tokens.txt").read_text() == "1"
    assert value_of(out) == 1


@pytest.mark.parametrize("slash", ["", "/", "/."])
def test_ways_to_name_a_target(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, slash: str
) -> None:
    source, out = folders
    (out.parent / "link").symlink_to(out)
    with pytest.raises(TargetError, match="is a link: give the folder that it leads to"):
        convert(source, out.parent / "link", overwrite=True)
    monkeypatch.chdir(out)
    convert(source, f"{out}{slash}" if slash else ".", overwrite=True)
    assert value_of(out) == 2
    assert own_files(out) == OWN


@pytest.mark.parametrize("what", ["target", "folder in it"])
def test_what_cannot_be_moved_is_refused_first(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    source, out = folders
    locked = out if what == "target" else out / "logs"
    real = os.access
    monkeypatch.setattr(
        replacing.os, "access", lambda path, mode: Path(path) != locked and real(path, mode)
    )
    with pytest.raises(TargetError, match=f"{locked} may not be written"):
        convert(source, out, overwrite=True)
    assert value_of(out) == 1


def test_files_that_come_while_it_is_converted_are_kept(folders: tuple[Path, Path]) -> None:
    source, out = folders

    def late(done: int, total: int) -> None:
        put(out, {"late.txt": "late", "late.safetensors": "x"} if done else {})

    with pytest.raises(UnfinishedError, match=r"late\.safetensors is no part of the checkpoint"):
        convert(source, out, overwrite=True, progress=late)
    (out / "late.safetensors").unlink()
    report = convert(source, out, overwrite=True, resume=True)
    assert "late.txt" in report.left_alone
    assert (out / "late.txt").read_text() == "late"
    assert value_of(out) == 2


def run_and_kill(work: Callable[[], object], step: int, can_exchange: bool) -> bool:
    """Run in another process that is killed before its nth step of publishing; whether it was."""
    pid = os.fork()
    if pid:
        status = os.waitpid(pid, 0)[1]
        assert status in (0, signal.SIGKILL)
        return status != 0
    try:
        steps, real = count(), Workplace.publish

        def watch(event: str, _: object) -> None:
            if event.startswith(("os.", "open", "ctypes.")) and next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)

        def publishing(self: Workplace, *arguments: Any) -> Any:
            sys.addaudithook(watch)
            return real(self, *arguments)

        Workplace.publish = publishing  # type: ignore[method-assign]
        if not can_exchange:
            workplace.exchange = lambda *_: False  # type: ignore[attr-defined]
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def texts_below(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_file() and path.name in {Path(name).name for name in OWN}:
            yield path.read_text()


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("door", ["convert", "save"])
def test_killed_at_each_step_of_publishing(
    folders: tuple[Path, Path], can_exchange: bool, door: str
) -> None:
    """Old or new one is complete, and each file of the user exists; the next command tidies up."""
    source, out = folders
    kept = out.parent / "kept"
    shutil.copytree(out, kept, symlinks=True)
    works: dict[str, Callable[[], object]] = {
        "convert": lambda: convert(source, out, overwrite=True),
        "save": lambda: save({"a": torch.full((64,), 2.0)}, out, overwrite=True),
    }
    stride = {"convert": 9, "save": 17}[door]  # not each step in the usual run
    for step in range(0, 400, cases(stride, 1)):
        if not run_and_kill(works[door], step, can_exchange):
            break
        partial = out.parent / ".out.reshard-partial"
        whole = out if out.exists() else partial / "old"
        assert out.exists() or not can_exchange
        assert value_of_any(whole) in (1, 2)
        assert sorted(texts_below(out.parent)) == sorted([*OWN.values(), *OWN.values()])
        with suppress(TargetError, UnfinishedError):
            convert(source, out)
        assert own_files(out) == OWN
        works[door]() if door == "save" else convert(source, out, overwrite=True, resume=True)
        assert value_of_any(out) == 2
        assert own_files(out) == OWN
        assert sorted(path.name for path in out.parent.iterdir()) == ["kept", "out", "src"]
        shutil.rmtree(out)
        shutil.copytree(kept, out, symlinks=True)
    assert step > 14


def value_of_any(folder: Path) -> int:
    if (folder / "model.safetensors").exists():
        return value_of(folder)
    [file] = folder.glob("*.safetensors")
    [value] = {int(one) for one in load_file(file)["a"]}
    return value


def test_resuming_what_is_complete_succeeds(tmp_path: Path) -> None:
    """``until reshard convert ... --resume`` ends, wherever the run before was killed."""
    source, out = write(tmp_path / "src", 2), tmp_path / "out"
    for options in ({}, {"checksums": False}):
        convert(source, out, overwrite=True, **options)
        report = convert(source, out, resume=True, **options)
        assert report.was_complete
        assert report.bytes_written == report.bytes_read == 0
        assert str(report).startswith("already complete: ")
        with pytest.raises(TargetError, match="exists"):
            convert(source, out, **options)
        for other in ({"dtype": "bfloat16"}, {"checksums": bool(options)}):
            with pytest.raises(TargetError, match="exists"):
                convert(source, out, resume=True, **{**options, **other})
    (out / "model.safetensors").write_bytes(b"truncated")
    with pytest.raises(TargetError, match="exists"):
        convert(source, out, resume=True, checksums=False)


def test_resuming_what_is_complete_at_an_address_succeeds(tmp_path: Path) -> None:
    source = write(tmp_path / "src", 2)
    convert(source, "memory://complete")
    assert convert(source, "memory://complete", resume=True).was_complete
    with pytest.raises(TargetError, match="exists"):
        convert(source, "memory://complete", resume=True, dtype="bfloat16")
    fsspec.filesystem("memory").pipe_file("/complete/_RESHARD_COMMITTED", b"[" * 99_999)
    with pytest.raises(TargetError, match="exists"):
        convert(source, "memory://complete", resume=True)
