"""Who of several ranks does how much, so that the busiest does as little as possible?

A line is an amount of bytes that its members share. Water is filled in: a member that already has
much to do gets less. Lines with the fewest members go first, because they have the least choice;
where lines cross (members in common, neither inside the other) filling is repeated.

    >>> members = np.array([[0, 1], [2, 3]])
    >>> fill(np.array([100, 100]), np.array([[0, 60], [5, 5]]), np.array([2, 2])).tolist()
    [[80, 20], [50, 50]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reshard.layout.columns import distinct
from reshard.layout.grid import Ints

__all__ = ["Line", "balance", "fill"]

MAX_PASSES = 48
"""How often crossing lines are filled again, at most."""
GOOD = 1.004
"""Loads closer than this count as equal."""


@dataclass(frozen=True, eq=False, slots=True)
class Line:
    """Equal numbers of members share each of several amounts, one per row."""

    amounts: Ints
    """Bytes to share, one per row."""
    members: Ints
    """The index of each member, one row per amount."""
    grain: int
    """No share is smaller than this, unless the amount is."""
    item: int = 1
    """Shares are whole multiples of this many bytes, as amounts are."""

    @property
    def crossing(self) -> bool:
        """Whether a rank is a member of two rows."""
        return self.members.size != len(distinct(self.members.reshape(-1)))


def fill(amounts: Ints, loads: Ints, most: Ints) -> Ints:
    """Share each amount over the members of its row, the least loaded first.

    At most ``most`` members of a row get a share. Shares of a row add up to its amount.
    """
    num = loads.shape[1]
    if num == 1:
        return amounts[:, None].copy()
    order = np.argsort(loads, axis=1, kind="stable")
    rising = np.take_along_axis(loads, order, axis=1)
    below = np.cumsum(rising, axis=1)
    count = np.arange(1, num + 1)
    room = rising * count - below
    reached = (room < amounts[:, None]) & (count <= most[:, None])
    used = np.maximum(reached.sum(axis=1), 1)
    level = (amounts + below[np.arange(len(used)), used - 1]) // used
    shares = np.where(count <= used[:, None], level[:, None] - rising, 0)
    left = amounts - shares.sum(axis=1)
    shares += count <= left[:, None]
    result = np.empty_like(shares)
    np.put_along_axis(result, order, shares, axis=1)
    return result


def balance(lines: Sequence[Line], num_ranks: int) -> list[Ints]:
    """The share of every member of every line, such that no rank has much more than it must."""
    loads = np.zeros(num_ranks, dtype=np.int64)
    order = sorted(range(len(lines)), key=lambda i: lines[i].members.shape[1])
    shares: list[Ints] = [np.zeros(line.members.shape, dtype=np.int64) for line in lines]
    for number in order:
        _refill(lines[number], shares[number], loads)
    best, kept = loads.max(initial=0), [share.copy() for share in shares]
    for _ in range(MAX_PASSES):
        if not _improvable(lines, shares, loads):
            break
        for number in order:
            _refill(lines[number], shares[number], loads)
        if loads.max() < best:
            best, kept = loads.max(), [share.copy() for share in shares]
    return kept


def _refill(line: Line, shares: Ints, loads: Ints) -> None:
    """Take a line's shares out of the loads and fill them in again; row by row if rows cross."""
    if line.members.shape[1] == 1:
        if not shares.any():
            shares[:, 0] = line.amounts
            np.add.at(loads, line.members[:, 0], line.amounts)
        return
    step = 1 if line.crossing else len(line.amounts)
    most = np.clip(line.amounts // line.grain, 1, line.members.shape[1])
    for first in range(0, len(line.amounts), max(step, 1)):
        rows = slice(first, first + step)
        members = line.members[rows]
        loads[members] -= shares[rows]
        items = fill(line.amounts[rows] // line.item, loads[members] // line.item, most[rows])
        shares[rows] = items * line.item
        loads[members] += shares[rows]


def _improvable(lines: Sequence[Line], shares: Sequence[Ints], loads: Ints) -> bool:
    """Whether some busiest rank has a share that a clearly less busy member could take."""
    busiest = loads.max(initial=0)
    for line, share in zip(lines, shares, strict=True):
        if line.members.shape[1] == 1:
            continue
        load = loads[line.members]
        high = np.where(share > 0, load, 0).max(axis=1)
        spare = load.min(axis=1)
        movable = (share * (load * GOOD >= busiest)).max(axis=1) >= line.grain
        if bool(((high * GOOD >= busiest) & (spare * GOOD < high) & movable).any()):
            return True
    return False
