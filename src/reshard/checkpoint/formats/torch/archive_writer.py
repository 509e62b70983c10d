"""The zip files that ``torch.save`` makes of one tensor, known but for the tensor's bytes; and of a
plain value, known in full.

    archive/data.pkl            how to build the tensor of its storage
    archive/.format_version     1
    archive/.storage_alignment  64
    archive/byteorder           little
    archive/data/0              the elements, stored as they are, at a multiple of 64 bytes
    archive/version             3
    the directory of all these

>>> archive = Archive.of("float32", (2, 3))
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
from reshard.dtypes import itemsize
from reshard.layout.box import row_major

__all__ = ["ALIGNMENT", "Archive", "value_archive"]

ALIGNMENT = 64
UTF8 = 0x0800
BIG = 0xFFFFFFFF
"""What a 32-bit field says when the number stands in the 64-bit extra field."""
ZIP64, PADDING = 1, 0x4246

STORAGES = {
    "float32": "FloatStorage", "float64": "DoubleStorage", "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage", "int64": "LongStorage", "int32": "IntStorage",
    "int16": "ShortStorage", "int8": "CharStorage", "uint8": "ByteStorage", "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage", "complex128": "ComplexDoubleStorage",
}  # fmt: skip
"""The class that torch names for each dtype; dtypes without one have a storage of bytes."""


@dataclass(frozen=True, slots=True)
class Archive:
    """A zip file of one tensor: all bytes before and after those of its elements."""

    head: bytes
    data_size: int
    tail: bytes

    @property
    def data_offset(self) -> int:
        """Where the elements begin."""
        return len(self.head)

    @property
    def size(self) -> int:
        """Bytes of the whole zip file."""
        return len(self.head) + self.data_size + len(self.tail)

    @classmethod
    def of(cls, dtype: str, shape: Sequence[int]) -> Archive:
        """The archive of a contiguous tensor."""
        size = prod(shape) * itemsize(dtype)
        members = _Members()
        members.add("data.pkl", pickled(_tensor(dtype, tuple(shape))))
        members.add(".format_version", b"1")
        members.add(".storage_alignment", str(ALIGNMENT).encode())
        members.add("byteorder", b"little")
        members.add_header("data/0", size, crc=0)
        head = bytes(members.out)
        members.skipped = size
        members.add("version", b"3\n")
        members.finish()
        return cls(head, size, bytes(members.out[len(head) :]))


def value_archive(value: Any) -> bytes:
    """The zip file that ``torch.save`` makes of a plain value."""
    members = _Members()
    members.add("data.pkl", pickled(value))
    members.add(".format_version", b"1")
    members.add(".storage_alignment", str(ALIGNMENT).encode())
    members.add("byteorder", b"little")
    members.add("version", b"3\n")
    members.finish()
    return bytes(members.out)


def _tensor(dtype: str, shape: tuple[int, ...]) -> Call:
    """What ``torch.save`` pickles: a call that makes the tensor of its storage."""
    strides = row_major(shape)
    count = prod(shape)
    hooks = Call(Global("collections", "OrderedDict"), ())
    if dtype in STORAGES:
        storage = ("storage", Global("torch", STORAGES[dtype]), "0", "cpu", count)
        arguments = (Persistent(storage), 0, shape, strides, False, hooks)
        return Call(Global("torch._utils", "_rebuild_tensor_v2"), arguments)
    storage = (
        "storage",
        Global("torch.storage", "UntypedStorage"),
        "0",
        "cpu",
        count * itemsize(dtype),
    )
    typed = (Persistent(storage), 0, shape, strides, False, hooks, Global("torch", dtype))
    return Call(Global("torch._utils", "_rebuild_tensor_v3"), typed)


class _Members:
    """A zip file in the making: stored members, each followed by the next."""

    def __init__(self) -> None:
        self.out = bytearray()
        self.skipped = 0
        """Bytes of the tensor, which are not in ``out``."""
        self._directory = bytearray()
        self._count = 0

    def add(self, name: str, data: bytes) -> None:
        """A member whose bytes are known."""
        self.add_header(name, len(data), crc32(data))
        self.out += data

    def add_header(self, name: str, size: int, crc: int) -> None:
        """What stands before a member's bytes, padded so that these are aligned."""
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
        """The entry of a member in the directory."""
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
        """The directory, and where it is found."""
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
