"""Ctrl-C on one rank: it gets its KeyboardInterrupt, and the others an error that names it."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from reshard.errors import LiveError
from reshard.live.failure.watch import Watch
from reshard.live.transport.host import HostTransport
from tests.live.failure.faults import TRANSPORTS, Tried, check_same, plan_of, source_of, tried
from tests.ranks.outcome import Returned
from tests.ranks.pool import fresh_ranks
from tests.ranks.rank import tell
from tests.soak import soaking, within

VICTIM, LATE = 1, 3
LATE_SECONDS = 2.0


def move_on_and_on(rank: int, transport: str, how: str) -> tuple[Tried, str, int]:
    plan = plan_of((1024, 1024), memory="32KiB")
    given = source_of(plan, rank)
    options: Any = {"transport": transport, "timeout": 10}
    if how != "first":
        plan.run(given, **options)

    made = 0

    def move() -> None:
        nonlocal made
        tell("ready")
        if how == "first" and rank == LATE:
            time.sleep(LATE_SECONDS)  # the others wait for it to make connections
        while True:
            made += 1
            if how == "handle":
                finished(plan.start(given, **options))
            else:
                plan.run(given, **options)

    outcome = tried(lambda: inside(move))
    catch_up(made, lambda: plan.run(given, **options))
    return outcome, torch.equal(*again(plan, given, options)) * "right", made


def catch_up(made: int, move: Callable[[], object]) -> None:
    """Make as many calls as the rank that made most: one that completed the failed call has made
    one more, which has failed as well."""
    most = torch.tensor(made)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    for _ in range(made, int(most)):
        with suppress(LiveError):
            move()
    dist.barrier()


class OutsideError(Exception):
    """The interrupt came between two calls of ours: nobody can hear of it but the test."""


def finished(handle: Any) -> None:
    try:
        handle.wait()
    except KeyboardInterrupt:
        # The thread of the move may have been done already: then no call was interrupted.
        with suppress(LiveError):
            handle.wait()
            raise OutsideError from None
        raise


def inside(move: Callable[[], None]) -> None:
    try:
        move()
    except KeyboardInterrupt as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if not any("reshard/live" in file for file in files):
            raise OutsideError from None
        raise


def again(plan: Any, given: Any, options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The next call, twice."""
    first, second = (plan.run(given, **options)["tensor"] for _ in range(2))
    return first, second


@pytest.mark.parametrize("transport", TRANSPORTS if soaking() else ["auto"])
@pytest.mark.parametrize("how", ["run", "handle", "first"])
def test_an_interrupt(how: str, transport: str) -> None:
    if not any(interrupted_well(how, transport) for _ in range(3)):
        raise AssertionError("every interrupt came between two calls of some rank")


def interrupted_well(how: str, transport: str) -> bool:
    """Whether the interrupt came while all were in the same call, and all was well then."""
    with fresh_ranks(4) as ranks:
        job = ranks.begin(move_on_and_on, transport, how)
        for rank in range(4):
            job.hear(rank)
        time.sleep(0.7 if how == "first" else 0.3)
        ranks.kill(VICTIM, signal.SIGINT)
        sent = time.monotonic()
        (victim,) = job.outcomes(40, ranks=[VICTIM])
        if "OutsideError" in str(victim):
            return False
        told = job.outcomes(40)
    outcomes = []
    for outcome in told:
        assert isinstance(outcome, Returned), str(outcome)
        outcomes.append(outcome.value)
    assert {end for _, end, _ in outcomes} == {"right"}
    if any(made > outcomes[VICTIM][2] for _, _, made in outcomes):
        return False  # in its last round: ranks that had completed the call were in the next one
    assert outcomes[VICTIM][0].kind == "KeyboardInterrupt"
    others = {rank: one for rank, (one, _, _) in enumerate(outcomes) if rank != VICTIM}
    check_same(list(others.values()), "LiveError", f"rank {VICTIM} was interrupted")
    asleep = LATE_SECONDS if how == "first" else 0.0  # and cannot hear of it
    for rank, one in others.items():
        assert one.ended - sent < within(2.0) + asleep * (rank == LATE), others
    return True


def interrupt_while_failing(rank: int) -> list[Tried]:
    """Rank 1 finds an error of its own, and Ctrl-C comes before the others know of it."""
    plan = plan_of()
    given, post = source_of(plan, rank), Watch.post
    plan.run(given)

    def fail(*_: object) -> None:
        raise LiveError("an error of the transport")

    def post_after_ctrl_c(watch: Watch, cause: Any) -> Any:
        Watch.post = post  # type: ignore[method-assign]
        raise KeyboardInterrupt

    sends = fail if rank == VICTIM else HostTransport.send_hellos
    posts = post_after_ctrl_c if rank == VICTIM else post
    with patch.object(HostTransport, "send_hellos", sends), patch.object(Watch, "post", posts):
        one = tried(lambda: plan.run(given, timeout=20))
    dist.barrier()
    return [one, tried(lambda: plan.run(given, timeout=20))]


def test_an_error_that_is_interrupted_reaches_the_others() -> None:
    with fresh_ranks(4) as ranks:
        found = ranks.run(interrupt_while_failing, timeout=60)
    for rank, (one, following) in enumerate(found):
        assert following.kind == "moved", following
        assert one.seconds < within(5)
        kind = "KeyboardInterrupt" if rank == VICTIM else "LiveError"
        assert one.kind == kind, one
        assert rank == VICTIM or "rank 1" in one.cause
