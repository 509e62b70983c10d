"""Which regions are needed next? Those that were next in the last backward.

Regions are numbered as they are kept. Backward asks for them in some order, mostly the reverse, and
the steps between are remembered by the names of the regions:

    forward      1: a    2: b    3: c
    backward     3: c    2: b    1: a        after c comes the one before, after b too, after a none
    forward      4: a    5: b    6: c
    backward     6: c    so 5 and then 4 can be brought before they are asked for

It is a guess: ranks tell each other theirs, and follow it only where all have the same.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from reshard.nn.activations.region import Region

__all__ = ["MOST_AHEAD", "Order"]

MOST_TOGETHER = 8 << 20
"""Bytes of regions that are brought in one exchange; a larger one comes alone."""
MOST_AHEAD = 15
"""Regions that are brought in one exchange."""


class Order:
    """The order in which regions are kept and asked for."""

    def __init__(self) -> None:
        self._count = 0
        self._regions: WeakValueDictionary[int, Region] = WeakValueDictionary()
        self._last: tuple[str, int] | None = None
        self._steps: dict[str, int | None] = {}
        """From the region of this name to the one that was asked for after it; None: no other."""

    def keep(self, region: Region, in_backward: bool) -> None:
        """One more region is kept; what backward computes again may never be asked for."""
        if not in_backward and self._last is not None:
            self._steps[self._last[0]] = None
            self._last = None
        self._count += 1
        region.number = self._count
        self._regions[self._count] = region

    def ask(self, region: Region) -> None:
        """Backward needs a region."""
        if self._last is not None:
            label, number = self._last
            if number == region.number:
                return
            self._steps[label] = region.number - number
        self._last = (region.label, region.number)

    def after(self, region: Region, most: int) -> list[Region]:
        """The regions that are expected next, as many as should come in one exchange."""
        found: list[Region] = []
        total, last = 0, region
        while len(found) < most:
            step = self._steps.get(last.label)
            following = None if step is None else self._regions.get(last.number + step)
            if following is None or not _is_to_come(following) or following in (region, *found):
                break
            total += following.num_bytes
            if found and (total > MOST_TOGETHER or following.device != found[0].device):
                break
            found.append(following)
            last = following
        return found


def _is_to_come(region: Region) -> bool:
    return region.is_cut and region.whole is None and bool(region.views)
