"""Checksums of the files that reshard writes, in the sidecar ``reshard-checksums.json``.

The sidecar has the size of each file, a checksum of each of its chunks, and the digest of each
tensor. A chunk is what one call wrote, at most 4 MiB, so checksums are computed from the bytes that
are written, by any worker and in any order, and nothing is read again. The last line of the sidecar
is a checksum of the lines before it.

The checksum is xxh3 with 128 bits: 8 GB/s on one core, ten times the rate of a cryptographic hash.
It detects damage; no hash in the same folder protects against a change of both file and checksum.

>>> written = [*sums_of(0, 3, b"defg"), *sums_of(0, 0, b"abc")]
>>> sums = Checksums(file_sums([StoredFile("a.bin", 7)], written), {})
>>> Checksums.from_bytes(sums.to_bytes()) == sums
True
>>> Checker(sums, "ckpt").check("a.bin", 0, b"abcdefG")
Traceback (most recent call last):
    ...
reshard.errors.DamageError: ckpt/a.bin: bytes 3 to 7 changed since they were written: ...
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from reshard.checkpoint.storage.local import Storage, StoredFile, blocks, check_path
from reshard.errors import CheckpointError, DamageError, UnsupportedError
from reshard.text import quoted

SIDECAR = "reshard-checksums.json"
VERSION = 2
CHUNK = 4 << 20
"""The longest chunk that is written; an unaligned reader re-reads at most two of them."""
WIDTH = 16  # bytes of one checksum
ROOM = 32 << 20
"""Bytes that a sidecar may have regardless of its files."""
PER_BYTE = 4
"""Further bytes of a sidecar per byte of its files. A chunk takes at most 55 bytes there, a tensor
its name and 40 more. A chunk of a few bytes is a whole tensor or box, whose name and shape take at
least 60 bytes in the header or archive of its file."""
MAX_ALONE = 4 << 30
"""The largest sidecar that is read for a single file, where the other files are unknown."""

_ADVICE = "restore it from a copy, or delete it to continue without checksums"

Bytes = bytes | bytearray | memoryview
Sum = tuple[int, int, int, str]
"""File, start, stop and checksum of bytes that were written."""


class ChunkSum(NamedTuple):
    start: int
    stop: int
    sum: bytes


@dataclass(frozen=True, slots=True)
class FileSums:
    """The checksums of one file, whose chunks are consecutive and cover it."""

    ends: tuple[int, ...]
    """The end of each chunk; the last is the size of the file."""
    sums: bytes
    """The checksums of all chunks, one after the other."""

    @property
    def size(self) -> int:
        return self.ends[-1] if self.ends else 0

    def chunk(self, index: int) -> ChunkSum:
        start = self.ends[index - 1] if index else 0
        return ChunkSum(start, self.ends[index], self.sums[index * WIDTH : (index + 1) * WIDTH])

    def touching(self, start: int, stop: int) -> range:
        """The indices of the chunks that overlap a range."""
        last = min(bisect_left(self.ends, stop) + 1, len(self.ends))
        return range(bisect_right(self.ends, start), last if start < stop else 0)


@dataclass(frozen=True, slots=True)
class Checksums:
    files: Mapping[str, FileSums]
    digests: Mapping[str, str]
    request: Mapping[str, Any] | None = None
    """The conversion that wrote the files, if one did."""

    def to_bytes(self) -> bytes:
        """The sidecar as JSON, whose last line is a checksum of all lines before it."""
        files = {
            path: {"ends": sums.ends, "sums": sums.sums.hex()}
            for path, sums in sorted(self.files.items())
        }
        entries: dict[str, Any] = {"reshard-checksums": VERSION}
        if self.request is not None:
            entries["request"] = dict(self.request)
        entries |= {"files": files, "digests": dict(sorted(self.digests.items()))}
        lines = (
            f'"{key}": {json.dumps(value, separators=(",", ":"))}' for key, value in entries.items()
        )
        body = ("{" + ",\n".join(lines) + ",\n").encode()
        return body + _seal(body)

    @staticmethod
    def from_bytes(text: bytes, where: str = SIDECAR) -> Checksums:
        length = len(_seal(b""))
        if text[-length:] != _seal(text[:-length]):
            raise DamageError(f"{where} was changed or truncated since it was written: {_ADVICE}")
        try:
            data = json.loads(text)
            version = data.get("reshard-checksums")
            if version == VERSION:
                request = data.get("request")
                return Checksums(
                    {check_path(path): _read_sums(entry) for path, entry in data["files"].items()},
                    {str(name): _hex(digest) for name, digest in data["digests"].items()},
                    None if request is None else dict(request),
                )
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise DamageError(
                f"{where} is not what reshard writes ({' '.join(str(error).split())}): {_ADVICE}"
            ) from None
        raise UnsupportedError(
            f"{where} is of version {quoted(version)} and this reshard reads {VERSION}: use the "
            "reshard that wrote it, or delete it to continue without checksums"
        )


def load_checksums(storage: Storage) -> Checksums | None:
    """The checksums of a checkpoint, or None if it has none."""
    sizes = {file.path: file.size for file in storage.list()}
    is_listed, where = SIDECAR in sizes, f"{storage.root}/{SIDECAR}"
    if not is_listed and len(sizes) != 1:
        return None
    try:
        size = storage.size(SIDECAR)
    except DamageError:
        if is_listed:
            raise
        return None  # a single file without a sidecar
    others = sum(sizes.values()) - sizes.get(SIDECAR, 0)
    most = ROOM + others * PER_BYTE if is_listed else MAX_ALONE
    if size > most:
        raise DamageError(
            f"{where} has {size} bytes, and for {others} bytes of files at most {most} are read: "
            f"{_ADVICE}"
        )
    text = bytearray()
    for part in blocks(storage, SIDECAR, 0, size):
        text += part
        if b"\0" in text[-len(part) :]:  # a sparse file is refused before it takes memory
            raise DamageError(f"{where} has zero bytes and is no text: {_ADVICE}")
    return Checksums.from_bytes(bytes(text), where)


def checksum(data: Bytes) -> bytes:
    return _hasher(data).digest()  # type: ignore[no-any-return]


def sums_of(file: int, offset: int, data: Bytes) -> list[Sum]:
    view = memoryview(data)
    parts = ((offset + at, view[at : at + CHUNK]) for at in range(0, len(view), CHUNK))
    return [(file, at, at + len(part), checksum(part).hex()) for at, part in parts]


def file_sums(files: Sequence[StoredFile], sums: Iterable[Sum]) -> dict[str, FileSums]:
    """The checksums of each file, from those of all writes, in any order.

    Raises unless every byte was written exactly once.
    """
    chunks: list[list[tuple[int, int, str]]] = [[] for _ in files]
    for number, start, stop, text in sums:
        chunks[number].append((start, stop, text))
    by_path = {}
    for file, written in zip(files, chunks, strict=True):
        starts, ends, texts = zip(*sorted(written), strict=True) if written else ((), (), ())
        for start, end in zip((*starts, file.size), (0, *ends), strict=True):
            if start != end:
                low, high = sorted((start, end))
                times = "twice" if start < end else "never"
                raise CheckpointError(
                    f"{file.path}: bytes {low} to {high} of {file.size} were written {times}: this "
                    "is a bug in reshard; please report it"
                )
        by_path[file.path] = FileSums(ends, bytes.fromhex("".join(texts)))
    return by_path


class Checker:
    """Compares bytes that are read with the checksums of a checkpoint; from any thread.

    Chunks that are read whole, or in order from their start, are compared at once. Chunks that were
    read otherwise are read again by ``finish``.
    """

    def __init__(self, checksums: Checksums | None, root: str) -> None:
        self.root = root
        self.report: Callable[[str, ChunkSum, bytes], None] | None = None
        """Takes damage (path, chunk, its checksum now); without it damage is raised."""
        self._files = checksums.files if checksums is not None else {}
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int], tuple[Any, int] | None] = {}
        """Chunks that were read in part: the hash up to which byte, if from their start."""
        self._done: dict[tuple[str, int], bool] = {}
        """Whether each chunk that was checked is right."""

    def check(self, path: str, offset: int, data: Bytes) -> None:
        """Check bytes that were read at an offset; DamageError if a chunk has changed."""
        sums = self._files.get(path)
        if sums is None:
            return
        view = memoryview(data).cast("B")
        for index in sums.touching(offset, offset + len(view)):
            chunk = sums.chunk(index)
            start, stop = max(chunk.start, offset), min(chunk.stop, offset + len(view))
            part = view[start - offset : stop - offset]
            if len(part) == chunk.stop - chunk.start:
                self._judge(path, index, chunk, checksum(part))
            else:
                self._check_part(path, index, chunk, start, part)

    def finish(self, storage: Storage, path: str | None = None) -> int:
        """Read chunks again that were read only in parts, or all unchecked chunks of a file.

        Returns the number of bytes.
        """
        with self._lock:
            left = sorted(self._open)
            if path is not None:
                every = ((path, index) for index in range(len(self._files[path].ends)))
                left = [key for key in every if key not in self._done]
        num_bytes = 0
        for path, index in left:
            chunk = self._files[path].chunk(index)
            self._judge(path, index, chunk, sum_of(storage, path, chunk.start, chunk.stop))
            num_bytes += chunk.stop - chunk.start
        return num_bytes

    def _check_part(
        self, path: str, index: int, chunk: ChunkSum, start: int, part: memoryview
    ) -> None:
        key = (path, index)
        with self._lock:
            if key in self._done:
                return
            known = self._open.setdefault(key, None)
            if start != (known[1] if known else chunk.start):
                return
            hasher = known[0] if known else _hasher()
            hasher.update(part)
            self._open[key] = hasher, start + len(part)
        if start + len(part) == chunk.stop:
            self._judge(path, index, chunk, hasher.digest())

    def _judge(self, path: str, index: int, chunk: ChunkSum, now: bytes) -> None:
        key, is_right = (path, index), now == chunk.sum
        with self._lock:
            was_right = self._done.get(key, True)
            self._done[key] = is_right and was_right
            self._open.pop(key, None)
        if is_right:
            return
        if self.report is None:
            raise DamageError(damage(f"{self.root}/{path}", chunk, now))
        if was_right:
            self.report(path, chunk, now)


def damage(where: str, chunk: ChunkSum, now: bytes) -> str:
    return (
        f"{where}: bytes {chunk.start} to {chunk.stop} changed since they were written: their "
        f"checksum is {now.hex()} and was {chunk.sum.hex()}: restore the file from a "
        f"copy; if it was changed on purpose, delete {SIDECAR}"
    )


def sum_of(storage: Storage, path: str, start: int, stop: int) -> bytes:
    hasher = _hasher()
    for part in blocks(storage, path, start, stop):
        hasher.update(part)
    return hasher.digest()  # type: ignore[no-any-return]


def _hasher(data: Bytes = b"") -> Any:
    from xxhash import xxh3_128

    return xxh3_128(data)


def _seal(body: bytes) -> bytes:
    return b'"checksum": "' + checksum(body).hex().encode() + b'"}\n'


def _read_sums(entry: Mapping[str, Any]) -> FileSums:
    ends, sums = entry["ends"], bytes.fromhex(_hex(entry["sums"]))
    whole = all(type(end) is int for end in ends)
    rising = whole and all(low < high for low, high in zip([0, *ends], ends, strict=False))
    if not rising or len(sums) != WIDTH * len(ends):
        raise ValueError("chunks that do not rise, or not one checksum for each")
    return FileSums(tuple(ends), sums)


def _hex(text: object) -> str:
    if not isinstance(text, str) or not set(text) <= set("0123456789abcdef"):
        raise ValueError("a checksum that is not hexadecimal")
    return text
