"""Inside a rank: raise at one bytecode of a call after the other, as a signal handler could."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from reshard.live.session import mailbox, session
from tests.live.session.interrupts import Moves, RaisedByHandlerError, Seen, is_inside, size_of

THEN = {"start": "run", "same": "move", "local": "move"}
"""What is called after a call of each kind, where it is not the same: it must have messages."""


class Tracer:
    """Raises at the n-th bytecode of this library that is executed inside a call."""

    def __init__(self, at: int, counts: Callable[[], bool]) -> None:
        self.at, self.counts = at, counts
        self.count = 0
        self.raised = 0.0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if "/reshard/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not self.raised and self.counts() and is_inside(frame, False):
            self.count += 1
            if self.count == self.at:
                self.raised = time.monotonic()
                raise RaisedByHandlerError(f"bytecode {self.count} in {frame.f_code.co_name}")
        return self

    def run(self, action: Callable[[], Any]) -> Any:
        sys.settrace(self)
        try:
            return action()
        finally:
            sys.settrace(None)


class FirstWait:
    """Raises when the call waits for the first time, so that what follows is error handling."""

    def __init__(self, twice: bool) -> None:
        self._twice = twice
        self.raised = False

    def __enter__(self) -> FirstWait:
        self._step = mailbox.Mailbox.step
        if self._twice:
            mailbox.Mailbox.step = self.step  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *_: object) -> None:
        mailbox.Mailbox.step = self._step  # type: ignore[method-assign]

    def step(self, *args: Any) -> None:
        if not self.raised:
            self.raised = True
            raise KeyboardInterrupt
        self._step(*args)


def disturb(
    rank: int, num_ranks: int, kind: str, victim: int, twice: bool, which: list[int]
) -> list[tuple[Seen, Seen]]:
    """A call in which the victim raises at a bytecode, and a call that must be right, for each."""
    # A call in flight that is never started is left out: there calls need tags.
    moves = Moves(rank, num_ranks, tagged=kind == "start")
    for number in range(3):
        for one in dict.fromkeys((kind, THEN.get(kind, kind))):
            moves.make(one, number, size_of(one))
    return [
        (_tried(moves, kind, 2 * n + 10, at if rank == victim else 0, twice),
         _tried(moves, THEN.get(kind, kind), 2 * n + 11, 0, False))
        for n, at in enumerate(which)
    ]  # fmt: skip


def _tried(moves: Moves, kind: str, number: int, at: int, twice: bool) -> Seen:
    seen = Seen(time.monotonic())
    first = FirstWait(twice and at > 0)
    tracer = Tracer(at, lambda: first.raised or not twice)
    try:
        with first:
            action: Callable[[], Any] = lambda: moves.make(kind, number, size_of(kind))  # noqa: E731
            found = tracer.run(action) if at else action()
        seen.numbers = sorted({float(n) for tensor in found for n in tensor.unique()})
    except BaseException as error:
        seen.outcome, seen.message = type(error).__name__, str(error)[:300]
    seen.ended = time.monotonic()
    seen.raised = [tracer.raised] if tracer.raised else []
    if at and not tracer.raised:
        seen.message = f"only {tracer.count} bytecodes"
    session.sessions()
    return seen
