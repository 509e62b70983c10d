"""A budget for saved activations: which of them stay as they are, and which are kept elsewhere?

Tensors come one after the other, and nobody knows how many there will be. All stay whole until the
budget is reached; then the oldest give way, which backward needs last: first those that are equal
on all ranks are cut into shares, then, where there is a host to go to, the others are offloaded,
and last the shares.

What was kept elsewhere must have room when it is made whole again. Nothing is taken to be gone by
then, because checkpointing keeps its inputs to the end, and two may be whole at a time: while one
is still used, the next one comes.

    budget 12, 4 ranks, tensors of 4 that are equal on all ranks
    4 4 4         12
    4 4 4 4       16 is too much
    1 1 1 1       and room for 4 + 4

Nothing but sizes and order decides, so that all ranks decide alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from reshard.bytesize import format_bytes
from reshard.errors import MemoryCapError

__all__ = ["HOST", "SHARE", "WHOLE", "Entry", "Ledger"]

WHOLE, SHARE, HOST = "whole", "share", "host"


@dataclass(eq=False, slots=True)
class Entry:
    """One tensor, and where it is kept."""

    size: int
    is_equal: bool
    """Whether all ranks have the same, so that each may keep a share."""
    can_offload: bool
    place: str = WHOLE
    kept: int = field(init=False)
    """Bytes on the device."""

    def __post_init__(self) -> None:
        self.kept = self.size


class Ledger:
    """What is kept now, and what has to give way.

    >>> ledger = Ledger(12, num_ranks=4)
    >>> entries = [Entry(4, True, False) for _ in range(4)]
    >>> [len(ledger.add(entry)) for entry in entries]
    [0, 0, 0, 4]
    >>> ledger.kept, ledger.room
    (4, 0)
    """

    def __init__(self, budget: int, num_ranks: int) -> None:
        self.budget = budget
        self._num_ranks = num_ranks
        self._entries: dict[Entry, None] = {}
        self.kept = 0
        self.smallest = 0
        """The smallest budget that would have done so far."""

    @property
    def room(self) -> int:
        """Bytes that are left for what is made whole before its time."""
        moved = [one.size for one in self._entries if one.place != WHOLE]
        return self.budget - self.kept - _two_largest(moved)

    def add(self, entry: Entry) -> list[Entry]:
        """Count one more; gives the entries that are kept elsewhere from now on."""
        self._entries[entry] = None
        self.kept += entry.size
        self.smallest = max(self.smallest, self._least())
        moved: dict[Entry, None] = {}
        for step in (self._to_share, self._local_to_host, self._to_host):
            for one in list(self._entries):
                if self.room >= 0:
                    return list(moved)
                if step(one):
                    moved[one] = None
        return list(moved)

    def remove(self, entry: Entry) -> None:
        """An entry is not needed any more."""
        if self._entries.pop(entry, 0) is None:
            self.kept -= entry.kept

    def check(self) -> None:
        """Raise if the budget was not enough, with the smallest that is."""
        if self.smallest > self.budget:
            raise MemoryCapError(
                f"a budget of {format_bytes(self.budget)} ({self.budget} bytes) for saved "
                f"activations: the smallest that works here is {self.smallest} bytes "
                f"({format_bytes(self.smallest)}); give at least that, or more ranks"
            )

    def _least(self) -> int:
        """What would do for all that is there now."""
        moved = [one.size for one in self._entries if self._least_of(one) < one.size]
        least = sum(map(self._least_of, self._entries)) + _two_largest(moved)
        return min(sum(one.size for one in self._entries), least)

    def _least_of(self, entry: Entry) -> int:
        if entry.can_offload:
            return 0
        return self._share(entry) if entry.is_equal else entry.size

    def _share(self, entry: Entry) -> int:
        return -(-entry.size // self._num_ranks)

    def _to_share(self, entry: Entry) -> bool:
        if not entry.is_equal or entry.place != WHOLE:
            return False
        self._put(entry, SHARE, self._share(entry))
        return True

    def _local_to_host(self, entry: Entry) -> bool:
        return not entry.is_equal and self._to_host(entry)

    def _to_host(self, entry: Entry) -> bool:
        if not entry.can_offload or entry.place == HOST:
            return False
        self._put(entry, HOST, 0)
        return True

    def _put(self, entry: Entry, place: str, kept: int) -> None:
        self.kept += kept - entry.kept
        entry.place, entry.kept = place, kept


def _two_largest(sizes: Sequence[int]) -> int:
    return sum(heapq.nlargest(2, sizes))
