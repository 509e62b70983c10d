"""Runs of many ranks on one axis of time, in the Chrome trace format.

A rank is a process, a call is a track in it, and slices are nested: a call contains setup,
handshake and the rounds; a round contains packing, waiting and unpacking. Clocks of several hosts
are aligned by the time of day: between hosts slices are only as exact as that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reshard.live.report import RunReport

__all__ = ["timeline"]


def timeline(reports: Sequence[RunReport]) -> list[dict[str, Any]]:
    """The events of a trace: names first, then slices in the order of their start.

    >>> timeline([])
    []
    """
    shown = [report for report in reports if report.rounds or report.seconds]
    origin = min((_nanoseconds(report, report.started) for report in shown), default=0)
    slices = [event for report in shown for event in _slices(report, origin)]
    # Of slices that start together the longer is the outer one.
    slices.sort(key=lambda event: (event["ts"], -event["dur"]))
    return [*_names(shown), *slices]


def _names(reports: Sequence[RunReport]) -> Iterator[dict[str, Any]]:
    for rank in sorted({report.rank for report in reports}):
        yield _name("process_name", rank, 0, f"rank {rank}")
        yield {**_name("process_sort_index", rank, 0, ""), "args": {"sort_index": rank}}
    for rank, track in sorted({(report.rank, _track(report)) for report in reports}):
        yield _name("thread_name", rank, track, f"call {track - 1}" if track else "alone")


def _name(kind: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": {"name": name}}


def _track(report: RunReport) -> int:
    return report.call + 1


def _slices(report: RunReport, origin: int) -> Iterator[dict[str, Any]]:
    def piece(name: str, start: float, end: float, **details: Any) -> dict[str, Any]:
        # Whole nanoseconds: slices that touch must not overlap by a rounding.
        low, high = (_nanoseconds(report, moment) - origin for moment in (start, end))
        times = {"ts": low / 1000, "dur": (high - low) / 1000}
        where = {"pid": report.rank, "tid": _track(report)}
        return {"ph": "X", "name": name, "cat": "reshard", **times, **where, "args": details}

    began, ready = report.started, report.started + report.setup
    yield piece(
        "move", began, began + report.seconds, plan=report.digest, staged=report.peak_staging
    )
    if report.rounds:
        yield piece("setup", began, ready)
        yield piece("handshake", ready, ready + report.handshake)
    for part in report.rounds:
        figures = {"sent": part.bytes_sent, "received": part.bytes_received}
        name, end = f"round {part.round + 1}", part.started + part.seconds
        yield piece(name, part.started, end, **figures)
        for phase, at, seconds in part.events:
            yield piece(phase, at, at + seconds, round=part.round + 1)


def _nanoseconds(report: RunReport, moment: float) -> int:
    # Rounded before they are added: a time of day as a float is exact to 240 nanoseconds only.
    return round(moment * 1e9) + round(report.clock * 1e9)
