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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import itemgetter
from typing import NamedTuple
from zlib import crc32

from reshard.checkpoint.catalog import Crc
from reshard.checkpoint.storage.local import Range, Storage
from reshard.errors import CheckpointError, DamageError, UnsupportedError
from reshard.text import quoted

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


class Member(NamedTuple):
    """A stored member: the byte of the file at which its content begins, its size and CRC-32."""

    offset: int
    size: int
    crc: int


@dataclass(slots=True)
class Archive:
    """An archive in a range of a file: its pickle, and the places of its storages."""

    where: str
    range: Range
    head: bytes = b""
    tail: bytes = b""
    members: dict[str, Member] = field(default_factory=dict)
    """The storages, the pickle and the byte order, by their names in the folder of the archive."""
    pickle: bytes = b""

    @property
    def storages(self) -> dict[str, Member]:
        return {n[5:]: member for n, member in self.members.items() if n.startswith("data/")}

    def crcs(self, file: int, prefix: str = "data/") -> list[Crc]:
        """The CRC-32 of each member with this prefix that has one, by default of the storages."""
        members = (m for name, m in self.members.items() if name.startswith(prefix))
        return [Crc(file, m.offset, m.size, m.crc) for m in members if m.crc and m.size]

    def known(self, start: int, length: int) -> bytes | None:
        """Bytes of the archive, relative to its start, if they were read already."""
        first = self.range[2] - len(self.tail)
        if start + length <= len(self.head):
            return self.head[start : start + length]
        is_in_tail = start >= first and start + length <= self.range[2]
        return self.tail[start - first : start - first + length] if is_in_tail else None


def read_archives(
    storage: Storage, ranges: Sequence[Range], largest: int = MAX_PICKLE
) -> list[Archive]:
    """The archives in these ranges of files.

    Pickles and directories of more than ``largest`` bytes are refused: many are in memory at once.
    """
    archives = _with_members(storage, ranges, largest)
    read = [
        (archive, name, archive.members[name])
        for archive in archives
        for name in ("data.pkl", "byteorder")
        if name in archive.members
    ]
    for archive, _, member in read:
        if member.size > largest:
            raise UnsupportedError(
                f"{archive.where}: a pickle of {member.size} bytes, at most {largest} are read"
            )
    contents = _read(storage, [(a, m.offset - a.range[1], m.size) for a, _, m in read])
    for (archive, name, member), data in zip(read, contents, strict=True):
        if member.crc and crc32(data) != member.crc:
            raise DamageError(crc_damage(archive.where, *member, crc32(data)))
        if name == "data.pkl":
            archive.pickle = data
        elif data != b"little":
            raise UnsupportedError(
                f"{archive.where} was written on a big-endian machine, which is not supported: "
                "load it with torch and save it again here"
            )
    return archives


def crc_damage(where: str, offset: int, size: int, was: int, now: int) -> str:
    return (
        f"{where}: bytes {offset} to {offset + size} changed since torch saved them: their CRC-32 "
        f"is {now:08x} and was {was:08x}: restore the file from a copy"
    )


def each_archive(
    storage: Storage, ranges: Sequence[Range], largest: int
) -> Iterator[Archive | DamageError | UnsupportedError]:
    """The archives in these ranges, many read together; an error for each that cannot be read."""
    for first in range(0, len(ranges), BATCH):
        batch = ranges[first : first + BATCH]
        try:
            yield from read_archives(storage, batch, largest)
        except (DamageError, UnsupportedError) as error:
            if len(batch) == 1:
                yield error
            else:
                yield from chain(*(each_archive(storage, [one], largest) for one in batch))


def archive_crcs(storage: Storage, place: Range, file: int) -> list[Crc]:
    """The CRC-32 of every member of one archive; no member is read."""
    [archive] = _with_members(storage, [place], MAX_PICKLE)
    return archive.crcs(file, prefix="")


def is_archive(storage: Storage, place: Range) -> bool:
    """Whether a range begins or ends as an archive does, although it may be damaged."""
    path, offset, length = place
    if length < _END.size:
        return False
    ends = [(path, offset, 4), (path, offset + length - _END.size, 4)]
    head, tail = storage.read_many(ends)
    return head == b"PK\x03\x04" or tail == b"PK\x05\x06"


