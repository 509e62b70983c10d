"""A topology says which ranks share a host and how fast the links are: how long will a move take?

ranks_per_host = 8
[inside]                  # between ranks of one host
bandwidth = "400GB"       # bytes per second and rank
latency = 5e-6            # seconds per message
[between]                 # between hosts
bandwidth = "50GB"        # bytes per second and host, each way
latency = 2e-5
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

from reshard.errors import SizeError, TopologyError
from reshard.text import count, parse_bytes

MAX_FILE = 1 << 20


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes per second and seconds per message."""

    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True)
class Topology:
    """Hosts and links.

    >>> topology = Topology(ranks_per_host=8)
    >>> topology.host_of(9), topology.between.bandwidth
    (1, 50000000000.0)
    """

    ranks_per_host: int = 8
    hosts: tuple[tuple[int, ...], ...] = ()
    """The ranks of each host, where they do not simply count up."""
    inside: Link = Link(400e9, 5e-6)
    between: Link = Link(50e9, 2e-5)

    def __post_init__(self) -> None:
        if self.ranks_per_host < 1:
            raise TopologyError(f"ranks_per_host is {self.ranks_per_host}: a host has at least 1")
        seen: set[int] = set()
        for rank in chain(*self.hosts):
            if rank in seen or rank < 0:
                raise TopologyError(f"rank {rank} is on two hosts or negative: name each once")
            seen.add(rank)
        for name, link in (("inside", self.inside), ("between", self.between)):
            if not 0 < link.bandwidth < inf or not 0 <= link.latency < inf:
                raise TopologyError(
                    f"[{name}] has a bandwidth of {link.bandwidth} bytes a second and a latency of "
                    f"{link.latency} seconds: the first must be above 0, the second at least 0"
                )

    def host_of(self, rank: int) -> int:
        """The number of the host a rank is on."""
        return self.hosts_of([rank])[rank]

    def hosts_of(self, ranks: Iterable[int]) -> dict[int, int]:
        """The host of each of these ranks."""
        ranks = list(ranks)
        if not self.hosts:
            return {rank: rank // self.ranks_per_host for rank in ranks}
        where = {rank: number for number, host in enumerate(self.hosts) for rank in host}
        missing = [rank for rank in ranks if rank not in where]
        if missing:
            raise TopologyError(
                f"rank {missing[0]} is on no host of the topology, which has "
                f"{count(len(where), 'rank')} on {count(len(self.hosts), 'host')} and lacks "
                f"{len(missing)} of {len(ranks)}: add it"
            )
        return {rank: where[rank] for rank in ranks}

    @classmethod
    def load(cls, path: str | Path) -> Topology:
        """Read a topology file."""
        if not isinstance(path, str | Path):
            raise TopologyError(
                f"{path!r} is no topology: give an rs.Topology or the path of a file"
            )
        try:
            with Path(path).open("rb") as file:
                data = file.read(MAX_FILE + 1)
            if len(data) > MAX_FILE:
                raise TopologyError(f"{path} has more than {MAX_FILE} bytes: it is no topology")
            return cls.from_dict(tomllib.loads(data.decode()), str(path))
        except FileNotFoundError:
            raise TopologyError(f"topology {path} does not exist: check the path") from None
        except TopologyError:
            raise
        except (OSError, ValueError, RecursionError) as error:  # tomllib also lets int() raise
            reason = error.strerror if isinstance(error, OSError) else error
            raise TopologyError(
                f"topology {path} cannot be read: {reason}: expected a TOML file"
            ) from None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "topology") -> Topology:
        """Read plain data, such as a parsed TOML file."""
        unknown = set(data) - {"ranks_per_host", "hosts", "inside", "between"}
        if unknown:
            raise TopologyError(
                f'{where}: "{min(unknown)}" is not known: '
                "use ranks_per_host, hosts, inside, between"
            )
        per_host, hosts = data.get("ranks_per_host", 8), data.get("hosts", [])
        are_lists = isinstance(hosts, list) and all(isinstance(host, list) for host in hosts)
        if not are_lists or any(type(number) is not int for number in [per_host, *chain(*hosts)]):
            raise TopologyError(f"{where}: ranks_per_host is a number, hosts a list of rank lists")
        inside = _link(data.get("inside"), cls.inside, f"{where}: [inside]")
        between = _link(data.get("between"), cls.between, f"{where}: [between]")
        return cls(per_host, tuple(map(tuple, hosts)), inside, between)

    def to_dict(self) -> dict[str, Any]:
        """The topology as plain data."""
        return asdict(self) | {"hosts": [list(host) for host in self.hosts]}


def _link(data: object, default: Link, where: str) -> Link:
    if data is None:
        return default
    if not isinstance(data, dict) or set(data) - {"bandwidth", "latency"}:
        raise TopologyError(f"{where} has bandwidth and latency, and found {data}")
    try:
        speed = data.get("bandwidth", default.bandwidth)
        speed = float(parse_bytes(speed)) if isinstance(speed, str) else float(speed)
        return Link(speed, float(data.get("latency", default.latency)))
    except (OverflowError, SizeError, TypeError, ValueError) as error:
        raise TopologyError(f"{where}: {error}") from None
