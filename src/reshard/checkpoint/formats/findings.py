"""What is wrong with a checkpoint, collected: inspecting lists all of it, reading raises the first.

Damage and what is merely not supported are kept apart: a copy from a backup mends only the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from reshard.errors import DamageError, UnsupportedError
from reshard.text import quoted

__all__ = ["Findings"]

MAX_NOTED = 1000


@dataclass(slots=True)
class Findings:
    """What is wrong with a checkpoint, and what its reader should know; one line each."""

    damage: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    """What is sound, as far as can be seen, and is not read."""
    notes: list[str] = field(default_factory=list)

    def noting(self) -> Noting:
        """Note what is damaged or not supported inside, and go on after it."""
        return Noting(self)

    def found(self, what: str) -> None:
        """Note one damage; of thousands, the first tell enough."""
        if len(self.damage) < MAX_NOTED:
            self.damage.append(what)

    def refuse(self, what: str) -> None:
        """Note one thing that is not supported."""
        if len(self.unsupported) < MAX_NOTED:
            self.unsupported.append(what)

    def refuse_doubled(self, doubled: Mapping[tuple[str, str], Sequence[str]], advice: str) -> None:
        """Note tensors that are in two files each: nothing says which of these counts."""
        for (one, two), names in doubled.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.refuse(
                f"tensor {quoted(names[0])}{more} is in {one} and in {two}, and nothing says which "
                f"of them counts: {advice}"
            )

    @property
    def any(self) -> bool:
        """Whether something could not be read."""
        return bool(self.damage or self.unsupported)

    def note(self, what: str) -> None:
        """Note what is no damage and yet worth knowing."""
        if len(self.notes) < MAX_NOTED:
            self.notes.append(what)

    def check(self, root: str) -> None:
        """Raise what was found; damage first."""
        for kind, found in ((DamageError, self.damage), (UnsupportedError, self.unsupported)):
            if found:
                more = len(found) - 1
                others = f" (and {more} more: reshard inspect {root} lists them)" if more else ""
                raise kind(f"{found[0]}{others}")


@dataclass(frozen=True, slots=True)
class Noting:
    """Takes errors as findings; a class, because a hundred thousand generators take a second."""

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
