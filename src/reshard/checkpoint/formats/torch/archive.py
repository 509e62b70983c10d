"""The zip archives of ``torch.save``, read and written.

    archive/data.pkl            a pickle in which tensors refer to storages by number
    archive/.format_version     1
    archive/.storage_alignment  64
    archive/byteorder           little
    archive/data/0              the bytes of a storage, uncompressed, at a multiple of 64 bytes
    archive/version             3
    central directory           names, sizes and places of all members

A reader reads only the directory, the pickle and the header of each storage. A ``.distcp`` file is
a sequence of such archives, so an archive is a range of a file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import NamedTuple
from zlib import crc32

from reshard.checkpoint.catalog import Crc
from reshard.checkpoint.storage.local import Range, Storage
from reshard.errors import CheckpointError, DamageError, UnsupportedError
from reshard.text import quoted

__all__ = [
    "ALIGNMENT", "Archive", "ArchiveWriter", "Member", "archive_crcs", "each_archive",
    "is_archive", "read_archives",
]  # fmt: skip

HEAD, TAIL = 1024, 1024
"""Bytes of both ends of an archive that are read first; enough for one tensor."""
MAX_PICKLE = 1 << 28
BATCH = 1024
"""Archives that are read together."""
ALIGNMENT = 64
BIG = 0xFFFFFFFF
"""Stands in a 32-bit field whose number is in the 64-bit extra field."""
UTF8, ZIP64, PADDING = 0x0800, 1, 0x4246
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")


@dataclass(frozen=True, slots=True)
class Member:
    """A stored member: the byte of the file at which its content begins, and how long it is."""

    offset: int
    size: int
    crc: int


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive in a range of a file: its pickle, and the places of its storages."""

    where: str
    pickle: bytes
    storages: Mapping[str, Member]

    def crcs(self, file: int) -> list[Crc]:
        """The CRC-32 of each storage."""
        return _crcs(self.storages, file)


def _crcs(members: Mapping[str, Member], file: int) -> list[Crc]:
    """The CRC-32 of each member; 0 in the file means that none was computed."""
    return [Crc(file, m.offset, m.size, m.crc) for m in members.values() if m.crc and m.size]


@dataclass(slots=True)
class _Zip:
    """An archive that is being read: a range of a file, and the bytes read so far."""

    where: str
    range: Range
    largest: int
    head: bytes = b""
    tail: bytes = b""

    def known(self, start: int, length: int) -> bytes | None:
        """Bytes of the archive, relative to its start, if they were read already."""
        size = self.range[2]
        if start + length <= len(self.head):
            return self.head[start : start + length]
        first = size - len(self.tail)
        if start >= first and start + length <= size:
            return self.tail[start - first : start - first + length]
        return None


def read_archives(
    storage: Storage, ranges: Sequence[Range], largest: int = MAX_PICKLE
) -> list[Archive]:
    """The archives in these ranges of files.

    Pickles and directories of more than ``largest`` bytes are refused: many are in memory at once.
    """
    zips, members = _read_zips(storage, ranges, largest)
    return [_archive(storage, found, some) for found, some in zip(zips, members, strict=True)]


def each_archive(
    storage: Storage, ranges: Sequence[Range], largest: int
) -> Iterator[Archive | DamageError | UnsupportedError]:
    """The archives in these ranges, many read together; an error for each that cannot be read."""
    for first in range(0, len(ranges), BATCH):
        batch = ranges[first : first + BATCH]
        found: Iterable[Archive | DamageError | UnsupportedError]
        try:
            found = read_archives(storage, batch, largest)
        except (DamageError, UnsupportedError) as error:
            one_by_one = (each_archive(storage, [one], largest) for one in batch)
            found = chain.from_iterable(one_by_one) if len(batch) > 1 else [error]
        yield from found


def archive_crcs(storage: Storage, found: Range, file: int) -> list[Crc]:
    """The CRC-32 of every member of one archive; no member is read."""
    _, [members] = _read_zips(storage, [found], MAX_PICKLE)
    return _crcs(members, file)


