"""What run reports say, as cards and bars: how long the move and each of its rounds took.

>>> from reshard.show.run_report import RoundReport
>>> part = RoundReport(0, 4096, 4096, started=0.25, seconds=0.5, waiting=0.25, packing=0.125)
>>> run = run_of([RunReport(3, 7, "ab", {}, [part], seconds=1.0, setup=0.125, started=0.0)])
>>> [(card.label, card.value, card.note) for card in run.cards][:2]
[('Measured', '1.00 s', 'on rank 3'), ('Before the first round', '250 ms', \
'setup 125 ms, handshake 125 ms')]
>>> [(bar.kind, bar.left, bar.width) for bar in run.rounds[0].bars]
[('packing', 0.0, 25.0), ('waiting', 25.0, 50.0), ('rest', 75.0, 25.0)]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reshard.errors import FormatError
from reshard.layout.mesh import format_ranks
from reshard.show.page.document import Card, Lane, LaneBar, Run
from reshard.show.page.drawings import Tick
from reshard.show.run_report import RoundReport, RunReport, format_seconds
from reshard.text import count, format_bytes, shorten

__all__ = ["check_reports", "run_of"]

MAX_ROUNDS = 32
"""Rounds that are shown; if there are more, the slowest are."""
PHASES = ("packing", "waiting", "unpacking")


def check_reports(reports: Sequence[RunReport], digest: str) -> None:
    """Refuse reports of another plan."""
    for report in reports:
        if report.digest != digest:
            raise FormatError(
                f"the report of rank {report.rank} is of plan {shorten(report.digest, 40)} and "
                f"this plan is {digest}: give the reports of a run of this plan"
            )


def run_of(reports: Sequence[RunReport]) -> Run | None:
    """What was measured; None where there are no reports."""
    if not reports:
        return None
    slowest = max(reports, key=lambda report: report.seconds)
    rounds = _slowest_rounds(reports)
    longest = max((part.seconds for _, part in rounds), default=0.0)
    shown = sorted(rounds, key=lambda pair: -pair[1].seconds)[:MAX_ROUNDS]
    lanes = [_lane(*pair, longest) for pair in sorted(shown, key=lambda pair: pair[1].round)]
    ranks = sorted({report.rank for report in reports})
    note = f"Reports of rank{'s' * (len(ranks) > 1)} {shorten(format_ranks(ranks), 60)}."
    if len(rounds) > len(shown):
        note += f" The {len(shown)} slowest of {len(rounds):,} rounds."
    scale = [Tick(0, "0"), Tick(100, format_seconds(longest))] if longest else []
    return Run(list(_cards(reports, slowest)), lanes, scale, note)


def _cards(reports: Sequence[RunReport], slowest: RunReport) -> Iterator[Card]:
    yield Card(
        "Measured",
        format_seconds(slowest.seconds),
        f"on rank {slowest.rank}" + f", the slowest of {len(reports)}" * (len(reports) > 1),
    )
    before = slowest.setup + slowest.handshake
    parts = f"setup {format_seconds(slowest.setup)}, handshake {format_seconds(slowest.handshake)}"
    yield Card("Before the first round", format_seconds(before), parts)
    sent = sum(report.bytes_sent for report in reports)
    rate = max(report.bytes_per_second for report in reports)
    yield Card("Sent", format_bytes(sent), f"by {count(len(reports), 'rank')} with a report")
    yield Card("Fastest rank", f"{rate / 1e9:.2f} GB/s", "sent or received, and kept")
    waited = max(reports, key=lambda report: report.waiting)
    yield Card("Longest wait", format_seconds(waited.waiting), f"on rank {waited.rank}")
    peak = max(report.peak_staging for report in reports)
    yield Card("Staged", format_bytes(peak), "at most on a rank")


def _slowest_rounds(reports: Sequence[RunReport]) -> list[tuple[int, RoundReport]]:
    """Every round on the rank that took longest for it."""
    found: dict[int, tuple[int, RoundReport]] = {}
    for report in reports:
        for part in report.rounds:
            if part.round not in found or part.seconds > found[part.round][1].seconds:
                found[part.round] = report.rank, part
    return list(found.values())


def _lane(rank: int, part: RoundReport, longest: float) -> Lane:
    bars, at = [], 0.0
    spent = [(phase, getattr(part, phase)) for phase in PHASES]
    spent.append(("rest", max(part.seconds - sum(seconds for _, seconds in spent), 0.0)))
    for kind, seconds in spent:
        width = round(100 * seconds / longest, 2) if longest else 0.0
        width = min(width, round(100 - at, 2))
        if width > 0:
            bars.append(LaneBar(round(at, 2), width, kind))
        at += width
    moved = format_bytes(max(part.bytes_sent, part.bytes_received))
    return Lane(
        f"round {part.round}", bars, f"{format_seconds(part.seconds)} on rank {rank}, {moved}"
    )
