"""Listed geometry: all cells of a stack, worked out once, whatever the layouts are."""

from __future__ import annotations

import numpy as np

from reshard.layout.grid import Ints
from reshard.planning.cells import Cells
from reshard.planning.geometry import Lined, Relays
from reshard.planning.lines import LineSet

__all__ = ["ListedGeometry"]


class ListedGeometry:
    """All cells of a stack and their lines, as columns."""

    listed = True

    def __init__(
        self,
        cells: Lined,
        senders: LineSet,
        receivers: LineSet,
        wanting: LineSet,
        relays: Relays | None,
        copies: tuple[Cells, Ints],
        addends: tuple[int, ...],
        addend_holders: list[Ints],
    ) -> None:
        self.cells = cells
        self.senders = senders
        self.receivers = receivers
        self.wanting = wanting
        self.relays = relays
        self._copies, self._copiers = copies
        self.addends = addends
        self._addend_holders = addend_holders
        self.num_addends = max(len(addend_holders), 1)

    def sent_by(self, rank: int) -> Lined:
        """All cells: they are listed anyway."""
        return self.cells

    def wanted_by(self, rank: int) -> Lined:
        """All cells: they are listed anyway."""
        return self.cells

    def all(self) -> Lined:
        """All cells that travel."""
        return self.cells

    def copied_by(self, rank: int) -> Cells:
        """The cells that a rank both holds and wants."""
        mine = self._copiers == rank
        columns = (getattr(self._copies, c)[mine] for c in Cells.__dataclass_fields__)
        return Cells(*columns)

    def copied_elements(self) -> int:
        """Elements of one tensor that ranks both hold and want."""
        return int(self._copies.size.sum())

    def addend_senders(self, cells: Ints, receivers: Ints, addend: int) -> Ints:
        """The receiver where it holds the addend, else the holders in turn."""
        holders = self._addend_holders[addend][self.cells.cells.have_region[cells]]
        rows = np.arange(len(cells))
        in_turn = holders[rows, rows % np.maximum((holders >= 0).sum(axis=1), 1)]
        own = (holders == receivers[:, None]).any(axis=1)
        found: Ints = np.where(own, receivers, in_turn)
        return found
