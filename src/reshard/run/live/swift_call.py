"""One call of a move whose steps were made before: greet, meet the others, exchange.

It waits as if nothing could go wrong. When anything is not as usual the ordinary watch takes over
and says what is wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from reshard.bytesize import format_bytes
from reshard.errors import ReshardError
from reshard.run.live.agreement import (
    check_tags,
    check_words,
    raise_disagreement,
    suspect_comparing,
)
from reshard.run.live.call import told
from reshard.run.live.faults import Watch
from reshard.run.live.links import who_gave_up
from reshard.run.live.mailbox import Kind, packed
from reshard.run.live.options import Options

if TYPE_CHECKING:
    from reshard.run.live.session import Ticket
    from reshard.run.live.swift import Swift
    from reshard.run.live.team import Team

__all__ = ["SwiftCall"]

GLANCES = 16
GLANCE_SECONDS = 0.05
"""How often and how long a call just waits, before somebody is watched for."""


class SwiftCall(ABC):
    """One call on one rank."""

    def __init__(self, swift: Swift, ticket: Ticket, team: Team, word: int) -> None:
        self.swift = swift
        self.ticket = ticket
        self.team = team
        self.word = word
        self.round = -1
        self.touched: object = None
        """What other processes may write into, until they know that the call has failed."""
        self._has_met = False
        self._watch: Watch | None = None
        assert swift.session is not None
        self.number = swift.session.begin(ticket)
        self.inbox = team.mailbox.open(self.number)
        ticket.watch_of = self.get_watch

    @abstractmethod
    def _greet(self) -> None:
        """Say that this rank has entered the call."""

    @abstractmethod
    def _exchange(self) -> None:
        """Send and receive; all have entered the call."""

    @abstractmethod
    def _give_up(self) -> None:
        """The call has failed."""

    def get_watch(self) -> Watch:
        """Who looks after this call, once it does not go as usual."""
        if self._watch is None:
            self._watch = Watch(
                self.team,
                self.number,
                self.swift.digest,
                timeout=Options().timeout,
                deadline=None,
                status=self._status,
                word=self.word,
                move=f'the move of "{self.swift.want.name}"',
            )
            self._watch.touched = self.touched
            if self._has_met:
                self._watch.has_met()
        return self._watch

    watch = property(get_watch)

    def run(self) -> None:
        """Do all of it. Failures of the engine are told to the other ranks here, everything else
        that is raised by the cleanup thread of sessions."""
        settled = False
        try:
            self._greet()
            self._wait(self._unmet, self._meet_slowly)
            if who_gave_up(self.team.links, self.number):
                self.watch.check_given_up()
            self._has_met = True
            self._exchange()
            settled = True
        except ReshardError:
            self._give_up()
            settled = True
            with told(self.watch):
                raise
        except BaseException:
            self._give_up()
            raise
        finally:
            if self._watch is None:
                self.team.mailbox.close(self.number)
            else:
                self._watch.close()
            if settled:
                self.ticket.finish()

    def _send(
        self, peer: int, kind: Kind, *numbers: int, fd: int | None = None, text: bytes = b""
    ) -> None:
        filled = (*numbers, 0, 0, 0, 0, 0, 0, 0)[:7]
        data = packed(kind, self.number, self.swift.digest, *filled) + text
        self.team.mailbox.send_bytes(peer, data, fd)

    def _await_ready(self, peers: tuple[int, ...], number: int) -> None:
        """Wait for the messages of these peers in a round."""
        ready = self.inbox.ready

        def missing() -> list[int]:
            return [peer for peer in peers if (peer, number) not in ready]

        self._wait(missing, lambda: self.watch.wait(missing, self._its_part))

    def _await_taken(self, peers: tuple[int, ...], number: int) -> None:
        """Wait until these peers have read what this rank has for them in a round."""
        if not peers:
            return
        taken = self.inbox.taken

        def missing() -> list[int]:
            return [peer for peer in peers if (peer, number) not in taken]

        what = f'it to take its part of "{self.swift.want.name}" in {self._which()}'
        self._wait(missing, lambda: self.watch.wait(missing, lambda peer: what))

    def _wait(self, missing: Callable[[], object], slowly: Callable[[], object]) -> None:
        """Wait as if nothing could go wrong, for a while."""
        mailbox, inbox = self.team.mailbox, self.inbox
        for _ in range(GLANCES):
            if inbox.aborted_by is not None or not missing():
                break
            if mailbox.lost:
                break
            mailbox.step(GLANCE_SECONDS)
        if inbox.aborted_by is not None:
            self.watch.check()
        if missing():
            slowly()

    def _unmet(self) -> list[int]:
        """Peers that have not said hello; those that have must mean the same move."""
        hellos, digest, word = self.inbox.hellos, self.swift.digest, self.word
        for hello in tuple(hellos.values()):
            if hello.tag:
                check_tags(self.watch, {peer: one.tag for peer, one in tuple(hellos.items())})
            if hello.digest != digest:
                raise_disagreement(self.watch, self.swift.terms(word))
            if hello.round not in (0, word):
                said = {peer: one.round for peer, one in tuple(hellos.items())}
                check_words(self.watch, {**said, self.swift.rank: word})
        return [peer for peer in self.swift.peers if peer not in hellos]

    def _meet_slowly(self) -> None:
        watch, terms = self.watch, self.swift.terms(self.word)
        watch.suspect = lambda: suspect_comparing(watch, terms)
        watch.wait(self._unmet, lambda peer: f'it to begin the move of "{self.swift.want.name}"')
        watch.has_met()

    def _its_part(self, peer: int) -> str:
        return f'its part of "{self.swift.want.name}" in {self._which()}'

    def _which(self) -> str:
        return f"round {self.round + 1} of {self.swift.num_rounds}"

    def _status(self) -> str:
        where = self._which() if self.round >= 0 else "no round begun"
        amount = f"{format_bytes(self._done())} of {format_bytes(self.swift.num_bytes)} done"
        return f"on rank {self.swift.rank}: {where}, {amount}"

    @abstractmethod
    def _done(self) -> int:
        """Bytes that have come."""