def is_archive(storage: Storage, found: Range) -> bool:
    """Whether a range begins or ends as an archive does, although it may be damaged."""
    path, offset, length = found
    if length < _END.size:
        return False
    ends = [(path, offset, 4), (path, offset + length - _END.size, 4)]
    head, tail = storage.read_many(ends)
    return head == b"PK\x03\x04" or tail == b"PK\x05\x06"


def _read_zips(
    storage: Storage, ranges: Sequence[Range], largest: int
) -> tuple[list[_Zip], list[dict[str, Member]]]:
    """The archives in these ranges, and the storages, pickle and byte order of each, by name."""
    zips = []
    for path, offset, length in ranges:
        whole = offset == 0 and length == storage.size(path)
        where = storage.where(path)
        where = where if whole else f"{where}: bytes {offset} to {offset + length}"
        zips.append(_Zip(where, (path, offset, length), largest))
    _read_ends(storage, zips)
    content = _read_wanted(storage, zips, [_directory(found) for found in zips])
    tables: list[list[_Listed]] = []
    known: dict[bytes, tuple[list[_Listed], int]] = {}  # tensors of one shape share a directory
    for found, data in zip(zips, content, strict=True):
        if data not in known:
            members, end = _listed(found, data)
            known[data] = _wanted_members(found, members), end
        table, end = known[data]
        if end > found.range[2]:
            raise DamageError(f"{found.where}: its members end at byte {end} of {found.range[2]}")
        tables.append(table)
    return zips, _located(storage, zips, tables)


def _read_ends(storage: Storage, zips: Sequence[_Zip]) -> None:
    """Read both ends of every archive, or all of it if it is not longer."""
    wanted = []
    for found in zips:
        path, offset, length = found.range
        if length < _END.size:
            raise DamageError(f"{found.where}: {length} bytes are no archive of torch.save")
        if length <= HEAD + TAIL:
            wanted.append((path, offset, length))
        else:
            wanted += [(path, offset, HEAD), (path, offset + length - TAIL, TAIL)]
    data = iter(storage.read_many(wanted))
    for found in zips:
        found.head = head = next(data)
        found.tail = head if found.range[2] <= HEAD + TAIL else next(data)
        if head[:4] != b"PK\x03\x04":
            raise _no_zip(found.where, head)


_OTHERS = {
    b"\x80": "a pickle, as torch.save wrote it before torch 1.6",
    b"\x1f\x8b": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"\x89HDF": "an HDF5 file",
    b"GGUF": "a GGUF file",
}
"""The first bytes of other formats that use the same file names."""


def _no_zip(where: str, head: bytes) -> CheckpointError:
    what = next((what for begins, what in _OTHERS.items() if head.startswith(begins)), None)
    if head[257:262] == b"ustar":
        what = "a tar archive"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < MAX_PICKLE:
        what = "in the format of safetensors"
    if what is None:
        return DamageError(f"{where} begins with {head[:4]!r} and is no archive of torch.save")
    return UnsupportedError(
        f"{where} is {what}, which is not read: load it with what wrote it and save it again with "
        "torch.save"
    )


def _directory(found: _Zip) -> tuple[int, int]:
    """The start and length of the directory, which must be inside the archive."""
    at = found.tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size != len(found.tail):
        raise DamageError(f"{found.where}: the directory at its end is missing: it is truncated")
    _, _, _, _, count, length, start, _ = _END.unpack_from(found.tail, at)
    locator = at - _LOCATOR.size
    if locator >= 0 and found.tail[locator : locator + 4] == b"PK\x06\x07":
        at = _LOCATOR.unpack_from(found.tail, locator)[2]
        data = found.known(at, _END64.size) if at < found.range[2] else None
        if data is None or data[:4] != b"PK\x06\x06":
            raise DamageError(f"{found.where}: its zip64 directory is not at byte {at}")
        *_, count, length, start = _END64.unpack(data)
    fits = start + length <= found.range[2] and length <= found.largest
    if not fits or length < count * _CENTRAL.size:
        raise DamageError(
            f"{found.where}: a directory of {count} members and {length} bytes at byte {start} "
            f"does not fit into {found.range[2]} bytes"
        )
    return start, length