def _with_members(storage: Storage, ranges: Sequence[Range], largest: int) -> list[Archive]:
    """The archives in these ranges, with the places of their members and no pickles."""
    archives = []
    for path, offset, length in ranges:
        whole = offset == 0 and length == storage.size(path)
        where = storage.where(path)
        where = where if whole else f"{where}: bytes {offset} to {offset + length}"
        archives.append(Archive(where, (path, offset, length)))
    _read_ends(storage, archives)
    directories = _read(storage, [(one, *_directory(one, largest)) for one in archives])
    wanted: list[tuple[Archive, _Listed]] = []
    known: dict[bytes, tuple[list[_Listed], int]] = {}  # tensors of one shape share a directory
    for archive, data in zip(archives, directories, strict=True):
        if data not in known:
            known[data] = _listed(archive.where, data)
        table, end = known[data]
        if end > archive.range[2]:
            raise DamageError(
                f"{archive.where}: its members end at byte {end} of {archive.range[2]}"
            )
        wanted += [(archive, member) for member in table]
    # The place of a member depends on the length of the header before it.
    headers = _read(storage, [(archive, one.header, _LOCAL.size) for archive, one in wanted])
    for (archive, one), header in zip(wanted, headers, strict=True):
        fields = _LOCAL.unpack(header)
        start = one.header + _LOCAL.size + fields[9] + fields[10]
        if fields[0] != b"PK\x03\x04" or start + one.size > archive.range[2]:
            raise DamageError(
                f"{archive.where}: there is no member {quoted(one.path)} at byte {one.header}"
            )
        name = one.path.partition("/")[2]
        archive.members[name] = Member(archive.range[1] + start, one.size, one.crc)
    return archives


def _read(storage: Storage, places: Sequence[tuple[Archive, int, int]]) -> list[bytes]:
    """Ranges of archives, relative to their starts; those at the ends were read before."""
    known = [archive.known(start, length) for archive, start, length in places]
    ranges = []
    for (archive, start, length), data in zip(places, known, strict=True):
        path, offset, size = archive.range
        if data is None and start + length > size:
            raise DamageError(f"{archive.where}: byte {start + length} is beyond its end")
        if data is None:
            ranges.append((path, offset + start, length))
    rest = iter(storage.read_many(ranges))
    return [next(rest) if data is None else data for data in known]


def _read_ends(storage: Storage, archives: Sequence[Archive]) -> None:
    """Read both ends of every archive, or all of it if it is not longer."""
    ends = []
    for archive in archives:
        path, offset, length = archive.range
        if length < _END.size:
            raise DamageError(f"{archive.where}: {length} bytes are no archive of torch.save")
        if length <= HEAD + TAIL:
            ends.append((path, offset, length))
        else:
            ends += [(path, offset, HEAD), (path, offset + length - TAIL, TAIL)]
    data = iter(storage.read_many(ends))
    for archive in archives:
        archive.head = head = next(data)
        archive.tail = head if archive.range[2] <= HEAD + TAIL else next(data)
        if head[:4] != b"PK\x03\x04":
            raise _no_zip(archive.where, head)


_OTHERS = (
    (4, b"\0\0\0\0{", "in the format of safetensors"),
    (257, b"ustar", "a tar archive"),
    (0, b"\x80", "a pickle, as torch.save wrote it before torch 1.6"),
    (0, b"\x1f\x8b", "compressed with gzip"),
    (0, b"\x28\xb5\x2f\xfd", "compressed with zstd"),
    (0, b"\x89HDF", "an HDF5 file"),
    (0, b"GGUF", "a GGUF file"),
)
"""Bytes, and where they are in files of other formats that use the same names."""


def _no_zip(where: str, head: bytes) -> CheckpointError:
    what = next((what for at, magic, what in _OTHERS if head.startswith(magic, at)), None)
    if what is None:
        return DamageError(f"{where} begins with {head[:4]!r} and is no archive of torch.save")
    return UnsupportedError(
        f"{where} is {what}, which is not read: load it with what wrote it and save it again with "
        "torch.save"
    )


def _directory(archive: Archive, largest: int) -> tuple[int, int]:
    """The start and length of the directory, which must be inside the archive and not too long."""
    where, size, tail = archive.where, archive.range[2], archive.tail
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size != len(tail):
        raise DamageError(f"{where}: the directory at its end is missing: it is truncated")
    _, _, _, _, count, length, start, _ = _END.unpack_from(tail, at)
    locator = at - _LOCATOR.size
    if locator >= 0 and tail[locator : locator + 4] == b"PK\x06\x07":
        at = _LOCATOR.unpack_from(tail, locator)[2]
        data = archive.known(at, _END64.size) if at < size else None
        if data is None or data[:4] != b"PK\x06\x06":
            raise DamageError(f"{where}: its zip64 directory is not at byte {at}")
        *_, count, length, start = _END64.unpack(data)
    fits = start + length <= size and length <= largest
    if not fits or length < count * _CENTRAL.size:
        raise DamageError(
            f"{where}: a directory of {count} members and {length} bytes at byte {start} "
            f"does not fit into {size} bytes"
        )
    return start, length


class _Listed(NamedTuple):
    """A member in the directory; its header is at this byte of the archive."""

    path: str
    header: int
    size: int
    crc: int
    is_packed: bool


