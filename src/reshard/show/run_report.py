"""What a run did on one rank: bytes, messages and seconds of every round.

>>> report = RunReport(rank=0, call=7, digest="ab", transports={1: "peer memory"})
>>> part = report.begin_round(0, started=0.0)
>>> part.bytes_sent, part.messages_sent = 4096, 1
>>> report.bytes_sent, report.messages_sent
(4096, 1)

The reports of all ranks make one timeline:

    dist.gather_object(handle.report, reports if rank == 0 else None)
    if rank == 0:
        Path("move.trace").write_text(rs.RunReport.merged(reports))   # open in ui.perfetto.dev
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from reshard.errors import FormatError
from reshard.layout.mesh import format_ranks
from reshard.text import align, count, format_bytes

MAX_LINES = 8

SCHEMA = "reshard.run/2"
EXPECTED = f'expected JSON with the schema "{SCHEMA}", as RunReport.save writes it'
MAX_FILE = 1 << 26

LEGEND = (
    "packing includes writes into peers' memory; unpacking includes reads from it, sums, and "
    "copies on the rank"
)


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
    seconds: float = 0.0
    """All of the round: these three, and what lies between them."""
    started: float = 0.0
    """When the round began, on the clock of its process."""
    events: list[tuple[str, float, float]] = field(default_factory=list, repr=False)
    """What was done when: phase, start and seconds, for the trace."""

    def spent(self, name: str, began: float, seconds: float | None = None) -> None:
        """Count the time since a moment, or so many seconds, as time of a phase."""
        seconds = time.perf_counter() - began if seconds is None else seconds
        setattr(self, name, getattr(self, name) + seconds)
        self.events.append((name, began, seconds))


_SUMMED = (
    "bytes_sent", "bytes_received", "bytes_copied", "messages_sent", "messages_received",
    "packing", "waiting", "unpacking",
)  # fmt: skip
_WRITTEN = [field.name for field in fields(RoundReport) if field.name not in ("started", "events")]
"""What a file has of a round."""


@dataclass(slots=True)
class RunReport:
    """A whole run on one rank; what its rounds count, such as ``bytes_sent``, is added up."""

    rank: int
    call: int
    """Which call of these ranks it was; -1 where nothing had to be exchanged."""
    digest: str
    """Of the plan."""
    transports: dict[int, str] = field(default_factory=dict)
    """How each peer was reached."""
    rounds: list[RoundReport] = field(default_factory=list)
    seconds: float = 0.0
    setup: float = 0.0
    """Seconds of comparing plans and compiling addresses, before the handshake."""
    started: float = field(default_factory=time.perf_counter)
    """When the run began, on the clock of its process."""
    clock: float = field(default_factory=lambda: time.time() - time.perf_counter())
    """What makes a time of that clock a time of day, which other hosts have as well."""

    def begin_round(self, number: int, started: float) -> RoundReport:
        """The report of a round that begins."""
        part = RoundReport(number, started=started)
        self.rounds.append(part)
        return part

    def finish(self) -> None:
        """The run is over, perhaps in the middle of a round."""
        now = time.perf_counter()
        self.seconds = now - self.started
        if self.rounds and not self.rounds[-1].seconds:
            self.rounds[-1].seconds = now - self.rounds[-1].started

    def __getattr__(self, name: str) -> Any:
        if name in _SUMMED:
            return sum(getattr(part, name) for part in self.rounds)
        raise AttributeError(f"a run report has no {name}")

    @property
    def peak_staging(self) -> int:
        """The most bytes that were staged in any round."""
        return max((part.bytes_staged for part in self.rounds), default=0)

    @property
    def handshake(self) -> float:
        """Seconds until the peers had called as well, after ``setup`` and before round 1."""
        if not self.rounds:
            return 0.0
        return max(self.rounds[0].started - self.started - self.setup, 0.0)

    @property
    def bytes_per_second(self) -> float:
        """What this rank sent or received, whichever is more, and what it kept, in a second."""
        moved = max(self.bytes_sent, self.bytes_received) + self.bytes_copied
        return float(moved / self.seconds) if self.seconds else 0.0

    def peers(self) -> dict[str, list[int]]:
        """The peers by how they were reached.

        >>> RunReport(0, 1, "ab", {1: "peer memory", 8: "network (gloo)", 2: "peer memory"}).peers()
        {'peer memory': [1, 2], 'network (gloo)': [8]}
        """
        ranks: dict[str, list[int]] = {}
        for rank, name in sorted(self.transports.items()):
            ranks.setdefault(name, []).append(rank)
        return ranks

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        rounds = [{name: getattr(part, name) for name in _WRITTEN} for part in self.rounds]
        return {
            "schema": SCHEMA,
            "rank": self.rank,
            "call": self.call,
            "plan": self.digest,
            "started": self.started + self.clock,
            "seconds": self.seconds,
            "setup": self.setup,
            "handshake": self.handshake,
            "peak_staging": self.peak_staging,
            "transports": {str(rank): name for rank, name in self.transports.items()},
            "rounds": rounds,
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """The report as JSON text: bytes and seconds, and ``started`` as a time of day."""
        return json.dumps(self.to_dict(), indent=indent)

    @staticmethod
    def from_json(text: str) -> RunReport:
        """Read what ``to_json`` wrote."""
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                raise ValueError("another schema")
            times = (float(_number(data[name])) for name in ("seconds", "setup", "handshake"))
            seconds, setup, handshake = times
            rounds = [RoundReport(**_numbers(part)) for part in data["rounds"]]
            if rounds:  # what the handshake took is when the first round began
                rounds[0].started = setup + handshake
            transports = {int(rank): str(name) for rank, name in data["transports"].items()}
            rank, call = int(_number(data["rank"])), int(_number(data["call"]))
            report = RunReport(rank, call, str(data["plan"]), transports, rounds, seconds, setup)
            report.started, report.clock = 0.0, float(_number(data["started"]))
            return report
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise FormatError(f"this is no run report: {EXPECTED}") from None

    @staticmethod
    def load(path: str | Path) -> RunReport:
        """Read what ``save`` wrote as ``.json``."""
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE + 1)
        if len(data) > MAX_FILE:
            raise FormatError(f'"{path}" is larger than {MAX_FILE} bytes: is it a run report?')
        try:
            return RunReport.from_json(data.decode())
        except (FormatError, UnicodeDecodeError):
            raise FormatError(f'"{path}" is no run report: {EXPECTED}') from None

    def to_trace(self) -> str:
        """The report as a Chrome trace, which Perfetto opens."""
        return self.merged([self])

    @staticmethod
    def merged(reports: Iterable[RunReport]) -> str:
        """The reports of many ranks as one Chrome trace: a process per rank, a track per call.

        >>> part = RoundReport(0, started=1.0, seconds=0.5, events=[("waiting", 1.25, 0.125)])
        >>> report = RunReport(3, 7, "ab", {}, [part], seconds=1.5, setup=0.75, started=0.0)
        >>> events = json.loads(RunReport.merged([report]))["traceEvents"]
        >>> [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"][2:]
        [('handshake', 750000.0, 250000.0), ('round 1', 1000000.0, 500000.0), \
('waiting', 1250000.0, 125000.0)]
        """
        return json.dumps({"traceEvents": _timeline(list(reports)), "displayTimeUnit": "ms"})

    def save(self, path: str | Path) -> None:
        """Write the report as ``.json`` or, for Perfetto, as ``.trace``."""
        path = Path(path)
        if path.suffix not in (".json", ".trace"):
            raise FormatError(
                f'cannot save a report as "{path}": the suffix must be .json or .trace'
            )
        path.write_text(self.to_trace() if path.suffix == ".trace" else self.to_json(indent=1))

    def _repr_html_(self) -> str:
        return str(import_module("reshard.show.page.notebook").run_cell(self))

    def __str__(self) -> str:
        """The report as a table: the slowest rounds, and how each peer was reached."""
        if not self.rounds:
            return f"rank {self.rank} has no part in this move"
        call = f", call {self.call}" if self.call >= 0 else ""
        moved = (self.bytes_sent, self.bytes_received, self.bytes_copied)
        sent, received, kept = map(format_bytes, moved)
        head = (
            f"rank {self.rank}{call}: {sent} sent, {received} received, {kept} kept, in "
            f"{format_seconds(self.seconds)} ({self.bytes_per_second / 1e9:.2f} GB/s)"
        )
        setup, handshake = map(format_seconds, (self.setup, self.handshake))
        rows = [
            *(
                (name, f"to and from rank{'s' * (len(ranks) > 1)} {format_ranks(ranks)}")
                for name, ranks in self.peers().items()
            ),
            ("setup", f"{setup}, handshake {handshake}"),
            ("staging", f"{format_bytes(self.peak_staging)} at most, beyond the tensors"),
        ]
        return "\n".join([head, "", *self._table(), "", *align(rows), LEGEND])

    def _table(self) -> list[str]:
        """The slowest rounds in order, and the sum of all."""
        slowest = sorted(self.rounds, key=lambda part: -part.seconds)[:MAX_LINES]
        shown = sorted(slowest, key=lambda part: part.round)
        heads = ("round", "sent", "messages", "received", "messages", "kept")
        rows: list[tuple[str, ...]] = [(*heads, "packing", "waiting", "unpacking", "all")]
        rows += [_cells(str(part.round + 1), part, part.seconds) for part in shown]
        if len(self.rounds) > 1:
            rows.append(_cells("total", self, sum(part.seconds for part in self.rounds)))
        lines = align(rows, right=range(1, len(heads) + 4))
        left_out = len(self.rounds) - len(shown)
        if left_out:
            lines.insert(-1, f"and {count(left_out, 'faster round')}")
        return lines


def _numbers(part: Any) -> dict[str, Any]:
    """A round as a file has it."""
    if not part.keys() <= {*_WRITTEN}:
        raise ValueError("other keys")
    return {name: _number(value) for name, value in part.items()}


def _number(value: Any) -> Any:
    """A number that a report may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1 << 63:
        raise ValueError("not a number")
    return value


def _cells(label: str, part: RoundReport | RunReport, seconds: float) -> tuple[str, ...]:
    """One line of the table: a round, or the sum of all."""
    return (
        label, format_bytes(part.bytes_sent), f"{part.messages_sent:,}",
        format_bytes(part.bytes_received), f"{part.messages_received:,}",
        format_bytes(part.bytes_copied),
        *map(format_seconds, (part.packing, part.waiting, part.unpacking, seconds)),
    )  # fmt: skip


def format_seconds(seconds: float) -> str:
    """A time the short way, three digits of it.

    >>> format_seconds(0.0000123), format_seconds(0.25), format_seconds(12.3456)
    ('12 us', '250 ms', '12.3 s')
    """
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} us"
    number, unit = (seconds * 1e3, "ms") if seconds < 0.9995 else (seconds, "s")
    digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:.{digits}f} {unit}"


