"""Reads the zip archives of ``torch.save``: the pickle, and the places of the storages.

    archive/data.pkl      a pickle in which tensors refer to storages by number
    archive/data/0        the bytes of a storage, uncompressed
    central directory     names, sizes and places of all members, at the end

Only the directory, the pickle and the header of each storage are read. A ``.distcp`` file is a
sequence of such archives, so an archive is a range of a file.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple
from zlib import crc32

from reshard.checkpoint.catalog import Crc
from reshard.checkpoint.storage import Range, Storage
from reshard.errors import CheckpointError, DamageError, UnsupportedError
from reshard.text import quoted

__all__ = ["Archive", "Member", "archive_crcs", "read_archives"]

HEAD, TAIL = 1024, 1024
"""Bytes of both ends of an archive that are read first; enough for one tensor."""
MAX_PICKLE = 1 << 28
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_FULL = 0xFFFFFFFF
"""Stands in a 32-bit field whose number is in the extra field."""


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
        """The CRC-32 of each storage; 0 in the file means that none was computed."""
        members = self.storages.values()
        return [Crc(file, m.offset, m.size, m.crc) for m in members if m.crc and m.size]


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
    zips = [_Zip(_where(storage, found), found, largest) for found in ranges]
    members = _all_members(storage, zips)
    return [_archive(storage, found, some) for found, some in zip(zips, members, strict=True)]


def archive_crcs(storage: Storage, found: Range, file: int) -> list[Crc]:
    """The CRC-32 of every member of one archive; no member is read."""
    [members] = _all_members(storage, [_Zip(_where(storage, found), found, MAX_PICKLE)])
    return [Crc(file, m.offset, m.size, m.crc) for m in members.values() if m.crc and m.size]


def _all_members(storage: Storage, zips: list[_Zip]) -> list[dict[str, Member]]:
    """The storages, pickle and byte order of each archive, by name."""
    _read_ends(storage, zips)
    directories = [_directory(found, *_end_of(found)) for found in zips]
    content = _read_wanted(storage, zips, directories)
    tables: list[list[_Listed]] = []
    known: dict[bytes, tuple[list[_Listed], int]] = {}  # tensors of one shape share a directory
    for found, data in zip(zips, content, strict=True):
        if data not in known:
            members = _members(found, data)
            known[data] = _wanted_members(found, members), _end_apart(found, members)
        table, end = known[data]
        if end > found.range[2]:
            raise DamageError(f"{found.where}: its members end at byte {end} of {found.range[2]}")
        tables.append(table)
    return _located(storage, zips, tables)


def _where(storage: Storage, found: Range) -> str:
    path, offset, length = found
    whole = offset == 0 and length == storage.size(path)
    text = storage.where(path)
    return text if whole else f"{text}: bytes {offset} to {offset + length}"


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


def _end_of(found: _Zip) -> tuple[int, int, int]:
    """The start, length and number of members of the directory."""
    at = found.tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size != len(found.tail):
        raise DamageError(f"{found.where}: the directory at its end is missing: it is truncated")
    _, _, _, _, count, length, start, _ = _END.unpack_from(found.tail, at)
    locator = at - _LOCATOR.size
    if locator >= 0 and found.tail[locator : locator + 4] == b"PK\x06\x07":
        return _end64_of(found, _LOCATOR.unpack_from(found.tail, locator)[2])
    return start, length, count


def _end64_of(found: _Zip, at: int) -> tuple[int, int, int]:
    data = found.known(at, _END64.size) if at < found.range[2] else None
    if data is None or data[:4] != b"PK\x06\x06":
        raise DamageError(f"{found.where}: its zip64 directory is not at byte {at}")
    *_, count, length, start = _END64.unpack(data)
    return start, length, count


def _directory(found: _Zip, start: int, length: int, count: int) -> tuple[int, int]:
    """Check that the directory is inside the archive; returns its start and length."""
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


def _members(found: _Zip, data: bytes) -> list[_Listed]:
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
        if _FULL in (size, packed, header):
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
    return members


def _wide(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """The 64-bit numbers of the extra field, in the order of the fields that did not fit."""
    at, wide = 0, b""
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = extra[at + 4 : at + 4 + length]
        at += 4 + length
    numbers = []
    for number in (size, packed, header):
        if number == _FULL and len(wide) >= 8:
            number, wide = int.from_bytes(wide[:8], "little"), wide[8:]
        numbers.append(number)
    return numbers[0], numbers[1], numbers[2]


def _end_apart(found: _Zip, members: list[_Listed]) -> int:
    """The end of the last member; raises if members overlap."""
    end, before = 0, ""
    for name, header, size, *_ in sorted(members, key=itemgetter(1)):
        if header < end:
            raise DamageError(f"{found.where}: members {quoted(before)} and {quoted(name)} overlap")
        end, before = header + _LOCAL.size + size, name
    return end


def _located(
    storage: Storage, zips: list[_Zip], tables: list[list[_Listed]]
) -> list[dict[str, Member]]:
    """The place of each member, which depends on the length of the header before it."""
    wanted = [(found, m) for found, table in zip(zips, tables, strict=True) for m in table]
    headers = _read_wanted(
        storage, [one for one, _ in wanted], [(m.header, _LOCAL.size) for _, m in wanted]
    )
    places = (
        _member(found, listed, header)
        for (found, listed), header in zip(wanted, headers, strict=True)
    )
    return [{listed.name: next(places) for listed in table} for table in tables]


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


def _member(found: _Zip, member: _Listed, header: bytes) -> Member:
    fields = _LOCAL.unpack(header)
    start = member.header + _LOCAL.size + fields[9] + fields[10]
    if fields[0] != b"PK\x03\x04" or start + member.size > found.range[2]:
        raise DamageError(
            f"{found.where}: there is no member {quoted(member.name)} at byte {member.header}"
        )
    return Member(found.range[1] + start, member.size, member.crc)


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
