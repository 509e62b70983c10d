"""Problems found while reading a checkpoint: an inspection lists them all, a read raises the first.

Damage and unsupported content are kept apart: only damage can be repaired from a backup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from reshard.errors import DamageError, UnsupportedError
from reshard.text import and_more, quoted

__all__ = ["Findings"]

MAX_NOTED = 1000


@dataclass(slots=True)
class Findings:
    """Problems of a checkpoint, and notes for its reader; one line each."""

    damage: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    """Content that is not damaged, as far as is known, and cannot be read."""
    notes: list[str] = field(default_factory=list)

    def noting(self) -> Noting:
        """A ``with`` block that notes DamageError and UnsupportedError and goes on after it."""
        return Noting(self)

    def found(self, what: str) -> None:
        """Note one damage, up to a limit."""
        if len(self.damage) < MAX_NOTED:
            self.damage.append(what)

    def refuse(self, what: str) -> None:
        """Note something that is not supported, up to a limit."""
        if len(self.unsupported) < MAX_NOTED:
            self.unsupported.append(what)

    def refuse_doubled(self, doubled: Mapping[tuple[str, str], Sequence[str]], advice: str) -> None:
        """Note tensors that are in two files each, where nothing decides between these."""
        for (one, two), names in doubled.items():
            tensors = and_more([quoted(name) for name in names])
            self.refuse(
                f"tensor {tensors} is in {one} and in {two}, and nothing says which "
                f"of them counts: {advice}"
            )

    @property
    def any(self) -> bool:
        """Whether something could not be read."""
        return bool(self.damage or self.unsupported)

    def note(self, what: str) -> None:
        """Note something that is no problem but worth knowing."""
        if len(self.notes) < MAX_NOTED:
            self.notes.append(what)

    def check(self, root: str) -> None:
        """Raise the first problem; damage before unsupported content."""
        for kind, found in ((DamageError, self.damage), (UnsupportedError, self.unsupported)):
            if found:
                more = len(found) - 1
                others = f" (and {more} more: reshard inspect {root} lists them)" if more else ""
                raise kind(f"{found[0]}{others}")


@dataclass(frozen=True, slots=True)
class Noting:
    """Notes errors as findings; a class, because 100,000 generators take a second."""

    findings: Findings

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, DamageError):
            self.findings.found(str(error))
        elif isinstance(error, UnsupportedError):
            self.findings.refuse(str(error))
        else:
            return False
        return True
