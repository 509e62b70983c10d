"""The client of a session's store, with a store that does not answer."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from reshard.errors import PeerLostError
from reshard.live.session.mailbox import Inbox, Mailbox
from reshard.live.session.store import MAX_LEFT, StoreClient
from reshard.live.session.wait_graph import WaitGraph


class SilentStore:
    """Answers nothing before it is told to."""

    def __init__(self, answers: threading.Event) -> None:
        self.answers = answers

    def clone(self) -> SilentStore:
        """Another connection to the same store."""
        return SilentStore(self.answers)

    def check(self, keys: list[str]) -> bool:
        """Answer a request."""
        assert self.answers.wait(60)
        return keys == ["key"]

    def set(self, key: str, value: str) -> None:
        """The same."""
        assert self.answers.wait(60)

    def delete_key(self, key: str) -> None:
        """The same."""
        assert self.answers.wait(60)


def test_connections_are_replaced_while_the_store_is_silent_but_not_without_end() -> None:
    answers = threading.Event()
    store: Any = SilentStore(answers)
    client = StoreClient(store, 0, 0.05)
    for _ in range(3 * MAX_LEFT):
        with pytest.raises(PeerLostError, match=r"rank 0 serves, has not answered for 0.05 s"):
            client.check(["key"])
        client.renew()
    assert len(client._left) == MAX_LEFT
    answers.set()
    client.seconds = 10.0
    assert client.check(["key"])
    for worker in client._left:
        worker.end(10.0)
    client.renew()
    assert not client._left
    client.close()


def test_a_rank_that_has_its_data_does_not_wait_for_a_silent_store() -> None:
    """Its record in the session, and that for other sessions, are withdrawn without an answer."""
    answers = threading.Event()
    store: Any = SilentStore(answers)
    client, mailbox = StoreClient(store, 0, 0.05), Mailbox({})
    session: Any = SimpleNamespace(rank=1, ranks=(0, 1, 2), group_store=store, key="{}/{}".format)
    graph = WaitGraph(session, 7, "the move")
    graph.attach(mailbox, client, Inbox(), 10.0)
    graph.post([2], "its part")
    assert graph.outcome() is None
    began = time.monotonic()
    graph.withdraw()
    graph.close()
    assert time.monotonic() - began < 0.5
    answers.set()
    client.close()
    mailbox.shut()
