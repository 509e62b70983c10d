"""What became of a function on one rank, and the errors that tell it."""

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Returned:
    """The function came back with a value."""

    value: Any
    seconds: float
    """From the call to its end, on the rank."""
    ended: float
    """`time.monotonic()` at the end: one clock for all processes of a host."""


@dataclass(frozen=True)
class Raised:
    """The function raised; KeyboardInterrupt and SystemExit count as well."""

    kind: str
    """The name of the exception's type, without its module."""
    message: str
    traceback: str
    seconds: float
    ended: float

    def __str__(self) -> str:
        return f"raised {self.kind}: {self.message}\n{self.traceback}"


@dataclass(frozen=True)
class Died:
    """The process ended before the function did."""

    exit_code: int | None
    """Negative for a signal, as `multiprocessing` has it."""
    stacks: str
    """What faulthandler wrote last; a crash in C leaves its stack here."""
    ended: float
    """`time.monotonic()` when the death was noticed."""

    def __str__(self) -> str:
        return f"died: {describe_exit(self.exit_code)}\n{self.stacks}"


@dataclass(frozen=True)
class Told:
    """Not an end: a value that the function sent on its way."""

    value: Any


Outcome: TypeAlias = Returned | Raised | Died


class RankError(Exception):
    """Some ranks raised or died; the message has the traceback of each."""

    def __init__(self, message: str, outcomes: Mapping[int, Outcome] | None = None) -> None:
        super().__init__(message)
        self.outcomes = dict(outcomes or {})


class HangError(RankError):
    """Some ranks did not end in time; the message has the stacks of all ranks."""


def describe_exit(exit_code: int | None) -> str:
    """`killed by SIGKILL`, `exited with 3`."""
    if exit_code is None:
        return "hung up and did not exit"
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exited with {exit_code}"


def failures(outcomes: Mapping[int, Outcome]) -> dict[int, Raised | Died]:
    return {rank: end for rank, end in outcomes.items() if not isinstance(end, Returned)}


def describe_failures(outcomes: Mapping[int, Outcome]) -> str:
    """Each failure once, with all the ranks that ended in the same way."""
    ranks_of: dict[str, list[int]] = {}
    for rank, end in sorted(failures(outcomes).items()):
        ranks_of.setdefault(str(end).rstrip(), []).append(rank)
    return "\n\n".join(f"{name_ranks(ranks)} {text}" for text, ranks in ranks_of.items())


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 2`."""
    ranks = list(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
