"""An output never contains data of an earlier run, another source, or from before a crash."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from reshard.checkpoint import convert, inspect, save, verify
from reshard.checkpoint.conversion import build
from reshard.checkpoint.integrity.checksums import SIDECAR
from reshard.checkpoint.publish import journal, workplace
from reshard.checkpoint.publish.journal import Journal, read_journals
from reshard.errors import CheckpointError, DamageError, TargetError, UnfinishedError

LITTLE = {"memory": "1MiB", "workers": 1}


def write(folder: Path, **tensors: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def stop_after(calls: int) -> Callable[[int, int], None]:
    """Progress that is interrupted, as by Ctrl-C."""
    left = [calls]

    def progress(done: int, total: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    return progress


def interrupt(source: str | Path, target: Path, calls: int, **options: object) -> None:
    with pytest.raises(KeyboardInterrupt):
        convert(source, target, progress=stop_after(calls), **LITTLE, **options)


def values(folder: Path) -> np.ndarray:
    return load_file(folder / "model.safetensors")["w"]


def test_a_kill_while_cleaning_up_leaves_nothing_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of the folder is deleted first: the next conversion starts from nothing."""
    ones = write(tmp_path / "ones", w=np.full(1000, 1, np.float32))
    twos = write(tmp_path / "twos", w=np.full(1000, 2, np.float32))

    def killed(folder: Path, ignore_errors: bool = False) -> None:
        (Path(folder) / "request.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(workplace.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        convert(ones, tmp_path / "out")
    monkeypatch.undo()
    report = convert(twos, tmp_path / "out", overwrite=True)
    assert report.bytes_resumed == 0
    assert (values(tmp_path / "out") == 2).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ones", "out", "twos"]


def test_a_journal_without_its_request_is_not_believed(tmp_path: Path) -> None:
    source = write(tmp_path / "source", w=np.arange(1000, dtype=np.float32))
    place = tmp_path / ".out.reshard-partial"
    place.mkdir()
    with Journal(place, 0) as lines:
        lines.append({"chunk": 0, "bytes": 4000, "sums": [], "parts": {}})
    report = convert(source, tmp_path / "out")
    assert report.bytes_resumed == 0
    assert verify(source, tmp_path / "out").ok


def test_what_stood_at_the_target_is_not_deleted_for_want_of_a_request(tmp_path: Path) -> None:
    source = write(tmp_path / "source", w=np.ones(4, np.float32))
    old = write(tmp_path / ".out.reshard-partial" / "old", w=np.zeros(4, np.float32))
    with pytest.raises(UnfinishedError, match="holds the old content of"):
        convert(source, tmp_path / "out")
    assert (values(old) == 0).all()


def test_a_planted_link_leads_nowhere(tmp_path: Path) -> None:
    source = write(tmp_path / "source", w=np.ones(4, np.float32))
    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / ".out.reshard-partial").mkdir()
    (tmp_path / ".out.reshard-partial" / "data").symlink_to(victim)
    with pytest.raises(TargetError, match="is a symbolic link"):
        convert(source, tmp_path / "out")
    assert not any(victim.iterdir())


