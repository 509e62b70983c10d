"""Cells of a class of tensors, and the lines along which ranks share the work on them.

A cell is a box inside one box of the source and one box of the destination. Two kinds of geometry
produce them: for two regular layouts on separate ranks, or without replicas, the cells of a rank
follow from its own regions by arithmetic (``regular``); for all others every cell is worked out
once (``listed``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from reshard.layout.columns import Ints
from reshard.planning.sharing import LineSet

__all__ = ["Cells", "Geometry", "Lined"]


@dataclass(frozen=True, eq=False, slots=True)
class Cells:
    """Cells as columns; coordinates have one row per cell and one column per dim."""

    have_region: Ints
    want_region: Ints
    have_low: Ints
    want_low: Ints
    width: Ints
    size: Ints
    """Elements of each cell."""
    have_at: Ints
    """How many elements of its source region come before each cell."""
    want_at: Ints
    """How many elements of its destination region come before each cell."""


@dataclass(frozen=True, eq=False, slots=True)
class Lined:
    """Cells, and the position of each on the line of its senders and on that of its receivers.

    Positions count elements of one tensor; a stack of T tensors is T times as long.
    """

    cells: Cells
    send_line: Ints
    send_at: Ints
    receive_line: Ints
    receive_at: Ints


class Geometry(Protocol):
    """Cells by rank, and who shares what."""

    @property
    def senders(self) -> LineSet:
        """The ranks that share the sending of each line."""

    @property
    def receivers(self) -> LineSet:
        """The ranks that share each line; those that add up addends, where there are any."""

    @property
    def wanting(self) -> LineSet:
        """The ranks that want each line; some may hold parts of it."""

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

    def copied_elements(self) -> tuple[Ints, Ints]:
        """Ranks, perhaps several times, and elements of one tensor that each holds and wants."""

    def num_cells(self) -> int:
        """How many cells there are."""

    def wanted_elements(self) -> int:
        """Elements of one tensor that ranks want of what the source has, once per such rank."""

    def addend_senders(self, cells: Ints, receivers: Ints, addend: int) -> Ints:
        """Who sends an addend of a cell to a receiver; the receiver itself if it holds it."""
