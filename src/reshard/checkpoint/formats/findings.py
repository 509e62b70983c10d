"""Damage, collected: inspecting tells all that is wrong, reading stops at the first of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from reshard.errors import DamageError

__all__ = ["Findings"]

MAX_NOTED = 1000


@dataclass(slots=True)
class Findings:
    """What is wrong with a checkpoint, and what its reader should know; one line each."""

    damage: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note damage that is found inside, and go on after it."""
        try:
            yield
        except DamageError as error:
            self.found(str(error))

    def found(self, what: str) -> None:
        """Note one damage; of thousands, the first tell enough."""
        if len(self.damage) < MAX_NOTED:
            self.damage.append(what)

    def note(self, what: str) -> None:
        """Note what is no damage and yet worth knowing."""
        if len(self.notes) < MAX_NOTED:
            self.notes.append(what)

    def check(self, root: str) -> None:
        """Raise what was found."""
        if self.damage:
            more = len(self.damage) - 1
            others = f" (and {more} more: reshard inspect {root} lists them)" if more else ""
            raise DamageError(f"{self.damage[0]}{others}")
