"""The report of a run: its text, its JSON, and a trace that viewers can open."""

import json
import pickle
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

import reshard as rs
from reshard.show.run_report import RoundReport

PHASES = ("packing", "unpacking", "waiting")


def made(rank: int, *, num_rounds: int = 2, began: float = 100.0, call: int = 3) -> rs.RunReport:
    """1 ms of setup, 1 ms of handshake, and rounds of 6 ms: phases with pauses between them."""
    transports = {1 - rank: "peer memory", 8: "network (gloo)", 9: "network (gloo)"}
    report = rs.RunReport(rank, call, "abc", transports, started=began, setup=0.001)
    at = began + 0.002
    for number in range(num_rounds):
        part = RoundReport(number, started=at, seconds=0.006)
        part.bytes_sent, part.messages_sent = 3 << 20, 3
        part.bytes_received, part.messages_received = 2 << 20, 2
        part.bytes_copied, part.bytes_staged = 1 << 20, (number + 1) << 10
        for phase in PHASES:
            part.spent(phase, at, 0.001)
            at += 0.002
        report.rounds.append(part)
    report.seconds = at - began
    return report


def slices_of(trace: str) -> list[dict]:
    data = json.loads(trace)
    assert data["displayTimeUnit"] == "ms"
    return [event for event in data["traceEvents"] if event["ph"] == "X"]


def test_rounds_are_added_up() -> None:
    report = made(0, num_rounds=4)
    assert report.bytes_sent == 12 << 20
    assert report.messages_received == 8
    assert report.waiting == pytest.approx(0.004)
    assert report.peak_staging == 4 << 10
    assert report.bytes_per_second == pytest.approx((16 << 20) / 0.026)
    assert report.handshake == pytest.approx(0.001)
    with pytest.raises(AttributeError, match="no bytes_lost"):
        _ = report.bytes_lost


def test_a_report_travels_to_other_ranks() -> None:
    report = made(0)
    assert pickle.loads(pickle.dumps(report)) == report


def test_print() -> None:
    lines = str(made(0)).splitlines()
    assert lines[0].startswith("rank 0, call 3: 6.0 MiB sent, 4.0 MiB received, 2.0 MiB kept, in ")
    table = lines[2:6]
    assert [line.split()[0] for line in table] == ["round", "1", "2", "total"]
    assert len({len(line) for line in table}) == 1
    total = "total 6.0 MiB 6 4.0 MiB 4 2.0 MiB 2.00 ms 2.00 ms 2.00 ms 12.0 ms"
    assert " ".join(table[-1].split()) == total
    text = "\n".join(lines)
    assert "\npeer memory     to and from rank 1\n" in text
    assert "\nnetwork (gloo)  to and from ranks 8-9\n" in text


def test_of_many_rounds_the_slowest_are_printed() -> None:
    report = made(0, num_rounds=60)
    report.rounds[41].waiting = report.rounds[41].seconds = 1.0
    lines = str(report).splitlines()
    assert len(lines) < 25
    assert any(line.startswith("42 ") and "1.00 s" in line for line in lines)
    assert "and 52 faster rounds" in lines


def test_a_round_is_timed_even_if_it_fails() -> None:
    report = rs.RunReport(0, 1, "abc", started=time.perf_counter())

    part = report.begin_round(0, time.perf_counter())
    time.sleep(0.01)
    part.spent("packing", part.started)
    report.finish()
    assert report.rounds[0].seconds >= report.packing >= 0.01
    assert 0 <= report.handshake < 1


def test_a_rank_without_a_part() -> None:
    assert str(rs.RunReport(5, -1, "abc")) == "rank 5 has no part in this move"
    assert slices_of(rs.RunReport(5, -1, "abc").to_trace()) == []


def test_json() -> None:
    data = json.loads(made(0).to_json())
    assert data["schema"] == "reshard.run/2"
    assert data["transports"] == {"1": "peer memory", "8": "network (gloo)", "9": "network (gloo)"}
    assert [part["bytes_sent"] for part in data["rounds"]] == [3 << 20] * 2
    assert "events" not in data["rounds"][0]


def test_trace() -> None:
    reports = [
        made(rank, began=100.0 + rank / 1000, call=call) for rank in (0, 1) for call in (3, 4)
    ]
    trace = rs.RunReport.merged(reports)
    slices = slices_of(trace)
    assert len(slices) == 4 * (1 + 2 + 2 * (1 + 3))
    assert [event["ts"] for event in slices] == sorted(event["ts"] for event in slices)
    assert slices[0]["ts"] == 0
    assert all(event["dur"] >= 0 for event in slices)
    named = [e for e in json.loads(trace)["traceEvents"] if e["ph"] == "M"]
    assert {e["args"]["name"] for e in named if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    assert {e["args"]["name"] for e in named if e["name"] == "thread_name"} == {"call 3", "call 4"}


def test_slices_of_a_track_lie_in_or_beside_one_another() -> None:
    """What a viewer needs: no two overlap without one holding the other."""
    slices = slices_of(made(0, num_rounds=5).to_trace())
    # As numbers of nanoseconds, which is what a viewer makes of them.
    spans = [(round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)) for e in slices]
    open_ends: list[int] = []
    for start, end in spans:
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1]
        open_ends.append(end)
    rounds = [span for span, event in zip(spans, slices, strict=True) if "round " in event["name"]]
    assert all(one[1] <= other[0] for one, other in pairwise(rounds))


def test_save(tmp_path: Path) -> None:
    report = made(0)
    report.save(tmp_path / "run.json")
    report.save(tmp_path / "run.trace")
    assert json.loads((tmp_path / "run.json").read_text()) == report.to_dict()
    assert (tmp_path / "run.trace").read_text() == report.to_trace()
    with pytest.raises(rs.FormatError, match=r"must be \.json or \.trace"):
        report.save(tmp_path / "run.pdf")


def test_a_report_is_read_without_torch() -> None:
    code = "import sys, reshard; reshard.RunReport; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