def _read_wanted(
    storage: Storage, zips: Sequence[_Zip], places: Sequence[tuple[int, int]]
) -> list[bytes]:
    """A range of each archive, read only where it is not known yet."""
    found = [one.known(*place) for one, place in zip(zips, places, strict=True)]
    missing = [number for number, data in enumerate(found) if data is None]
    ranges = []
    for number in missing:
        path, offset, size = zips[number].range
        start, length = places[number]
        if start + length > size:
            raise DamageError(f"{zips[number].where}: byte {start + length} is beyond its end")
        ranges.append((path, offset + start, length))
    for number, data in zip(missing, storage.read_many(ranges), strict=True):
        found[number] = data
    return [data for data in found if data is not None]


class _Listed(NamedTuple):
    """A member in the directory: the place of its header in the archive, its size and CRC-32."""

    name: str
    header: int
    size: int
    crc: int
    is_packed: bool


def _listed(found: _Zip, data: bytes) -> tuple[list[_Listed], int]:
    """The members in a directory, which must not overlap, and the end of the last one."""
    members, at = [], 0
    while at + _CENTRAL.size <= len(data):
        row = _CENTRAL.unpack_from(data, at)
        if row[0] != b"PK\x01\x02":
            break
        flags, method, crc, packed, size = row[3], row[4], row[7], row[8], row[9]
        name_end = at + _CENTRAL.size + row[10]
        extra_end = name_end + row[11]
        name = data[at + _CENTRAL.size : name_end].decode("utf-8", "replace")
        header = row[16]
        if BIG in (size, packed, header):
            size, packed, header = _wide(data[name_end:extra_end], size, packed, header)
        is_packed = bool(method or flags & 1)
        if packed != size and not is_packed:
            raise DamageError(
                f"{found.where}: member {quoted(name)} has {packed} bytes and {size} unpacked"
            )
        members.append(_Listed(name, header, packed, crc, is_packed))
        at = extra_end + row[12]
    if at != len(data) or not members:
        raise DamageError(f"{found.where}: its directory ends after {len(members)} members")
    end, before = 0, ""
    for name, header, size, *_ in sorted(members, key=itemgetter(1)):
        if header < end:
            raise DamageError(f"{found.where}: members {quoted(before)} and {quoted(name)} overlap")
        end, before = header + _LOCAL.size + size, name
    return members, end


def _wide(extra: bytes, *numbers: int) -> list[int]:
    """The numbers, with those of the extra field, in this order, for the ones that did not fit."""
    at, wide = 0, b""
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == ZIP64:
            wide = extra[at + 4 : at + 4 + length]
        at += 4 + length
    found = []
    for number in numbers:
        if number == BIG and len(wide) >= 8:
            number, wide = int.from_bytes(wide[:8], "little"), wide[8:]
        found.append(number)
    return found


def _wanted_members(found: _Zip, table: list[_Listed]) -> list[_Listed]:
    names = {member.name for member in table}
    if len(names) != len(table):
        raise DamageError(f"{found.where}: two members of its directory have one name")
    pickles = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise UnsupportedError(
            f"{found.where} is a zip archive with {len(pickles)} members called data.pkl, and "
            "torch.save writes one: is it of something else?"
        )
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}constants.pkl" in names:
        raise UnsupportedError(
            f"{found.where} is a TorchScript archive, which is not read: torch.jit.load it, and "
            "torch.save its state_dict()"
        )
    places = (f"{root}data/", f"{root}data.pkl", f"{root}byteorder")
    wanted = [member for member in table if member.name.startswith(places)]
    packed = next((member.name for member in wanted if member.is_packed), None)
    if packed is not None:
        raise UnsupportedError(
            f"{found.where}: member {quoted(packed)} is compressed or encrypted, which torch.save "
            "never does: unpack it and zip it again without compression"
        )
    return wanted


