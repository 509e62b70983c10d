"""The CRC-32 that ``torch.save`` writes for every storage, compared while the bytes are read.

Torch writes it and never compares it, so it loads a flipped bit of a ``.distcp`` as another number.
Files without reshard's checksums are checked with it. No bytes are read again: each range that is
read gives a part, in any order, from any thread or process, and consecutive parts are combined to
the CRC of the whole record.

>>> from zlib import crc32
>>> crcs = Crcs([Crc(0, 100, 11, crc32(b"left, right"))])
>>> parts = crcs.parts(0, 106, b"right"), crcs.parts(0, 100, b"left, ")
>>> for some in parts:
...     crcs.add(some)
>>> [now == crc.value for crc, now in crcs.values(lambda *unread: 1 / 0)]
[True]
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache

from reshard.checkpoint.catalog import Catalog, Crc
from reshard.checkpoint.formats.torch.archive import archive_crcs, crc_damage, is_archive
from reshard.checkpoint.integrity.checksums import Bytes, Checksums
from reshard.checkpoint.piece_table import tensors_at
from reshard.checkpoint.storage.local import Storage, blocks
from reshard.errors import DamageError, UnsupportedError
from reshard.text import quoted

Part = tuple[int, int, int, int]
"""The number of a record, the start and end of a range of its file, and the CRC-32 of the range."""


def crcs_of(storage: Storage, catalog: Catalog, checksums: Checksums | None) -> tuple[Crc, ...]:
    """The CRC-32 of all tensors and objects in files that the sidecar does not cover.

    Raises DamageError for an object that is an archive of torch.save and cannot be read.
    """
    ours = checksums.files if checksums is not None else {}
    files = {number for number, file in enumerate(catalog.files) if file.path not in ours}
    crcs = [crc for crc in catalog.crcs if crc.file in files]
    for entry in catalog.objects.values():
        if entry.file in files:
            place = catalog.files[entry.file].path, entry.offset, entry.size
            try:
                crcs += archive_crcs(storage, place, entry.file)
            except UnsupportedError:
                continue  # of another kind than torch.save writes: it has no CRC
            except DamageError as error:
                if is_archive(storage, place):
                    what = f"entry {quoted(entry.name)} cannot be read"
                    raise DamageError(f"{error} ({what}): restore the file from a copy") from None
    return tuple(crcs)


class Crcs:
    """Compares bytes that are read with the CRC-32 of records; from any thread."""

    def __init__(self, crcs: Iterable[Crc]) -> None:
        self._crcs = sorted(set(crcs))
        self._ends = [(crc.file, crc.offset + crc.size) for crc in self._crcs]
        self._lock = threading.Lock()
        self._parts: dict[int, dict[int, tuple[int, int]]] = {}

    def __len__(self) -> int:
        return len(self._crcs)

    def chosen(self, which: Collection[int]) -> list[Crc]:
        return [self._crcs[one] for one in sorted(which)]

    def touching(self, file: int, start: int, stop: int) -> range:
        first = bisect_right(self._ends, (file, start))
        last = first
        while last < len(self._crcs) and self._crcs[last][:2] < (file, stop):
            last += 1
        return range(first, last) if start < stop else range(0)

    def parts(self, file: int, offset: int, data: Bytes) -> list[Part]:
        """The CRC-32 of bytes that were read at an offset, split at the ends of records."""
        view = memoryview(data).cast("B")
        parts = []
        for which in self.touching(file, offset, offset + len(view)):
            start = max(self._crcs[which].offset, offset)
            stop = min(self._ends[which][1], offset + len(view))
            parts.append((which, start, stop, zlib.crc32(view[start - offset : stop - offset])))
        return parts

    def add(self, parts: Iterable[Part]) -> None:
        """Keep parts; of those that begin at the same byte, the longest."""
        with self._lock:
            for which, start, stop, value in parts:
                known = self._parts.setdefault(which, {})
                if stop > known.get(start, (0, 0))[0]:
                    known[start] = stop, value

    def values(
        self, unread: Callable[[int, int, int], int], which: Collection[int] | None = None
    ) -> Iterator[tuple[Crc, int]]:
        """The current CRC-32 of these records, or of all that were read in part.

        ``unread`` reads a range that is missing (file, start, stop), and returns its CRC-32.
        """
        for one in sorted(self._parts) if which is None else which:
            crc, parts = self._crcs[one], self._parts.pop(one, {})
            at, value = crc.offset, 0
            starts = [*sorted(parts), self._ends[one][1]]
            while at < starts[-1]:
                stop, part = parts.get(at) or (starts[bisect_left(starts, at)], None)
                part = unread(crc.file, at, stop) if part is None else part
                value = combine(value, part, stop - at)
                at = stop
            yield crc, value


def crc_of(storage: Storage, path: str, start: int, stop: int) -> int:
    value = 0
    for part in blocks(storage, path, start, stop):
        value = zlib.crc32(part, value)
    return value


def changed(
    catalog: Catalog, records: Sequence[tuple[Crc, int]]
) -> Iterator[tuple[str, list[str]]]:
    """The error message for each record that has another CRC-32 now, and the tensors in it."""
    ranges = [(crc.file, crc.offset, crc.offset + crc.size) for crc, _ in records]
    for (crc, now), names in zip(records, tensors_at(catalog, ranges), strict=True):
        some = ", ".join(map(quoted, names[:3])) + " and more" * (len(names) > 3)
        message = crc_damage(f"{catalog.root}/{catalog.files[crc.file].path}", *crc[1:], now)
        yield message + f" (tensor {some})" * bool(names), names


_POLYNOMIAL = 0xEDB88320
"""The polynomial of CRC-32, with the coefficient of the lowest power in the highest bit."""


def combine(left: int, right: int, length: int) -> int:
    """The CRC-32 of two consecutive ranges, the second of which has this length.

    Appending bytes multiplies the CRC of the bytes before them by a power of x.
    """
    return _times(_shift(length), left) ^ right


@lru_cache(maxsize=1 << 12)
def _shift(length: int) -> int:
    """x to the power of 8 times the length."""
    power, factor = 1 << 31, 1 << 23  # 1, and x to the power of 8
    while length:
        if length & 1:
            power = _times(factor, power)
        factor = _times(factor, factor)
        length >>= 1
    return power


def _times(left: int, right: int) -> int:
    """The product of two polynomials over GF(2), modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if left >> bit & 1:
            product ^= right
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return product
