"""When a rank is given up, and which one: decided from what the waiting rank has heard."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

import reshard as rs
from reshard.live.failure.watch import Watch
from reshard.live.session.control import Cause
from reshard.live.session.mailbox import Inbox
from reshard.live.session.wait_graph import Wait

TIMEOUT = 10.0


class Waiting:
    """Rank 0 in a wait for ranks 1 to 3, without any process; ``looks`` are what it finds."""

    def __init__(self, looks: list[bool], stuck: bool = False) -> None:
        self.asked: list[tuple[int, ...]] = []
        """For whom it waited, at every look for the rank that holds it up."""
        self._looks = iter(looks)
        client = SimpleNamespace(is_stuck=stuck)
        connections = SimpleNamespace(leader=1, rank=0, client=client, peers={1: 0, 2: 0, 3: 0})
        waits = SimpleNamespace(last_wait=self._last_wait, post=lambda *_: None)
        self.watch: Any = SimpleNamespace(
            waits=waits, connections=connections, inbox=Inbox(), timeout=TIMEOUT, deadline=None,
            ends=None, handshaking=False, fail=self._fail, _silent=False, _expires=0.0,
            _impatient_after=0.25, _look_for_cause=lambda: None,
        )  # fmt: skip
        self.watch._expire = lambda *args, **more: Watch._expire(self.watch, *args, **more)

    def _last_wait(self, peers: Any, what: str) -> tuple[int, Wait, bool]:
        self.asked.append(tuple(peers))
        return 2, Wait((0, 1, 2, 3), 7, (3,), "its part", met=True), next(self._looks)

    @staticmethod
    def _fail(cause: Cause) -> NoReturn:
        raise cause.error("on rank 0")

    def look(self) -> None:
        """Look once, after the timeout."""
        self.watch._expires = 0.0
        Watch._grow_impatient(
            self.watch, [1, 2, 3], lambda _: "its part", time.monotonic() - 2 * TIMEOUT
        )


def test_a_rank_is_given_up_when_it_was_silent_at_two_looks_in_a_row() -> None:
    one = Waiting([False, True, False, False])
    for _ in range(3):
        one.look()
    with pytest.raises(
        rs.MoveTimeoutError, match="rank 3 stopped answering within 10 s and rank 2"
    ):
        one.look()


def test_a_rank_that_works_is_waited_for() -> None:
    one = Waiting([True] * 20)
    for _ in range(20):
        one.look()
    assert len(one.asked) == 20
    assert one.watch._expires > time.monotonic() - 1


def test_without_the_store_one_look_is_enough() -> None:
    with pytest.raises(rs.MoveTimeoutError, match="rank 3 stopped answering"):
        Waiting([False], stuck=True).look()


def test_the_rank_that_was_silent_for_longest_comes_first() -> None:
    one, now = Waiting([True]), time.monotonic()
    one.watch.inbox.heard.update({1: now - 12, 2: now - 15, 3: now - 11})
    one.look()
    assert one.asked == [(2, 1, 3)]


def test_who_was_heard_within_the_timeout_is_not_asked_for() -> None:
    one, now = Waiting([]), time.monotonic()
    one.watch.inbox.heard.update({1: now - 8, 2: now - 9, 3: now - 7})
    one.look()
    assert one.asked == []
