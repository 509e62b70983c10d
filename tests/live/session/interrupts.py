"""Inside a rank: moves that signal handlers interrupt at random moments, and what came of them.

Every iteration moves its own number. A result with another number in it is data of another call.
"""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import reshard as rs
from reshard.live.failure import cleanup
from reshard.live.gather import gather_bytes

ROWS, COLUMNS = 24, 48
LARGE = 504
AGAIN = 0.0005


class RaisedByHandlerError(Exception):
    """What a signal handler raises."""


@dataclass(frozen=True)
class Call:
    """What one rank does in one iteration."""

    kind: str
    """``move``, ``run``, ``large`` or ``start``: three calls in flight."""
    late: float
    """Seconds before the call."""
    interrupts: tuple[float, ...]
    """Seconds after which signals come, from the beginning of the call."""
    skips: bool = False
    """Whether this rank leaves the call out."""


@dataclass
class Seen:
    """What one rank saw in one iteration."""

    began: float
    ended: float = 0.0
    outcome: str = "moved"
    message: str = ""
    numbers: list[float] = field(default_factory=list)
    raised: list[float] = field(default_factory=list)
    """When handlers raised."""


def script(seed: int, num_ranks: int, num_calls: int, skips: bool) -> list[list[Call]]:
    """What every rank does, by rank and iteration: the same list on every rank."""
    rng = random.Random(seed)
    calls: list[list[Call]] = [[] for _ in range(num_ranks)]
    left = 0
    victim = 0
    for number in range(num_calls):
        kind = rng.choice(["move", "move", "run", "large", "start"])
        if not left and rng.random() < 0.4:
            left, victim = rng.randint(1, 3), rng.randrange(num_ranks)
        for rank in range(num_ranks):
            late = rng.choice([0, 0, 0, rng.random() * 0.01, rng.random() * 0.1])
            times: tuple[float, ...] = ()
            if left and rank == victim:
                times = tuple(
                    sorted(rng.choice([1e-4, 1e-3, 1e-2, 0.05]) * rng.random() for _ in range(left))
                )
            skip = skips and rng.random() < 0.1 and number < num_calls - 4
            calls[rank].append(Call(kind, late, times, skip))
        left -= bool(left)
    return calls


def is_inside(frame: FrameType | None, anywhere: bool) -> bool:
    """Whether a call has begun, which it has when it has a ticket; or anywhere around it."""
    while frame is not None:
        if anywhere and frame.f_code is Moves.make.__code__:
            return True
        if frame.f_code is cleanup.with_ticket.__code__ and "ticket" in frame.f_locals:
            return True
        frame = frame.f_back
    return False


class Interrupter:
    """Raises in the main thread, at given times, and only inside a call."""

    def __init__(self, anywhere: bool) -> None:
        self._anywhere = anywhere
        self._times: list[float] = []
        self.raised: list[float] = []
        self._on = False
        signal.signal(signal.SIGALRM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def arm(self, times: tuple[float, ...]) -> None:
        self.raised, self._times = [], [time.monotonic() + one for one in times]
        self._on = bool(times)
        self._next()

    def disarm(self) -> None:
        self._on = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _next(self) -> None:
        if self._times:
            left = max(self._times[0] - time.monotonic(), 1e-5)
            signal.setitimer(signal.ITIMER_REAL, left)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._on or not self._times:
            return
        if not is_inside(frame, self._anywhere):
            signal.setitimer(signal.ITIMER_REAL, AGAIN)
            return
        self._times.pop(0)
        self._next()
        self.raised.append(time.monotonic())
        if len(self.raised) % 2:
            raise KeyboardInterrupt
        raise RaisedByHandlerError("by a signal")


class Moves:
    """The moves of one rank."""

    def __init__(self, rank: int, num_ranks: int, tagged: bool) -> None:
        mesh = rs.Mesh(x=num_ranks)
        self.layouts = rs.Layout(mesh, "x -"), rs.Layout(mesh, "- x")
        self.whole = rs.Layout(mesh, "- -")
        self.plans = {
            size: rs.plan(*self.layouts, shape=(size, size), dtype="float32", memory=memory)
            for size, memory in ((ROWS, None), (COLUMNS, 1024), (LARGE, None))
        }
        self.rank, self.num_ranks, self.tagged = rank, num_ranks, tagged

    def make(self, kind: str, iteration: int, size: int) -> list[torch.Tensor]:
        rows = torch.full((size // self.num_ranks, size), float(iteration))
        options: Any = {"timeout": 20.0}
        if self.tagged:
            # A call that another rank leaves out in its last iterations is waited for in vain.
            options = {"timeout": 4.0, "tag": iteration}
        if kind == "move" and not self.tagged:
            return [rs.move(rows, *self.layouts, shape=(size, size))]
        if kind == "same":
            return [rs.move(rows, self.layouts[0], self.layouts[0], shape=(size, size))]
        if kind == "local":
            full = torch.full((size, size), float(iteration))
            return [rs.move(full, self.whole, self.layouts[0], shape=(size, size))]
        if kind in ("move", "large"):
            return [rs.move(rows, *self.layouts, shape=(size, size), **options)]
        if kind == "gather":
            group = dist.group.WORLD
            assert group is not None
            data, what = str(iteration).encode() * 2000, "a test"
            found = gather_bytes(group, data, timeout=20.0, what=what, limit=1 << 20)
            assert found is not None
            assert {len(one) for one in found.values()} == {len(data)}
            numbers = [int(one[: len(data) // 2000]) for one in found.values()]
            return [torch.tensor(numbers)]
        if kind == "run":
            return [self.plans[size].run({"tensor": rows}, **options)["tensor"]]
        handles = [self.plans[size].start({"tensor": rows}, **options) for _ in range(3)]
        return [handle.wait()["tensor"] for handle in handles]


def size_of(kind: str) -> int:
    return {"start": COLUMNS, "large": LARGE, "gather": 0}.get(kind, ROWS)


def run_on_rank(rank: int, num_ranks: int, seed: int, num_calls: int, anywhere: bool) -> list[Seen]:
    """Make the calls of a script. With ``anywhere`` signals also come between calls, and tags are
    given, as a program must do then."""
    moves, interrupter = Moves(rank, num_ranks, anywhere), Interrupter(anywhere)
    seen: list[Seen] = []
    for iteration, call in enumerate(script(seed, num_ranks, num_calls, anywhere)[rank]):
        if call.kind == "start" and not anywhere:
            call = Call("run", call.late, call.interrupts)
        time.sleep(call.late)
        one = Seen(time.monotonic())
        if call.skips:
            one.outcome = "skipped"
        else:
            try:
                interrupter.arm(call.interrupts)
                found = moves.make(call.kind, iteration, size_of(call.kind))
                interrupter.disarm()
                one.numbers = sorted({float(n) for tensor in found for n in tensor.unique()})
            except BaseException as error:
                interrupter.disarm()
                one.outcome, one.message = type(error).__name__, str(error)[:300]
        interrupter.disarm()
        one.raised = interrupter.raised if call.interrupts else []
        one.ended = time.monotonic()
        seen.append(one)
    return seen
