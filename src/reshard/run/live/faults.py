"""Nobody waits for ever, and everybody learns the same cause.

A rank that waits longer than a second leaves word in the store of whom it waits for. When its time
is over it follows these words to the one rank that waits for nobody: that is the cause. The first
to post a cause wins; all ranks of the call raise it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from reshard.errors import PeerLostError
from reshard.run.live.c10d import Store
from reshard.run.live.cause import Cause
from reshard.run.live.mailbox import Inbox, Kind, Message
from reshard.run.live.meeting import await_keys
from reshard.run.live.team import Team

__all__ = ["LOOK_EVERY", "PAUSE_GROWTH", "Watch"]

POST_AFTER = 1.0
"""Seconds of waiting after which a rank says so in the store, and looks there for a cause."""

LOOK_EVERY = 0.25
PAUSE_GROWTH = 1.2


class Watch:
    """Watches one call on one rank."""

    def __init__(
        self,
        team: Team,
        call: int,
        digest: bytes,
        *,
        timeout: float,
        deadline: float | None,
        status: Callable[[], str],
        word: int = 0,
    ) -> None:
        self.team = team
        self.call = call
        self.digest = digest
        self.timeout = timeout
        self.ends = None if deadline is None else time.monotonic() + deadline
        self.deadline = deadline
        self.status = status
        self.word = word
        """What this rank says in its greetings besides."""
        self.inbox: Inbox = team.mailbox.open(call)
        self.broken: dict[int, str] = {}
        """Peers whose connection failed, and how."""
        self._posted = False
        self._looked = 0.0

    def wait(
        self,
        missing: Callable[[], Collection[int]],
        what: Callable[[int], str],
        pause: float = LOOK_EVERY,
    ) -> float:
        """Wait until no peer is missing; gives the seconds it took.

        ``what`` says what a peer is waited for, in words that follow "waits for". What no message
        tells is asked for again after a pause, which grows.
        """
        began = time.monotonic()
        while left := missing():
            self.check_lost(left, what)
            self._check_aborted()
            quiet = {peer: self._quiet(peer, began) for peer in left}
            longest = max(quiet, key=lambda peer: quiet[peer])
            if quiet[longest] > self.timeout:
                self._expire(longest, what)
            if self.ends is not None and time.monotonic() > self.ends:
                self._expire(longest, what, deadline=True)
            if quiet[longest] > POST_AFTER:
                self._post(longest, what)
                self._look()
            self.team.mailbox.step(min(pause, LOOK_EVERY, self.timeout / 4))
            pause *= PAUSE_GROWTH
        self._check_aborted()
        if self._posted:
            self._unpost()
        return time.monotonic() - began

    def check(self) -> None:
        """Raise if the call has failed elsewhere; cheap enough for inner loops."""
        self._check_aborted()
        if self.ends is not None and time.monotonic() > self.ends:
            self.fail(
                Cause(
                    "late",
                    f"the deadline of {self.deadline:g} s has passed on rank {self.team.rank}",
                )
            )

    def fail(self, cause: Cause) -> NoReturn:
        """Post a cause, tell everyone, and raise what was posted first."""
        found = cause
        with contextlib.suppress(PeerLostError):
            key, text = f"abort/{self.call}", cause.to_json()
            # Before anybody can know of the failure, so that nobody begins anew without knowing.
            self.team.end_epoch(self.call)
            answer: Any = self.team.line.ask(lambda store: store.compare_set(key, "", text))
            found = Cause.from_json(answer)
        self.stop()
        raise found.error(self.status())

    def barrier(self, name: str) -> None:
        """Wait until every rank of the team has come this far in the call."""
        keys = {rank: f"{name}/{self.call}/{rank}" for rank in self.team.ranks}
        self.team.line.ask(lambda store: store.set(keys[self.team.rank], "1"))

        def missing() -> list[int]:
            left = set(await_keys(self.team.line, keys.values(), 0.2))
            return [rank for rank, key in keys.items() if key in left]

        self.wait(missing, lambda peer: "it to have all of its part")
        self.team.forget(f"{name}/{self.call}", list(keys.values()))

    def stop(self) -> None:
        """Tell the ranks of this host that the call is over, and keep them from our memory."""
        self.team.door.board.close_call(self.call)
        self.team.last_failed = max(self.team.last_failed, self.call)
        self.team.drop_wire()
        for peer in self.team.links:
            self.team.mailbox.send(peer, Message(Kind.ABORT, self.call, self.digest))

    def failed_at(self, peer: int) -> NoReturn:
        """A peer has given the call up."""
        self._raise_posted(peer)

    def blame(self, peer: int, error: OSError, what: str) -> NoReturn:
        """A peer's memory could not be reached: it is gone, has given up, or forbids it."""
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            self._check_aborted()
            self.check_lost([peer], lambda _: what)
            self.team.mailbox.step(0.05)
        self.fail(
            Cause(
                "error", f"rank {self.team.rank} cannot reach the memory of rank {peer} ({error})"
            )
        )

    def _quiet(self, peer: int, began: float) -> float:
        return time.monotonic() - max(began, self.inbox.heard.get(peer, 0.0))

    def _check_aborted(self) -> None:
        if self.inbox.aborted_by is not None:
            self._raise_posted(self.inbox.aborted_by)

    def check_lost(self, left: Collection[int], what: Callable[[int], str]) -> None:
        """Fail if one of these is gone."""
        gone = sorted(set(left) & self.team.mailbox.lost)
        torn = sorted(set(left) & set(self.broken))
        if torn:
            time.sleep(LOOK_EVERY)
            self._look()
            self.fail(
                Cause(
                    "lost",
                    f"rank {torn[0]} is gone ({self.broken[torn[0]]}) and rank {self.team.rank} "
                    f"waits for {what(torn[0])}",
                )
            )
        if gone:
            self._look()
            self.fail(
                Cause(
                    "lost",
                    f"rank {gone[0]} is gone (its process ended) and rank {self.team.rank} waits "
                    f"for {what(gone[0])}",
                )
            )

    def _raise_posted(self, peer: int) -> NoReturn:
        """Raise what stands in the store; a peer said that something does."""
        found = Cause("error", f"rank {peer} has failed and could not say why")
        with contextlib.suppress(PeerLostError):
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                posted = self._posted_cause()
                if posted is not None:
                    found = posted
                    break
                time.sleep(0.01)
        self.stop()
        raise found.error(self.status())

    def _posted_cause(self) -> Cause | None:
        key = f"abort/{self.call}"

        def look(store: Store) -> bytes | None:
            return store.get(key) if store.check([key]) else None

        found = self.team.line.ask(look)
        return None if found is None else Cause.from_json(found)

    def _look(self) -> None:
        """Look for a cause in the store, now and then."""
        if time.monotonic() - self._looked < LOOK_EVERY:
            return
        self._looked = time.monotonic()
        with contextlib.suppress(PeerLostError):
            posted = self._posted_cause()
            if posted is not None:
                self.stop()
                raise posted.error(self.status())

    def _post(self, peer: int, what: Callable[[int], str]) -> None:
        """Say in the store whom this rank waits for."""
        if self._posted:
            return
        self._posted = True
        word = json.dumps({"peer": peer, "what": what(peer), "met": peer in self.inbox.hellos})
        key = f"wait/{self.call}/{self.team.rank}"
        with contextlib.suppress(PeerLostError):
            self.team.line.ask(lambda store: store.set(key, word))

    def _unpost(self) -> None:
        self._posted = False
        key = f"wait/{self.call}/{self.team.rank}"
        with contextlib.suppress(PeerLostError):
            self.team.line.ask(lambda store: store.delete_key(key))

    def _expire(self, peer: int, what: Callable[[int], str], deadline: bool = False) -> NoReturn:
        """Time is over: follow who waits for whom to the rank that waits for nobody."""
        waiter, root, word, met = self.team.rank, peer, what(peer), peer in self.inbox.hellos
        seen = {waiter}
        with contextlib.suppress(PeerLostError, ValueError, TypeError, KeyError):
            while root not in seen:
                seen.add(root)
                posted = self._waits_for(root)
                if posted is None:
                    break
                waiter, root = root, int(posted["peer"])
                word, met = str(posted["what"]), bool(posted["met"])
        limit = f"the deadline of {self.deadline:g} s" if deadline else f"{self.timeout:g} s"
        state = "stopped answering" if met else "has not called"
        self.fail(
            Cause("late", f"rank {root} {state} within {limit} and rank {waiter} waits for {word}")
        )

    def _waits_for(self, rank: int) -> dict[str, Any] | None:
        key = f"wait/{self.call}/{rank}"

        def look(store: Store) -> bytes | None:
            return store.get(key) if store.check([key]) else None

        found = self.team.line.ask(look)
        return None if found is None else json.loads(found)

    def close(self) -> None:
        """The call is over."""
        self.team.mailbox.close(self.call)
