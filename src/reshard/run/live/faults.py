"""No call waits for ever, and all ranks of a call learn the same cause.

A wait ends when a peer is lost, when a cause is posted, or when its time is over: then the rank at
the end of the chain of those that wait is named. The first cause that is posted stands; all ranks
of the call raise it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NoReturn

from reshard.errors import PeerLostError
from reshard.mesh import format_ranks
from reshard.run.live.c10d import Store
from reshard.run.live.cause import Cause
from reshard.run.live.crossing import Crossing
from reshard.run.live.links import who_gave_up
from reshard.run.live.mailbox import Inbox, Kind, Message
from reshard.run.live.tags import AheadError, Tag, order
from reshard.run.live.team import ASK_SECONDS, Team, outcome_key
from reshard.run.live.wait_graph import WaitGraph

__all__ = ["LOOK_EVERY", "PAUSE_GROWTH", "Watch"]

POST_AFTER = 1.0
"""Seconds of waiting after which a rank says so in the store, and looks there for a cause."""

LOOK_EVERY = 0.25
PAUSE_GROWTH = 1.2

BREATHE_EVERY = 1.0
"""Seconds of work after which a rank says that it lives; sooner where the timeout is short."""

WRITER_SECONDS = 1.0
"""How long to wait for a process that was about to write into our memory when a call failed."""

LEAVE_SECONDS = 0.5
"""How long messages over the network may take that were sent by a rank that has left."""


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
        move: str = "a move",
        tag: Tag | None = None,
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
        self.move = move
        """What the call does, in words."""
        self.tag = tag
        """What the user calls the call; all ranks must say the same."""
        self.is_meeting = True
        """Whether it is still waited for that all have called."""
        self._crossing: Crossing | None = None
        self.inbox: Inbox = team.mailbox.open(call)
        self.waits = WaitGraph(team, call, digest, self.inbox, timeout)
        team.line.be_patient(timeout)
        self.broken: dict[int, str] = {}
        """Peers whose connection failed, and how."""
        self.by_network: frozenset[int] = frozenset()
        """Peers that are reached over the network; some may be neighbours all the same."""
        self._left_at: dict[int, float] = {}
        self.undone: Cause | None = None
        """Why another call had to cut the connections that this one uses."""
        self.cause: Cause | None = None
        """Why the call has failed."""
        self.is_over = False
        """Whether the call has failed, and the other ranks know."""
        self.compared = False
        """Whether ranks have compared what they were given in this call."""
        self.suspect: Callable[[], None] = lambda: None
        """Looks, whenever the store is looked at, for what a missing peer does instead."""
        self.touched: object = None
        """What other processes may write into."""
        self._what: Callable[[int], str] = lambda peer: "its part"
        self._looked = 0.0
        self._breathed = time.monotonic()

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
        self._what = what
        left = missing()
        while left:
            self.check_lost(left, what)
            self._check_aborted()
            self._grow_impatient(left, began)
            self.team.mailbox.step(min(pause, LOOK_EVERY, self.timeout / 4))
            pause *= PAUSE_GROWTH
            left = missing()
        if self.is_meeting:
            self.check_given_up()
        self._check_aborted()
        self.waits.withdraw()
        return time.monotonic() - began

    def _grow_impatient(self, left: Collection[int], began: float) -> None:
        """Look for a cause, leave word, or give up, by how long a peer has been quiet."""
        now, heard = time.monotonic(), self.inbox.heard
        quiet = {peer: now - max(began, heard.get(peer, 0.0)) for peer in left}
        longest = max(quiet, key=lambda peer: quiet[peer])
        if self.is_meeting and quiet[longest] > LOOK_EVERY:
            self._look_across(left)
        if self.ends is not None and now > self.ends:
            self._expire(longest, f"the deadline of {self.deadline:g} s")
        if quiet[longest] > self.timeout:
            self._expire(longest, f"{self.timeout:g} s", patient=True)
        elif quiet[longest] > min(POST_AFTER, self.timeout / 3):
            self.waits.post(longest, self._what(longest))
            self._look()
            if self.is_meeting:
                self._check_passed(left)
        elif quiet[longest] > LOOK_EVERY and not self.team.links.keys() >= set(left):
            self._look()  # only a neighbour's word of a failure comes by itself

    def _check_passed(self, left: Collection[int]) -> None:
        """Fail if a peer is through with this call, of which it has told us nothing.

        A greeting over the network may come after one of a later call over a socket.
        """
        passed, hellos = self.team.mailbox.passed, self.inbox.hellos
        for peer in set(left) - self.by_network:
            if passed.get(peer, 0) > self.call and peer not in hellos:
                self._check_aborted()
                if self._crossing is not None:
                    # It may have given up a circle in which it found this rank too.
                    self._fail_crossed(self._crossing.told())
                self.fail(
                    Cause(
                        "disagree",
                        f"rank {peer} has made call {self.call} of ranks "
                        f"{format_ranks(self.team.ranks)} without an exchange, and rank "
                        f"{self.team.rank} waits for it to begin {self.move}: give all ranks the "
                        "same move",
                    )
                )

    def _look_across(self, left: Collection[int]) -> None:
        """Have ranks given this call up before they were connected, or wait in another move?"""
        team = self.team
        if self._crossing is None:
            self._crossing = Crossing(team.home, team.rank, team.ranks, self.move, self.call)
        if self._crossing.is_due and self.call != team.first_call:
            refused = self._crossing.get(team.caller, outcome_key(self.call))
            if refused is not None:
                self.fail(Cause.from_json(refused))
        self._fail_crossed(self._crossing.look(left))

    def _fail_crossed(self, found: str | None) -> None:
        if found is not None and self._crossing is not None:
            self.fail(Cause("disagree", found, calls=tuple(self._crossing.given_up)))

    def check_given_up(self) -> None:
        """Fail if a rank of this host that called long ago has given up since.

        Its word of that may be unread, and its greeting, with all of its part, read.
        """
        for peer in who_gave_up(self.team.links, self.call):
            self.failed_at(peer, "its part")

    def has_met(self) -> None:
        """All have called: from now on they only wait for each other's parts."""
        self.is_meeting = False
        self.suspect = lambda: None
        if self._crossing is not None:
            self._crossing.close()
            self._crossing = None

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

    def breathe(self) -> None:
        """Say now and then that this rank lives, amid long work; and hear whether it is in vain."""
        now = time.monotonic()
        if now - self._breathed < min(BREATHE_EVERY, self.timeout / 4):
            return
        self._breathed = now
        for peer in self.team.links:
            self._send(peer, Kind.ALIVE)
        if len(self.team.links) + 1 < len(self.team.ranks):
            self._leave_sign(str(now))
        self.team.mailbox.step(0.0)
        self.check()

    def _leave_sign(self, sign: str) -> None:
        with contextlib.suppress(PeerLostError):
            key = f"alive/{self.team.rank}"
            self.team.line.ask(lambda store: store.set(key, sign), ASK_SECONDS)

    @property
    def tag_code(self) -> int:
        """The code of the call's tag; 0 if it has none."""
        return 0 if self.tag is None else self.tag.code

    def fail(self, cause: Cause) -> NoReturn:
        """Post a cause, tell everyone, and raise what was posted first."""
        self._raise(self.post(cause))

    def post(self, cause: Cause) -> Cause:
        """Post why the call fails on the ranks that are in it; gives what was posted first."""
        if not cause.tag and self.tag is not None:
            cause = replace(cause, tag=self.tag.code)
        key, text, call = f"abort/{self.call}", cause.to_json(), self.call

        def post(store: Store) -> Any:
            # Before anybody can know of the failure, so that nobody begins anew without knowing.
            if store.add("epoch", 0) <= call:
                store.set("epoch", str(call + 1))
            return store.compare_set(key, "", text)

        found = cause
        with contextlib.suppress(PeerLostError):
            found = Cause.from_json(self.team.line.ask(post, ASK_SECONDS))
        return found

    def barrier(self, name: str) -> None:
        """Wait until every rank of the team has come this far in the call."""
        keys = {rank: f"{name}/{self.call}/{rank}" for rank in self.team.ranks}
        self.team.line.ask(lambda store: store.set(keys[self.team.rank], "1"))

        self.wait(lambda: self.team.missing(keys), lambda peer: "it to have all of its part")
        self.team.forget(self, f"{name}/{self.call}", list(keys.values()))

    def stop(self) -> None:
        """Tell the ranks of this host that the call is over, and keep them from our memory."""
        self.is_over = True
        self.team.door.board.close_call(self.call)
        self.team.last_failed = max(self.team.last_failed, self.call)
        for peer in self.team.links:
            word = (self.cause or Cause("error", f"rank {self.team.rank} has given up")).to_json()
            self._send(peer, Kind.ABORT, word)
        if self._writers_after(WRITER_SECONDS):
            # One was stopped on its way from looking at our board to writing. Nobody can tell when
            # it goes on; what it writes into must never be anything else.
            self.team.kept.append(self.touched)

    def _send(self, peer: int, kind: Kind, text: str = "") -> None:
        message = Message(kind, self.call, self.digest)
        self.team.mailbox.send(peer, message, text=text.encode())

    def _writers_after(self, seconds: float) -> set[int]:
        """Who may be writing into our memory still, after at most so long.

        Whoever is seen not to write once looks at our board before it writes again.
        """
        links, end = self.team.links, time.monotonic() + seconds
        left = set(links)
        while True:
            left = {peer for peer in left if links[peer].board.is_writing(self.call)}
            left -= self.team.mailbox.lost
            if not left or time.monotonic() > end:
                return left
            self.team.mailbox.step(0.001)

    def failed_at(self, peer: int, what: str) -> NoReturn:
        """A peer of which something was waited for has given up; it is about to say why."""
        self._hear_of(peer, what)
        self.fail(Cause("error", f"rank {peer} has failed and did not say why"))

    def _hear_of(self, peer: int, what: str) -> None:
        """Give the news of a peer's end a moment to come, and raise it."""
        end = time.monotonic() + ASK_SECONDS
        while time.monotonic() < end:
            self._check_aborted()
            self.check_lost([peer], lambda _: what)
            self.team.mailbox.step(0.05)

    def blame(self, peer: int, error: OSError, what: str) -> NoReturn:
        """A peer's memory could not be reached: it is gone, has given up, or forbids it."""
        self._hear_of(peer, what)
        self.fail(
            Cause(
                "error", f"rank {self.team.rank} cannot reach the memory of rank {peer} ({error})"
            )
        )

    def _check_aborted(self) -> None:
        if self.is_over and self.cause is not None:
            raise self.cause.error(self.status())  # another thread has given the call up
        peer = self.inbox.aborted_by
        if peer is not None:
            self._raise(Cause.from_json(self.inbox.texts.get((peer, Kind.ABORT), b"")))

    def check_lost(self, left: Collection[int], what: Callable[[int], str]) -> None:
        """Fail if one of these is gone; ``what`` says what each is waited for."""
        gone = sorted(peer for peer in set(left) & self.team.mailbox.lost if self._is_gone(peer))
        torn = sorted(set(left) & set(self.broken))
        if gone:
            self._look(now=True)
            self._fail_without(gone[0], "its process ended", what)
        if torn and self.undone is not None:
            self.fail(self.undone.made_earlier())
        if torn:
            time.sleep(LOOK_EVERY)  # whoever cut the connection may be about to say why
            self._look(now=True)
            self._look_back()
            self._fail_without(torn[0], self.broken[torn[0]], what)

    def _look_back(self) -> None:
        """A peer that failed in a call before, which this rank is through with, has cut it then."""
        for call in range(max(self.call - 3, 0), self.call):
            found = None
            with contextlib.suppress(PeerLostError):
                found = self.team.get(f"abort/{call}")
            if found is not None and call > self.team.last_failed:
                self.fail(Cause.from_json(found).made_earlier())

    def _is_gone(self, peer: int) -> bool:
        """Whether nothing comes any more from a rank that has left.

        What it sent over the network before it left may come after the news that it has.
        """
        if peer not in self.by_network:
            return True
        now = time.monotonic()
        return now - self._left_at.setdefault(peer, now) > LEAVE_SECONDS

    def _fail_without(self, peer: int, how: str, what: Callable[[int], str]) -> NoReturn:
        waits = f"rank {self.team.rank} waits for {what(peer)}"
        self.fail(Cause("lost", f"rank {peer} is gone ({how}) and {waits}"))

    def _raise(self, cause: Cause) -> NoReturn:
        self.team.skip_calls(cause.calls)
        if self.is_meeting and self.tag is not None and order(self.tag_code, cause.tag) == 1:
            raise AheadError(cause)  # this rank left out the call that failed
        self.cause = cause
        self.stop()
        raise cause.error(self.status())

    def _look(self, now: bool = False) -> None:
        """Look for a cause in the store, now and then; without a store there is none."""
        if not now and time.monotonic() - self._looked < LOOK_EVERY:
            return
        self._looked = time.monotonic()
        posted = None
        with contextlib.suppress(PeerLostError):
            posted = self.team.get(f"abort/{self.call}")
            self.suspect()
        if posted is not None:
            self._raise(Cause.from_json(posted))

    def _expire(self, peer: int, limit: str, patient: bool = False) -> None:
        """Time is over: name the rank at the end of the chain of those that wait.

        With patience, a rank that is at work may take longer, and so may those that wait for it.
        """
        root, alive = self.waits.root(peer, self._what(peer))
        if patient and alive:
            # Asked again in a moment: it may have come to the end just now.
            self.inbox.heard[peer] = time.monotonic() - self.timeout + LOOK_EVERY
            return
        state = "stopped answering" if root.met else "has not called"
        waits = f"rank {root.waiter} waits for {root.what}"
        self.fail(Cause("late", f"rank {root.rank} {state} within {limit} and {waits}"))

    def close(self) -> None:
        """The call is over. Its tensors should go when the user lets them go, so none is kept."""
        self.has_met()
        self.team.mailbox.close(self.call)
        over = f"on rank {self.team.rank}: the call is over"
        self.status, self._what, self.touched = lambda: over, lambda peer: "its part", None
