"""What a run did, on one rank: bytes, messages and seconds of every round.

>>> report = RunReport(rank=0, call=7, digest="ab", transports={1: "peer memory"})
>>> with report.round(0) as part:
...     part.bytes_sent, part.messages_sent = 4096, 1
>>> report.bytes_sent, report.messages_sent
(4096, 1)
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reshard.bytesize import format_bytes
from reshard.mesh import format_ranks

__all__ = ["RoundReport", "RunReport"]

PHASES = ("packing", "waiting", "unpacking")


@dataclass(slots=True)
class RoundReport:
    """One round on one rank."""

    round: int
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_copied: int = 0
    """What stayed on this rank."""
    messages_sent: int = 0
    messages_received: int = 0
    bytes_staged: int = 0
    """The most that was packed, received and added up at a time, beyond the tensors."""
    packing: float = 0.0
    """Seconds of packing, and of writing into peers' memory."""
    waiting: float = 0.0
    unpacking: float = 0.0
    """Seconds of unpacking, of reading from peers' memory, of adding up and of own copies."""
    events: list[tuple[str, float, float]] = field(default_factory=list, repr=False)
    """What was done when: phase, start and seconds, for the trace."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of what is done inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spent(name, began, time.perf_counter() - began)

    def spent(self, name: str, began: float, seconds: float) -> None:
        """Count time that was measured elsewhere."""
        setattr(self, name, getattr(self, name) + seconds)
        self.events.append((name, began, seconds))


@dataclass(slots=True)
class RunReport:
    """A whole run on one rank."""

    rank: int
    call: int
    digest: str
    transports: dict[int, str] = field(default_factory=dict)
    """How each peer was reached."""
    rounds: list[RoundReport] = field(default_factory=list)
    seconds: float = 0.0
    planning: float = 0.0
    """Seconds of comparing and of working out addresses, before the first round."""
    started: float = 0.0

    @contextmanager
    def round(self, number: int) -> Iterator[RoundReport]:
        """The report of a round that begins."""
        part = RoundReport(number)
        self.rounds.append(part)
        yield part

    def __getattr__(self, name: str) -> Any:
        if name in RoundReport.__slots__ and name not in ("events", "round"):
            return sum(getattr(part, name) for part in self.rounds)
        raise AttributeError(f"a run report has no {name}")

    @property
    def peak_staging(self) -> int:
        """The most bytes that were staged in any round."""
        return max((part.bytes_staged for part in self.rounds), default=0)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        rounds = [asdict(part) for part in self.rounds]
        for part in rounds:
            del part["events"]
        return {
            "schema": "reshard.run/1",
            "rank": self.rank,
            "call": self.call,
            "plan": self.digest,
            "seconds": self.seconds,
            "planning": self.planning,
            "peak_staging": self.peak_staging,
            "transports": {str(rank): name for rank, name in self.transports.items()},
            "rounds": rounds,
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_trace(self) -> str:
        """The report as a Chrome trace, which Perfetto opens: one line per rank."""
        events: list[dict[str, Any]] = [
            {
                "ph": "M",
                "name": "process_name",
                "pid": self.rank,
                "args": {"name": f"rank {self.rank}"},
            }
        ]
        for part in self.rounds:
            for name, began, seconds in part.events:
                events.append(
                    {
                        "ph": "X", "pid": self.rank, "tid": 0, "cat": "reshard",
                        "name": f"{name} round {part.round}",
                        "ts": (began - self.started) * 1e6, "dur": seconds * 1e6,
                        "args": {"sent": part.bytes_sent, "received": part.bytes_received},
                    }
                )  # fmt: skip
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    def save(self, path: str | Path) -> None:
        """Write the report as ``.json`` or, for Perfetto, as ``.trace``."""
        path = Path(path)
        path.write_text(self.to_trace() if path.suffix == ".trace" else self.to_json(indent=2))

    def __str__(self) -> str:
        head = (
            f"rank {self.rank}, call {self.call}: {format_bytes(self.bytes_sent)} sent in "
            f"{self.messages_sent} messages, {format_bytes(self.bytes_received)} received, "
            f"{format_bytes(self.bytes_copied)} copied, in {self.seconds * 1e3:.2f} ms; "
            f"peak staging {format_bytes(self.peak_staging)}"
        )
        return "\n".join([head, *self._peer_lines(), *map(_line, self.rounds)])

    def _peer_lines(self) -> list[str]:
        by_name: dict[str, list[int]] = {}
        for rank, name in sorted(self.transports.items()):
            by_name.setdefault(name, []).append(rank)
        return [f"  {name}: ranks {format_ranks(ranks)}" for name, ranks in by_name.items()]


def _line(part: RoundReport) -> str:
    return (
        f"  round {part.round}: sent {format_bytes(part.bytes_sent)} in {part.messages_sent}, "
        f"received {format_bytes(part.bytes_received)} in {part.messages_received}, packing "
        f"{part.packing * 1e3:.2f} ms, waiting {part.waiting * 1e3:.2f} ms, unpacking "
        f"{part.unpacking * 1e3:.2f} ms"
    )
