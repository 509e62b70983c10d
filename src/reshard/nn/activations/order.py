"""Which region is needed next? The one that was next in the last backward.

Regions are numbered as they are kept. Backward asks for them in some order, mostly the reverse, and
the steps between are remembered by the names of the regions:

    forward      1: a    2: b    3: c
    backward     3: c    2: b    1: a        after c comes the one before, after b too, after a none
    forward      4: a    5: b    6: c
    backward     6: c    so 5 and then 4 can be brought before they are asked for

Every rank guesses alike, because nothing but sizes and order is looked at.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from reshard.nn.activations.region import Form, Region

__all__ = ["Order"]

MOST_TOGETHER = 8 << 20
"""Bytes of regions that are brought in one exchange; a larger one comes alone."""


class Order:
    """The order in which regions are kept and asked for."""

    def __init__(self) -> None:
        self._count = 0
        self._regions: WeakValueDictionary[int, Region] = WeakValueDictionary()
        self._last: tuple[str, int] | None = None
        self._steps: dict[str, int | None] = {}
        """From the region of this name to the one that was asked for after it; None: no other."""

    def keep(self, region: Region) -> None:
        """Forward keeps one more region."""
        if self._last is not None:
            self._steps[self._last[0]] = None
            self._last = None
        self._count += 1
        region.number = self._count
        self._regions[self._count] = region

    def ask(self, region: Region) -> None:
        """Backward needs a region."""
        if self._last is not None:
            label, number = self._last
            self._steps[label] = region.number - number
        self._last = (region.label, region.number)

    def after(self, region: Region) -> Region | None:
        """The region that is expected to be asked for next, if it is still to be brought."""
        step = self._steps.get(region.label)
        found = None if step is None else self._regions.get(region.number + step)
        if found is None or found.whole is not None or found.form is Form.WHOLE or not found.uses:
            return None
        return found

    def together(self, first: Region) -> list[Region]:
        """A region, and what is expected after it, to be brought in one exchange."""
        found, total = [first], first.num_bytes
        while (following := self.after(found[-1])) is not None:
            total += following.num_bytes
            if total > MOST_TOGETHER or following in found or not _alike(first, following):
                break
            found.append(following)
        return found


def _alike(one: Region, other: Region) -> bool:
    """Whether two regions come the same way."""
    return one.form is other.form and one.device == other.device
