"""Why a call failed, as all its ranks are told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from reshard import errors
from reshard.errors import (
    DisagreementError,
    LiveError,
    MoveTimeoutError,
    PeerLostError,
    ReshardError,
    TensorError,
)

__all__ = ["MOST_CHARACTERS", "MOST_RANKS", "Cause"]

MOST_CHARACTERS = 2000
"""A longer text is cut short: the same for all ranks, whichever way they are told."""
MOST_RANKS = 256
"""Ranks, with repetition, of the sessions whose calls a cause names. Of more it names none: a rank
then counts those calls when it finds the circle itself."""

_ERRORS: dict[str, type[LiveError]] = {
    "lost": PeerLostError,
    "late": MoveTimeoutError,
    "disagree": DisagreementError,
    "tensor": TensorError,
}


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a call failed, as all its ranks are told."""

    kind: str
    text: str
    tag: int = 0
    """The code of the failed call's tag; 0 if it has none."""
    calls: tuple[tuple[tuple[int, ...], int], ...] = ()
    """Calls of other sessions that failed with it, by their ranks: they count as made."""

    def to_json(self) -> str:
        """As it stands in the store, and follows a message; never longer than that may be."""
        text = self.text
        if len(text) > MOST_CHARACTERS:
            text = text[: MOST_CHARACTERS - 3] + "..."
        data: dict[str, Any] = {"kind": self.kind, "text": text, "tag": self.tag}
        if 0 < sum(len(ranks) for ranks, _ in self.calls) <= MOST_RANKS:
            data["calls"] = self.calls
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: bytes) -> Cause:
        """Read what ``to_json`` wrote; anything else is told as it is."""
        try:
            data = json.loads(text)
            listed = data.get("calls", [])
            calls = tuple((tuple(map(int, ranks)), int(call)) for ranks, call in listed)
            return cls(str(data["kind"]), str(data["text"]), int(data.get("tag", 0)), calls)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return cls("error", f"a cause that cannot be read: {text[:200]!r}")

    @classmethod
    def of(cls, error: LiveError) -> Cause:
        """The cause that an error tells of."""
        kinds = [kind for kind, known in _ERRORS.items() if type(error) is known]
        return cls(kinds[0] if kinds else "error", str(error))

    @classmethod
    def of_any(cls, error: BaseException, rank: int) -> Cause:
        """The cause when something goes wrong on a rank that a move does not know of."""
        if isinstance(error, LiveError):
            return cls.of(error)
        if isinstance(error, KeyboardInterrupt):
            return cls("error", f"rank {rank} was interrupted")
        if isinstance(error, ReshardError):
            return cls(type(error).__name__, f"rank {rank} was given a wrong request: {error}")
        return cls("error", f"rank {rank} failed with {error!r}")

    @classmethod
    def after(cls, error: LiveError) -> Cause:
        """The cause of what fails because something before it did."""
        return cls.of(error).made_earlier()

    def made_earlier(self) -> Cause:
        """The same, told by a move that fails because of it."""
        earlier = "a move before it failed: "
        return Cause(self.kind, earlier + self.text.removeprefix(earlier))

    def error(self, status: str) -> ReshardError:
        """The exception that a rank raises, with how far it had come."""
        tail = f" ({status})" if status else ""
        kind = _ERRORS.get(self.kind) or getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, ReshardError)):
            kind = LiveError
        return kind(self.text + tail)