def _timeline(reports: Sequence[RunReport]) -> list[dict[str, Any]]:
    """The events of a Chrome trace: names first, then slices in the order of their start.

    A rank is a process, a call is a track in it, and slices are nested: a call contains setup,
    handshake and the rounds; a round contains packing, waiting and unpacking. Clocks of several
    hosts are aligned by the time of day: between hosts slices are only as exact as that.
    """
    shown = [report for report in reports if report.rounds or report.seconds]
    origin = min((_nanoseconds(report, report.started) for report in shown), default=0)
    slices = [event for report in shown for event in _slices_of(report, origin)]
    # Of slices that start together the longer is the outer one.
    slices.sort(key=lambda event: (event["ts"], -event["dur"]))

    def about(name: str, rank: int, track: int, /, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": rank, "tid": track, "args": args}

    names = []
    for rank in sorted({report.rank for report in shown}):
        names.append(about("process_name", rank, 0, name=f"rank {rank}"))
        names.append(about("process_sort_index", rank, 0, sort_index=rank))
    for rank, call in sorted({(report.rank, report.call) for report in shown}):
        name = f"call {call}" if call >= 0 else "alone"
        names.append(about("thread_name", rank, call + 1, name=name))
    return names + slices


def _slices_of(report: RunReport, origin: int) -> Iterator[dict[str, Any]]:
    def piece(name: str, start: float, seconds: float, **details: Any) -> dict[str, Any]:
        # Whole nanoseconds: slices that touch must not overlap by a rounding.
        moments = (start, start + seconds)
        low, high = (_nanoseconds(report, moment) - origin for moment in moments)
        times = {"ts": low / 1000, "dur": (high - low) / 1000}
        where = {"pid": report.rank, "tid": report.call + 1}
        return {"ph": "X", "name": name, "cat": "reshard", **times, **where, "args": details}

    about = {"plan": report.digest, "staged": report.peak_staging}
    yield piece("move", report.started, report.seconds, **about)
    if report.rounds:
        yield piece("setup", report.started, report.setup)
        yield piece("handshake", report.started + report.setup, report.handshake)
    for part in report.rounds:
        figures = {"sent": part.bytes_sent, "received": part.bytes_received}
        yield piece(f"round {part.round + 1}", part.started, part.seconds, **figures)
        for phase, at, seconds in part.events:
            yield piece(phase, at, seconds, round=part.round + 1)


def _nanoseconds(report: RunReport, moment: float) -> int:
    # Rounded before they are added: a time of day as a float is exact to 240 nanoseconds only.
    return round(moment * 1e9) + round(report.clock * 1e9)
