"""The cells of a stack, and the lines along which ranks share the work on them.

Two geometries, one meaning. Two regular layouts on separate ranks, or without replicas, are *open*:
the cells of a rank follow from its own regions by arithmetic (``open_geometry``). All others are
*listed*: all cells are worked out once (``listing``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from reshard.layout.grid import Ints
from reshard.planning.cells import Cells
from reshard.planning.lines import LineSet

__all__ = ["Geometry", "Lined", "Relays", "concatenate_cells"]


@dataclass(frozen=True, eq=False, slots=True)
class Lined:
    """Cells, and where each lies on the line of its senders and on that of its receivers.

    Positions count elements of one tensor; a stack of T tensors is T times as long.
    """

    cells: Cells
    send_line: Ints
    send_at: Ints
    receive_line: Ints
    receive_at: Ints


@dataclass(frozen=True, eq=False, slots=True)
class Relays:
    """Lines of ranks on other hosts that get what a line of receivers got, from these."""

    lines: LineSet
    parent: Ints
    """The line of receivers that each line of relays is fed by."""


class Geometry(Protocol):
    """Cells by rank, and who shares what."""

    @property
    def senders(self) -> LineSet:
        """The ranks that share the sending of each line."""

    @property
    def receivers(self) -> LineSet:
        """The ranks that share the first receiving of each line."""

    @property
    def wanting(self) -> LineSet:
        """The ranks that want each line, first receivers included; they pass on to each other."""

    @property
    def relays(self) -> Relays | None:
        """Further lines on other hosts; only with a topology."""

    @property
    def listed(self) -> bool:
        """Whether all cells are listed, so that a rank gets them all."""

    @property
    def num_addends(self) -> int:
        """How many addends make a value; 1 where nothing is added up."""

    @property
    def addends(self) -> tuple[int, ...]:
        """Which addends of the source these are; none where nothing is added up."""

    def sent_by(self, rank: int) -> Lined:
        """At least the cells that a rank may send."""

    def wanted_by(self, rank: int) -> Lined:
        """At least the cells that a rank wants and does not hold."""

    def all(self) -> Lined:
        """All cells that travel."""

    def copied_by(self, rank: int) -> Cells:
        """The cells that a rank both holds and wants."""

    def copied_elements(self) -> int:
        """Elements of one tensor that ranks both hold and want, once per such rank."""

    def addend_senders(self, cells: Ints, receivers: Ints, addend: int) -> Ints:
        """Who sends an addend of a cell to a receiver; the receiver itself if it holds it."""


def concatenate_cells(parts: list[Cells]) -> Cells:
    """Cells of several lists in one."""
    if len(parts) == 1:
        return parts[0]
    return Cells(
        *(
            np.concatenate([getattr(part, column) for part in parts])
            for column in Cells.__dataclass_fields__
        )
    )
