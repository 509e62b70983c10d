"""A budget for saved activations: what stays whole, what is cut, and what goes to the host?

Tensors that are equal on all ranks can be cut into shares, which is a decision of all ranks: it
may depend on nothing but what all of them know. In the first forward nobody knows what is still to
come, so all of these are cut. When backward begins, ranks tell each other how much they have kept
beside, and from then on the newest of the equal ones stay whole, as many as fit:

    budget 12, 4 ranks, equal tensors of 4, and at most 2 on any rank beside
    first forward    1 1 1 1    + 2, and room to make two whole: 4 + 4     14 is too much: an error
    budget 14        1 1 1 1    + 2, and 4 + 4
    budget 18        all stay whole: 4 4 4 4 + 2

What a rank has for itself goes to the host, where there is one, as soon as the budget is reached;
each rank decides that alone. Counting begins anew with the first tensor after a backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from reshard.errors import MemoryCapError
from reshard.text import format_bytes

__all__ = ["Budget", "kept_whole"]


def kept_whole(
    sizes: Sequence[int], shares: Sequence[int], beside: int, budget: int
) -> tuple[bool, ...]:
    """Which of the equal tensors stay whole, from the newest on.

    >>> kept_whole([4, 4, 4, 4], [1, 1, 1, 1], 2, 18)
    (True, True, True, True)
    >>> kept_whole([4, 4, 4, 4], [1, 1, 1, 1], 2, 17)
    (False, False, False, True)
    """
    if sum(sizes) + beside <= budget:
        return (True,) * len(sizes)
    total = sum(shares) + beside + 2 * max(sizes, default=0)
    found = []
    for size, share in zip(reversed(sizes), reversed(shares), strict=True):
        total += size - share
        found.append(total <= budget)
        if total > budget:
            total -= size - share
    return tuple(reversed(found))


@dataclass(slots=True)
class _Count:
    """What was kept since the last backward."""

    sizes: list[int]
    shares: list[int]
    beside: int = 0
    """Bytes of what a rank has for itself, on the device."""

    @property
    def needed(self) -> int:
        """The smallest budget for it."""
        room = 2 * max(self.sizes, default=0)
        return self.beside + min(sum(self.sizes), sum(self.shares) + room)


class Budget:
    """Decides for one handle, tensor by tensor."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._count = _Count([], [])
        self._plan: tuple[tuple[int, bool], ...] = ()
        """Size, and whether it stays whole, of each equal tensor of the last forward."""
        self.kept = 0
        """Bytes on the device since the last backward, as if nothing of it were gone."""
        self.is_in_backward = False
        """Whether a backward has begun since the last tensor was kept."""
        self.is_counted = False
        """Whether anything was needed again since: what is kept then is of another forward."""
        self.is_first = True
        """Whether no backward has come yet, so that nobody knows how much there will be."""

    @property
    def beside(self) -> int:
        """Bytes that this rank keeps for itself."""
        return self._count.beside

    @property
    def needed(self) -> int:
        """The smallest budget that does for what was kept since the last backward."""
        return self._count.needed

    @property
    def room(self) -> int:
        """Bytes that are left for what is made whole before its time."""
        return self.limit - self.kept - 2 * max(self._count.sizes, default=0)

    def stays_whole(self, size: int, share: int) -> bool:
        """Count one more tensor that is equal on all ranks; whether it is not cut."""
        self._begin()
        number = len(self._count.sizes)
        self._count.sizes.append(size)
        self._count.shares.append(share)
        whole = number < len(self._plan) and self._plan[number] == (size, True)
        self.kept += size if whole else share
        return whole

    def goes_away(self, size: int, can_offload: bool) -> bool:
        """Count one more tensor that a rank has for itself; whether it goes to the host."""
        self._begin()
        if can_offload and size > self.room:
            return True
        self._count.beside += size
        self.kept += size
        return False

    @property
    def signature(self) -> int:
        """A number that ranks have in common if they have kept equal tensors of the same sizes."""
        return crc32(repr(self._count.sizes).encode())

    def learn(self, beside: int, alike: bool) -> None:
        """Backward begins, and no rank keeps more than this for itself: decide what comes next.

        Where ranks have not kept ``alike``, all that is equal is cut again.
        """
        self.is_in_backward, self.is_first = True, False
        count = self._count
        whole = kept_whole(count.sizes, count.shares, beside, self.limit)
        self._plan = tuple(zip(count.sizes, whole, strict=True)) if alike else ()

    def forget(self) -> None:
        """Count anew: nothing of it is there any more."""
        self._count, self.kept = _Count([], []), 0

    def check(self, needed: int) -> None:
        """Raise if it was not enough, with the smallest that is."""
        if needed > self.limit:
            raise MemoryCapError(
                f"a budget of {format_bytes(self.limit)} ({self.limit} bytes) for saved "
                f"activations: the smallest that works here is {needed} bytes "
                f"({format_bytes(needed)}); give at least that, or more ranks"
            )

    def _begin(self) -> None:
        if self.is_counted:
            self.is_in_backward = self.is_counted = False
            self.forget()
