"""The interface of a transport is enough: a toy passes the property tests of the real ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import pytest
import torch

import reshard as rs
from reshard.live.inputs.bound import BoundTensors, Locals
from reshard.live.program.rounds import Program
from reshard.live.session.mailbox import Inbox
from reshard.live.transport.base import Exchange
from tests.live import in_process
from tests.live.in_process import InProcessTransport, Messages
from tests.ranks.live import Arrays, difference, plan_of, simulated, tensors_of
from tests.soak import cases

SECONDS = 60.0
NUM_RANKS = 4


def wait(missing: Callable[[], Collection[int]], what: Callable[[int], str]) -> None:
    end = time.monotonic() + SECONDS
    while left := missing():
        assert time.monotonic() < end, [what(peer) for peer in left]
        time.sleep(0.0001)


def bound_of(plan: rs.Plan, rank: int, given: dict[str, np.ndarray]) -> BoundTensors:
    """A rank's source tensors, and new destination tensors."""
    bound = BoundTensors(len(plan.have) + len(plan.want))
    have, want = Locals(plan, rank).sides
    bound.bind(have, tensors_of(given, plan.have))
    bound.create(want, torch.device("cpu"))
    for tensor in bound.result.values():
        tensor.zero_()
    return bound


def run_in_threads(plan: rs.Plan, given: Arrays) -> dict[int, BoundTensors]:
    """All ranks of a plan, each in a thread."""
    inboxes = {rank: Inbox() for rank in plan.parties}
    messages: Messages = {}
    bound = {rank: bound_of(plan, rank, given.get(rank, {})) for rank in plan.parties}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            transport = InProcessTransport(rank, bound[rank], inboxes, messages)
            program = Program(plan, rank, {})
            transport.send_hellos()
            exchange = Exchange(program, bound[rank])
            exchange.connect([transport], inboxes[rank], wait)
            wait(lambda: transport.peers - inboxes[rank].hellos.keys(), lambda peer: "a Hello")
            exchange.run()
            transport.close(True)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in plan.parties]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS + 5)
    if errors:
        raise errors[0]
    assert not messages
    return bound


@pytest.mark.parametrize("states", [False, True], ids=["pairs", "states"])
def test_random_moves(states: bool) -> None:
    checked = 0
    for seed in range(cases(25, 400)):
        one = simulated(seed, NUM_RANKS, states)
        if one is None:
            continue
        plan = plan_of(one.case)
        for rank, bound in run_in_threads(plan, one.given).items():
            problem = difference(bound.result, one.expected.get(rank, {}))
            assert not problem, f"seed {seed}, rank {rank}: {problem}"
        checked += 1
    assert checked >= cases(16, 200)


def test_it_is_small() -> None:
    """A transport is at most 80 lines: more would mean that the interface asks for too much."""
    assert len(Path(in_process.__file__).read_text().splitlines()) <= 80
