"""Lines of ranks, host by host.

A station is the ranks of a line on one host. A cell has a station on every host that wants it, as
many as there are hosts, and ranks of few of these hold it; those pairs are listed, and no others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard.layout.columns import Ints
from reshard.planning.cells.geometry import Kinds
from reshard.planning.cells.listed import ListedGeometry
from reshard.planning.sharing import LineSet

__all__ = ["Home", "HostLines", "Stations"]

Home = Callable[[Ints], Ints]
"""The hosts of ranks."""


@dataclass(frozen=True, eq=False)
class Stations:
    """The ranks of lines, host by host: a station is the ranks of a line on one host."""

    members: Ints
    """Ranks in the order of lines, then hosts, then ranks."""
    first: Ints
    """Where the members of each station begin; one more entry ends the last."""
    host: Ints
    of_line: Ints
    """Where the stations of each line begin; one more entry ends the last."""

    @classmethod
    def of(cls, lines: LineSet, home: Home) -> Stations:
        """Group the members of each line by host."""
        line, host = lines.line_of, home(lines.members)
        order = np.lexsort((lines.members, host, line))
        line, host = line[order], host[order]
        new = np.ones(len(order), dtype=bool)
        new[1:] = (line[1:] != line[:-1]) | (host[1:] != host[:-1])
        first = np.append(np.flatnonzero(new), len(order))
        of_line = np.searchsorted(line[new], np.arange(len(lines.counts) + 1))
        return cls(lines.members[order], first, host[new], of_line)

    @cached_property
    def counts(self) -> Ints:
        """How many members each station has."""
        return np.diff(self.first)

    @cached_property
    def lines(self) -> LineSet:
        """The hosts of each line."""
        return LineSet.plain(self.of_line, self.host)

    def find(self, lines: Ints, hosts: Ints) -> Ints:
        """The station of each line on each host; -1 where there is none."""
        return self.lines.find(lines, hosts)


@dataclass(frozen=True, eq=False)
class HostLines:
    """Both kinds of lines of a geometry, and the hosts where a line is wanted and held."""

    wanting: Stations
    """The ranks that want each line."""
    holding: Stations
    """The ranks that hold each line of senders."""
    kinds: Kinds
    first: Ints
    """Where the hosts begin that hold and want each kind; one more entry ends the last."""
    host: Ints
    wanted_at: Ints
    """The station of ranks that want the kind on each of these hosts."""
    held_at: Ints
    """The station of ranks that hold it there."""
    lacking: LineSet
    """The ranks there that want it and do not hold it."""

    @classmethod
    def of(cls, geometry: ListedGeometry, home: Home) -> HostLines | None:
        """The hosts that each kind of cells has in common on both sides; None for addends."""
        kinds = geometry.kinds
        if kinds is None:
            return None
        wanting, holding = Stations.of(geometry.wanting, home), Stations.of(geometry.senders, home)
        row, host = holding.lines.common(wanting.lines, kinds.send, kinds.receive)
        first = np.searchsorted(row, np.arange(len(kinds.send) + 1))
        ends = wanting.find(kinds.receive[row], host), holding.find(kinds.send[row], host)
        wants = LineSet.plain(wanting.first, wanting.members).take(ends[0])
        lacks = geometry.senders.find(kinds.send[row][wants.line_of], wants.members) < 0
        return cls(wanting, holding, kinds, first, host, *ends, wants.only(lacks))

    @cached_property
    def common(self) -> LineSet:
        """The hosts that hold and want each kind."""
        return LineSet.plain(self.first, self.host)

    @property
    def counts(self) -> Ints:
        """On how many hosts each kind is both held and wanted."""
        return self.common.counts

    @cached_property
    def after_held(self) -> Ints:
        """For each such host the station after those of its line from there on that hold it."""
        ends = np.append(self.wanted_at[1:] != self.wanted_at[:-1] + 1, True)[: len(self.host)]
        ends[self.first[1:][self.counts > 0] - 1] = True
        last = np.flatnonzero(ends)
        found: Ints = self.wanted_at[last[np.searchsorted(last, np.arange(len(ends)))]] + 1
        return found
