"""The report of a conversion or of a dry run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from reshard.text import and_more, count, format_bytes, quoted

__all__ = ["ConvertReport"]


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """The figures of a conversion, or of its dry run."""

    source: str
    target: str
    format: str
    dry_run: bool
    num_tensors: int
    num_files: int
    """Files that hold tensors, as ``inspect`` counts them."""
    num_others: int
    """Files that are copied unchanged: a config, a tokenizer."""
    unique_bytes: int
    """Bytes of all source tensors that are used, each element once."""
    bytes_read: int
    bytes_written: int
    bytes_resumed: int
    """Bytes that an earlier run had already written."""
    memory: int
    """The most bytes of all buffers."""
    workers: int
    disk_needed: int
    disk_free: int | None
    seconds: float | None
    """Duration; None for a dry run."""
    checksums: bool
    was_complete: bool = False
    """Whether an earlier run of the same request had written all of it."""
    left_out: tuple[str, ...] = ()
    """Entries and values that the format cannot hold, parts of tensors that no name takes, and
    files of other tensors in the source folder.
    """
    left_alone: tuple[str, ...] = ()
    """Files and folders at the destination that were not part of the replaced checkpoint."""
    notes: tuple[str, ...] = ()
    """Remarks on the source and the layouts."""
    rank: int = 0
    num_ranks: int = 1

    @property
    def amplification(self) -> float:
        """Bytes read per byte needed."""
        return self.bytes_read / self.unique_bytes if self.unique_bytes else 1.0

    @property
    def gb_per_second(self) -> float | None:
        """Gigabytes written per second."""
        return self.bytes_written / self.seconds / 1e9 if self.seconds else None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        rate = self.gb_per_second
        extra = {"amplification": round(self.amplification, 4), "gb_per_second": rate}
        names = ("left_out", "left_alone", "notes")
        lists = {name: list(getattr(self, name)) for name in names}
        return {**asdict(self), **lists, **extra}

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        tensors = count(self.num_tensors, "tensor")
        if self.was_complete:
            return [f"already complete: {self.target} has {tensors}, written by an earlier run"]
        verb = "would write" if self.dry_run else "wrote"
        lines = [
            f"{verb} {tensors} to {self.target}",
            f"  format   {self.format}, {self._files()}",
            f"  read     {format_bytes(self.bytes_read)}, {self.amplification:.2f} x the tensors",
            f"  written  {format_bytes(self.bytes_written)}{self._resumed()}",
            f"  memory   {format_bytes(self.memory)} in buffers, workers: {self.workers}",
        ]
        if self.dry_run:
            free = "unknown" if self.disk_free is None else format_bytes(self.disk_free)
            lines.append(f"  disk     {format_bytes(self.disk_needed)} needed, {free} free")
        lines += self._time()
        if self.left_out:
            reason = "no place in this format, taken by no name, or no part of the source"
            lines.append(f"  left out {_some(self.left_out)}: {reason}")
        if self.left_alone:
            reason = "no part of the checkpoint that is replaced"
            lines.append(f"  kept     {_some(self.left_alone)}: {reason}")
        return lines + [f"  note     {note}" for note in self.notes[:5]]

    def _files(self) -> str:
        others = f", {self.num_others} copied that hold no tensors" if self.num_others else ""
        return count(self.num_files, "file") + others

    def _resumed(self) -> str:
        resumed = format_bytes(self.bytes_resumed)
        return f", and {resumed} by the run before" if self.bytes_resumed else ""

    def _time(self) -> list[str]:
        if self.seconds is None:
            return []
        rate = f", {self.gb_per_second:.2f} GB/s" if self.gb_per_second else ""
        return [f"  time     {self.seconds:.1f} s{rate}"]


def _some(names: tuple[str, ...]) -> str:
    """A few names, printable and on one line."""
    return and_more([quoted(name)[1:-1] for name in names], 5)