def _located(
    storage: Storage, zips: list[_Zip], tables: list[list[_Listed]]
) -> list[dict[str, Member]]:
    """The place of each member, which depends on the length of the header before it."""
    wanted = [(number, member) for number, table in enumerate(tables) for member in table]
    headers = _read_wanted(
        storage,
        [zips[number] for number, _ in wanted],
        [(m.header, _LOCAL.size) for _, m in wanted],
    )
    located: list[dict[str, Member]] = [{} for _ in zips]
    for (number, member), header in zip(wanted, headers, strict=True):
        fields = _LOCAL.unpack(header)
        start = member.header + _LOCAL.size + fields[9] + fields[10]
        _, offset, size = zips[number].range
        if fields[0] != b"PK\x03\x04" or start + member.size > size:
            raise DamageError(
                f"{zips[number].where}: there is no member {quoted(member.name)} at byte "
                f"{member.header}"
            )
        located[number][member.name] = Member(offset + start, member.size, member.crc)
    return located


def _archive(storage: Storage, found: _Zip, members: Mapping[str, Member]) -> Archive:
    storages = {}
    pickle = b""
    for name, member in members.items():
        last = name.partition("/")[2]
        if last == "data.pkl":
            pickle = _content(storage, found, member)
        elif last == "byteorder" and _content(storage, found, member) != b"little":
            raise UnsupportedError(
                f"{found.where} was written on a big-endian machine, which is not supported: load "
                "it with torch and save it again here"
            )
        elif last.startswith("data/"):
            storages[last.removeprefix("data/")] = member
    return Archive(found.where, pickle, storages)


def _content(storage: Storage, found: _Zip, member: Member) -> bytes:
    if member.size > found.largest:
        raise UnsupportedError(
            f"{found.where}: a pickle of {member.size} bytes, at most {found.largest} are read"
        )
    path, offset, _ = found.range
    data = found.known(member.offset - offset, member.size)
    data = storage.read(path, member.offset, member.size) if data is None else data
    if member.crc and crc32(data) != member.crc:
        raise DamageError(
            f"{found.where}: bytes {member.offset} to {member.offset + member.size} changed since "
            f"torch saved them: their CRC-32 is {crc32(data):08x} and was {member.crc:08x}: "
            "restore the file from a copy"
        )
    return data


class ArchiveWriter:
    """The bytes of an archive, which begins with a pickle."""

    def __init__(self, pickle: bytes) -> None:
        self.out = bytearray()
        self.skipped = 0
        """Bytes of the tensor, which are not in ``out``."""
        self._directory = bytearray()
        self._count = 0
        self.add("data.pkl", pickle)
        self.add(".format_version", b"1")
        self.add(".storage_alignment", str(ALIGNMENT).encode())
        self.add("byteorder", b"little")

    def add(self, name: str, data: bytes) -> None:
        """Add a member."""
        self.add_header(name, len(data), crc32(data))
        self.out += data

    def add_header(self, name: str, size: int, crc: int) -> None:
        """Add the header of a member, padded so that its bytes are aligned, and list the member."""
        path = f"archive/{name}".encode()
        at, shown = len(self.out) + self.skipped, min(size, BIG)
        extra = struct.pack("<HHQQ", ZIP64, 16, size, size) if size >= BIG else b""
        pad = -(at + _LOCAL.size + len(path) + len(extra) + 4) % ALIGNMENT
        extra += struct.pack("<HH", PADDING, pad) + b"Z" * pad
        self.out += _LOCAL.pack(
            b"PK\x03\x04", 0, UTF8, 0, 0, 0, crc, shown, shown, len(path), len(extra)
        )
        self.out += path + extra
        big = [value for value in (size, size, at) if value >= BIG]
        extra = struct.pack(f"<HH{len(big)}Q", ZIP64, 8 * len(big), *big) if big else b""
        self._directory += _CENTRAL.pack(
            b"PK\x01\x02", 0, 0, UTF8, 0, 0, 0, crc, shown, shown, len(path), len(extra),
            0, 0, 0, 0, min(at, BIG),
        )  # fmt: skip
        self._directory += path + extra
        self._count += 1

    def finish(self) -> None:
        """Add the last member, the central directory, and the records that locate it."""
        self.add("version", b"3\n")
        at, size, count = len(self.out) + self.skipped, len(self._directory), self._count
        self.out += self._directory
        if at >= BIG:
            self.out += _END64.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, at)
            self.out += _LOCATOR.pack(b"PK\x06\x07", 0, at + size, 1)
        self.out += _END.pack(b"PK\x05\x06", 0, 0, count, count, size, min(at, BIG), 0)
