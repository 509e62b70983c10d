"""Why a call failed, as its ranks tell each other."""

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

__all__ = ["MAX_CHARACTERS", "MAX_RANKS", "Calls", "Cause"]

MAX_CHARACTERS = 2000
"""A longer text is shortened, the same for all ranks, whichever way they are told."""
MAX_RANKS = 256
"""Ranks, counted with repetition, of the sessions whose calls a cause names. Above that it names no
calls: a rank then counts those calls when it finds the deadlock itself."""

Calls = tuple[tuple[tuple[int, ...], int], ...]
"""Calls by the ranks of their sessions, and their numbers there."""

_ERRORS: dict[str, type[LiveError]] = {
    "lost": PeerLostError,
    "late": MoveTimeoutError,
    "disagree": DisagreementError,
    "tensor": TensorError,
}


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a call failed."""

    kind: str
    """``lost``, ``late``, ``disagree``, ``tensor``, ``error``, or the name of a `ReshardError`."""
    text: str
    tag: int = 0
    """The code of the failed call's tag; 0 if it has none."""
    calls: Calls = ()
    """Calls of other sessions that failed for the same reason: they count as made."""

    def to_json(self) -> str:
        """The text that is stored and sent; bounded in size."""
        text = self.text
        if len(text) > MAX_CHARACTERS:
            text = text[: MAX_CHARACTERS - 3] + "..."
        data: dict[str, Any] = {"kind": self.kind, "text": text, "tag": self.tag}
        if 0 < sum(len(ranks) for ranks, _ in self.calls) <= MAX_RANKS:
            data["calls"] = self.calls
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: bytes) -> Cause:
        """Read what ``to_json`` wrote; anything else becomes a cause that quotes it."""
        try:
            data = json.loads(text)
            listed = data.get("calls", [])
            calls = tuple((tuple(map(int, ranks)), int(call)) for ranks, call in listed)
            return cls(str(data["kind"]), str(data["text"]), int(data.get("tag", 0)), calls)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return cls("error", f"a cause that cannot be read: {text[:200]!r}")

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Cause:
        """The cause that an exception on a rank stands for."""
        if isinstance(error, LiveError):
            kinds = [kind for kind, known in _ERRORS.items() if type(error) is known]
            return cls(kinds[0] if kinds else "error", str(error))
        if isinstance(error, KeyboardInterrupt):
            return cls("error", f"rank {rank} was interrupted")
        if isinstance(error, ReshardError):
            return cls(type(error).__name__, f"rank {rank} was given a wrong request: {error}")
        return cls("error", f"rank {rank} failed with {error!r}")

    def of_earlier_call(self) -> Cause:
        """The same cause for a later call, which fails because of it."""
        earlier = "a move before it failed: "
        return Cause(self.kind, earlier + self.text.removeprefix(earlier))

    def error(self, status: str) -> ReshardError:
        """The exception that a rank raises; ``status`` says how far the rank had come."""
        tail = f" ({status})" if status else ""
        kind = _ERRORS.get(self.kind) or getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, ReshardError)):
            kind = LiveError
        return kind(self.text + tail)
