"""Byte ranges of local folders and remote addresses: exactly what was asked for, or an error."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoint.formats.reader import open_storage
from reshard.checkpoint.storage import local as storage
from reshard.checkpoint.storage.local import LocalStorage, StoredFile, check_path
from reshard.checkpoint.storage.remote import RemoteStorage
from reshard.errors import CheckpointError, DamageError, UnsupportedError

DATA = bytes(range(256)) * 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    for name in ("a.bin", "deep/b.bin", "deep/er/c.bin", ".metadata", ".reshard-lock", ".git/x"):
        (tmp_path / name).write_bytes(DATA)
    (tmp_path / "gone").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def test_a_file_that_is_deleted_while_its_folder_is_listed_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = os.scandir

    def slow(path: Path) -> list[os.DirEntry[str]]:
        entries = list(scan(path))
        (folder / "a.bin").unlink(missing_ok=True)
        return entries

    monkeypatch.setattr(storage.os, "scandir", slow)
    (folder / "loop").symlink_to("loop")
    with open_storage(folder) as store:
        assert [file.path for file in store.list()] == [
            ".metadata", "deep/b.bin", "deep/er/c.bin"
        ]  # fmt: skip


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "a.bin/b"])
def test_a_path_that_cannot_exist_is_an_error(folder: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=r"does not exist|File name too long"):
        open_storage(folder / name)


def test_all_regular_files_but_our_own(folder: Path) -> None:
    with open_storage(folder) as store:
        found = store.list()
    expected = (".metadata", "a.bin", "deep/b.bin", "deep/er/c.bin")
    assert found == tuple(StoredFile(path, len(DATA)) for path in expected)


@given(st.integers(-2, len(DATA) + 2), st.integers(-2, len(DATA) + 2))
def test_a_range_is_there_or_is_an_error(offset: int, length: int) -> None:
    files = fsspec.filesystem("memory")
    files.pipe_file("/ranges/a.bin", DATA)
    inside = 0 <= offset <= len(DATA) and 0 <= length <= len(DATA) - offset
    with open_storage("memory://ranges") as store:
        if inside:
            assert store.read("a.bin", offset, length) == DATA[offset : offset + length]
        else:
            with pytest.raises(DamageError, match=rf"bytes {offset} to .* the file has 1280"):
                store.read("a.bin", offset, length)


@pytest.mark.parametrize(("offset", "length"), [(0, 0), (0, 1280), (7, 9), (1279, 1), (1280, 0)])
def test_local_ranges(folder: Path, offset: int, length: int) -> None:
    with open_storage(folder) as store:
        assert store.read("deep/b.bin", offset, length) == DATA[offset : offset + length]
        buffer = bytearray(length)
        store.read_into("deep/b.bin", offset, memoryview(buffer))
        assert buffer == DATA[offset : offset + length]


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 1281), (1280, 1), (-1, 1), (5, 1 << 62), (1 << 62, 5), (3, -1)]
)
def test_local_ranges_that_are_not_there(folder: Path, offset: int, length: int) -> None:
    with open_storage(folder) as store:
        with pytest.raises(DamageError, match=r"a\.bin: bytes .* are needed and the file has 1280"):
            store.read("a.bin", offset, length)
        if 0 <= length < 10_000:
            with pytest.raises(DamageError):
                store.read_into("a.bin", offset, memoryview(bytearray(length)))


def test_a_file_that_shrinks_is_noticed(folder: Path) -> None:
    with open_storage(folder) as store:
        store.read("a.bin", 0, 1)
        os.truncate(folder / "a.bin", 100)
        with pytest.raises(DamageError, match=r"ends at byte 100 and 1180 more are needed"):
            store.read("a.bin", 0, len(DATA))


@pytest.mark.parametrize(
    "path",
    ["../a", "/etc/passwd", "a/../b", "..", ".", "", "a//b", "a/./b", "a\0b", "..\\a", "deep/.."],
)
def test_paths_that_leave_the_root(folder: Path, path: str) -> None:
    with pytest.raises(UnsupportedError, match="leaves its checkpoint"):
        check_path(path)
    with (
        open_storage(folder) as store,
        pytest.raises(UnsupportedError, match="leaves its checkpoint"),
    ):
        store.read(path, 0, 1)
    fsspec.filesystem("memory").pipe_file("/paths/a.bin", DATA)
    with (
        open_storage("memory://paths") as remote,
        pytest.raises(UnsupportedError, match="leaves its"),
    ):
        remote.read(path, 0, 1)


def test_a_version_of_what_is_no_path_is_refused_as_a_read_is(tmp_path: Path) -> None:
    (tmp_path / "a\\b").write_bytes(DATA)
    with open_storage(tmp_path) as store:
        assert [file.path for file in store.list()] == ["a\\b"]
        with pytest.raises(UnsupportedError, match="leaves its checkpoint or is none"):
            store.versions(["a\\b"])


def test_links_may_not_leave_the_root(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"key")
    root = tmp_path / "root"
    root.mkdir()
    (root / "inside.bin").write_bytes(DATA)
    (root / "out.bin").symlink_to(tmp_path / "secret")
    (root / "up").symlink_to(tmp_path)
    (root / "fine.bin").symlink_to("inside.bin")
    with open_storage(root) as store:
        assert store.read("fine.bin", 0, 3) == DATA[:3]
        for path in ("out.bin", "up/secret"):
            with pytest.raises(UnsupportedError, match=r"leads to .*secret, outside of its"):
                store.read(path, 0, 1)
        assert "up/secret" not in [file.path for file in store.list()]


def test_a_file_that_is_named_may_be_a_link(tmp_path: Path) -> None:
    """Only it: a link beside it that leads elsewhere is not read."""
    (tmp_path / "a.bin").write_bytes(DATA)
    (tmp_path / "links").mkdir()
    for name in ("one.bin", "other.bin"):
        (tmp_path / "links" / name).symlink_to(tmp_path / "a.bin")
    with open_storage(tmp_path / "links" / "one.bin") as store:
        assert store.list() == (StoredFile("one.bin", len(DATA)),)
        assert store.read("one.bin", 0, 3) == DATA[:3]
        with pytest.raises(UnsupportedError, match="outside of its checkpoint"):
            store.read("other.bin", 0, 3)


def test_links_of_a_hub_cache_lead_to_its_blobs(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0a1b").write_bytes(DATA)
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0a1b")
    (snapshot / "unet").mkdir()
    (snapshot / "unet" / "model.safetensors").symlink_to("../../../blobs/0a1b")
    with open_storage(snapshot) as store:
        paths = ("model.safetensors", "unet/model.safetensors")
        assert store.list() == tuple(StoredFile(path, len(DATA)) for path in paths)
        assert all(store.read(path, 1, 2) == DATA[1:3] for path in paths)
    with open_storage(snapshot / "unet") as store:
        assert store.read("model.safetensors", 1, 2) == DATA[1:3]
    (snapshot / "out.bin").symlink_to("../../../elsewhere")
    (tmp_path.parent / "elsewhere").write_bytes(DATA)
    with open_storage(snapshot) as store, pytest.raises(UnsupportedError, match="outside of its"):
        store.read("out.bin", 0, 1)


def test_what_is_no_file(folder: Path) -> None:
    with open_storage(folder) as store:
        for path, says in (("pipe", "not a regular file"), ("deep", "not a regular file")):
            with pytest.raises(DamageError, match=says):
                store.read(path, 0, 1)
        with pytest.raises(DamageError, match=r"gone is missing"):
            store.read("gone", 0, 1)


@pytest.mark.parametrize("root", ["/nowhere/at/all", "memory://nowhere", "s4://bucket/x"])
def test_a_root_that_is_absent(root: str) -> None:
    with pytest.raises(CheckpointError, match=r"does not exist|cannot be reached"):
        open_storage(root)


def test_a_single_file_is_a_root_of_one(folder: Path) -> None:
    with open_storage(folder / "a.bin") as store:
        assert store.list() == (StoredFile("a.bin", len(DATA)),)
        assert store.read("a.bin", 3, 4) == DATA[3:7]


def test_few_descriptors_serve_many_files_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "MAX_OPEN", 4)
    for number in range(40):
        (tmp_path / f"{number}.bin").write_bytes(bytes([number]) * 1000)
    with LocalStorage(str(tmp_path)) as store, ThreadPoolExecutor(8) as pool:

        def read(number: int) -> bool:
            path = f"{number * 7 % 40}.bin"
            return store.read(path, 5, 900) == bytes([number * 7 % 40]) * 900

        with store.using("7.bin") as kept:
            assert all(pool.map(read, range(2000)))
            assert len(store._open) <= 4 + 8 + 1
            assert os.pread(kept.descriptor, 3, 0) == b"\7\7\7"


def test_descriptors_are_given_back(folder: Path) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(3):
        with open_storage(folder) as store:
            for file in store.list():
                store.read(file.path, 0, 1)
    assert len([*Path("/proc/self/fd").iterdir()]) == before


class Ranged(http.server.SimpleHTTPRequestHandler):
    """A folder over http; answers to ranges, unless told not to."""

    folder: str
    honest = True

    def __init__(self, *args: object) -> None:
        super().__init__(*args, directory=self.folder)  # type: ignore[arg-type]

    def log_message(self, *_: object) -> None:
        return

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        path = Path(self.translate_path(self.path))
        if not wanted or not path.is_file() or not self.honest:
            super().do_GET()
            return
        first, last = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
        data = path.read_bytes()[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Range", f"bytes {first}-{last}/{path.stat().st_size}")
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, type[Ranged]]]:
    """The address of a server of this folder, and its handler."""
    handler = type("Handler", (Ranged,), {"folder": str(folder)})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        thread = threading.Thread(target=served.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{served.server_address[1]}", handler
        served.shutdown()
        thread.join()


def test_ranges_over_http(folder: Path) -> None:
    pytest.importorskip("aiohttp")
    (folder / "pipe").unlink()
    with serving(folder) as (address, handler), open_storage(f"{address}/deep") as store:
        assert isinstance(store, RemoteStorage)
        assert [file.path for file in store.list()] == ["b.bin", "er/c.bin"]
        assert store.read_many([("b.bin", 3, 4), ("er/c.bin", 0, 2)]) == [DATA[3:7], DATA[:2]]
        handler.honest = False
        with pytest.raises(CheckpointError, match="does not serve byte ranges"):
            store.read("b.bin", 3, 4)


def test_remote_lists_and_many_reads() -> None:
    files = fsspec.filesystem("memory")
    for name in ("a.bin", "deep/b.bin", ".reshard-lock", ".cache/x", "deep/.metadata"):
        files.pipe_file(f"/listed/{name}", DATA)
    with open_storage("memory://listed/") as store:
        assert [file.path for file in store.list()] == ["a.bin", "deep/.metadata", "deep/b.bin"]
        ranges = [("a.bin", at, 3) for at in range(100)]
        assert store.read_many(ranges) == [DATA[at : at + 3] for at in range(100)]
        with pytest.raises(DamageError, match="does not exist"):
            store.size("b.bin")
