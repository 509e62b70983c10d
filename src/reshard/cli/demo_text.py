"""What ``reshard demo`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.cli.demo_live import Live, NotLive
from reshard.show.run_report import format_seconds
from reshard.text import align, format_bytes

if TYPE_CHECKING:
    from reshard.cli.demo import Comparison
    from reshard.cli.demo_files import Converted
    from reshard.planning.plan import Plan

__all__ = ["files_text", "introduction", "live_text", "proof_text", "simulated_text"]


def introduction(move: Plan, model: str, sides: tuple[str, str, str]) -> str:
    """What moves from where to where, and its plan."""
    have, fsdp, want = sides
    return (
        f"A trainer holds {model} on mesh {have}, tensors cut by tp and each shard by {fsdp}.\n"
        f"Two serving replicas want it on mesh {want}.\n\n{move}\n"
    )


def proof_text(move: Plan, seconds: float) -> str:
    """What was proven."""
    return (
        f"Proven in {seconds:.1f} s: every element of all {len(move.want)} tensors is written "
        "exactly once on every rank that wants it, by a rank that holds it.\n"
    )


def simulated_text(result: Comparison) -> str:
    """What a simulated move did, beside what its plan states."""
    peaks = [format_bytes(n) for n in (result.stated_peak_bytes, result.peak_bytes)]
    rows = [
        ("", "plan states", "happened"),
        ("bytes", f"{result.stated_wire_bytes:,}", f"{result.wire_bytes:,}"),
        ("messages", f"{result.stated_messages:,}", f"{result.messages:,}"),
        ("peak staging", f"<= {peaks[0]}", peaks[1]),
    ]
    found = "equal" if result.arrays_equal else "DIFFER FROM"
    return _section(
        f"Simulated on numpy arrays: {result.what} ({result.num_tensors} tensors)",
        *align(rows, right={1, 2}),
        f"all arrays {found} the tensors cut by the destination layout",
        f"{'as stated' if result.holds else 'NOT as stated'}, in {result.seconds:.1f} s",
    )


def live_text(what: str, ran: Live | NotLive) -> str:
    """What the move did between processes, beside what its plan states."""
    if isinstance(ran, NotLive):
        return _section(f"{'Not' if ran.holds else 'NOT'} run live: {ran.reason}")
    rows = [
        ("", "plan states", "happened"),
        ("bytes", f"{ran.stated_wire_bytes:,}", f"{ran.wire_bytes:,}"),
        ("messages", f"{ran.stated_messages:,}", f"{ran.messages:,}"),
    ]
    found = "equal" if ran.equal else "DIFFER FROM"
    first, second = (format_seconds(ran.seconds(call)) for call in (0, 1))
    speed = f"{ran.wire_bytes / ran.seconds(1) / 1e9:.2f} GB/s"
    return _section(
        f"Run live on {len(ran.reports[-1])} processes of this machine: {what}",
        *align(rows, right={1, 2}),
        f"all values on every rank {found} the simulated ones",
        f"{'as stated' if ran.holds else 'NOT as stated'}, in {second}: {speed} over all ranks",
        f"before that {ran.start_seconds:.1f} s to load torch and start, and a first call of "
        f"{first} to meet and compare",
        "",
        "The busiest rank:",
        *str(ran.busiest).splitlines(),
    )


def files_text(files: Converted) -> str:
    """What the conversion of a checkpoint did."""
    read, written = format_bytes(files.bytes_read), format_bytes(files.bytes_written)
    return _section(
        "Converted on disk, without torch: a small Llama from 4-way to 2-way tensor parallelism",
        f"before  {files.found}",
        f"after   {files.made}",
        f"read {read}, {files.amplification:.2f} x the tensors, and wrote {written}, "
        f"in {files.seconds:.2f} s",
        f"{'verified: same values' if files.equal else 'VALUES DIFFER'}, bit by bit, "
        f"in {files.verify_seconds:.2f} s",
    )


def _section(title: str, *lines: str) -> str:
    return "\n".join([title, *(f"  {line}".rstrip() for line in lines), ""])
