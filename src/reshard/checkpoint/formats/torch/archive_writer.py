"""The zip archives that ``torch.save`` writes: of a tensor, without its bytes; or of a plain value.

    archive/data.pkl            how to build the tensor from its storage
    archive/.format_version     1
    archive/.storage_alignment  64
    archive/byteorder           little
    archive/data/0              the elements, uncompressed, at a multiple of 64 bytes
    archive/version             3
    the central directory

>>> archive = TensorArchive.of("float32", (2, 3))
>>> archive.data_offset % 64, archive.data_size, len(archive.head) + archive.data_size
(0, 24, 536)
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any
from zlib import crc32

from reshard.checkpoint.formats.torch.pickler import Call, Global, Persistent, pickled
from reshard.checkpoint.formats.torch.tensors import STORAGE_DTYPES
from reshard.dtypes import itemsize
from reshard.layout.box import row_major

__all__ = ["ALIGNMENT", "TensorArchive", "value_archive"]

ALIGNMENT = 64
UTF8 = 0x0800
BIG = 0xFFFFFFFF
"""Stands in a 32-bit field whose number is in the 64-bit extra field."""
ZIP64, PADDING = 1, 0x4246
STORAGES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorArchive:
    """The archive of one tensor: all bytes before and after those of its elements."""

    head: bytes
    data_size: int
    tail: bytes

    @property
    def data_offset(self) -> int:
        """The byte at which the elements begin."""
        return len(self.head)

    @property
    def size(self) -> int:
        """Bytes of the whole archive."""
        return len(self.head) + self.data_size + len(self.tail)

    @classmethod
    def of(cls, dtype: str, shape: Sequence[int]) -> TensorArchive:
        """The archive of a contiguous tensor."""
        size = prod(shape) * itemsize(dtype)
        members = _Members(_tensor(dtype, tuple(shape)))
        members.add_header("data/0", size, crc=0)
        head = bytes(members.out)
        members.skipped = size
        members.finish()
        return cls(head, size, bytes(members.out[len(head) :]))


def value_archive(value: Any) -> bytes:
    """The archive that ``torch.save`` writes for a plain value."""
    members = _Members(value)
    members.finish()
    return bytes(members.out)


def _tensor(dtype: str, shape: tuple[int, ...]) -> Call:
    """The pickled call that builds the tensor from its storage."""
    strides = row_major(shape)
    count = prod(shape)
    hooks = Call(Global("collections", "OrderedDict"), ())
    known = dtype in STORAGES  # other dtypes have a storage of bytes
    kind = Global("torch", STORAGES[dtype]) if known else Global("torch.storage", "UntypedStorage")
    length = count if known else count * itemsize(dtype)
    storage = Persistent(("storage", kind, "0", "cpu", length))
    arguments = (storage, 0, shape, strides, False, hooks)
    if known:
        return Call(Global("torch._utils", "_rebuild_tensor_v2"), arguments)
    return Call(Global("torch._utils", "_rebuild_tensor_v3"), (*arguments, Global("torch", dtype)))


class _Members:
    """The members of an archive, which begins with the pickle of a value."""

    def __init__(self, value: Any) -> None:
        self.out = bytearray()
        self.skipped = 0
        """Bytes of the tensor, which are not in ``out``."""
        self._directory = bytearray()
        self._count = 0
        self.add("data.pkl", pickled(value))
        self.add(".format_version", b"1")
        self.add(".storage_alignment", str(ALIGNMENT).encode())
        self.add("byteorder", b"little")

    def add(self, name: str, data: bytes) -> None:
        """Add a member."""
        self.add_header(name, len(data), crc32(data))
        self.out += data

    def add_header(self, name: str, size: int, crc: int) -> None:
        """Add the header of a member, padded so that its bytes are aligned."""
        path = f"archive/{name}".encode()
        at = len(self.out) + self.skipped
        shown, extra = (
            (BIG, struct.pack("<HHQQ", ZIP64, 16, size, size)) if size >= BIG else (size, b"")
        )
        begin = at + 30 + len(path) + len(extra) + 4
        pad = -begin % ALIGNMENT
        extra += struct.pack("<HH", PADDING, pad) + b"Z" * pad
        common = struct.pack(
            "<HHHHHIIIHH", 0, UTF8, 0, 0, 0, crc, shown, shown, len(path), len(extra)
        )
        self.out += b"PK\x03\x04" + common + path + extra
        self._list(path, size, crc, at)

    def _list(self, path: bytes, size: int, crc: int, at: int) -> None:
        """Add a member to the central directory."""
        big = [value for value in (size, size, at) if value >= BIG]
        extra = struct.pack(f"<HH{len(big)}Q", ZIP64, 8 * len(big), *big) if big else b""
        shown, where = min(size, BIG), min(at, BIG)
        self._directory += b"PK\x01\x02" + struct.pack(
            "<HHHHHHIIIHHHHHII",
            0, 0, UTF8, 0, 0, 0, crc, shown, shown, len(path), len(extra), 0, 0, 0, 0, where,
        )  # fmt: skip
        self._directory += path + extra
        self._count += 1

    def finish(self) -> None:
        """Add the last member, the central directory, and the records that locate it."""
        self.add("version", b"3\n")
        at, size, count = len(self.out) + self.skipped, len(self._directory), self._count
        self.out += self._directory
        if at >= BIG:
            end = at + size
            self.out += b"PK\x06\x06" + struct.pack(
                "<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, size, at
            )
            self.out += b"PK\x06\x07" + struct.pack("<IQI", 0, end, 1)
        self.out += b"PK\x05\x06" + struct.pack(
            "<HHHHIIH", 0, 0, count, count, size, min(at, BIG), 0
        )
