"""A budget for saved activations: which of them stay as they are, and which are kept elsewhere?

Tensors come one after the other, and nobody knows how many there will be. All stay whole until the
budget is reached; then the oldest give way, which backward needs last: first those that are equal
on all ranks are cut into shares, then, where there is a host to go to, the others are offloaded,
and last the shares. Room for the two largest that must be made whole again is set aside.

    budget 10, 4 ranks, tensors of 4 that are equal on all ranks:
    4           ->  4                    whole
    4 4         ->  4 4
    4 4 4       ->  1 1 1 + 4 + 4        three shares, and room for two

Nothing but sizes and order decides, so that all ranks decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from reshard.bytesize import format_bytes
from reshard.errors import MemoryCapError

__all__ = ["Entry", "Ledger", "Place"]

WHOLE, SHARE, HOST = "whole", "share", "host"
Place = str
"""Where an entry is kept: whole on the device, a share on the device, or on the host."""


@dataclass(eq=False, slots=True)
class Entry:
    """One tensor, and where it is kept."""

    size: int
    is_equal: bool
    """Whether all ranks have the same, so that each may keep a share."""
    can_offload: bool
    place: Place = WHOLE
    kept: int = field(init=False)
    """Bytes on the device."""

    def __post_init__(self) -> None:
        self.kept = self.size


class Ledger:
    """What is kept now, and what has to give way.

    >>> ledger = Ledger(10, num_ranks=4)
    >>> entries = [Entry(4, True, False) for _ in range(3)]
    >>> [[each.place for each in ledger.add(entry)] for entry in entries]
    [[], [], ['share', 'share', 'share']]
    >>> ledger.kept, ledger.room
    (3, 7)
    """

    def __init__(self, budget: int, num_ranks: int) -> None:
        self.budget = budget
        self._num_ranks = num_ranks
        self._entries: dict[Entry, None] = {}
        self.kept = 0
        self._needed = 0
        """The smallest budget that would have done so far."""

    @property
    def room(self) -> int:
        """Bytes that are left for tensors that are made whole again."""
        return self.budget - self.kept

    def add(self, entry: Entry) -> list[Entry]:
        """Count one more; gives the entries that are kept elsewhere from now on."""
        self._entries[entry] = None
        self.kept += entry.size
        self._needed = max(self._needed, self._least())
        moved: dict[Entry, None] = {}
        for step in (self._to_share, self._to_host):
            for one in list(self._entries):
                if self._fits():
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
        if self._needed > self.budget:
            raise MemoryCapError(
                f"a budget of {format_bytes(self.budget)} ({self.budget} bytes) for saved "
                f"activations: the smallest that works here is {self._needed} bytes "
                f"({format_bytes(self._needed)}); give at least that, or more ranks"
            )

    def _fits(self) -> bool:
        return self.kept + _two_largest(one for one in self._entries if one.place != WHOLE) <= (
            self.budget
        )

    def _least(self) -> int:
        """The bytes without which what is there now cannot be kept and made whole again."""
        kept = sum(self._least_of(one) for one in self._entries)
        whole = sum(one.size for one in self._entries)
        moved = (one for one in self._entries if one.is_equal or one.can_offload)
        return min(whole, kept + _two_largest(moved))

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

    def _to_host(self, entry: Entry) -> bool:
        if not entry.can_offload or entry.place == HOST:
            return False
        self._put(entry, HOST, 0)
        return True

    def _put(self, entry: Entry, place: Place, kept: int) -> None:
        self.kept += kept - entry.kept
        entry.place, entry.kept = place, kept


def _two_largest(entries: object) -> int:
    sizes = sorted((one.size for one in entries), reverse=True)  # type: ignore[attr-defined]
    return sum(sizes[:2])