def test_lines_that_were_lost_stay_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boot A never synced; what boot B syncs says nothing of it."""
    source = write(tmp_path / "source", w=np.arange(1, 1 << 18, dtype=np.float32))
    monkeypatch.setattr(journal, "boot_id", lambda: "A")
    interrupt(source, tmp_path / "out", 5)
    data = tmp_path / ".out.reshard-partial" / "data" / "model.safetensors"
    data.write_bytes(bytes(data.stat().st_size))  # the machine went down before it was on disk
    monkeypatch.setattr(journal, "boot_id", lambda: "B")
    monkeypatch.setattr(build, "SYNC_EVERY", 200_000)
    interrupt(source, tmp_path / "out", 3, resume=True)
    convert(source, tmp_path / "out", resume=True, **LITTLE)
    assert verify(source, tmp_path / "out").ok


def test_a_sync_vouches_for_its_own_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def session(boot: str, *records: dict) -> None:
        monkeypatch.setattr(journal, "boot_id", lambda: boot)
        with Journal(tmp_path, 0) as lines:
            for record in records:
                if "sync" in record:
                    lines.synced(lines.num_records)
                else:
                    lines.append(record)

    def known(boot: str) -> list[int]:
        monkeypatch.setattr(journal, "boot_id", lambda: boot)
        return [record["chunk"] for record in read_journals(tmp_path)]

    session("A", {"chunk": 0}, {"sync": True}, {"chunk": 1})
    assert (known("A"), known("B")) == ([0, 1], [0])
    session("A", {"chunk": 2})
    assert (known("A"), known("B")) == ([0, 1, 2], [0])
    session("B", {"chunk": 3}, {"sync": True}, {"chunk": 4})
    assert (known("B"), known("C")) == ([0, 3, 4], [0, 3])


def test_another_source_is_not_gone_on_with(tmp_path: Path) -> None:
    """Folders whose files have one name, size and time; and addresses."""
    memory = fsspec.filesystem("memory")
    sources = {}
    for step in (100, 200):
        folder = write(tmp_path / f"step{step}", w=np.full((512, 512), step, np.float32))
        os.utime(folder / "model.safetensors", ns=(10**18, 10**18))
        memory.put(str(folder / "model.safetensors"), f"/mixed/step{step}/model.safetensors")
        sources[step] = folder, f"memory://mixed/step{step}"
    for place, (one, other) in enumerate(zip(sources[100], sources[200], strict=True)):
        interrupt(one, tmp_path / f"out{place}", 4)
        with pytest.raises(TargetError, match="was of another source"):
            convert(other, tmp_path / f"out{place}", resume=True, **LITTLE)
        convert(one, tmp_path / f"out{place}", resume=True, **LITTLE)
        assert (values(tmp_path / f"out{place}") == 100).all()


def test_a_remote_file_that_was_written_again_is_noticed(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for step in (1, 2):
        folder = write(tmp_path / f"s{step}", w=np.full((512, 512), step, np.float32))
        if step == 2:
            interrupt("memory://again", tmp_path / "out", 4)
        memory.put(str(folder / "model.safetensors"), "/again/model.safetensors")
    with pytest.raises(TargetError, match="was of another source"):
        convert("memory://again", tmp_path / "out", resume=True, **LITTLE)


def test_another_reading_of_one_source_is_not_gone_on_with(tmp_path: Path) -> None:
    ranks, rules = tmp_path / "ranks", tmp_path / "cut.toml"
    ranks.mkdir()
    for rank in range(4):
        part = np.full((256, 256), rank, np.float32)
        save_file({"w": part}, ranks / f"model-rank-{rank}-part-0.safetensors")
    rules.write_text('axes = ["a", "b"]\n[tensors]\n"w" = "(a b) -"\n')
    options = {"source_rules": rules}
    interrupt(ranks, tmp_path / "out", 4, source_mesh="a=2 b=2", **options)
    with pytest.raises(TargetError, match="asked for something else"):
        convert(ranks, tmp_path / "out", source_mesh="b=2 a=2", resume=True, **LITTLE, **options)


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A checkpoint that has checksums, with a file beside its tensors."""
    source = write(tmp_path / "source", w1=np.ones(8, np.float32), w2=np.zeros(8, np.float32))
    (source / "config.json").write_text(json.dumps({"vocab_size": 32000}))
    convert(source, tmp_path / "ours")
    return tmp_path / "ours"


def changed(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


def test_changes_beside_tensors_are_not_carried_on(ours: Path, tmp_path: Path) -> None:
    changed(ours / "config.json", b"32000", b"32008")
    with pytest.raises(DamageError, match=r"config\.json: bytes 0 to 21 changed"):
        convert(ours, tmp_path / "again")
    changed(ours / "config.json", b"32008", b"32000")
    changed(ours / "model.safetensors", b'"w1"', b'"w3"')
    with pytest.raises(DamageError, match='tensor "w1" was written and is in no file'):
        convert(ours, tmp_path / "again")
    changed(ours / "model.safetensors", b'"w3"', b'"w1"')
    changed(ours / "model.safetensors", b'"pt"', b'"tp"')
    with pytest.raises(DamageError, match=r"model\.safetensors: bytes 0 to"):
        convert(ours, tmp_path / "again")
    changed(ours / "model.safetensors", b'"tp"', b'"pt"')
    convert(ours, tmp_path / "again")


@pytest.mark.parametrize("what", ["gone", "longer"])
def test_files_that_the_checksums_know_are_there(ours: Path, tmp_path: Path, what: str) -> None:
    config = ours / "config.json"
    if what == "gone":
        config.unlink()
    else:
        config.write_text(config.read_text() + " ")
    with pytest.raises(
        DamageError, match=r"config\.json (is missing|has 22 bytes and was written)"
    ):
        convert(ours, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    (ours / SIDECAR).unlink()  # on purpose
    convert(ours, tmp_path / "again")


def test_a_changed_plain_value_is_not_carried_on(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    save({"w": torch.ones(4), "step": 7}, tmp_path / "saved", format="distcp")
    [data] = (tmp_path / "saved").glob("*.distcp")
    changed(data, b"K\x07.", b"K\x47.")
    with pytest.raises(DamageError, match=r"\.distcp: bytes \d+ to \d+ changed"):
        convert(tmp_path / "saved", tmp_path / "again", format="distcp")


def test_the_source_is_never_the_target(tmp_path: Path) -> None:
    source = write(tmp_path / "source", w=np.ones(8, np.float32))
    (tmp_path / "far" / "off").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "off")
    (source / "in").mkdir()
    (tmp_path / "into").symlink_to(source / "in")
    before = (source / "model.safetensors").read_bytes()
    same = [
        (source, tmp_path / "into" / ".." / "../source"),
        (f"file://{source}", source),
        (source, f"file://{source}"),
        (source, f"local://{source}/deeper"),
        ("memory://one/two", "memory://one/two/"),
        ("memory://one/two", "memory://one/two/three"),
    ]
    fsspec.filesystem("memory").put(str(source / "model.safetensors"), "/one/two/model.safetensors")
    for have, want in same:
        with pytest.raises(TargetError, match="contain each other"):
            convert(have, want, overwrite=True, dtype="bfloat16")
    assert (source / "model.safetensors").read_bytes() == before


def test_a_target_is_where_the_system_says(tmp_path: Path) -> None:
    """A link followed by .. leads to where the link leads, not to where it lies."""
    source = write(tmp_path / "source", w=np.ones(8, np.float32))
    (tmp_path / "far" / "off").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "off")
    convert(source, tmp_path / "link" / ".." / "out")
    assert inspect(tmp_path / "far" / "out").format
    assert not (tmp_path / "out").exists()


def test_local_addresses_are_local(tmp_path: Path) -> None:
    source = write(tmp_path / "source", w=np.ones(8, np.float32))
    (source / "deep").mkdir()
    (source / "deep" / "tokens.txt").write_text("a b")
    convert(f"file://{source}", f"file://{tmp_path}/new/out")
    assert (tmp_path / "new" / "out" / "deep" / "tokens.txt").read_text() == "a b"
    assert not (tmp_path / "new" / "out" / "_RESHARD_COMMITTED").exists()


def test_only_checkpoints_are_overwritten(tmp_path: Path) -> None:
    source = write(tmp_path / "source", w=np.ones(8, np.float32))
    project = tmp_path / "project"
    project.mkdir()
    (project / "main.py").write_text("print()")
    with pytest.raises(TargetError, match="holds no checkpoint"):
        convert(source, project, overwrite=True)
    assert (project / "main.py").exists()


def test_a_link_to_an_empty_folder_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    source = write(tmp_path / "source", w=np.ones(8, np.float32))
    (tmp_path / "empty").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "empty")
    with pytest.raises(TargetError, match="is a link: give the folder that it leads to"):
        convert(source, tmp_path / "out")


