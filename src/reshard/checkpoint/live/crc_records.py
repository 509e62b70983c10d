"""The CRC-32 of torch's files in a load: when are all tensors of a record read, and is it right?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.integrity.crcs import Crcs, changed, crc_of
from reshard.checkpoint.live.read_shares import Wish
from reshard.checkpoint.piece_table import Located
from reshard.checkpoint.storage.base import Storage
from reshard.errors import DamageError

__all__ = ["CrcRecords"]


class CrcRecords:
    """The records of a load, each compared once the last tensor that has bytes in it is read."""

    def __init__(self, crcs: Crcs, wishes: Mapping[str, Wish]) -> None:
        self.crcs = crcs
        self._of = {name: self._touched(wish) for name, wish in wishes.items()}
        self._left = Counter(which for some in self._of.values() for which in some)

    def _touched(self, wish: Wish) -> set[int]:
        if not len(self.crcs):
            return set()
        sides = wish.transfer.source, wish.transfer.replicas
        spans = (span for side in sides for span in _spans(side))
        return {which for span in spans for which in self.crcs.touching(*span)}

    def finished(self, names: Iterable[str]) -> list[int]:
        """The records that are complete now that these tensors are read."""
        found = []
        for name in names:
            for which in self._of[name]:
                self._left[which] -= 1
                found += [] if self._left[which] else [which]
        return sorted(found)

    def compare(self, storage: Storage, catalog: Catalog, which: Collection[int]) -> int:
        """Raise DamageError if a record has changed; how many bytes had to be read for it."""
        count = 0

        def unread(file: int, start: int, stop: int) -> int:
            nonlocal count
            count += stop - start
            return crc_of(storage, catalog.files[file].path, start, stop)

        for crc, now in self.crcs.values(unread, which):
            if crc.value != now:
                raise DamageError(changed(catalog, crc, now))
        return count


def _spans(pieces: Located) -> Iterable[tuple[int, int, int]]:
    ends = pieces.offsets + pieces.spans
    return zip(pieces.files.tolist(), pieces.offsets.tolist(), ends.tolist(), strict=True)
