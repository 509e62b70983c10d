"""The reports of a load and a save."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from reshard.text import and_more, count, format_bytes, quoted

__all__ = ["LoadReport", "SaveReport"]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The figures of a load; bytes are those of all ranks together."""

    source: str
    format: str
    num_tensors: int
    unique_bytes: int
    """Bytes of the stored tensors that any rank needs, each once."""
    bytes_read: int
    bytes_moved: int
    """Bytes that were sent from the rank that read them to another."""
    seconds: float
    checked: bool
    """Whether there were digests, which were compared."""
    num_ranks: int = 1
    missing: tuple[str, ...] = ()
    """Names that the checkpoint lacks (``strict=False``): these tensors are unchanged."""
    tied: tuple[str, ...] = ()
    """Names whose memory was loaded under another name, to which they are tied."""
    unexpected: tuple[str, ...] = ()
    """Names that only the checkpoint has."""
    left_alone: tuple[str, ...] = ()
    """Entries of the state dict that are not tensors."""
    notes: tuple[str, ...] = ()

    @property
    def amplification(self) -> float:
        """Bytes read per byte needed."""
        return self.bytes_read / self.unique_bytes if self.unique_bytes else 1.0

    def to_json(self) -> str:
        """The report as JSON text."""
        return _json(self, amplification=round(self.amplification, 4))

    def __str__(self) -> str:
        read = f"{format_bytes(self.bytes_read)}, {self.amplification:.2f} x what is needed"
        lines = [
            f"loaded {count(self.num_tensors, 'tensor')} from {self.source}",
            f"  format   {self.format}{', checked' * self.checked}",
            f"  read     {read}, by {count(self.num_ranks, 'rank')}",
            f"  moved    {format_bytes(self.bytes_moved)} between ranks",
            f"  time     {self.seconds:.1f} s",
        ]
        for word, names in (
            ("missing", self.missing),
            ("tied", self.tied),
            ("unused", self.unexpected),
            ("no tensor", self.left_alone),
        ):
            lines += [f"  {word:<8} {_some(names)}"] if names else []
        return "\n".join([*lines, *(f"  note     {note}" for note in self.notes[:5])])


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The figures of a save; bytes are those of all ranks together."""

    target: str
    format: str
    num_tensors: int
    num_files: int
    """Files that hold tensors."""
    unique_bytes: int
    """Bytes of all tensors, each once."""
    bytes_written: int
    """Bytes of all files."""
    busiest_bytes: int
    """The most bytes that one rank has written."""
    seconds: float
    checksums: bool
    num_ranks: int = 1
    left_out: tuple[str, ...] = ()
    """Entries that are not tensors and that the format cannot hold."""
    left_alone: tuple[str, ...] = ()
    """Files and folders at the destination that were not part of the replaced checkpoint."""

    def to_json(self) -> str:
        """The report as JSON text."""
        return _json(self)

    def __str__(self) -> str:
        files = count(self.num_files, "file")
        ranks = f"by {count(self.num_ranks, 'rank')}"
        busiest = f"at most {format_bytes(self.busiest_bytes)} by one"
        lines = [
            f"saved {count(self.num_tensors, 'tensor')} to {self.target}",
            f"  format   {self.format}, {files}{', with checksums' * self.checksums}",
            f"  written  {format_bytes(self.bytes_written)} {ranks}, {busiest}",
            f"  time     {self.seconds:.1f} s",
        ]
        lines += [f"  left out {_some(self.left_out)}"] if self.left_out else []
        lines += [f"  kept     {_some(self.left_alone)}"] if self.left_alone else []
        return "\n".join(lines)


def _json(report: Any, **more: Any) -> str:
    return json.dumps({**asdict(report), **more})


def _some(names: tuple[str, ...]) -> str:
    """A few names, printable and on one line."""
    return and_more([quoted(name)[1:-1] for name in names], 5)