def test_strangers_at_an_address_are_not_read_with_ours(tmp_path: Path) -> None:
    source = write(tmp_path / "source", w=np.ones(8, np.float32))
    fsspec.filesystem("memory").pipe_file("/strange/zz.safetensors", b"left over")
    with pytest.raises(UnfinishedError, match=r"zz\.safetensors exists and is not part of this"):
        convert(source, "memory://strange", overwrite=True)
    fsspec.filesystem("memory").rm_file("/strange/zz.safetensors")
    convert(source, "memory://strange", resume=True)
    assert verify(source, "memory://strange").ok


def test_a_commit_is_compared_with_what_is_there(tmp_path: Path) -> None:
    """A copy of an address that lacks a file, or has one that is too short, is noticed."""
    memory = fsspec.filesystem("memory")
    source = write(tmp_path / "source", w=np.ones(8, np.float32))
    (source / "tokens.txt").write_text("a b")
    convert(source, "memory://committed", checksums=False)
    memory.get("/committed", str(tmp_path / "copy"), recursive=True)
    assert verify(source, tmp_path / "copy").ok
    (tmp_path / "copy" / "tokens.txt").write_text("a")
    with pytest.raises(DamageError, match=r"tokens\.txt has 1 byte.* _RESHARD_COMMITTED .* 3"):
        convert(tmp_path / "copy", tmp_path / "out")
    (tmp_path / "copy" / "tokens.txt").unlink()
    with pytest.raises(DamageError, match=r"tokens\.txt is missing: _RESHARD_COMMITTED"):
        convert(tmp_path / "copy", tmp_path / "out")
    assert "is missing" in str(inspect(tmp_path / "copy"))
    memory.rm_file("/committed/tokens.txt")
    with pytest.raises(DamageError, match=r"tokens\.txt is missing: _RESHARD_COMMITTED"):
        convert("memory://committed", tmp_path / "out")
    (tmp_path / "copy" / "_RESHARD_COMMITTED").write_text("[" * 9999)
    with pytest.raises(DamageError, match="_RESHARD_COMMITTED is not what reshard writes"):
        convert(tmp_path / "copy", tmp_path / "out")


def test_a_source_without_versions_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reshard.checkpoint.storage import remote

    source = write(tmp_path / "source", w=np.ones((512, 512), np.float32))
    fsspec.filesystem("memory").put(str(source / "model.safetensors"), "/mute/model.safetensors")
    monkeypatch.setattr(remote, "VERSIONS", ())
    interrupt("memory://mute", tmp_path / "out", 4)
    with pytest.raises(TargetError, match="reports no versions of its files"):
        convert("memory://mute", tmp_path / "out", resume=True, **LITTLE)
    shutil.rmtree(tmp_path / ".out.reshard-partial")
    with pytest.raises(CheckpointError, match="does not exist"):
        convert("memory://nobody", tmp_path / "out")
    convert("memory://mute", tmp_path / "out")