def _listed(where: str, data: bytes) -> tuple[list[_Listed], int]:
    """The wanted members of a directory, whose members must not overlap, and the end of all."""
    members, at = [], 0
    while data[at : at + 4] == b"PK\x01\x02" and at + _CENTRAL.size <= len(data):
        row = _CENTRAL.unpack_from(data, at)
        crc, packed, size, header = *row[7:10], row[16]
        start, name_end, extra_end, at = accumulate(row[10:13], initial=at + _CENTRAL.size)
        path = data[start:name_end].decode("utf-8", "replace")
        if BIG in (size, packed, header):
            size, packed, header = _wide(data[name_end:extra_end], size, packed, header)
        is_packed = bool(row[4] or row[3] & 1)  # the method, and whether it is encrypted
        if packed != size and not is_packed:
            raise DamageError(
                f"{where}: member {quoted(path)} has {packed} bytes and {size} unpacked"
            )
        members.append(_Listed(path, header, packed, crc, is_packed))
    if at != len(data) or not members:
        raise DamageError(f"{where}: its directory ends after {len(members)} members")
    end, before = 0, ""
    for path, header, size, *_ in sorted(members, key=itemgetter(1)):
        if header < end:
            raise DamageError(f"{where}: members {quoted(before)} and {quoted(path)} overlap")
        end, before = header + _LOCAL.size + size, path
    return _wanted(where, members), end


def _wide(extra: bytes, *numbers: int) -> list[int]:
    """The numbers, with those of the extra field, in this order, for the ones that did not fit."""
    at, wide = 0, b""
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == ZIP64:
            wide = extra[at + 4 : at + 4 + length]
        at += 4 + length
    wider = []
    for number in numbers:
        if number == BIG and len(wide) >= 8:
            number, wide = int.from_bytes(wide[:8], "little"), wide[8:]
        wider.append(number)
    return wider


def _wanted(where: str, members: list[_Listed]) -> list[_Listed]:
    paths = {member.path for member in members}
    if len(paths) != len(members):
        raise DamageError(f"{where}: two members of its directory have one name")
    pickles = [path for path in paths if path.endswith("/data.pkl") and path.count("/") == 1]
    if len(pickles) != 1:
        raise UnsupportedError(
            f"{where} is a zip archive with {len(pickles)} members called data.pkl, and torch.save "
            "writes one: is it of something else?"
        )
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}constants.pkl" in paths:
        raise UnsupportedError(
            f"{where} is a TorchScript archive, which is not read: torch.jit.load it, and "
            "torch.save its state_dict()"
        )
    places = (f"{root}data/", f"{root}data.pkl", f"{root}byteorder")
    wanted = [member for member in members if member.path.startswith(places)]
    packed = next((member.path for member in wanted if member.is_packed), None)
    if packed is not None:
        raise UnsupportedError(
            f"{where}: member {quoted(packed)} is compressed or encrypted, which torch.save never "
            "does: unpack it and zip it again without compression"
        )
    return wanted


def archive_around(pickle: bytes, size: int | None = None) -> tuple[bytes, bytes]:
    """The bytes of an archive before and after its only storage, of this size.

    Without a size there is no storage: the first bytes are the whole archive. All members begin at
    a multiple of ``ALIGNMENT``.
    """
    members = {
        "data.pkl": pickle,
        ".format_version": b"1",
        ".storage_alignment": str(ALIGNMENT).encode(),
        "byteorder": b"little",
        **({} if size is None else {"data/0": b""}),
        "version": b"3\n",
    }
    out, directory, skipped, head_size = bytearray(), bytearray(), 0, None
    for name, data in members.items():
        is_storage = name == "data/0"
        length = (size or 0) if is_storage else len(data)
        path, at, crc = f"archive/{name}".encode(), len(out) + skipped, crc32(data)
        fields = UTF8, 0, 0, 0, crc, min(length, BIG), min(length, BIG), len(path)
        extra = struct.pack("<HHQQ", ZIP64, 16, length, length) if length >= BIG else b""
        pad = -(at + _LOCAL.size + len(path) + len(extra) + 4) % ALIGNMENT
        extra += struct.pack("<HH", PADDING, pad) + b"Z" * pad
        out += _LOCAL.pack(b"PK\x03\x04", 0, *fields, len(extra)) + path + extra + data
        if is_storage:
            skipped, head_size = length, len(out)
        wide = [value for value in (length, length, at) if value >= BIG]
        extra = struct.pack(f"<HH{len(wide)}Q", ZIP64, 8 * len(wide), *wide) if wide else b""
        directory += _CENTRAL.pack(
            b"PK\x01\x02", 0, 0, *fields, len(extra), 0, 0, 0, 0, min(at, BIG)
        )
        directory += path + extra
    at, count = len(out) + skipped, len(members)
    out += directory
    if at >= BIG:
        zip64 = 44, 45, 45, 0, 0, count, count, len(directory), at
        out += _END64.pack(b"PK\x06\x06", *zip64)
        out += _LOCATOR.pack(b"PK\x06\x07", 0, at + len(directory), 1)
    out += _END.pack(b"PK\x05\x06", 0, 0, count, count, len(directory), min(at, BIG), 0)
    return bytes(out[:head_size]), bytes(out[head_size:] if head_size else b"")
